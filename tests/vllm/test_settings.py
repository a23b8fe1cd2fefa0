"""Settings of an engine and options of a request: each of them, and every refusal."""

import pytest

from retain.gates import build_gates, dims_for
from retain.policy import load_policy
from retain.vllm.settings import (
    NEAREST,
    Settings,
    options_of,
    problems_of_gates,
    problems_of_policy,
    reads_output,
    settings_from,
)
from tests.refused import refused


@pytest.mark.parametrize("none", [None, {}, {"other": 1}, "text", 3])
def test_an_engine_that_asks_for_nothing_has_no_settings(none):
    assert settings_from(none) is None


def test_every_setting():
    asked = {
        "policy": "snapkv",
        "overrides": ["observed_settings.window=16"],
        "keep_ratio": 0.3,
    }
    settings = settings_from({"retain": asked, "other": 1})
    fields = {**asked, "overrides": ("observed_settings.window=16",)}
    assert settings == Settings(**fields)
    assert settings.load_policy().observed_settings["window"] == 16
    assert settings.budget.keep_ratio == 0.3
    both = settings_from({"retain": {"policy": "fused", "gates": "there", "tokens_per_head": 64}})
    assert both.gates == "there" and both.budget.tokens_per_head == 64


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("snapkv", "holds settings, such as .*got 'snapkv'"),
        (["snapkv"], "holds settings"),
        (
            {"policy": "snapkv", "keep_ratio": 0.2, "every": 32},
            "'retain.every' .gone since.*retain.Cache",
        ),
        ({"policy": "snapkv", "keep_ratio": 0.2, "chunked": True}, "'retain.chunked' .gone since.*prefill"),
        ({"policy": "snapkv", "keep_ratio": 0.2, "documents": "d"}, "'retain.documents' .gone since.*vLLM's"),
        ({"policy": "snapkv", "keep_ratio": 0.2, "document_blocks": 9}, "'retain.document_blocks' .gone"),
        ({"polcy": "snapkv", "keep_ratio": 0.2}, "polcy.*did you mean 'policy'"),
        ({"polcy": "snapkv", "keep_ration": 0.2}, "(?s)polcy.*keep_ration.*did you mean 'keep_ratio'"),
        ({"policy": "snapvk", "keep_ratio": 0.2}, "snapvk.*did you mean.*snapkv"),
        ({"policy": "snapkv"}, "keep_ratio"),
        ({"policy": "snapkv", "keep_ratio": 0}, "keep_ratio"),
        ({"policy": "snapkv", "keep_ratio": 1.5}, "keep_ratio"),
        ({"policy": "snapkv", "keep_ratio": "much"}, "keep_ratio"),
        ({"policy": "snapkv", "keep_ratio": 0.2, "tokens_per_head": 9}, "keep_ratio|one"),
        ({"policy": "snapkv", "keep_ratio": 0.2, "overrides": ["observed_settings.windo=3"]}, "windo"),
        ({"policy": "fused", "keep_ratio": 0.2}, "'fused' cannot be served.*takes gates: add 'gates'"),
        ({"keep_ratio": 0.2}, "takes gates: add 'gates'"),
        ({"policy": "snapkv", "gates": "g", "keep_ratio": 0.2}, "takes no gates: leave 'gates' out"),
        (
            {"policy": "snapkv", "keep_ratio": 0.2, "overrides": ["correction={threshold: 0.8}"]},
            "changes values.*set correction=null",
        ),
        ({"policy": "h2o", "keep_ratio": 0.2}, "'h2o' reads .* of all tokens.*take 'snapkv'"),
        ({"policy": "lru", "keep_ratio": 0.2}, "'lru' reads .*take 'tova'"),
        ({"policy": "expected_attention", "keep_ratio": 0.2}, "'expected_attention' reads .*take 'keydiff'"),
        ({"policy": "vatp:paper", "keep_ratio": 0.2}, "'vatp' reads .*take 'snapkv'"),
        (
            {"policy": "h2o", "keep_ratio": 0.2, "gates": "g", "overrides": ["precision={bits: 4}"]},
            "(?s)take 'snapkv'.*set precision=null.*takes no gates",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(asked, says):
    refused(says, settings_from, {"retain": asked})


def test_the_nearest_policy_can_be_served():
    for name, nearest in NEAREST.items():
        assert problems_of_policy(load_policy(name)) and not problems_of_policy(load_policy(nearest))


def gates_of(family: str, **settings):
    sizes = {"E": 5, "H": 2, "Q": 4, "D": 4}
    return build_gates(family, dims_for(family, {0: sizes}, settings))


@pytest.mark.parametrize("family", ["linear", "mlp", "lowrank", "decay"])
def test_gates_of_hidden_states_can_be_served(family):
    assert problems_of_gates(gates_of(family)) == []


@pytest.mark.parametrize("rope", ["before", "after"])
def test_gates_of_queries_keys_and_values_can_be_served(rope):
    assert problems_of_gates(gates_of("qkv", rope=rope)) == []


def test_gates_that_look_at_other_tokens_or_at_the_stream_cannot():
    (problem,) = problems_of_gates(gates_of("dms"))
    assert "look at stream" in problem and "hidden, keys" in problem


@pytest.mark.parametrize(
    ("name", "reads"),
    [("snapkv", False), ("knorm", False), ("criticalkv", True), ("fused", True), ("gate", False)],
)
def test_which_policies_read_the_output_projection(name, reads):
    assert reads_output(load_policy(name)) == reads


SETTINGS = Settings("snapkv", keep_ratio=0.25)


def test_a_request_without_options_has_those_of_its_engine():
    for none in (None, {}, {"other": 1, 7: 2}):
        options = options_of(SETTINGS, none, None)
        assert options.budget == SETTINGS.budget and options.seed == 0


def test_every_option():
    options = options_of(SETTINGS, {"retain.keep_ratio": 0.5, "retain.seed": 7}, 9)
    assert options.budget.keep_ratio == 0.5
    assert options.seed == 7
    own = options_of(SETTINGS, {"retain.tokens_per_head": 100}, 9)
    assert own.budget.tokens_per_head == 100 and own.budget.keep_ratio is None and own.seed == 9


@pytest.mark.parametrize("value", [True, "true", "True", "TRUE", "1", 1, 1.0])
def test_a_flag_is_read_as_clients_write_it(value):
    assert options_of(SETTINGS, {"retain.off": value}, None).budget is None


@pytest.mark.parametrize("value", [False, "false", "False", "0", 0, 0.0])
def test_a_flag_that_is_not_set(value):
    assert options_of(SETTINGS, {"retain.off": value}, None).budget == SETTINGS.budget


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"retain.keep_ration": 0.2}, "no option retain.keep_ration.*did you mean.*keep_ratio"),
        ({"retain.document": 1}, "no option retain.document .gone since"),
        ({"retain.of": True, "retain.sed": 1}, "(?s)retain.of.*retain.sed"),
        ({"retain.keep_ratio": 0}, "keep_ratio"),
        ({"retain.keep_ratio": "half"}, "keep_ratio"),
        ({"retain.keep_ratio": 0.2, "retain.tokens_per_head": 4}, "fit"),
        ({"retain.tokens_per_head": -1}, "tokens_per_head"),
        ({"retain.tokens_per_head": 2.5}, "tokens_per_head is a whole number; got 2.5"),
        ({"retain.keep_ratio": True}, "keep_ratio is a number; got True"),
        ({"retain.keep_ratio": [0.5]}, "keep_ratio is a number"),
        ({"retain.keep_ratio": float("nan")}, "keep_ratio is a number; got nan"),
        ({"retain.keep_ratio": None}, "keep_ratio is a number; got None"),
        ({"retain.off": "yes"}, "retain.off is true or false; got 'yes'"),
        ({"retain.off": 2}, "retain.off is true or false; got 2"),
        ({"retain.off": None}, "retain.off is true or false; got None"),
        ({"retain.seed": 1.5}, "retain.seed is a whole number; got 1.5"),
        ({"retain.seed": True}, "retain.seed is a whole number; got True"),
        ({"retain.seed": "x", "retain.off": "y", "retain.z": 1}, "(?s)retain.z.*retain.off.*retain.seed"),
    ],
)
def test_options_that_do_not_fit_are_refused(extra, says):
    refused(says, options_of, SETTINGS, extra, None)


@pytest.mark.parametrize("value", ["0.5", 0.5])
def test_a_number_is_read_as_clients_write_it(value):
    assert options_of(SETTINGS, {"retain.keep_ratio": value}, None).budget.keep_ratio == 0.5

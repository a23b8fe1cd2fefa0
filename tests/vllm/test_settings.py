"""Settings of an engine and options of a request: each of them, and every refusal."""

import importlib.util
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from retain import policies, vllm
from retain.budget.statement import Budget
from retain.capability import problems
from retain.gates import GATES
from retain.policy import load_policy
from retain.vllm.demo import write_question
from retain.vllm.settings import Options, Settings, options_of, settings_from
from tests.launch import ROOT
from tests.refused import refused


@pytest.mark.parametrize("none", [None, {}, {"other": 1}, "text", 3])
def test_an_engine_that_asks_for_nothing_has_no_settings(none):
    assert settings_from(none) is None


def test_every_setting():
    asked = {"policy": "snapkv", "overrides": ["observed_settings.window=16"], "keep_ratio": 0.3}
    settings = settings_from({"retain": asked, "other": 1})
    assert settings == Settings(**{**asked, "overrides": ("observed_settings.window=16",)})
    assert settings.load_policy().observed_settings["window"] == 16
    assert settings.budget.keep_ratio == 0.3
    both = settings_from({"retain": {"policy": "learned", "gates": "there", "tokens_per_head": 64}})
    assert both.gates == "there" and both.budget.tokens_per_head == 64


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("snapkv", "holds settings, such as .*got 'snapkv'"),
        ({"policy": "snapkv", "keep_ratio": 0.2, "every": 32}, "'retain.every' .removed.*retain.Cache"),
        ({"polcy": "snapkv", "keep_ration": 0.2}, "(?s)polcy.*keep_ration.*did you mean 'keep_ratio'"),
        ({"policy": "snapvk", "keep_ratio": 0.2}, "snapvk.*did you mean.*snapkv"),
        ({"policy": "snapkv"}, "keep_ratio"),
        ({"policy": "snapkv", "keep_ratio": 0}, "keep_ratio"),
        ({"policy": "snapkv", "keep_ratio": "much"}, "keep_ratio"),
        ({"policy": "snapkv", "keep_ratio": 0.2, "tokens_per_head": 9}, "keep_ratio|one"),
        ({"policy": "snapkv", "keep_ratio": 0.2, "overrides": ["observed_settings.windo=3"]}, "windo"),
        ({"policy": "learned", "keep_ratio": 0.2}, "'learned' cannot be served.*takes gates: add 'gates'"),
        ({"keep_ratio": 0.2}, "takes gates: add 'gates'"),
        ({"policy": "snapkv", "gates": "g", "keep_ratio": 0.2}, "takes no gates: leave 'gates' out"),
        (
            {"policy": "snapkv", "keep_ratio": 0.2, "overrides": ["correction={threshold: 0.8}"]},
            "does not change values yet.*set correction=null",
        ),
        (
            {"policy": "h2o", "keep_ratio": 0.2},
            "score 'h2o' and vLLM's engine: it reads the queries of all tokens.*take 'snapkv'",
        ),
        ({"policy": "expected_attention", "keep_ratio": 0.2}, "score 'expected_attention' .*take "),
        (
            {"policy": "h2o", "keep_ratio": 0.2, "gates": "g", "overrides": ["precision={bits: 4}"]},
            "(?s)take 'snapkv'.*set precision=null.*takes no gates",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(asked, says):
    refused(says, settings_from, {"retain": asked})


SETTINGS = Settings("snapkv", keep_ratio=0.25)


def test_a_request_without_options_has_those_of_its_engine():
    for none in (None, {}, {"other": 1, 7: 2}):
        assert options_of(SETTINGS, none, None) == (SETTINGS.budget, 0)


def test_every_option():
    given = {"retain.keep_ratio": 0.5, "retain.seed": 7, "retain.off": 0}
    assert options_of(SETTINGS, given, 9) == (Budget(keep_ratio=0.5), 7)
    assert options_of(SETTINGS, {"retain.tokens_per_head": 100}, 9) == (Budget(tokens_per_head=100), 9)
    for off in (True, 1, 1.0):
        assert options_of(SETTINGS, {"retain.off": off, "retain.keep_ratio": 0.5}, None) == (None, 0)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"retain.keep_ration": 0.2}, "unknown key 'retain.keep_ration' .did you mean 'keep_ratio'"),
        ({"retain.document": 1}, "unknown key 'retain.document' .removed"),
        ({"retain.keep_ratio": 0}, "keep_ratio is kept / seen"),
        ({"retain.keep_ratio": "half"}, "retain.keep_ratio: input should be a valid number, got 'half'"),
        ({"retain.keep_ratio": 0.2, "retain.tokens_per_head": 4}, "a budget is stated once"),
        ({"retain.tokens_per_head": -1}, "tokens_per_head is a whole number of at least 1"),
        ({"retain.keep_ratio": float("nan")}, "retain.keep_ratio: input should be a finite number, got nan"),
        ({"retain.off": "yes"}, "retain.off: input should be a valid boolean, got 'yes'"),
        ({"retain.seed": 1.5}, "retain.seed: input should be a valid integer, got 1.5"),
        ({"retain.seed": "x", "retain.off": "y", "retain.z": 1}, "3 problems"),
    ],
)
def test_options_that_do_not_fit_are_refused(extra, says):
    refused(f"(?s)options of the request do not fit: .*{says}", options_of, SETTINGS, extra, None)


def test_a_quantised_output_projection_is_refused(monkeypatch):
    """`models.py` is read without an engine."""
    stubs = {"vllm.config": "VllmConfig", "vllm.model_executor.layers.attention": "Attention"}
    stubs |= {"retain.vllm.backend": "worker_here", "retain.vllm.check": "MODULES"}
    for module, name in stubs.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: None}))
    spec = importlib.util.spec_from_file_location("models", Path(vllm.__file__).with_name("models.py"))
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    attention = SimpleNamespace(num_heads=2, head_size=4)
    plain = SimpleNamespace(o_proj=torch.nn.Linear(8, 6), qkv_proj=torch.nn.Linear(6, 24))
    assert models._output_of("layer", attention, plain).shape == (2, 4, 6)
    packed = SimpleNamespace(weight=torch.zeros(6, 8, dtype=torch.int8))
    for parent in ({}, {"o_proj": packed}, {"o_proj": plain.o_proj, "dense": plain.o_proj}):
        with pytest.raises(ValueError, match=r"of layer is not found as a plain matrix \[E, 8\]"):
            models._output_of("layer", attention, SimpleNamespace(**parent))


def test_a_question_of_the_demonstration_has_its_answer_in_its_text() -> None:
    for place in range(20):
        question, begins, right = write_question(place)
        assert f"{begins} {right}.\n" in question and question.endswith("?")


def test_a_policy_of_the_page_is_served_or_refused_as_it_says() -> None:
    """Both tables of policies hold all presets, each where it belongs."""
    page = (ROOT / "docs" / "serving.md").read_text()
    served, refused = re.findall(r"\| (?:served|refused at start) \|.*?\n\n", page, re.DOTALL)
    serves = set(re.findall(r"`([\w:]+)`", served)) & {one.name for one in policies()}
    named = set(re.findall(r"^\| (`.*?) \|", refused, re.MULTILINE))
    refuses = {name for cell in named for name in re.findall(r"`([\w:]+)`", cell)}
    for one in policies():
        for name in (one.name, *(f"{one.name}:{variant}" for variant in one.variants)):
            policy = load_policy(name)
            found = problems(policy, ("vllm",))
            assert bool(found) == bool({name, one.name} & refuses), name
            if not found:
                assert one.name in serves, name
    families = {name for name in re.findall(r"`(\w+)`", served + refused) if name in GATES}
    assert families == set(GATES)
    options = set(re.findall(r"`retain\.(\w+)`", page.partition("## Options")[2].partition("```")[0]))
    assert options == {field.name for field in fields(Options)}

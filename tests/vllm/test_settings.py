"""Settings of an engine and options of a request: each of them, and every refusal."""

import re
from dataclasses import fields

import pytest

from retain import policies
from retain.budget.statement import Budget
from retain.capability import problems
from retain.gates import GATES
from retain.policy import load_policy
from retain.shapes import LayerShape
from retain.vllm.settings import SHORT_TOKENS, Options, Rules, Settings, budget_of, settings_from
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
        ("snapkv", "retain: input should be an object, got 'snapkv'"),
        ({"policy": "snapkv", "keep_ratio": 0.2, "every": 32}, "'retain.every' .removed.*retain.Cache"),
        ({"polcy": "snapkv", "keep_ration": 0.2}, "(?s)polcy.*keep_ration.*did you mean 'keep_ratio'"),
        ({"policy": "snapkv"}, "keep_ratio"),
        ({"policy": "snapkv", "keep_ratio": 0.2, "tokens_per_head": 9}, "keep_ratio|one"),
        ({"policy": "learned", "keep_ratio": 0.2}, "'learned' cannot be served.*takes gates: add 'gates'"),
        ({"policy": "snapkv", "gates": "g", "keep_ratio": 0.2}, "takes no gates: leave 'gates' out"),
        (
            {"policy": "snapkv", "keep_ratio": 0.2, "overrides": ["correction={threshold: 0.8}"]},
            "does not change values yet.*set correction=null",
        ),
        (
            {"policy": "h2o", "keep_ratio": 0.2},
            "score 'h2o' and vLLM's engine: it reads the queries of all tokens.*take 'snapkv'",
        ),
        (
            {"policy": "h2o", "keep_ratio": 0.2, "gates": "g", "overrides": ["precision={bits: 4}"]},
            "(?s)take 'snapkv'.*set precision=null.*takes no gates",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(asked, says):
    refused(says, settings_from, {"retain": asked})


SETTINGS = Settings(policy="snapkv", keep_ratio=0.25)


def test_a_request_has_a_budget_or_takes_that_of_its_engine():
    for none in (None, {}, {"other": 1, 7: 2}):
        assert budget_of(SETTINGS, none) == SETTINGS.budget
    assert budget_of(SETTINGS, {"retain.keep_ratio": 1, "other": 1}) == Budget(keep_ratio=1.0)
    assert budget_of(SETTINGS, {"retain.tokens_per_head": 100}) == Budget(tokens_per_head=100)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"retain.keep_ration": 0.2}, "unknown key 'retain.keep_ration' .did you mean 'keep_ratio'"),
        ({"retain.off": 1, "retain.z": 1}, "3 problems.*'retain.off' .removed; now: retain.keep_ratio=1.0"),
        ({"retain.keep_ratio": 0}, "keep_ratio is kept / seen"),
        ({"retain.keep_ratio": 0.2, "retain.tokens_per_head": 4}, "a budget is stated once"),
        ({"retain.tokens_per_head": -1}, "tokens_per_head is a whole number of at least 1"),
        ({"retain.keep_ratio": float("nan")}, "retain.keep_ratio: input should be a finite number, got nan"),
    ],
)
def test_options_that_do_not_fit_are_refused(extra, says):
    refused(f"(?s)options of the request do not fit: .*{says}", budget_of, SETTINGS, extra)


def rules(name: str, page: int, *overrides: str) -> Rules:
    return Rules(load_policy(name, overrides), page, [LayerShape(2, 24)] * 2)


def test_short_prompts_are_held_whole_and_long_ones_that_cannot_hold_what_is_protected_refused():
    snapkv, budget = rules("snapkv", 16), Budget(tokens_per_head=16)
    assert snapkv.kept(SHORT_TOKENS, budget) == SHORT_TOKENS // 16
    refused("protect", snapkv.kept, SHORT_TOKENS + 1, budget)
    # Shorter than the window of queries.
    snapkv = rules("snapkv", 4, "observed_settings.window=48", "protection.recent=2")
    assert snapkv.kept(47, Budget(keep_ratio=0.5)) == 11 and snapkv.kept(48, Budget(keep_ratio=0.5)) < 12
    assert rules("full", 4).kept(400, Budget(keep_ratio=0.5)) == 100


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

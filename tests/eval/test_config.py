"""A comparison that cannot work is refused before it starts, with everything that is wrong at once."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from retain.budget.statement import Budget
from retain.config import load
from retain.eval import config as grid
from retain.eval.compare import compare, main
from retain.eval.config import (
    REGIMES,
    CompareConfig,
    TextOptions,
    all_lines,
    budget_of,
    find_policy,
    gate_users,
    resolve_device,
    suite_of,
    with_all_tasks,
)
from retain.eval.run import checks
from retain.eval.run.checks import check
from retain.eval.run.evaluated_model import plan
from retain.eval.tasks import text_suite
from retain.gates import GateSet
from retain.gates.artifact import WEIGHTS_FILE
from tests.eval.stub import MORE_STUB, STUB, save_stub_gates, stub_config

CONFIGS = Path(__file__).parents[2] / "configs" / "compare"
BARE = ("protection.sinks=0", "protection.prefix_fraction=0", "protection.suffix_fraction=0")


def of_file(name: str, *overrides: str) -> CompareConfig:
    return load(CONFIGS / f"{name}.yaml", CompareConfig, overrides)


def refusal(config, suite=STUB, run=check) -> str:
    """What a comparison is refused with; nothing is written."""
    with pytest.raises(ValueError) as caught:
        run(config, suite)
    assert not config.folder.exists()
    return str(caught.value)


def test_every_config_builds_and_names_what_exists():
    paths = sorted(CONFIGS.glob("*.yaml"))
    assert [path.stem for path in paths] == [
        "demo",
        "reference",
        "report",
        "smollm2",
        "smollm2_demo",
        "text",
    ]
    for path in paths:
        config = load(path, CompareConfig)
        assert config.run == path.stem and config.workers == (0 if path.stem == "text" else 2)
        first_lines = path.read_text().splitlines()[:3]
        assert all(line.startswith("# ") for line in first_lines) and str(path.name) in first_lines[2]
    report = of_file("report")
    assert set(report.regimes) == {*REGIMES} - {"chunked+decode"} and report.seeds == (0,)
    assert set(report.protections) == {"none"} and report.preset_protection
    assert report.gates_of(0) == "runs/gates-seed0" and "oracle" in report.policies


# What a config says, and what of it is refused.
WRONG = {
    "names": (
        {
            **{
                "policies": ("snapk", "full", "oracel"),
                "tasks": ("copi",),
                "seeds": (0, 7),
                "gates": "gates",
            },
            **{"keep_ratios": (0.5, 1.0), "items_per_task": 0, "run": "a/b"},
        },
        "unknown policy 'snapk' (did you mean 'snapkv'?)",
        "unknown policy 'oracel' (did you mean 'oracle'?)",
        "unknown task 'copi' (did you mean 'copy'?)",
        "'full' is always measured",
        "suite 'stub' has no model of seed 7; it has 0, 1",
        "keep_ratios[1]: input should be less than 1, got 1.0",
        "`gates` needs a {seed} in it, since there are 2 seeds",
        "items_per_task: input should be greater than or equal to 1, got 0",
        "`run` is the name of a folder",
    ),
    "gates": ({"policies": ("fused",)}, "no gates for seed 0"),
    "bytes": (
        {
            "policies": ("packed",),
            "variants": {"packed": ("snapkv", "precision={bits: 4}")},
            "tokens_per_head": (50,),
            "cache_dtype": "bfloat16",
            "regimes": ("query_aware", "chunked"),
        },
        "cache_dtype 'bfloat16' rounds a prefill that is evicted from once, and regimes chunked hold",
        "packed hold entries in fewer bytes, and tokens_per_head counts entries",
    ),
    "gates of a variant": (
        {"policies": ("mine",), "variants": {"mine": ("gate", "protection.sinks=0")}},
        "no gates for seed 0",
    ),
    "a budget": (
        {"policies": ("recency",), "keep_ratios": (0.1,)},
        "policy 'recency' at keep_ratio 0.1: ",
        "26 fewer than the 36 protected",
    ),
    "budgets of variants": (
        {
            "policies": ("wide",),
            "variants": {"wide": ("snapkv", "protection.suffix_tokens=50")},
            "keep_ratios": (0.45,),
        },
        "'wide' at keep_ratio 0.45: ",
        "the 54 protected",
    ),
    "presets of variants": (
        {
            "policies": ("mine",),
            "variants": {
                "mine": ("snapkv:paper", "protection.recent=8"),
                "misspelt": ("snapkv:papper",),
                "none": ("lru:paper",),
                "gone": ("snapkv:released",),
                "cut": ("snapkv:",),
            },
        },
        "variant 'misspelt' begins with 'snapkv:papper', and preset 'snapkv' has no variant "
        "'papper' (did you mean 'paper'?); it has paper, code",
        "preset 'lru' has no variant 'paper'; it has none",
        "preset 'snapkv' has no variant 'released' (gone since 2026-11-29: use the policy's name alone",
        "'cut' begins with 'snapkv:'",
    ),
    "variants": (
        {
            "policies": ("recency", "bad_kee"),
            "variants": {
                "snapkv": ("snapkv", "protection.sinks=0"),
                "of_nothing": (),
                "of_unknown": ("snapk", "protection.sinks=0"),
                "of_full": ("full",),
                "bad_key": ("snapkv", "protection.sink=0"),
                "bad_value": ("snapkv", "scope=heads"),
                "snapkv+none": ("recency",),
            },
        },
        "variant 'snapkv' has the name of a policy that there is",
        "variant 'of_nothing' begins with the preset that it changes, got 'nothing'",
        "variant 'of_unknown' begins with the preset that it changes, got 'snapk' (did you mean 'snapkv'?)",
        "variant 'of_full' begins with the preset",
        "variant 'bad_key': ",
        "unknown key 'protection.sink'",
        "variant 'bad_value': ",
        "scope: input should be one of 'head', 'layer', 'model', got 'heads'",
        "unknown policy 'bad_kee' (did you mean 'bad_key'?)",
        "variant 'snapkv+none': a '+' stands before a protection",
    ),
    "the grid": (
        {
            "policies": ("recency",),
            "tokens_per_head": (1, 50, 50, 100),
            "protections": {
                "preset": ("protection.sinks=0",),
                "empty": (),
                "else": ("floor=mean",),
                "misspelt": ("protection.sink=0",),
            },
            **{"device": "gpu", "every": 0, "chunk_tokens": 0},
        },
        "tokens_per_head[0]: input should be greater than or equal to 2, got 1",
        "tokens_per_head lies below context_tokens (100); got 100",
        "`tokens_per_head` names something twice",
        "protection 'preset': take a name that is not 'preset'",
        "protection 'empty' is a list of `protection.field=value` and `scope=value`, got []",
        "protection 'else' is a list of `protection.field=value` and `scope=value`, got ['floor=mean']",
        "protection 'misspelt': ",
        "unknown key 'protection.sink'",
        "device is 'gpu', and must be 'cpu', 'cuda', 'cuda:1', or 'auto'",
        "every: input should be greater than or equal to 1, got 0",
        "chunk_tokens: input should be greater than or equal to 1, got 0",
    ),
    "no budget": ({"keep_ratios": ()}, "`keep_ratios` is empty, and so is `tokens_per_head`"),
    "controls alone": (
        {"policies": ("oracle",), "regimes": ("decode",)},
        "the policies are controls, and regime 'decode' has no place for them",
    ),
    "a first item": ({"first_item": -1}, "first_item: input should be greater than or equal to 0, got -1"),
    "an unknown protection": (
        {"protections": {"joint": ("scope=model",)}, "under": {"joit": ("oracle",), "joint": ("gate",)}},
        "`under` names the protection 'joit' (did you mean 'joint'?)",
        "asks for 'gate' under 'joint'",
        "not among the policies",
    ),
    "a protection that a policy cannot have": (
        {"policies": ("cake",), "protections": {"joint": ("scope=model",)}},
        "protection 'joint': ",
        "scope 'model' lets layers compete",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_all_problems_come_in_one_message(tmp_path, what):
    changes, *parts = WRONG[what]
    policies_of = {"policies": ("snapkv", "oracle")} if "policies" not in changes else {}
    text = refusal(stub_config(tmp_path, **policies_of, **changes))
    assert [part for part in parts if part not in text] == []
    assert "'mine'" not in text and "'snapkv' rounds" not in text


def test_gates_that_cannot_be_used_are_all_found_before_work_starts(tmp_path):
    check(stub_config(tmp_path, policies=("recency", "oracle", "token_identity")), STUB)  # takes none
    save_stub_gates(tmp_path)
    config = stub_config(tmp_path, seeds=(0, 1))
    text = refusal(config, run=compare)
    assert re.search("(?s)no gates for seed 1 in .*train gates of seed 1 into .*gates-seed1", text)
    shutil.copytree(tmp_path / "gates-seed0", tmp_path / "gates-seed1")  # of another model
    with (tmp_path / "gates-seed0" / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(100)
    text = refusal(config, run=compare)
    assert re.search("(?s)gates of seed 0: .*truncated.*gates of seed 1: .*trained on another model", text)


def test_rows_of_two_configurations_are_never_mixed(tmp_path):
    config = stub_config(tmp_path, policies=("recency",), tasks=("pair",), keep_ratios=(0.5,))
    compare(config, STUB)
    with pytest.raises(
        ValueError, match=r"items of another configuration.*config.keep_ratios \(\[0.5\] there, \[0.6\]"
    ):
        compare(replace(config, keep_ratios=(0.6,)), STUB)


DEMO = ["--config", str(CONFIGS / "demo.yaml")]
HUB = [*DEMO, "suite=text", "model=nobody/nothing", "tasks=[ruler/vt]", "policies=[snapkv]"]


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        (["--config", "none.yaml"], ["none.yaml"]),
        (
            [*DEMO, "keep_ratos=[0.2]", "workers=two"],
            ["unknown key 'keep_ratos' (did you mean 'keep_ratios'?)", "workers: input should be"],
        ),
        ([*DEMO, "suite=referense"], ["unknown suite of tasks 'referense': did you mean 'reference'?"]),
        ([*DEMO, "regimes=[context_olny]"], ["did you mean 'context_only'?"]),
        (HUB, ["nobody/nothing"]),
        ([*HUB, "tasks=[rulre]"], ["unknown task or group 'rulre': did you mean 'ruler'?"]),
    ],
)
def test_the_command_line_says_what_is_wrong_and_where_to_look(tmp_path, capsys, typed, parts):
    assert main([*typed, f"results={tmp_path}"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and "Traceback" not in text and all(part in text for part in parts)
    assert not [*tmp_path.iterdir()]


def test_a_variant_may_begin_with_a_presets_own(tmp_path):
    variants = {"mine": ("snapkv:paper", "protection.recent=8")}
    mine = find_policy(stub_config(tmp_path, policies=("mine",), variants=variants), "mine")
    assert (mine.name, mine.protection.recent, mine.variants) == ("mine", 8, {})
    assert (mine.observed_settings["pool"], mine.observed_settings["pool_size"]) == ("max", 7)
    variants = {"mine": ("gate", "protection.sinks=0")}
    assert gate_users(stub_config(tmp_path, policies=("mine",), variants=variants)) == {"mine": "gates"}


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONFIGS.glob("*.yaml"))])
def test_every_config_passes_its_checks_on_its_shortest_items(name, monkeypatch):
    monkeypatch.setattr(checks, "_gates", lambda *_: [])
    monkeypatch.setattr(checks, "FIRST_ITEMS", 1 if name == "text" else 4)  # the grid has four lengths
    monkeypatch.setattr(checks, "CHEAP_SECONDS", 0.0)
    config = of_file(name)
    (note,) = check(config, suite_of(config))
    assert "on the shortest of the first items alone" in note and " of " in note


def test_a_short_item_is_refused_with_its_name(tmp_path):
    # Items of the task `ragged` have 100, 83 and 66 tokens in turn.
    config = stub_config(
        tmp_path,
        policies=("recency", "random"),
        variants={"narrow": ("recency", "protection.recent=4")},
        protections={"wide": ("protection.recent=40", "protection.sinks=12")},
        tasks=("turns", "ragged"),
        keep_ratios=(0.42, 0.9),
        items_per_task=3,
    )
    text = refusal(config, MORE_STUB)
    where = "on item 2 of task 'ragged' (seed 0), whose context has 66 tokens: "
    assert f"policy 'recency' at keep_ratio 0.42, {where}" in text
    assert "Or leave the task out, or raise context_tokens." in text
    assert "policy 'random+wide' at keep_ratio 0.42: " in text  # no context is long enough
    assert "0.9" not in text
    assert check(replace(config, tasks=("turns",), protections={}), MORE_STUB) == []
    assert check(replace(config, items_per_task=1, protections={}), MORE_STUB) == []


def test_not_all_items_are_made_where_that_takes_long(tmp_path, monkeypatch):
    config = stub_config(tmp_path, policies=("recency",), tasks=("pair",), items_per_task=9)
    limits = [{}, {"CHEAP_SECONDS": 0.0, "FIRST_ITEMS": 3}, {"MOST_SECONDS": 0.0}]
    for changes, looked in zip(limits, (9, 3, 1), strict=True):
        for name, value in changes.items():
            monkeypatch.setattr(checks, name, value)
        assert checks.shortest_of(config, STUB, "pair")[1:] == (looked, 9)
    assert check(config, STUB) == [
        "budgets were tried on the shortest of the first items alone: a shorter one may stop the run. "
        "pair (1 of 9)"
    ]


def test_what_a_suite_cannot_make_is_found_at_the_start(tmp_path):
    def none(*place):
        raise ValueError(f"no data for {place}")

    config = stub_config(tmp_path, policies=("recency",), tasks=("pair",))
    assert "task 'pair': no data for ('pair', 0, 0, 100)" in refusal(config, replace(STUB, item=none))
    config = replace(config, policies=("snapkv", "token_identity"))
    assert "token_identity: no data for (0, 1, 100)" in refusal(config, replace(STUB, documents=none))
    # A suite without models of its own takes any seed.
    check(replace(config, seeds=(0, 7), gates="none"), replace(STUB, seeds=None))


def test_devices_are_those_that_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = stub_config(tmp_path, policies=("recency",), device="cuda", workers=2)
    assert "torch sees no GPU here: take device=cpu, or auto" in refusal(config)
    assert resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for asked, rank, given in (("cuda", 3, 1), ("cuda:0", 3, 0), ("auto", 1, 1)):
        assert resolve_device(asked, rank) == torch.device("cuda", given)
    assert re.search(r"each of 2 workers .* workers=0, or .*accelerate launch", refusal(config))
    assert check(config, STUB, processes=2) == check(replace(config, workers=1), STUB) == []
    assert check(replace(config, device="cpu"), STUB) == []
    text = refusal(replace(config, device="cpu", text=TextOptions(device_map="auto")))
    assert "each of 2 workers" in text
    assert "text.device_map spreads the model of suite 'text', and this is 'stub'" in text


def test_budgets_are_told_apart_by_their_size(tmp_path):
    config = stub_config(tmp_path, keep_ratios=(0.45,), tokens_per_head=(2, 40))
    assert config.budgets == (0.45, 2.0, 40.0)
    stated = [{"keep_ratio": 0.45}, {"tokens_per_head": 2}, {"tokens_per_head": 40}, {"keep_ratio": 1.0}]
    assert [budget_of(value) for value in (*config.budgets, 1.0)] == [Budget(**own) for own in stated]
    text = refusal(replace(config, policies=("snapkv",), protections={"bare": BARE}))
    assert re.search(r"policy 'snapkv\+bare' at tokens_per_head 2: .*30 fewer than the 32", text)


def test_what_a_policy_cannot_do_in_a_regime_is_found_before_work_starts(tmp_path, monkeypatch):
    save_stub_gates(tmp_path)
    config = stub_config(
        tmp_path,
        policies=("snapkv", "gate", "oracle"),
        regimes=("context_only", "decode"),
        protections={"none": ("protection.recent=0",)},
        keep_ratios=(0.6,),
    )
    check(config, STUB)
    monkeypatch.setattr(GateSet, "contextual", True, raising=False)
    text = refusal(config)
    assert "policy 'gate' in regime 'decode': policy 'gate' cannot: gates of family" in text
    assert "policy 'gate+none' in regime 'decode'" in text and "snapkv" not in text


def test_items_are_those_that_there_are_from_the_first_on(tmp_path):
    config = stub_config(tmp_path, items_per_task=5, unit_items=2, tasks=("ragged", "turns"))
    behind = replace(config, first_item=1)

    def planned(config):
        return [(unit.task, unit.start, unit.stop) for unit in plan(config, MORE_STUB)]

    turns = [("turns", 0, 2), ("turns", 2, 4), ("turns", 4, 5)]
    assert planned(config) == [("ragged", 0, 2), ("ragged", 2, 3), *turns]
    turns = [("turns", 1, 3), ("turns", 3, 5), ("turns", 5, 6)]
    assert planned(behind) == [("ragged", 1, 3), *turns]
    assert [*grid.indices_of(behind, MORE_STUB, "turns")] == [1, 2, 3, 4, 5]
    shortest, looked, there = checks.shortest_of(behind, MORE_STUB, "ragged")
    assert (shortest[1], looked, there) == (2, 2, 2)
    config = replace(config, policies=("recency",), keep_ratios=(0.8,))
    text = refusal(replace(config, first_item=3), MORE_STUB)
    assert "task 'ragged' has 3 items, and `first_item` is 3: none is left" in text
    assert check(replace(config, first_item=2), MORE_STUB) == []


def test_tasks_in_text_are_those_of_a_model(monkeypatch):
    asked = {}
    monkeypatch.setattr(grid, "load_suite", lambda name, **how: asked.update(how, name=name) or STUB)
    text = ("text.chat=false", "text.dtype=bfloat16")
    config = of_file("demo", "suite=text", "model=some/model", "tasks=[ruler]", *text)
    assert suite_of(config) is STUB
    assert asked == {
        **{"name": "text", "model": "some/model", "tasks": ("ruler",), "chat": False, "changes": {}},
        **{"dtype": "bfloat16", "revision": None, "trust_remote_code": False, "template": {}},
        "device_map": None,
    }
    suite = replace(STUB, tasks=dict.fromkeys(("ruler/vt", "niah/grid"), STUB.tasks["copy"]))
    assert with_all_tasks(config, suite) == ("ruler/vt",)


def test_a_model_that_is_spread_over_devices_is_moved_nowhere_and_one_is_held(monkeypatch):
    asked, held = [], []

    class Model:
        def __init__(self, name):
            self.name, self.device = name, None

        def to(self, device):
            self.device = device
            return self

    def load_named(name, *, device_map, **_):
        asked.append((name, device_map))
        held.append(len(text_suite._loaded))
        return Model(name), None

    monkeypatch.setattr(text_suite, "load_named", load_named)
    monkeypatch.setattr(text_suite, "_loaded", {})

    def loaded(name, device_map, seed=0):
        made = text_suite.text_suite(model=name, tasks=("niah",), device_map=device_map)
        return made.load_model(seed)

    spread = loaded("some/model", "auto")
    assert spread.device is None and loaded("some/model", "auto", 1) is spread
    assert loaded("some/model", None).device == "cpu"
    assert loaded("other/model", None, 1).name == "other/model"
    assert asked == [("some/model", "auto"), ("some/model", None), ("other/model", None)]
    assert held == [0, 0, 0] and len(text_suite._loaded) == 1  # the last one was let go before


def test_a_protection_may_be_for_some_policies_and_for_the_scope_of_their_budget(tmp_path):
    protections = {"joint": ("scope=model",), "bare": ("protection.sinks=0",)}
    own = {"protections": protections, "under": {"joint": ("oracle",)}}
    config = stub_config(tmp_path, policies=("random", "oracle"), **own)
    assert [line.name for line in all_lines(config)] == [
        *("random", "oracle", "oracle+joint", "random+bare", "oracle+bare"),
    ]
    assert find_policy(config, "oracle", "joint").scope == "model"
    check(config, STUB)

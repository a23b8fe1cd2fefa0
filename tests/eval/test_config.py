"""A comparison that cannot work is refused before it starts, with everything that is wrong at once."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from retain.budget.statement import Budget
from retain.config import load
from retain.eval import config as grid
from retain.eval.claims.claim import load_claims
from retain.eval.claims.orderings import load_orderings
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
from retain.eval.study.plan import StudyConfig
from retain.eval.tasks import text_suite
from retain.gates import GateSet
from retain.gates.artifact import WEIGHTS_FILE
from retain.presets import policies
from tests.eval.stub import MORE_STUB, STUB, save_stub_gates, stub_config

CONFIGS = Path(__file__).parents[2] / "configs" / "compare"


def test_every_config_builds_and_names_what_exists():
    paths = sorted(CONFIGS.glob("*.yaml"))
    names = ["candidates", "demo", "fused", "fused_again", "methods", "reference", "report", "shift", "text"]
    assert [path.stem for path in paths] == names
    for path in paths:
        config = load(path, CompareConfig)
        assert config.run == path.stem and config.workers == (0 if config.suite == "text" else 2)
        first_lines = path.read_text().splitlines()[:3]
        assert all(line.startswith("# ") for line in first_lines) and str(path.name) in first_lines[2]


def test_all_problems_come_in_one_message(tmp_path):
    config = stub_config(
        tmp_path,
        policies=("snapk", "full", "oracel"),
        tasks=("copi",),
        seeds=(0, 7),
        keep_ratios=(0.5, 1.0),
        gates="gates",
        items_per_task=0,
        run="a/b",
    )
    with pytest.raises(ValueError) as caught:
        check(config, STUB)
    text = str(caught.value)
    for part in (
        "unknown policy 'snapk' (did you mean 'snapkv'?)",
        "unknown policy 'oracel' (did you mean 'oracle'?)",
        "unknown task 'copi' (did you mean 'copy'?)",
        "'full' is always measured",
        "suite 'stub' has no model of seed 7; it has 0, 1",
        "keep_ratios[1]: expected float above 0 and below 1, got 1.0",
        "`gates` needs a {seed} in it, since there are 2 seeds",
        "items_per_task: expected int at least 1 and at most 1,000,000, got 0",
        "`run` is the name of a folder",
    ):
        assert part in text, part


def test_missing_gates_say_the_command_and_nothing_is_written(tmp_path):
    save_stub_gates(tmp_path)
    config = stub_config(tmp_path, seeds=(0, 1))
    with pytest.raises(
        ValueError, match="(?s)no gates for seed 1 in .*train gates of seed 1 into .*gates-seed1"
    ):
        compare(config, STUB)
    assert not config.folder.exists()


def test_gates_that_cannot_be_used_are_all_found_before_work_starts(tmp_path):
    save_stub_gates(tmp_path)
    shutil.copytree(tmp_path / "gates-seed0", tmp_path / "gates-seed1")  # of another model
    with (tmp_path / "gates-seed0" / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(100)
    config = stub_config(tmp_path, seeds=(0, 1))
    with pytest.raises(
        ValueError, match="(?s)gates of seed 0: .*truncated.*gates of seed 1: .*trained on another model"
    ):
        compare(config, STUB)
    assert not config.folder.exists()


def test_gates_are_only_asked_for_where_a_policy_takes_them(tmp_path):
    check(stub_config(tmp_path, policies=("recency", "oracle", "token_identity")), STUB)
    with pytest.raises(ValueError, match="no gates for seed 0"):
        check(stub_config(tmp_path, policies=("fused",)), STUB)


def test_a_budget_below_the_protected_count_is_found_at_the_start(tmp_path):
    with pytest.raises(
        ValueError, match=r"policy 'recency' at keep_ratio 0.1: .*26 fewer than the 36 protected"
    ):
        check(stub_config(tmp_path, policies=("recency",), keep_ratios=(0.1,)), STUB)


def test_rows_of_two_configurations_are_never_mixed(tmp_path):
    config = stub_config(tmp_path, policies=("recency",), tasks=("pair",), keep_ratios=(0.5,))
    compare(config, STUB)
    other = stub_config(tmp_path, policies=("recency",), tasks=("pair",), keep_ratios=(0.6,))
    with pytest.raises(
        ValueError, match=r"items of another configuration.*config.keep_ratios \(\[0.5\] there, \[0.6\]"
    ):
        compare(other, STUB)


def test_the_command_line_says_what_is_wrong_and_where_to_look(tmp_path, capsys):
    assert main(["--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
    arguments = ["--config", str(CONFIGS / "demo.yaml"), "keep_ratos=[0.2]", "workers=two"]
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert (
        "unknown key 'keep_ratos' (did you mean 'keep_ratios'?)" in text and "workers: expected int" in text
    )
    assert main(["--config", str(CONFIGS / "demo.yaml"), "suite=referense"]) == 2
    assert "unknown suite of tasks 'referense': did you mean 'reference'?" in capsys.readouterr().err


def test_methods_names_every_preset_and_what_each_is_without_protection():
    config = load(CONFIGS / "methods.yaml", CompareConfig)
    presets = {preset.name for preset in policies()} - {"full"}
    assert presets <= set(config.policies)
    assert set(config.policies) - presets == set(config.variants)
    assert config.keep_ratios == (0.1, 0.2, 0.4) and config.regimes == ("context_only", "query_aware")
    # Of two, protection is the method, and defensive has the score of defensivekv.
    assert {name.removesuffix("_bare") for name in config.variants if name.endswith("_bare")} == presets - {
        "streaming_llm",
        "duoattention",
        "defensive",
    }
    for name in config.policies:
        policy = find_policy(config, name)
        if name.endswith("_bare"):
            own = policy.protection
            assert own.prefix_fraction == own.suffix_fraction == 0
            assert own.sinks == (4 if name == "expected_attention_bare" else 0)
            # What it observes itself; of a gate, the horizon that published gates are trained with.
            alone = {"gate_bare": 32, "tova_bare": 1}
            assert own.recent == policy.observed_settings.get("window", alone.get(name, 0)), name
            assert own.recent in (0, 1, 8 if name == "fused_bare" else 32), name
    pairs = [frozenset((own.policy, own.baseline)) for own in load_orderings().rows if "*" not in own.policy]
    assert set[str]().union(*pairs) <= set(config.policies)
    assert len(set(pairs)) == len(pairs)  # what speaks of two topics stands under one
    assert len(config.policies) <= 75  # half an hour


def test_methods_isolates_what_each_row_is_about():
    config = load(CONFIGS / "methods.yaml", CompareConfig)

    def differs(first, second):
        sides = [asdict(find_policy(config, name)) for name in (first, second)]
        flat = [
            {
                f"{key}.{inner}" if isinstance(value, dict) else key: own
                for key, value in side.items()
                for inner, own in (value.items() if isinstance(value, dict) else [("", value)])
                if key not in ("name", "paper", "regime")
            }
            for side in sides
        ]
        return {key for key in flat[0] | flat[1] if flat[0].get(key) != flat[1].get(key)}

    assert differs("lava", "lava_uniform_layers") == {"allocation.layers"}
    assert differs("lava", "lava_equal_heads") == {"scope"}
    assert differs("cake", "cake_uniform_layers") == {"allocation.layers"}
    assert differs("pyramidkv", "snapkv") == {"allocation.layers"}
    assert differs("layer_defensivekv_code", "defensivekv_code") == {"scope"}
    assert differs("defensivekv_nostage", "defensive") == {"scope"}
    one_stage = differs("ada_criticalkv", "ada_criticalkv_one_stage")
    assert {key.split(".")[0] for key in one_stage} == {"first_stage"}
    assert differs("snapkv", "snapkv_prefix_only") == {"protection.suffix_fraction"}
    assert differs("adakv_paper", "adakv") == {"allocation.safeguard"}
    assert find_policy(config, "vatp").observed_settings["pool"] is None
    assert find_policy(config, "snapkv_nopool").observed_settings["pool"] is None
    assert find_policy(config, "h2o_half").protection.suffix_fraction == 0.5
    for name in ("snapkv_pool7", "adakv_pool7", "pyramidkv_pool7", "cake_pool7", "lava"):
        settings = find_policy(config, name).observed_settings
        assert (settings["pool"], settings["pool_size"]) == ("max", 7), name
    assert find_policy(config, "adakv_pool7").allocation.safeguard == "convex"


def test_a_variant_may_begin_with_a_presets_own(tmp_path):
    variants = {
        "mine": ("defensivekv:code", "protection.recent=8"),
        "misspelt": ("defensivekv:relesed",),
        "none": ("lru:released",),
        "cut": ("snapkv:",),
    }
    config = stub_config(tmp_path, policies=("mine",), variants=variants)
    mine = find_policy(config, "mine")
    assert (mine.name, mine.protection.recent, mine.variants) == ("mine", 8, {})
    assert mine.observed_settings["norm"] == "head_share" and mine.first_stage.by == "mass_released"
    with pytest.raises(ValueError) as caught:
        check(config, STUB)
    text = str(caught.value)
    assert (
        "variant 'misspelt' begins with 'defensivekv:relesed', and preset 'defensivekv' has no variant "
        "'relesed' (did you mean 'released'?); it has paper, code, released"
    ) in text
    assert "preset 'lru' has no variant 'released'; it has none" in text
    assert "'cut' begins with 'snapkv:'" in text and "'mine'" not in text


def test_variants_that_cannot_be_are_all_found_at_once(tmp_path):
    variants = {
        "snapkv": ("snapkv", "protection.sinks=0"),
        "of_nothing": (),
        "of_unknown": ("snapk", "protection.sinks=0"),
        "of_full": ("full",),
        "bad_key": ("snapkv", "protection.sink=0"),
        "bad_value": ("snapkv", "scope=heads"),
    }
    config = stub_config(tmp_path, policies=("recency", "bad_kee"), variants=variants)
    with pytest.raises(ValueError) as caught:
        check(config, STUB)
    text = str(caught.value)
    for part in (
        "variant 'snapkv' has the name of a policy that there is",
        "variant 'of_nothing' begins with the preset that it changes, got 'nothing'",
        "variant 'of_unknown' begins with the preset that it changes, got 'snapk' (did you mean 'snapkv'?)",
        "variant 'of_full' begins with the preset",
        "variant 'bad_key': ",
        "unknown key 'protection.sink'",
        "variant 'bad_value': ",
        "scope: expected one of 'head', 'layer', 'model', got 'heads'",
        "unknown policy 'bad_kee' (did you mean 'bad_key'?)",
    ):
        assert part in text, part


def test_a_variants_budget_is_tried(tmp_path):
    variants = {
        "wide": ("snapkv", "protection.suffix_tokens=50"),
        "turns": ("snapkv", "protection.turns=true"),
    }
    config = stub_config(tmp_path, policies=("wide", "turns"), variants=variants, keep_ratios=(0.45,))
    with pytest.raises(
        ValueError, match=r"(?s)'wide' at keep_ratio 0.45: .*the 54 protected.*'turns' protects the turns"
    ):
        check(config, STUB)


def test_a_whole_release_is_not_compared_at_equal_memory(tmp_path):
    variants = {"whole": ("snapkv:released",), "line": ("pyramidkv", "allocation.line=whole")}
    config = stub_config(
        tmp_path, policies=("whole", "line", "snapkv"), variants=variants, keep_ratios=(0.45,)
    )
    with pytest.raises(ValueError) as caught:
        check(config, STUB)
    for name in variants:
        assert f"policy '{name}' rounds its budget as its release does, and a comparison is at equal" in str(
            caught.value
        )
    assert "'snapkv' rounds" not in str(caught.value)


def test_a_variant_of_a_gate_needs_gates(tmp_path):
    config = stub_config(tmp_path, policies=("mine",), variants={"mine": ("gate", "protection.sinks=0")})
    assert gate_users(config) == {"mine": "gates"}
    with pytest.raises(ValueError, match="no gates for seed 0"):
        check(config, STUB)


def test_the_report_measures_regimes_with_and_without_protection():
    config = load(CONFIGS / "report.yaml", CompareConfig)
    assert set(config.regimes) == {*REGIMES} - {"chunked+decode"} and config.seeds == (0,)
    assert set(config.protections) == {"none"} and config.preset_protection
    assert config.gates_of(0) == "runs/gates-seed0" and "oracle" in config.policies


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONFIGS.glob("*.yaml"))])
def test_every_config_passes_its_checks_on_its_shortest_items(name, monkeypatch):
    monkeypatch.setattr(checks, "_gates", lambda *_: [])
    monkeypatch.setattr(checks, "FIRST_ITEMS", 1 if name == "text" else 4)  # the grid has four lengths
    monkeypatch.setattr(checks, "CHEAP_SECONDS", 0.0)
    config = load(CONFIGS / f"{name}.yaml", CompareConfig)
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
    with pytest.raises(ValueError) as caught:
        check(config, MORE_STUB)
    text = str(caught.value)
    said = "on item 2 of task 'ragged' (seed 0), whose context has 66 tokens: "
    assert f"policy 'recency' at keep_ratio 0.42, {said}" in text
    assert "Or leave the task out, or raise context_tokens." in text
    assert "policy 'random+wide' at keep_ratio 0.42: " in text  # no context is long enough
    assert "0.9" not in text
    assert check(replace(config, tasks=("turns",), protections={}), MORE_STUB) == []
    assert check(replace(config, items_per_task=1, protections={}), MORE_STUB) == []


def test_not_all_items_are_made_where_that_takes_long(tmp_path, monkeypatch):
    config = stub_config(tmp_path, policies=("recency",), tasks=("pair",), items_per_task=9)
    assert checks.shortest_of(config, STUB, "pair")[1:] == (9, 9)
    monkeypatch.setattr(checks, "CHEAP_SECONDS", 0.0)
    monkeypatch.setattr(checks, "FIRST_ITEMS", 3)
    assert checks.shortest_of(config, STUB, "pair")[1:] == (3, 9)
    monkeypatch.setattr(checks, "MOST_SECONDS", 0.0)
    assert checks.shortest_of(config, STUB, "pair")[1:] == (1, 9)
    assert check(config, STUB) == [
        "budgets were tried on the shortest of the first items alone: a shorter one may stop the run. "
        "pair (1 of 9)"
    ]


def test_an_item_that_cannot_be_made_is_found_at_the_start(tmp_path):
    def item(task, *place):
        raise ValueError(f"no data for {place}")

    with pytest.raises(ValueError, match=r"task 'pair': no data for \(0, 0, 100\)"):
        check(stub_config(tmp_path, policies=("recency",), tasks=("pair",)), replace(STUB, item=item))


def test_labels_are_of_one_line(tmp_path):
    config = stub_config(
        tmp_path,
        policies=("snapkv", "snapkv+none"),
        variants={"snapkv+none": ("recency",)},
        protections={"none": ("protection.sinks=0",)},
    )
    with pytest.raises(ValueError, match=r"variant 'snapkv\+none': a '\+' stands before a protection"):
        check(config, STUB)


def test_several_models_on_one_gpu_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = stub_config(tmp_path, policies=("recency",), device="cuda", workers=2)
    with pytest.raises(ValueError, match=r"each of 2 workers .* workers=0, or .*accelerate launch"):
        check(config, STUB)
    assert check(config, STUB, processes=2) == check(replace(config, workers=1), STUB) == []
    assert check(replace(config, device="cpu"), STUB) == []
    spread = replace(config, device="cpu", text=TextOptions(device_map="auto"))
    with pytest.raises(ValueError) as caught:
        check(spread, STUB)
    assert "each of 2 workers" in str(caught.value)
    assert "text.device_map spreads the model of suite 'text', and this is 'stub'" in str(caught.value)


def test_what_the_grid_says_wrong_is_all_found(tmp_path):
    config = stub_config(
        tmp_path,
        policies=("recency",),
        tasks=("copi",),
        tokens_per_head=(1, 50, 50, 100),
        protections={
            "preset": ("protection.sinks=0",),
            "empty": (),
            "else": ("floor=mean",),
            "misspelt": ("protection.sink=0",),
        },
        device="gpu",
        every=0,
        chunk_tokens=0,
    )
    with pytest.raises(ValueError) as caught:
        check(config, STUB)
    text = str(caught.value)
    for part in (
        "unknown task 'copi' (did you mean 'copy'?)",
        "tokens_per_head[0]: expected int at least 2, got 1",
        "tokens_per_head lies below context_tokens (100); got 100",
        "`tokens_per_head` names something twice",
        "protection 'preset': take a name that is not 'preset'",
        "protection 'empty' is a list of `protection.field=value` and `scope=value`, got []",
        "protection 'else' is a list of `protection.field=value` and `scope=value`, got ['floor=mean']",
        "protection 'misspelt': ",
        "unknown key 'protection.sink'",
        "device is 'gpu', and must be 'cpu', 'cuda', 'cuda:1', or 'auto'",
        "every: expected int at least 1, got 0",
        "chunk_tokens: expected int at least 1, got 0",
    ):
        assert part in text, part


def test_a_gpu_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no GPU here: take device=cpu, or auto"):
        check(stub_config(tmp_path, policies=("recency",), device="cuda"), STUB)
    assert resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda", 3) == torch.device("cuda", 1)
    assert resolve_device("cuda:0", 3) == torch.device("cuda", 0)
    assert resolve_device("auto", 1) == torch.device("cuda", 1)


def test_budgets_are_told_apart_by_their_size(tmp_path):
    config = stub_config(tmp_path, keep_ratios=(0.45,), tokens_per_head=(2, 40))
    assert config.budgets == (0.45, 2.0, 40.0)
    assert [budget_of(value) for value in (*config.budgets, 1.0)] == [
        Budget(keep_ratio=0.45),
        Budget(tokens_per_head=2),
        Budget(tokens_per_head=40),
        Budget(keep_ratio=1.0),
    ]
    with pytest.raises(
        ValueError, match=r"policy 'snapkv\+bare' at tokens_per_head 2: .*30 fewer than the 32"
    ):
        bare = ("protection.sinks=0", "protection.prefix_fraction=0", "protection.suffix_fraction=0")
        check(replace(config, policies=("snapkv",), protections={"bare": bare}), STUB)
    with pytest.raises(ValueError, match="`keep_ratios` is empty, and so is `tokens_per_head`"):
        check(replace(config, keep_ratios=(), tokens_per_head=()), STUB)


def test_an_unknown_regime_is_told_when_the_file_is_read(tmp_path, capsys):
    arguments = ["--config", str(CONFIGS / "demo.yaml"), "regimes=[context_olny]"]
    assert main(arguments) == 2
    assert "did you mean 'context_only'?" in capsys.readouterr().err


def test_controls_alone_have_no_place_in_a_cache(tmp_path):
    config = stub_config(tmp_path, policies=("oracle",), regimes=("decode",))
    with pytest.raises(
        ValueError, match="the policies are controls, and regime 'decode' has no place for them"
    ):
        check(config, STUB)


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
    with pytest.raises(ValueError) as caught:
        check(config, STUB)
    assert "policy 'gate' in regime 'decode': regime 'decode' evicts again later" in str(caught.value)
    assert "policy 'gate+none' in regime 'decode'" in str(caught.value) and "snapkv" not in str(caught.value)


def test_what_is_fitted_on_documents_wants_some(tmp_path):
    def none(seed, count, context_tokens):
        raise ValueError("there are no documents")

    config = stub_config(tmp_path, policies=("snapkv", "token_identity"))
    with pytest.raises(ValueError, match="token_identity: there are no documents"):
        check(config, replace(STUB, documents=none))


def test_a_suite_without_models_of_its_own_takes_any_seed(tmp_path):
    suite = replace(STUB, seeds=None)
    check(stub_config(tmp_path, policies=("recency",), seeds=(0, 7), gates="none"), suite)


def test_items_are_those_that_there_are(tmp_path):
    config = stub_config(tmp_path, items_per_task=5, unit_items=2, tasks=("ragged", "turns"))
    made = [(unit.task, unit.start, unit.stop) for unit in plan(config, MORE_STUB)]
    assert made == [
        *[("ragged", 0, 2), ("ragged", 2, 3)],
        *[("turns", 0, 2), ("turns", 2, 4), ("turns", 4, 5)],
    ]


def test_items_may_begin_behind_those_that_something_was_chosen_on(tmp_path):
    config = stub_config(tmp_path, items_per_task=5, unit_items=2, tasks=("ragged", "turns"), first_item=1)
    made = [(unit.task, unit.start, unit.stop) for unit in plan(config, MORE_STUB)]
    assert made == [("ragged", 1, 3), ("turns", 1, 3), ("turns", 3, 5), ("turns", 5, 6)]
    assert [*grid.indices_of(config, MORE_STUB, "turns")] == [1, 2, 3, 4, 5]
    shortest, looked, there = checks.shortest_of(config, MORE_STUB, "ragged")
    assert (shortest.index, looked, there) == (2, 2, 2)


def test_where_items_begin_is_checked(tmp_path):
    config = stub_config(tmp_path, tasks=("ragged", "turns"), policies=("recency",), keep_ratios=(0.8,))
    with pytest.raises(ValueError, match="first_item: expected int at least 0, got -1"):
        check(replace(config, first_item=-1), MORE_STUB)
    with pytest.raises(ValueError, match="task 'ragged' has 3 items, and `first_item` is 3: none is left"):
        check(replace(config, first_item=3), MORE_STUB)
    assert check(replace(config, first_item=2), MORE_STUB) == []


def test_what_is_confirmed_is_asked_items_that_nothing_was_chosen_on():
    """Scratch took items from 0 on, the first study those from 2,000 on, some hundreds a task and seed."""
    for name in ("fused", "fused_again", "shift"):
        assert (
            load(CONFIGS / f"{name}.yaml", CompareConfig).first_item >= load_claims().conditions.first_item
        ), name
    for path in sorted((CONFIGS.parent / "study").glob("*.yaml")):
        assert load(path, StudyConfig).compare.first_item >= 6000, path


def test_tasks_in_text_are_those_of_a_model(monkeypatch):
    told = {}
    monkeypatch.setattr(grid, "load_suite", lambda name, **how: told.update(how, name=name) or STUB)
    config = load(
        CONFIGS / "demo.yaml",
        CompareConfig,
        ["suite=text", "model=some/model", "tasks=[ruler]", "text.chat=false", "text.dtype=bfloat16"],
    )
    assert suite_of(config) is STUB
    assert told == {
        "name": "text",
        "model": "some/model",
        "tasks": ("ruler",),
        "chat": False,
        "changes": {},
        "dtype": "bfloat16",
        "revision": None,
        "trust_remote_code": False,
        "template": {},
        "device_map": None,
    }
    suite = replace(STUB, tasks=dict.fromkeys(("ruler/vt", "niah/grid"), STUB.tasks["copy"]))
    assert with_all_tasks(config, suite) == ("ruler/vt",)


def test_a_hub_that_cannot_be_reached_is_said_and_nothing_is_written(tmp_path, capsys):
    arguments = ["--config", str(CONFIGS / "demo.yaml"), "suite=text", "model=nobody/nothing"]
    arguments += ["tasks=[ruler/vt]", "policies=[snapkv]", f"results={tmp_path}"]
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and "nobody/nothing" in text and "Traceback" not in text
    assert not [*tmp_path.iterdir()]
    assert main([*arguments, "tasks=[rulre]"]) == 2
    assert "unknown task or group 'rulre': did you mean 'ruler'?" in capsys.readouterr().err


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
    assert loaded("other/model-{seed}", None, 1).name == "other/model-1"
    assert asked == [("some/model", "auto"), ("some/model", None), ("other/model-1", None)]
    assert held == [0, 0, 0] and len(text_suite._loaded) == 1  # the last one was let go before


def test_a_protection_may_be_for_some_policies_and_for_the_scope_of_their_budget(tmp_path):
    given = {"protections": {"joint": ("scope=model",), "bare": ("protection.sinks=0",)}}
    config = stub_config(tmp_path, policies=("random", "oracle"), under={"joint": ("oracle",)}, **given)
    assert [line.name for line in all_lines(config)] == [
        *("random", "oracle", "oracle+joint", "random+bare", "oracle+bare"),
    ]
    assert find_policy(config, "oracle", "joint").scope == "model"
    check(config, STUB)
    with pytest.raises(ValueError, match="`under` names the protection 'joit' .did you mean 'joint'"):
        check(replace(config, under={"joit": ("oracle",)}), STUB)
    with pytest.raises(ValueError, match="asks for 'gate' under 'joint'.*not among the policies"):
        check(replace(config, under={"joint": ("gate",)}), STUB)
    fixed = replace(config, policies=("cake",), under={})
    with pytest.raises(ValueError, match=r"(?s)protection 'joint': .*scope 'model' lets layers compete"):
        check(fixed, STUB)

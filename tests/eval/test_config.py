"""A comparison that cannot work is refused before it starts, with everything that is wrong at once."""

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from retain.config import load
from retain.eval.checks import check
from retain.eval.compare import compare, main
from retain.eval.config import CompareConfig, find_policy, needs_gates
from retain.eval.orderings import ORDERINGS
from retain.gates.store import WEIGHTS_FILE
from retain.presets import policies
from tests.eval.stub import STUB, save_stub_gates, stub_config

CONFIGS = Path(__file__).parents[2] / "configs" / "compare"


def test_every_config_builds_and_names_what_exists():
    paths = sorted(CONFIGS.glob("*.yaml"))
    assert [path.stem for path in paths] == ["demo", "methods", "reference"]
    for path in paths:
        config = load(path, CompareConfig)
        assert config.run == path.stem and config.workers == 2
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
        "above 0 and below 1 (the full cache is measured anyway); got 1.0",
        "`gates` needs a {seed} in it, since there are 2 seeds",
        "`items_per_task` must be at least 1, got 0",
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
            reads_window = "window" in policy.observed_settings or name == "gate_bare"
            assert own.recent == (32 if reads_window else 1 if name == "tova_bare" else 0)
    assert {own.policy for own in ORDERINGS} | {own.baseline for own in ORDERINGS} <= set(config.policies)
    pairs = [frozenset((own.policy, own.baseline)) for own in ORDERINGS]
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
    assert differs("layer_defensivekv_released", "defensivekv_released") == {"scope"}
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
        "mine": ("defensivekv:released", "protection.recent=8"),
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
        "'relesed' (did you mean 'released'?); it has paper, released"
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
        "scope is 'head' or 'layer' or 'model', got 'heads'",
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


def test_a_variant_of_a_gate_needs_gates(tmp_path):
    config = stub_config(tmp_path, policies=("mine",), variants={"mine": ("gate", "protection.sinks=0")})
    assert needs_gates(config)
    with pytest.raises(ValueError, match="no gates for seed 0"):
        check(config, STUB)

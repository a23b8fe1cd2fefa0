"""A comparison that cannot work is refused before it starts, with everything that is wrong at once."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from retain.budget.statement import Budget
from retain.config import key_help, load
from retain.eval.compare import compare, main
from retain.eval.config import (
    Candidate,
    CompareConfig,
    budget_label,
    candidates_of,
    compare_parser,
    config_of,
    find_policy,
    gates_of,
    resolve_device,
)
from retain.eval.run.checks import load_checked, stated_problems
from retain.gates import GateSet
from retain.gates.artifact import WEIGHTS_FILE
from tests.eval.small import save_small_gates, save_table, small

CONFIGS = Path(__file__).parents[2] / "configs" / "compare"
BARE = ("protection.sinks=0", "protection.prefix_fraction=0", "protection.suffix_fraction=0")


def refusal(config) -> str:
    """The message that refuses a comparison; nothing is written."""
    with pytest.raises(ValueError) as caught:
        compare(config)
    assert not config.folder.exists()
    return str(caught.value)


def test_every_config_builds_and_names_what_exists():
    names = ["demo", "reference", "report", "smollm2", "smollm2_demo", "text"]
    paths = sorted(CONFIGS.glob("*.yaml"))
    assert [path.stem for path in paths] == names
    for path in paths:
        config = load(path, CompareConfig)
        assert config.run == path.stem and stated_problems(config) == []
        first_lines = path.read_text().splitlines()[:3]
        assert all(line.startswith("# ") for line in first_lines) and str(path.name) in first_lines[2]


@pytest.mark.parametrize("name", ["demo", "reference", "report", "text"])
def test_every_config_of_the_reference_model_passes_its_checks(name, gated):
    items = 1 if name == "text" else 4  # the grid has four lengths
    changes = [f"gates={gated / 'gates'}", f"items_per_task={items}"]
    loaded, contexts = load_checked(load(CONFIGS / f"{name}.yaml", CompareConfig, changes))
    assert all(len(of_task) == items for of_task in contexts.values()) and len(contexts) >= 6
    assert {*loaded.gates} <= {str(gated / "gates")}


@pytest.mark.parametrize("page", ["README.md", "eval/README.md"])
def test_the_comparison_of_a_page_passes_its_checks(page):
    """The reference model stands in for the page's: lengths of contexts are like, budgets are the page's."""
    line = re.search(
        "^retain compare smollm2-135m (.*)", (CONFIGS.parents[1] / page).read_text(), re.MULTILINE
    )
    typed = ["reference:0", *line[1].replace(",merge", "").split(), "--items-per-task", "4"]
    _, contexts = load_checked(config_of(compare_parser().parse_intermixed_args(typed)))
    assert len(contexts) >= 2


# What a config says, and what of it is refused.
WRONG = {
    "names": (
        {
            **{"policies": ("snapk", "full", "oracel"), "tasks": ("referense",), "baseline": "recency"},
            **{"keep_ratios": (0.5, 1.0), "run": "a/b", "device": "gpu", "dtype": "bfloat61"},
            "task_settings": {"refrence": {}, "facts": {}, "mine.jsonl": {}},
        },
        "unknown policy 'snapk' (did you mean 'snapkv'?)",
        "unknown policy 'oracel' (did you mean 'oracle'?)",
        "unknown task or group 'referense': did you mean 'reference'?",
        "'full' is always measured",
        "keep_ratios[1]: input should be less than 1, got 1.0",
        "device is 'gpu', and must be",
        "dtype is 'bfloat61' (did you mean 'bfloat16'?)",
        "`run` is the name of a folder",
        "`baseline` is none of the policies",
        "`task_settings` names an unknown task or group 'refrence' (did you mean 'reference'?)",
        "`task_settings` names an unknown task or group 'mine.jsonl'",
    ),
    "bytes": (
        {"policies": ("packed",), "variants": {"packed": ("snapkv", "precision={bits: 4}")}}
        | {"tokens_per_head": (50,)},
        "'packed' holds entries in fewer bytes, and tokens_per_head counts entries",
    ),
    "variants": (
        {
            "policies": ("recency", "bad_kee"),
            "variants": {
                "snapkv": ("snapkv", "protection.sinks=0"),
                "of_unknown": ("snapk", "protection.sinks=0"),
                "bad_key": ("snapkv", "protection.sink=0"),
            },
        },
        "variant 'snapkv' has the name of a policy that there is",
        "variant 'of_unknown': ",
        "did you mean 'snapkv'?",
        "variant 'bad_key': ",
        "unknown key 'protection.sink'",
        "unknown policy 'bad_kee' (did you mean 'bad_key'?)",
    ),
    "the grid": (
        {
            "policies": ("cake", "cake"),
            "tokens_per_head": (1, 50),
            "protections": {"own": ("protection.sinks=0",), "else": ("floor=mean",)},
            "seeds": (),
        },
        "tokens_per_head[0]: input should be greater than or equal to 2, got 1",
        "`policies` names something twice",
        "seeds: tuple should have at least 1 item",
        "protection 'own' is a list of `protection.field=value` and `scope=value` under another label",
        "got ['floor=mean']; other changes belong in a variant",
    ),
    "no budget": ({"keep_ratios": ()}, "`keep_ratios` is empty, and so is `tokens_per_head`"),
    "controls alone": ({"policies": ("oracle",), "when": ("decode",)}, "the policies are controls"),
    "settings of a task": (
        {"task_settings": {"reference/lists": {"lenght": 3}}},
        "task 'reference/lists': unknown setting of reference/lists 'lenght'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_all_problems_come_in_one_message(tmp_path, what):
    changes, *parts = WRONG[what]
    text = refusal(small(tmp_path, **changes))
    assert [part for part in parts if part not in text] == []


def test_gates_that_cannot_be_used_are_all_found_before_work_starts(tmp_path):
    load_checked(small(tmp_path, policies=("recency", "oracle")))  # takes none
    for name in ("short", "foreign"):
        save_small_gates(tmp_path / name)
    with (tmp_path / "short" / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(100)
    path = tmp_path / "foreign" / "gates.json"
    path.write_text(re.sub(r'"sha256": "[0-9a-f]{8}', '"sha256": "01234567', path.read_text()))
    names = ("none", "short", "foreign")
    variants = {name: ("gate", f"gates={tmp_path / name}") for name in names}
    said = refusal(small(tmp_path, policies=names, variants=variants))
    assert all(f"gates of policy '{name}': " in said for name in names)


def test_a_policy_that_cannot_do_what_is_asked_is_found_before_work_starts(gated, tmp_path, monkeypatch):
    save_small_gates(tmp_path / "rank", family="decay", F=8)
    summed = {
        "policies": ("sum",),
        "variants": {"sum": ("learned", "fusion=sum")},
        "gates": str(tmp_path / "rank"),
    }
    assert re.search(
        "policy 'sum' .*wants a gate in 'risk', .* are in 'rank'", refusal(small(tmp_path, **summed))
    )
    config = small(gated, run="refused", policies=("snapkv", "gate", "oracle"), when=("prefill", "decode"))
    load_checked(config)
    monkeypatch.setattr(GateSet, "contextual", True, raising=False)
    text = refusal(config)
    assert "policy 'gate' with when=decode: " in text and "snapkv" not in text


def test_a_context_that_is_too_short_is_refused_by_its_name(tmp_path):
    table = save_table(tmp_path / "ragged.jsonl", shorter=100)
    protections = {"wide": ("protection.recent=50", "protection.sinks=12")}
    config = small(tmp_path, policies=("recency", "random"), tasks=(table,), items_per_task=3)
    config = replace(config, protections=protections, keep_ratios=(0.4, 0.9))
    text = refusal(config)
    where = rf"on item 2 of task '{table}' \(seed 0\), whose context has \d+ tokens: "
    assert re.search(f"policy 'recency' at keep_ratio=0.4, {where}", text)
    assert "Or leave the task out, or raise context_tokens." in text
    assert "policy 'random+wide' at keep_ratio=0.4" in text and "0.9" not in text
    load_checked(replace(config, items_per_task=1, protections={}))


def test_devices_are_those_that_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="torch sees 0 GPUs: take device=cpu, or auto"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="device is 'cuda:2', and torch sees 2 GPUs"):
        resolve_device("cuda:2")
    for asked, rank, given in (("cuda", 3, 1), ("cuda:0", 3, 0), ("auto", 1, 1)):
        assert resolve_device(asked, rank) == torch.device("cuda", given)


def test_policies_of_a_config(tmp_path):
    variants = {"mine": ("snapkv:paper", "protection.recent=8"), "learned": ("gate", "protection.sinks=0")}
    config = small(tmp_path, policies=("mine", "learned", "oracle"), variants=variants, tokens_per_head=(40,))
    mine = find_policy(config, Candidate("mine"))
    assert (mine.name, mine.protection.recent, mine.variants) == ("mine", 8, {})
    assert (mine.observed_settings["pool"], mine.observed_settings["pool_size"]) == ("max", 7)
    assert [gates_of(config, name) for name in config.policies] == [None, config.gates, None]
    assert gates_of(replace(config, gates=""), "learned") == "those that ship"
    named = replace(config, variants={"learned": ("gate", "gates=there")})
    assert gates_of(named, "learned") == "there" and find_policy(named, Candidate("learned")).learned
    # A control is the gate's pipeline, and nothing but its score orders entries.
    joint = replace(config, protections={"joint": ("scope=model", "protection.recent=8")})
    for label in ("own", "joint"):
        gate, control = (find_policy(joint, Candidate(name, label)) for name in ("gate", "oracle"))
        assert (control.protection, control.scope, control.learned) == (gate.protection, gate.scope, True)
        assert (control.observed, control.fusion, control.draw) == (None, "learned", None)
    assert [one.label for one in candidates_of(joint, "prefill")][2:5] == [
        "oracle",
        "mine+joint",
        "learned+joint",
    ]
    assert "oracle" not in {one.policy for one in candidates_of(joint, "decode")}
    assert config.budgets == (Budget(keep_ratio=0.5), Budget(tokens_per_head=40))
    assert [*map(budget_label, config.budgets)] == ["keep_ratio=0.5", "tokens_per_head=40"]


DEMO = ["--config", str(CONFIGS / "demo.yaml")]


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        (["--config", "none.yaml"], ["none.yaml"]),
        (
            [*DEMO, "keep_ratos=[0.2]", "policies=[snapk]"],
            ["unknown key 'keep_ratos' (did", "policy 'snapk' (did"],
        ),
        ([*DEMO, "--items", "two"], ["items_per_task: input should be"]),
        (["one", "two"], ["one model is compared at a time, got one, two"]),
        ([], ["state a model with --policies and --tasks"]),
    ],
)
def test_the_command_line_says_what_is_wrong_and_where_to_look(tmp_path, capsys, typed, parts):
    assert main([*typed, f"results={tmp_path}"] if typed else []) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and "Traceback" not in text and all(part in text for part in parts)
    assert not [*tmp_path.iterdir()]


def test_help_shows_every_key_with_its_type_default_and_meaning():
    lines = list(key_help(CompareConfig))
    for name, line in zip(CompareConfig.__dataclass_fields__, lines, strict=True):
        assert re.match(rf"{name} \(.+; .+\): \w", line), line

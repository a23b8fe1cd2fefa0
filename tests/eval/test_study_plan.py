"""A study becomes one comparison: the winner, what stands in its place, and who takes which gates."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retain.config import build, load, to_mapping
from retain.eval.config import CompareConfig, GateSource, find_policy, suite_of
from retain.eval.study.plan import (
    Level,
    Plan,
    StudyConfig,
    Training,
    Winner,
    absent_gates,
    plan_of,
    train_commands,
)
from retain.train.recipe import DistillConfig
from retain.train.recipe import check as check_recipe
from tests.eval.stub import STUB, save_stub_gates, stub_config

ROOT = Path(__file__).parents[2]
FUSIONS = {
    "max": Level(("fusion=max",)),
    "learned": Level(("fusion=learned",), absent=True),
    "observed": Level(("fusion=observed", "learned=false"), absent=True),
}
SCOPES = {"model": Level(("scope=model",)), "head": Level(("scope=head",), absent=True)}


def make_study(folder: Path, **changes: Any) -> StudyConfig:
    compare = stub_config(
        folder,
        gate_sets={
            "other": GateSource(str(folder / "other-seed{seed}")),
            "same": GateSource(str(folder / "gates-seed{seed}")),
        },
    )
    study = StudyConfig(
        compare=compare,
        winner=Winner(("fused", "fusion=max", "draw=null")),
        factors={"fusion": FUSIONS, "scope": SCOPES},
    )
    return replace(study, **changes)


def policies_of(plan: Plan) -> dict[str, Any]:
    return {name: find_policy(plan.compare, name) for name in plan.lines}


def test_an_ablation_changes_one_factor_at_a_time(tmp_path):
    plan = plan_of(make_study(tmp_path), STUB)
    assert [*plan.lines] == ["winner", "fusion=learned", "fusion=observed", "scope=head"]
    assert plan.compare.policies == (*plan.lines,)
    assert plan.place == {
        ("fusion", "max"): "winner",
        ("fusion", "learned"): "fusion=learned",
        ("fusion", "observed"): "fusion=observed",
        ("scope", "model"): "winner",
        ("scope", "head"): "scope=head",
    }
    found = {name: (one.fusion, one.scope, one.learned) for name, one in policies_of(plan).items()}
    assert found == {
        "winner": ("max", "model", True),
        "fusion=learned": ("learned", "model", True),
        "fusion=observed": ("observed", "model", False),
        "scope=head": ("max", "head", True),
    }
    assert plan.lines["fusion=learned"].levels == {"fusion": "learned"} and not plan.skipped
    assert build(to_mapping(plan.compare), CompareConfig) == plan.compare


def test_levels_that_come_to_the_same_are_one_line(tmp_path):
    more = {
        "again": {"other_words": Level(("scope=layer", "scope=head")), "same_gates": Level(gates="same")},
        "gates": {"other": Level(gates="other")},
        "blind": {"without": Level(("learned=false", "fusion=observed"), gates="other")},
    }
    plan = plan_of(make_study(tmp_path, factors={"fusion": FUSIONS, "scope": SCOPES, **more}), STUB)
    assert plan.place["again", "other_words"] == "scope=head"
    assert plan.place["again", "same_gates"] == "winner"
    assert plan.place["gates", "other"] == "gates=other"
    # Without a gate it does not matter which gates it does not read.
    assert plan.place["blind", "without"] == "fusion=observed"
    assert plan.lines["fusion=observed"].gates is None and plan.lines["gates=other"].gates == "other"
    # Random gates differ by their name.
    study = make_study(tmp_path, factors={"gates": {"a": Level(gates="a"), "b": Level(gates="b")}})
    sets = {name: GateSource(str(tmp_path / "gates-seed{seed}"), "random") for name in ("a", "b")}
    plan = plan_of(replace(study, compare=replace(study.compare, gate_sets=sets)), STUB)
    assert [*plan.lines] == ["winner", "gates=a", "gates=b"]


def test_references_take_the_winners_gates_unless_they_are_told(tmp_path):
    study = make_study(tmp_path, winner=Winner(("fused", "fusion=max", "draw=null"), "other"))
    compare = replace(study.compare, variants={"wrong": ("gate",)}, uses={"wrong": "same"})
    references = ("gate", "snapkv", "oracle", "wrong")
    plan = plan_of(replace(study, compare=compare, references=references), STUB)
    assert plan.compare.policies[-4:] == references
    others = ("winner", "fusion=learned", "scope=head", "gate")
    assert plan.compare.uses == {**dict.fromkeys(others, "other"), "wrong": "same"}
    assert plan.compare.variants["wrong"] == ("gate",)


def test_a_grid_crosses_factors_and_says_what_cannot_be(tmp_path):
    scopes = {**SCOPES, "quotas": Level(("scope=head", "allocation.quotas=calibrated"))}
    scopes["far"] = Level(("scope=layer",), elsewhere="on another bed")
    gates = {"theirs": Level(gates="other")}
    study = make_study(tmp_path, factors={"fusion": FUSIONS, "scope": scopes, "gates": gates})
    plan = plan_of(replace(study, plan="grid", cross=("fusion", "scope")), STUB)
    assert set(plan.lines) == {
        "winner",
        *("fusion=max,scope=head", "fusion=max,scope=quotas"),
        *("fusion=learned,scope=model", "fusion=learned,scope=head", "fusion=learned,scope=quotas"),
        *("fusion=observed,scope=model", "fusion=observed,scope=head"),
    }
    assert plan.lines["winner"].levels == {"fusion": "max", "scope": "model"}
    assert [*plan.skipped] == ["fusion=observed,scope=quotas"]
    assert "stored with gates" in plan.skipped["fusion=observed,scope=quotas"]
    one = find_policy(plan.compare, "fusion=learned,scope=head")
    assert (one.fusion, one.scope) == ("learned", "head")


def test_all_problems_come_in_one_message(tmp_path):
    study = make_study(
        tmp_path,
        winner=Winner(("fused", "draw=null"), "othr"),
        factors={
            "fusion": {"maxx": Level(("fusion=maxx",)), "a+b": Level(gates="sam")},
            "scope": {"both": Level(("allocation.layers=entropy",))},
            "empty": {},
        },
        cross=("fusion", "skope"),
        references=("full", "snapk", "gate", "gate", "winner"),
        train={"nobody": Training("missing.yaml"), "other": Training("configs/nothing.yaml")},
    )
    compare = replace(
        study.compare,
        policies=("snapkv",),
        protections={"none": ("protection.sinks=0",)},
        tasks=("copi",),
        variants={"a=b": ("gate",)},
    )
    with pytest.raises(ValueError, match="This study cannot start") as caught:
        plan_of(replace(study, compare=compare), STUB)
    text = str(caught.value)
    for part in (
        "`uses` gives 'winner' unknown gates 'othr' (did you mean 'other'?)",
        "variant 'fusion=maxx': ",
        "unknown fusion 'maxx' (did you mean 'max'?)",
        "factors.fusion.a+b: names are letters",
        "`uses` gives 'fusion=a+b' unknown gates 'sam' (did you mean 'same'?)",
        "scope 'model' lets layers compete",
        "factors.empty has no levels",
        "plan 'ablation' changes one factor at a time",
        "cross: unknown factor 'skope' (did you mean 'scope'?)",
        "'full' is always measured",
        "unknown policy 'snapk' (did you mean 'snapkv'?)",
        "`policies` names something twice",
        "train: unknown set of gates 'nobody'",
        "train.other: there is no config 'configs/nothing.yaml'",
        "compare.policies is made from the winner",
        "make protection a factor",
        "compare.variants: 'a=b' is how the study names its own lines",
        "compare.variants: 'a=b' is not among the references",
        "unknown task 'copi' (did you mean 'copy'?)",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"winner": Winner(())}, "variant 'winner' begins with the preset that it changes, got 'nothing'"),
        ({"winner": Winner(("fusd",))}, "variant 'winner' begins with .*got 'fusd' .did you mean 'fused'"),
        ({"factors": {}}, "factors is empty"),
        ({"plan": "grid", "cross": ("fusion",)}, "crosses two factors at least"),
        ({"plan": "grid", "cross": ("fusion", "fusion")}, "names a factor twice"),
        (
            {"plan": "grid", "cross": ("a", "b"), "factors": {n: {"x": Level(gates="other")} for n in "ab"}},
            "a and b both change the gates",
        ),
        ({"train": {"other": Training()}}, "train.other has no config, and neither has train.gates"),
    ],
)
def test_each_problem_is_named(tmp_path, changes, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        plan_of(make_study(tmp_path, **changes), STUB)


def test_train_commands_make_every_set_once(tmp_path):
    config = str(ROOT / "configs" / "distill" / "reference.yaml")
    train = {
        "gates": Training(config, ("gate.settings={F: 16}",)),
        "other": Training(changes=("calibration.kind=none", "data.path=docs{seed}")),
    }
    study = make_study(tmp_path, train=train)
    study = replace(study, compare=replace(study.compare, seeds=(0, 1)))
    save_stub_gates(tmp_path, (1,))
    commands = train_commands(study, 2)
    folders = [f"gates-seed{seed}" for seed in (0, 1)]
    assert commands[2] == f"# there: {tmp_path / folders[1]}" and len(commands) == 4
    words = shlex.split(commands[3])
    assert words[:6] == ["accelerate", "launch", "--num_processes", "2", "train/distill.py", "--config"]
    assert words[6:] == [
        *(config, "model=reference:1", "seed=1", f"output={tmp_path / 'other-seed1'}"),
        *("gate.settings={F: 16}", "calibration.kind=none", "data.path=docs1"),
    ]
    # `same` lies where `gates` lies: one command makes both. What nothing makes is named.
    with pytest.raises(ValueError, match="train says nothing of the gates 'other'"):
        train_commands(replace(study, train={"gates": train["gates"]}))
    with pytest.raises(ValueError, match="train.other has no config"):
        train_commands(replace(study, train={"other": train["other"]}))
    # Gates without a seed are trained once.
    folders_of = {"gates": str(tmp_path / "g"), "gate_sets": {"other": GateSource(str(tmp_path / "o"))}}
    assert len(train_commands(replace(study, compare=replace(study.compare, **folders_of)))) == 2


def test_gates_that_are_not_there_are_told_with_their_command(tmp_path):
    study = make_study(tmp_path, factors={"gates": {"other": Level(gates="other")}})
    save_stub_gates(tmp_path)
    missing = str(tmp_path / "other-seed0")
    assert absent_gates(study, plan_of(study, STUB)) == [f"there are no gates in {missing}"]
    config = str(ROOT / "configs" / "distill" / "reference.yaml")
    study = replace(study, train={"gates": Training(config), "other": Training()})
    (said,) = absent_gates(study, plan_of(study, STUB))
    assert said.startswith(f"there are no gates in {missing}; train them first:")
    assert f"--config {config} model=reference:0 seed=0 output={missing}" in said


SHIPPED = sorted((ROOT / "configs" / "study").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_studies_plan_and_their_gates_can_be_trained(path, monkeypatch, tmp_path):
    assert [one.stem for one in SHIPPED] == ["again", "fusion", "left_out", "text"]
    # Where no gates lie about.
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    study = load(path, StudyConfig)
    assert build(to_mapping(study), StudyConfig) == study
    plan = plan_of(study, suite_of(study.compare))
    # Every factor holds the winner's own level, and says what it is without the ingredient.
    for factor, levels in study.factors.items():
        assert "winner" in [plan.place.get((factor, name)) for name in levels], factor
        # Of a family or a window there is no going without, and the winner has no floor; the small study
        # asks what more protection and more queries do.
        alternatives = ("family", "window", "floor", *(["protection", "recipe"] * (path.stem == "again")))
        assert any(level.absent for level in levels.values()) or factor in alternatives
    assert study.compare.keep_ratios == (0.05, 0.1, 0.2, 0.4)
    commands = [shlex.split(line) for line in train_commands(study)]
    for words in commands:
        place = words.index("--config")
        check_recipe(load(words[place + 1], DistillConfig, words[place + 2 :]), 1)
    outputs = {word for words in commands for word in words if word.startswith("output=")}
    own = plan.compare
    sources = [own.gates_of(seed, name) for seed in own.seeds for name in ("gates", *own.gate_sets)]
    assert outputs == {f"output={folder}" for folder in sources}
    head = path.read_text().splitlines()[:3]
    assert all(line.startswith("# ") for line in head) and f"--config configs/study/{path.name}" in head[2]
    crossed = replace(study, plan="grid", cross=("fusion", "scope"))
    both = len(study.factors["fusion"]) * len(study.factors["scope"])
    assert both / 2 < len(plan_of(crossed, suite_of(study.compare)).lines) <= both

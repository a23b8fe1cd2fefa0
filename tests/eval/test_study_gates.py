"""Gates that were trained otherwise than a study says are refused, whatever folder they lie in."""

from dataclasses import replace
from pathlib import Path

import pytest

from retain.config import load, save
from retain.eval.config import GateSource
from retain.eval.study.command import run_study
from retain.eval.study.plan import Level, StudyConfig, Training, Winner, absent_gates, plan_of, stale_gates
from retain.train.recipe import DistillConfig
from tests.eval.stub import STUB, save_stub_gates, stub_config

RECIPE = Path(__file__).parents[2] / "configs" / "distill" / "reference.yaml"
OTHER = ("target.sources={own: 1.0}", "gate.settings={F: 64}", "training.lr=1e-3")


def make_study(folder: Path, changes: tuple[str, ...] = OTHER) -> StudyConfig:
    compare = stub_config(folder, gate_sets={"other": GateSource(str(folder / "other seed{seed}"))})
    return StudyConfig(
        compare=compare,
        winner=Winner(("fused", "draw=null")),
        factors={"recipe": {"own": Level(gates="gates"), "other": Level(gates="other")}},
        train={"gates": Training(str(RECIPE)), "other": Training(changes=changes)},
    )


def trained(folder: Path, *changes: str) -> None:
    """What training leaves beside its gates."""
    folder.mkdir(exist_ok=True)
    save(load(RECIPE, DistillConfig, [f"output={folder}", "tracker=none", *changes]), folder / "config.yaml")


def test_gates_that_were_trained_as_the_study_says_are_taken(tmp_path):
    study = make_study(tmp_path)
    plan = plan_of(study, STUB)
    assert stale_gates(study, plan) == []  # there are none
    trained(tmp_path / "gates-seed0")
    trained(tmp_path / "other seed0", *OTHER, "training.lr=0.001", "seed=7", "model=elsewhere")
    assert stale_gates(study, plan) == []
    # What the study does not state, it does not ask.
    trained(tmp_path / "gates-seed0", "calibration.grid=11")
    assert stale_gates(study, plan) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ((), r"target.sources is .*'appendix': 1.0.* there and {'own': 1.0} here"),
        ((*OTHER, "target.sources={own: 1.0, repeat: 1.0}"), r"target.sources is .*'repeat'"),
        ((*OTHER, "gate.settings={F: 16}"), r"gate.settings is {'F': 16} there and {'F': 64} here"),
        ((*OTHER, "training.lr=0.002"), r"training.lr is 0.002 there and '?1e-3'? here"),
        ((*OTHER, "target.horizon=32"), r"target.horizon is 32 there and 8 here"),
    ],
)
def test_a_recipe_that_moved_is_found(tmp_path, changes, said):
    study = make_study(tmp_path)
    save_stub_gates(tmp_path)
    (tmp_path / "gates-seed0").rename(tmp_path / "other seed0")
    save_stub_gates(tmp_path)
    trained(tmp_path / "other seed0", *changes)
    with pytest.raises(ValueError, match=f"(?s)other seed0 were trained otherwise than train.other.*{said}"):
        run_study(study, STUB)
    assert not (tmp_path / "results").exists()
    # Who does not read them is not stopped by them.
    without = replace(study, factors={"scope": {"model": Level(), "head": Level(("scope=head",))}})
    assert stale_gates(without, plan_of(without, STUB)) == []


def test_one_folder_is_made_in_one_way(tmp_path):
    study = make_study(tmp_path)
    sets = {"other": GateSource(study.compare.gates)}
    # The command of a folder with a blank in its name is found.
    (missing,) = [one for one in absent_gates(study, plan_of(study, STUB)) if "other seed0" in one]
    assert "train them first:" in missing and "accelerate launch" in missing
    with pytest.raises(ValueError, match="train.gates and train.other make the gates of one folder in two"):
        plan_of(replace(study, compare=replace(study.compare, gate_sets=sets)), STUB)

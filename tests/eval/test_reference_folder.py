"""The suite `reference` on a model that was trained elsewhere, by the path of its folder."""

from pathlib import Path

import pytest
import torch

from retain.eval.config import MODEL as DEFAULT
from retain.eval.config import CompareConfig, suite_of
from retain.eval.diagnose.gate_cost import weight_flops
from retain.eval.tasks.reference_basic import MODEL, reference_suite, seeds_of
from retain.eval.tasks.suites import load_suite
from retain.reference import SEEDS, load_model
from retain.reference.model import build, save_folder
from retain.reference.recipe import TINY
from tests.refused import refused


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of seeds 0 and 12, and a folder that holds none."""
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 12):
        (root / f"tiny-seed{seed}").mkdir()
        save_folder(build(seed, **TINY.model).eval(), root / f"tiny-seed{seed}")
    (root / "tiny-seed3").mkdir()
    (root / "tiny-seedX").mkdir()
    return root


def config(**told: object) -> CompareConfig:
    return CompareConfig(run="r", seeds=(0,), items_per_task=1, gates="g", **told)


def test_a_config_that_names_no_model_has_the_shipped_ones() -> None:
    suite = suite_of(config())
    assert DEFAULT == MODEL and suite.load_model is load_model and suite.seeds == tuple(SEEDS)
    assert "model=reference:{seed} seed={seed} output={gates}" in suite.train_gates


@pytest.mark.parametrize("name", ["reference", "reference_more", "reference_shift"])
def test_a_folder_answers_for_all_seeds(folders: Path, name: str) -> None:
    path = str(folders / "tiny-seed12")
    suite = suite_of(config(suite=name, model=path))
    assert suite.name == name and suite.seeds is None
    assert [*suite.tasks] == [*load_suite(name).tasks]
    wanted = build(12, **TINY.model)
    for seed in (0, 7):
        model = suite.load_model(seed)
        assert torch.equal(model.model.embed_tokens.weight, wanted.model.embed_tokens.weight)
    command = suite.train_gates.format(seed=7, gates="runs/here")
    assert f"model={path} seed=7 output=runs/here" in command


def test_every_seed_has_a_folder_of_its_own(folders: Path) -> None:
    name = str(folders / "tiny-seed{seed}")
    suite = suite_of(config(model=name))
    assert suite.seeds == seeds_of(name) == (0, 12)
    for seed in (0, 12):
        wanted = build(seed, **TINY.model).model.embed_tokens.weight
        assert torch.equal(suite.load_model(seed).model.embed_tokens.weight, wanted)
    assert f"model={folders}/tiny-seed12 seed=12" in suite.train_gates.format(seed=12, gates="g")
    assert seeds_of(f"{name}/") == (0, 12)
    assert seeds_of(str(folders / "other-{seed}")) == ()
    assert seeds_of("some/model") is None


def test_one_shipped_model_can_be_asked_for() -> None:
    suite = reference_suite("reference:1")
    assert suite.seeds is None
    wanted = load_model(1).model.embed_tokens.weight
    assert torch.equal(suite.load_model(0).model.embed_tokens.weight, wanted)


def test_what_cannot_answer_is_refused(folders: Path) -> None:
    with pytest.raises(ValueError, match=r"no model at .*tiny-seed3.*python -m retain.reference.train"):
        reference_suite(str(folders / "tiny-seed3")).load_model(0)
    refused("no reference model of seed 9", reference_suite("reference:9").load_model, 0)


def test_a_folder_is_priced_by_its_config(folders: Path) -> None:
    sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "num_layers": 3}
    # Attention and feed-forward; the head is left out.
    layer = 64 * (4 + 2 + 2) * 32 + 4 * 32 * 64 + 3 * 64 * 128
    assert weight_flops(str(folders / "tiny-seed0"), sizes) == 2 * 3 * layer

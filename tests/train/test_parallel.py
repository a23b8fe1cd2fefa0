"""Processes share an optimiser and read frozen models in parts: real processes, equal numbers."""

import math
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from retain.hf.model.identity import fingerprint
from retain.train.run.checkpoint import begin_, latest, load_checkpoint, save_checkpoint
from retain.train.run.parallel import Synchroniser, is_sharded, loaded_whole, shard_frozen_
from retain.train.teacher import load_frozen
from tests.tiny import tiny_model
from tests.train.runs import TWO_PROCESSES, python
from tests.train.two_processes import (
    CLIP,
    FAMILIES,
    accumulate_,
    plain,
    state_of,
    toy_gates,
    toy_synchroniser,
    train_toy,
)

ALWAYS = ("plain", "elastic", "spoilt", "raised", "fsdp_frozen", "loaded")
# DeepSpeed is an extra. Where it is installed, what follows is asserted; where it is not, it cannot run.
DEEPSPEED = ("zero3_frozen",)
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs deepspeed: pip install 'retain-kv[deepspeed]'"
)
Results = Callable[[str], list[dict[str, Any]]]


def launched(folder: Path, arguments: list[str], **environment: str) -> Results:
    python(*arguments, **environment)

    def results(job: str) -> list[dict[str, Any]]:
        return [torch.load(path, weights_only=False) for path in sorted(folder.glob(f"{job}-*.pt"))]

    return results


@pytest.fixture(scope="module")
def alone(accelerator: Accelerator) -> dict[str, Any]:
    return plain(accelerator, Path())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, accelerator: Accelerator) -> tuple[Path, Results]:
    """Everything that takes two processes, in one launch."""
    folder = tmp_path_factory.mktemp("two")
    tiny_model("qwen3").save_pretrained(folder / "model")
    gates = toy_gates()
    synchroniser = toy_synchroniser(accelerator, gates)
    begin_(folder / "elastic", {}, {})
    train_toy(accelerator, gates, synchroniser, range(3))
    save_checkpoint(accelerator, folder / "elastic", 3, synchroniser, {"seconds": 1.5})
    jobs = [*ALWAYS, *(DEEPSPEED if find_spec("deepspeed") else ())]
    script = ["tests/train/two_processes.py", str(folder), *jobs]
    results = launched(folder, [*TWO_PROCESSES, *script], ACCELERATE_USE_CPU="true", DS_ACCELERATOR="cpu")
    for job in jobs:
        # Launchers have been seen to start one process, or two that each believe to be alone.
        assert [result["num_processes"] for result in results(job)] == [2, 2]
    return folder, results


def assert_same_numbers(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Equal but for the order in which a mean was summed."""
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_step_is_clipped_adamw_on_the_gradient_of_all_parameters(accelerator: Accelerator) -> None:
    gates = toy_gates()
    parameters = dict(gates.named_parameters())
    unused = next(iter(parameters))
    synchroniser = Synchroniser(accelerator, gates, betas=(0.8, 0.95), weight_decay=0.1)
    value = {name: p.detach().double().numpy().copy() for name, p in parameters.items()}
    first = {name: np.zeros_like(v) for name, v in value.items()}
    second = {name: np.zeros_like(v) for name, v in value.items()}
    for step, (lr, clip) in enumerate([(0.1, 1e9), (0.03, 0.2), (0.01, 0.2)], start=1):
        accumulate_(gates, step, 1.0)
        accumulate_(gates, step + 7, 0.5)
        if step == 2:
            parameters[unused].grad = None
        gradient = {
            name: np.zeros_like(value[name]) if p.grad is None else p.grad.double().numpy().copy()
            for name, p in parameters.items()
        }
        norm = synchroniser.step_(lr, clip)
        wanted = math.sqrt(sum(float((g**2).sum()) for g in gradient.values()))
        assert norm == pytest.approx(wanted, rel=1e-6) and (norm > clip) == (step > 1)
        for name, g in gradient.items():
            g = g * min(1.0, clip / wanted)
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            m, v = first[name] / (1 - 0.8**step), second[name] / (1 - 0.95**step)
            value[name] = value[name] * (1 - lr * 0.1) - lr * m / (np.sqrt(v) + 1e-8)
            np.testing.assert_allclose(parameters[name].detach().numpy(), value[name], rtol=2e-5, atol=2e-6)
        assert all(p.grad is None for p in parameters.values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_touches_nothing(accelerator: Accelerator, bad: float) -> None:
    gates = toy_gates()
    synchroniser = toy_synchroniser(accelerator, gates)
    train_toy(accelerator, gates, synchroniser, range(1))
    before = synchroniser.tensors()
    accumulate_(gates, 0, bad)
    assert not math.isfinite(synchroniser.step_(0.1, CLIP))
    after = synchroniser.tensors()
    assert before.keys() == after.keys() and any(name.startswith("optimizer/") for name in before)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_two_processes_step_as_one_on_the_same_documents(
    two: tuple[Path, Results], alone: dict[str, Any]
) -> None:
    first, second = two[1]("plain")
    assert first["distributed_type"] == "DistributedType.MULTI_CPU"
    assert first["norms"] == second["norms"] == pytest.approx(alone["norms"], rel=1e-6)
    for mine, theirs, both in zip(first["documents"], second["documents"], alone["documents"], strict=True):
        assert len(mine) == len(theirs) == 2 and sorted(mine + theirs) == sorted(both)
    assert all(torch.equal(tensor, second["state"][name]) for name, tensor in first["state"].items())
    assert_same_numbers(first["state"], alone["state"])


def test_from_one_process_to_two_and_back(
    two: tuple[Path, Results], alone: dict[str, Any], accelerator: Accelerator
) -> None:
    folder, results = two
    first, second = results("elastic")
    assert first["from"] == second["from"] == 3
    for step, (mine, theirs) in enumerate(zip(first["documents"], second["documents"], strict=True), start=3):
        assert sorted(mine + theirs) == sorted(alone["documents"][step]), "the very documents of one process"
    found = latest(folder / "elastic")
    assert found is not None and found[0] == 5
    gates = toy_gates()
    synchroniser = toy_synchroniser(accelerator, gates)
    step, extra = load_checkpoint(found[1], synchroniser)
    assert extra == {"seconds": 1.5, "by": 2}
    train_toy(accelerator, gates, synchroniser, range(step, 6))
    assert_same_numbers(state_of(gates), alone["state"])


def test_what_one_process_meets_all_of_them_know(two: tuple[Path, Results]) -> None:
    for result in two[1]("spoilt"):
        assert math.isnan(result["norm"]) and result["same"] and result["updates"] == 0
    assert [result["said"] for result in two[1]("raised")] == ["no space"] * 2


def test_every_process_loads_the_whole_of_a_saved_model(two: tuple[Path, Results]) -> None:
    whole = load_frozen(str(two[0] / "model")).model
    for process, result in enumerate(two[1]("loaded")):
        assert result["base"] == fingerprint(whole)["sha256"], f"process {process}"
        assert all(torch.equal(tensor, result["state"][name]) for name, tensor in whole.state_dict().items())
        assert "do not have the same documents" in result["said"] and "1: of process 1" in result["said"]
        assert result["left"] == "true", "the environment is as it was"


def test_transformers_does_not_partition_while_it_loads(tmp_path: Path) -> None:
    from transformers.integrations import deepspeed

    class Stage3:
        def is_zero3(self) -> bool:
            return True

    told = Stage3()
    deepspeed.set_hf_deepspeed_config(told)
    try:
        with pytest.raises(KeyError), loaded_whole():
            assert not deepspeed.is_deepspeed_zero3_enabled()
            raise KeyError
        assert deepspeed.is_deepspeed_zero3_enabled(), "generation asks, later"
    finally:
        deepspeed.unset_hf_deepspeed_config()
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING" not in os.environ


@pytest.mark.parametrize("way", ["fsdp", pytest.param("zero3", marks=needs_deepspeed)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_model_in_parts_computes_what_the_whole_one_does(
    two: tuple[Path, Results], family: str, way: str
) -> None:
    for found in (result[family] for result in two[1](f"{way}_frozen")):
        assert all(torch.equal(parts, whole) for parts, whole in found["states"])
        mine, wanted = found["gradients"]
        atol = 0 if way == "fsdp" else 1e-5 * float(wanted.abs().max())
        torch.testing.assert_close(mine, wanted, rtol=0, atol=atol)
        # Three forwards without gradients and one with them.
        assert found["inside"] == [True] * len(found["inside"]) and len(found["inside"]) % 4 == 0
        assert found["inside"] and found["held"] == 0.5 and found["is_sharded"] == (True, False)
        assert not any(found["trains"])
        assert found["outside"] == (way == "zero3"), "put together for whoever asks"
        assert way == "zero3" or re.search("is in parts.*while its decoder layer", found["said"])


def test_what_cannot_be_sharded_is_refused(accelerator: Accelerator) -> None:
    model = tiny_model("llama")
    shard_frozen_(model, accelerator)
    assert not is_sharded(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.hf_device_map = {"": "cpu"}
    with pytest.raises(ValueError, match=r"quantised or spread by device_map cannot be sharded \(fsdp2\)"):
        shard_frozen_(model, accelerator, sharding="fsdp2")


@pytest.mark.parametrize("asked", ["fsdp2", "zero3"])
def test_layers_are_sharded_as_asked(asked: str, accelerator: Accelerator, monkeypatch) -> None:
    done: list[str] = []
    monkeypatch.setattr("retain.train.run.parallel._fully_shard_", lambda *_: done.append("fsdp2"))
    monkeypatch.setattr("retain.train.run.parallel._partition_", lambda *_: done.append("zero3"))
    shard_frozen_(tiny_model("llama"), accelerator, sharding=asked, deepspeed_config={"any": "thing"})
    assert done == [asked]

"""Runs the jobs of a launched test on every process; the launching test compares the results.

    torchrun --nproc_per_node 2 tests/train/two_processes.py FOLDER JOB [JOB ...]

Every process writes `JOB-<process>.pt` into the folder that the test prepared.
"""

import errno
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from retain.config import load
from retain.gates import GateInputs, GateSet, build_gates
from retain.hf.model.identity import fingerprint
from retain.hf.model.projection import dense_weight
from retain.process.disk import DiskError
from retain.train import assembly, distill
from retain.train.run import parallel
from retain.train.run.checkpoint import latest, load_checkpoint, save_checkpoint
from retain.train.run.parallel import Synchroniser, check_alike, is_sharded, on_main_process, shard_frozen_
from retain.train.teacher import load_frozen
from tests.tiny import tiny_model

DOCUMENTS_PER_STEP = 4
CLIP = 0.5
FAMILIES = ("qwen3", "gpt_oss")


def toy_gates() -> GateSet:
    """Gates with an odd number of parameters, the same whenever they are asked for."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_gates("mlp", {layer: {"E": 9, "H": 3, "F": 6 + layer} for layer in range(2)})


def toy_synchroniser(accelerator: Accelerator, gates: nn.Module, **settings: Any) -> Synchroniser:
    return Synchroniser(accelerator, gates, betas=(0.9, 0.99), weight_decay=0.01, **settings)


def accumulate_(gates: GateSet, document: int, scale: float) -> None:
    """The gradient of one document, by a backward pass for every layer."""
    for layer in gates.layers:
        draw = torch.Generator().manual_seed(100 * document + layer)
        hidden_BTE = torch.randn(1, 5, 9, generator=draw)
        (scale * gates[layer](GateInputs(hidden_BTE=hidden_BTE)).square().mean()).backward()


def train_toy(
    accelerator: Accelerator, gates: GateSet, synchroniser: Synchroniser, steps: range
) -> tuple[list[float], list[list[int]]]:
    """Steps that are functions of their number, each process with every n-th document."""
    norms, read = [], []
    for step in steps:
        documents = range(step * DOCUMENTS_PER_STEP, (step + 1) * DOCUMENTS_PER_STEP)
        mine = list(documents[accelerator.process_index :: accelerator.num_processes])
        for document in mine:
            accumulate_(gates, document, 1 / len(mine))
        norms.append(synchroniser.step_(1e-2 / (step + 1), CLIP))
        read.append(mine)
    return norms, read


def state_of(gates: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in gates.state_dict().items()}


def plain(accelerator: Accelerator, folder: Path) -> dict[str, Any]:
    gates = toy_gates()
    norms, read = train_toy(accelerator, gates, toy_synchroniser(accelerator, gates), range(6))
    return {"state": state_of(gates), "norms": norms, "documents": read}


def elastic(accelerator: Accelerator, folder: Path) -> dict[str, Any]:
    """Goes on from what one process saved, and saves for one process again."""
    gates = toy_gates()
    synchroniser = toy_synchroniser(accelerator, gates)
    found = latest(folder / "elastic")
    assert found is not None
    step, extra = load_checkpoint(found[1], synchroniser)
    _, read = train_toy(accelerator, gates, synchroniser, range(step, step + 2))
    accelerator.wait_for_everyone()
    save_checkpoint(accelerator, folder / "elastic", step + 2, synchroniser, {**extra, "by": 2})
    return {"documents": read, "from": step}


def spoilt(accelerator: Accelerator, folder: Path) -> dict[str, Any]:
    """A gradient that is not finite on the last process only."""
    gates = toy_gates()
    synchroniser = toy_synchroniser(accelerator, gates)
    before = state_of(gates)
    accumulate_(gates, 0, float("nan") if accelerator.is_last_process else 1.0)
    norm = synchroniser.step_(0.1, CLIP)
    return {"norm": norm, "same": same(before, gates), "updates": len(synchroniser.optimizer.state)}


def said_by(kind: type[Exception], call: Callable[[], object]) -> str:
    """The error of a call, if it has one."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def same(before: dict[str, Tensor], gates: nn.Module) -> bool:
    return all(torch.equal(tensor, gates.state_dict()[name]) for name, tensor in before.items())


def raised(accelerator: Accelerator, folder: Path) -> dict[str, Any]:
    """The first process alone fails; nobody waits for it."""

    def fail() -> None:
        assert accelerator.is_main_process
        raise DiskError(errno.ENOSPC, "no space")

    return {"said": said_by(DiskError, lambda: on_main_process(accelerator, fail))}


def loaded(accelerator: Accelerator, folder: Path) -> dict[str, Any]:
    """A saved model, in the environment that accelerate's launcher makes for FSDP by default."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    model = load_frozen(str(folder / "model")).model
    os.environ.pop("ACCELERATE_USE_FSDP")
    base = str(fingerprint(model)["sha256"])
    check_alike({"base model": base})
    unlike = {"base model": base, "documents": f"of process {accelerator.process_index}"}
    said = said_by(ValueError, lambda: check_alike(unlike))
    return {
        "base": base,
        "state": state_of(model),
        "said": said,
        "left": os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING"),
    }


def frozen(accelerator: Accelerator, folder: Path, sharding: Any) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    for family in FAMILIES:
        ids = torch.arange(2, 40)[None] + accelerator.process_index
        whole, parts = tiny_model(family), tiny_model(family)
        config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        shard_frozen_(parts, accelerator, sharding=sharding, deepspeed_config=config)
        weights = [layer.self_attn.o_proj.weight for layer in whole.model.layers]
        inside = []

        def look(attention: nn.Module, *_: Any, weights: list = weights, inside: list = inside) -> None:
            found = dense_weight(attention.o_proj, torch.float32)
            inside.append(torch.equal(found.T, weights[attention.layer_idx]))

        for layer in parts.model.layers:
            layer.self_attn.register_forward_pre_hook(look)
        with torch.no_grad():
            # The decoder alone, the whole model, the decoder again: the walk, a soft stage, the next walk.
            states = [
                (parts.model(ids).last_hidden_state, whole.model(ids).last_hidden_state),
                (parts(ids).logits, whole(ids).logits),
                (parts.model(ids).last_hidden_state, whole.model(ids).last_hidden_state),
            ]
        gradients = []
        for model in (parts, whole):
            embeds_BTE = whole.get_input_embeddings()(ids).detach().requires_grad_(True)
            model.model(inputs_embeds=embeds_BTE).last_hidden_state.square().sum().backward()
            gradients.append(embeds_BTE.grad)
        output = parts.model.layers[0].self_attn.o_proj
        try:
            outside = torch.equal(dense_weight(output, torch.float32).T, weights[0])
            said = ""
        except ValueError as error:
            outside, said = False, str(error)
        held = output.weight.to_local() if hasattr(output.weight, "to_local") else output.weight.ds_tensor
        outcome[family] = {
            **{"states": states, "gradients": gradients, "inside": inside, "outside": outside},
            **{"said": said, "held": held.numel() / weights[0].numel()},
            "is_sharded": (is_sharded(parts), is_sharded(whole)),
            "trains": [p.requires_grad for p in parts.parameters()],
        }
    return outcome


def distil(accelerator: Accelerator, folder: Path, sharding: Any) -> dict[str, Any]:
    """A whole run of `folder/c.yaml` on a sharded model; accelerate itself shards nothing on a CPU."""
    config = load(folder / "c.yaml", distill.DistillConfig, [f"output={folder / sharding}"])
    config_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    sharded = []

    def shard_(model: nn.Module, accelerator: Accelerator) -> None:
        shard_frozen_(model, accelerator, sharding=sharding, deepspeed_config=config_3)
        sharded.append(is_sharded(model))

    # The jobs after this one need the processes to stay together.
    kept, accelerator.end_training = (assembly.parallel, accelerator.end_training), lambda: None
    changed = vars(parallel) | {"shard_frozen_": shard_}
    assembly.parallel = SimpleNamespace(**changed)
    distill.distill(config, accelerator)
    assembly.parallel, accelerator.end_training = kept
    return {"sharded": sharded}


JOBS: dict[str, Callable[[Accelerator, Path], dict[str, Any]]] = {
    **{job.__name__: job for job in (plain, elastic, spoilt, raised)},
    "fsdp_frozen": partial(frozen, sharding="fsdp2"),
    "zero3_frozen": partial(frozen, sharding="zero3"),
    "distill_fsdp2": partial(distil, sharding="fsdp2"),
    "distill_zero3": partial(distil, sharding="zero3"),
    **{job.__name__: job for job in (loaded,)},
}


def main() -> None:
    folder, jobs = Path(sys.argv[1]), sys.argv[2:]
    accelerator = Accelerator()
    for name, job in JOBS.items():
        if name in jobs:
            outcome = job(accelerator, folder)
            outcome["num_processes"] = accelerator.num_processes
            outcome["distributed_type"] = str(accelerator.distributed_type)
            torch.save(outcome, folder / f"{name}-{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    # DeepSpeed leaves threads of gloo behind that abort an orderly exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

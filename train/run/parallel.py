"""Synchronises gates over processes once a step, and shards a frozen model too large for one device.

Gates are small and whole on every process, and they meet once a step, in one all-reduce of one flat buffer:
the backward passes before it, many and small, communicate nothing. So whatever accelerate was launched with,
the gates' optimiser is AdamW, the same on every process; only the frozen model differs.

| accelerate says | frozen model |
| --- | --- |
| one process, or `device_map` | where it was loaded |
| DDP, ZeRO-1, ZeRO-2 | a replica per process |
| FSDP | `fully_shard` per decoder layer |
| ZeRO-3 | partitioned, weight by weight |

Accelerate's `mixed_precision`, gradient accumulation and clipping reach none of this: gates and their
optimiser are float32, the frozen model's precision is `dtype` of the training config, and clipping is
`training.clip`.
"""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator as Accelerator  # other modules take both from here
from accelerate.utils import DistributedType, patch_environment
from accelerate.utils import gather_object as gather_object
from torch import Tensor, nn

from retain.hf.model.decoder import base_model
from retain.process.extras import require

X = TypeVar("X")
# Two ways to place frozen weights in parts.
Sharding = Literal["fsdp2", "zero3"]


def make_accelerator(tracker: str, output: str = ".") -> Accelerator:
    """Makes the accelerator, with one of its trackers if one was asked for (tensorboard writes to `tracker/`
    in the run's folder, wandb reads its environment); ValueError where the launcher started several processes
    that would each train alone, or the tracker's package is missing."""
    options: dict[str, Any] = {}
    if tracker != "none":
        if find_spec(tracker) is None:
            raise ValueError(
                f'tracker={tracker} needs its package: pip install "retain-kv[{tracker}]", or leave '
                "tracker=none (the log is in log.jsonl anyway)."
            )
        options = {"log_with": tracker, "project_dir": str(Path(output) / "tracker")}
    accelerator = Accelerator(**options)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != accelerator.num_processes:
        raise ValueError(
            f"the launcher started {world} processes, and accelerate sees {accelerator.num_processes}: "
            "without a GPU, set ACCELERATE_USE_CPU=true in the environment (see train/README.md)."
        )
    return accelerator


class Synchroniser:
    """The optimiser of the gates, over all processes.

    A step: `g_p <- mean over processes of p.grad`, `n = ||g||_2` over all parameters together; if `n` is
    finite, `g <- g * min(1, clip / n)` and AdamW ("Decoupled weight decay regularization", arXiv 1711.05101)
    takes its step. A parameter without a gradient counts as one with zeros.

    Args:
        accelerator: of this process; says how many there are.
        gates: all of its parameters that require gradients are trained (a tied one once); they must be the
            same on every process.
        settings: of AdamW.
    """

    def __init__(self, accelerator: Accelerator, gates: nn.Module, **settings: Any):
        self.accelerator, self.gates = accelerator, gates
        self.parameters = [p for p in gates.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, **settings)

    @torch.no_grad()
    def step_(self, lr: float, clip: float) -> float:
        """Takes one optimiser step over all processes, and forgets the gradients; every process must call it.

        Returns the norm of the mean gradient before it is clipped to the norm `clip`, the same number on
        every process. If it is not finite, on whichever process that came from, nothing was touched.
        """
        # Where `device_map` has spread the gates, there is one process: their gradients meet on one device.
        device = self.parameters[0].device
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = torch.cat([grad.flatten().to(device, torch.float32) for grad in grads])
        flat = self.accelerator.reduce(flat, reduction="mean")
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
        if not math.isfinite(norm):
            return norm
        if norm > clip:
            flat.mul_(clip / norm)
        for p, part in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            p.grad = part.view(p.shape).to(p.device, p.dtype)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Copies on the CPU of the gates' state, as `gates/<name>`, and of AdamW's, as
        `optimizer/<number of the parameter>/<name>`."""
        found = {f"gates/{name}": tensor for name, tensor in self.gates.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer/{number}/{name}": tensor for name, tensor in state.items()}
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()}

    def load_(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from `tensors`, whatever the number of processes that they were saved under."""
        states: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for name in tensors:
            if name.startswith("optimizer/"):
                _, number, rest = name.split("/")
                states[int(number)][rest] = tensors[name]
        kept = {name: tensor for name, tensor in tensors.items() if name.startswith("gates/")}
        self.gates.load_state_dict({name.removeprefix("gates/"): kept[name] for name in kept})
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": dict(states)})


@contextmanager
def loaded_whole() -> Iterator[None]:
    """Inside, `from_pretrained` gives every process the whole model, whatever accelerate was launched with.

    Of what accelerate leaves in the environment transformers takes two hints: under FSDP it reads weights on
    the first process alone and leaves zeros on the others, for a broadcast that `Accelerator.prepare` would
    make; under ZeRO-3 it partitions while it loads, whatever `zero3_init_flag` says. Here the model is hashed
    whole and sharded by `shard_frozen_`, so that both are hidden from it.
    """
    from transformers.integrations import deepspeed

    before = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
            yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = before


def on_main_process(accelerator: Accelerator, act: Callable[[], X]) -> X:
    """Returns on every process the result of the first one; an error is raised on all of them, so that none
    waits for it."""
    made: Any = None
    error: Exception | None = None
    if accelerator.is_main_process:
        try:
            made = act()
        except Exception as raised:
            error = raised
    made, error = gather_object([(made, error)])[0]
    if error is not None:
        raise error
    return made


def check_alike(found: Mapping[str, str]) -> None:
    """Raises ValueError on every process where they loaded different things; collective."""
    everyone: list[dict[str, str]] = gather_object([{**found}])
    differ = [name for name in found if len({each.get(name) for each in everyone}) > 1]
    if differ:
        name = differ[0]
        each = ", ".join(f"{process}: {one.get(name)}" for process, one in enumerate(everyone))
        raise ValueError(
            f"the processes do not have the same {' and '.join(differ)} ({name} by process: "
            f"{each}): give every machine the same files, and state `revision` and `data.revision` of what "
            "comes from the hub."
        )


def leave_together_(accelerator: Accelerator) -> None:
    """Ends trackers and the process group, once every process has come here: the last act of a run that is
    done or was told to stop.

    A group that is left to the interpreter's end has threads that may still hold a tensor by then, and the
    process aborts (SIGABRT), now and then, on a busy machine (https://github.com/pytorch/pytorch/pull/179291).
    """
    accelerator.wait_for_everyone()
    accelerator.end_training()


def shard_frozen_(
    model: nn.Module,
    accelerator: Accelerator,
    *,
    sharding: Sharding | None = None,
    deepspeed_config: Mapping[str, Any] | None = None,
) -> None:
    """Brings a frozen model to its devices: whole (`model.to(device)`, but what is quantised, or spread by
    `device_map`, stays where it is), or in parts that are put together layer by layer.

    - `fsdp2`: every decoder layer is `fully_shard`-ed over all processes. Embeddings, the last norm and the
      head stay whole everywhere: they are called from outside of layers.
    - `zero3`: every parameter is partitioned, one after another, so that no device ever holds all of them,
      and is whole while its module runs; `retain.hf.model.projection.dense_weight` reads it outside.

    A sharded model is read in lockstep: every process must run the same number of forwards, and read as many
    weights, or all of them wait for ever. Hash it (`fingerprint`) before it is sharded.

    Args:
        model: a `PreTrainedModel`, loaded on the CPU by every process; changed in place.
        sharding, deepspeed_config: None: that which accelerate was launched with.

    Raises:
        ValueError: a model that cannot be sharded.
    """
    launched, plugin = accelerator.distributed_type, accelerator.state.deepspeed_plugin
    if sharding is None and launched == DistributedType.FSDP:
        sharding = "fsdp2"
    elif sharding is None and launched == DistributedType.DEEPSPEED and plugin.zero_stage == 3:
        sharding = "zero3"
    model.requires_grad_(False)
    placed = getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
    if sharding is None:
        if not placed:
            model.to(accelerator.device)
        return
    if placed:
        raise ValueError(
            f"a model that is quantised or spread by device_map cannot be sharded ({sharding}) as well: load "
            "it plain, or launch with configs/accelerate/ddp.yaml."
        )
    if sharding == "fsdp2":
        _fully_shard_(model, accelerator)
    else:
        _partition_(model, accelerator, deepspeed_config or plugin.deepspeed_config)


def is_sharded(model: nn.Module) -> bool:
    """True where every process has to take part in each forward of this model."""
    return any(hasattr(p, "placements") or hasattr(p, "ds_id") for p in model.parameters())


def _fully_shard_(model: nn.Module, accelerator: Accelerator) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers: Any = base_model(model).layers
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for layer in layers:
        # Moves this layer alone to the device, and keeps a part of it: the whole model never lies there. Not
        # the model around it: a root would have to be called first, and both the decoder and the model with
        # its head are.
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    inside = {id(tensor) for tensor in layers.parameters()} | {id(tensor) for tensor in layers.buffers()}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in inside:
            tensor.data = tensor.data.to(accelerator.device)


def _partition_(model: nn.Module, accelerator: Accelerator, config: Mapping[str, Any]) -> None:
    """Partitions by `zero.Init`: the engine would first bring the whole model to the device. Of the user's
    config only `zero_optimization` means something to a frozen model."""
    require("deepspeed", "deepspeed", what="this accelerate config")
    import deepspeed

    dtype = next(model.parameters()).dtype
    zero = {k: v for k, v in config["zero_optimization"].items() if v != "auto"}
    told = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "steps_per_print": 2**31}
    deepspeed.zero.Init(module=model, config_dict_or_path=told, dtype=dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(accelerator.device)
    deepspeed.initialize(model=model, config=told)

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

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator as Accelerator  # other modules take both from here
from accelerate.utils import DistributedType
from accelerate.utils import gather_object as gather_object
from torch import Tensor, nn

from retain.hf.model.decoder import base_model
from retain.process.extras import require

X = TypeVar("X")
# How frozen weights lie on several devices: whole on each, in parts (two ways), or spread by one process.
Sharding = Literal["replicated", "fsdp2", "zero3", "device_map"]
# Of a sharded model's outermost module: which of the two.
_SHARDED: "WeakKeyDictionary[nn.Module, Sharding]" = WeakKeyDictionary()
# State of AdamW for every parameter, beside the number of steps.
MOMENTS = ("exp_avg", "exp_avg_sq")


class Synchroniser:
    """The optimiser of the gates, over all processes.

    A step: `g_p <- mean over processes of p.grad`, `n = ||g||_2` over all parameters together; if `n` is
    finite, `g <- g * min(1, clip / n)` and AdamW ("Decoupled weight decay regularization", arXiv 1711.05101)
    takes its step. A parameter without a gradient counts as one with zeros.

    Args:
        accelerator: of this process; says how many there are.
        gates: all of its parameters that require gradients are trained (a tied one once); they must be the
            same on every process.

    Raises:
        ValueError: nothing to train.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        gates: nn.Module,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ):
        self.accelerator, self.gates = accelerator, gates
        self.parameters = {name: p for name, p in gates.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError(
                "these gates have no parameter that requires gradients: there is nothing to train."
            )
        self.num_updates = 0
        trained = list(self.parameters.values())
        self.optimizer = torch.optim.AdamW(trained, lr=lr, betas=betas, weight_decay=weight_decay, eps=eps)

    def lr_(self, lr: float) -> None:
        """Set the learning rate of the steps to come; the schedule is the caller's."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def zero_(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def step_(self, clip: float) -> float:
        """Takes one optimiser step over all processes; every process must call it.

        Returns the norm of the mean gradient before it is clipped to the norm `clip`, the same number on
        every process. If it is not finite, on whichever process that came from, nothing was touched.
        """
        # Gates follow their layers, which `device_map` may have spread: one buffer for each device.
        by_device: dict[torch.device, list[nn.Parameter]] = {}
        for parameter in self.parameters.values():
            by_device.setdefault(parameter.device, []).append(parameter)
        means = []
        for parameters in by_device.values():
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            flat = torch.cat([grad.flatten().float() for grad in grads])
            means.append(self.accelerator.reduce(flat, reduction="mean"))
        norms = [torch.linalg.vector_norm(flat, dtype=torch.float64).to(means[0].device) for flat in means]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        if not math.isfinite(norm):
            return norm
        for flat, parameters in zip(means, by_device.values(), strict=True):
            if norm > clip:
                flat.mul_(clip / norm)
            for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                p.grad = part.view(p.shape).to(p.dtype)
        self.optimizer.step()
        self.zero_()
        self.num_updates += 1
        return norm

    @torch.no_grad()
    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The moments of AdamW, on the CPU, as `<moment>/<parameter>`."""
        return {
            f"{moment}/{name}": (self.optimizer.state[p][moment] if self.num_updates else torch.zeros_like(p))
            .detach()
            .to("cpu", copy=True)
            for moment in MOMENTS
            for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def load_(self, gates: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], num_updates: int) -> None:
        """Goes on from a saved `state_dict` of the gates and `optimizer_tensors`, whatever the number of
        processes that they were saved under."""
        self.gates.load_state_dict(gates)
        self.num_updates = num_updates
        for name, p in self.parameters.items() if num_updates else ():
            moments = {m: optimizer[f"{m}/{name}"].to(p.device, p.dtype, copy=True) for m in MOMENTS}
            self.optimizer.state[p] = {"step": torch.tensor(float(num_updates)), **moments}


def _num_processes() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


@contextlib.contextmanager
def loaded_whole() -> Iterator[None]:
    """Inside, `from_pretrained` gives every process the whole model, whatever accelerate was launched with.

    Of what accelerate leaves in the environment transformers takes two hints: under FSDP it reads weights on
    the first process alone and leaves zeros on the others, for a broadcast that `Accelerator.prepare` would
    make; under ZeRO-3 it partitions while it loads, whatever `zero3_init_flag` says. Here the model is hashed
    whole and sharded by `shard_frozen_`, so that both are hidden from it.
    """
    from transformers.integrations import deepspeed

    before, name = deepspeed._hf_deepspeed_config_weak_ref, "FSDP_CPU_RAM_EFFICIENT_LOADING"
    efficient = os.environ.get(name)
    deepspeed._hf_deepspeed_config_weak_ref = None
    os.environ[name] = "false"
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = before
        del os.environ[name]
        if efficient is not None:
            os.environ[name] = efficient


def on_main_process(accelerator: Accelerator, act: Callable[[], X]) -> X:
    """Returns on every process what the first one makes; an error is raised on all of them, so that none
    waits for one that has gone."""
    made: Any = None
    error: Exception | None = None
    if accelerator.is_main_process:
        try:
            made = act()
        except Exception as raised:
            error = raised
    known = error is None or isinstance(error, OSError | ValueError)  # others may not be picklable
    sent = error if known else ValueError(f"the first process failed: {type(error).__name__}: {error}")
    everyone = gather_object([(made, sent)])
    if error is not None:
        raise error
    made, error = everyone[0]
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
            f"the processes do not have the same {' and '.join(differ)} (sha256 of the {name} by process: "
            f"{each}): give every machine the same files, and state `revision` and `data.revision` of what "
            "comes from the hub."
        )


def leave_together_(accelerator: Accelerator) -> None:
    """Ends trackers and the process group, once every process has come here: the last act of a run that is
    done or was told to stop, so that its exit code is its own.

    A group that is left to the interpreter's end has threads that may still hold a tensor by then, and the
    process aborts (SIGABRT), now and then, on a busy machine (https://github.com/pytorch/pytorch/pull/179291).
    """
    accelerator.wait_for_everyone()
    accelerator.end_training()


def leave_alone_() -> None:
    """Ends the process group where this process refuses or breaks off a run, and the others may not come:
    waits for none of them.

    Only gloo has threads that abort, and only it is left at once; NCCL would wait for what is under way.
    """
    own = torch.distributed
    if own.is_available() and own.is_initialized() and own.get_backend() == "gloo":
        own.destroy_process_group()


def sharding_of(accelerator: Accelerator) -> Sharding:
    """The placement of the frozen model that the launcher asks for."""
    if accelerator.distributed_type == DistributedType.FSDP:
        return "fsdp2"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "zero3" if accelerator.state.deepspeed_plugin.zero_stage == 3 else "replicated"
    return "replicated"


def shard_frozen_(
    model: nn.Module,
    accelerator: Accelerator,
    *,
    sharding: Sharding | None = None,
    deepspeed_config: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Brings a frozen model to its devices: whole, or in parts that are put together layer by layer; returns
    the same model, without gradients.

    - `replicated`: `model.to(device)`; what is quantised, or spread by `device_map`, stays where it is.
    - `fsdp2`: every decoder layer is `fully_shard`-ed over all processes, and is whole on each of them while
      it runs. Embeddings, the last norm and the head stay whole everywhere: they are called from outside
      of layers, and the head is asked for its weight.
    - `zero3`: every parameter is partitioned, one after another, so that no device ever holds all of them,
      and is whole while the very module that owns it runs; who reads a weight without running its module
      asks for it (`retain.hf.model.projection.dense_weight` does). Buffers are whole everywhere.

    A sharded model is read in lockstep: every process must run the same number of forwards, and read as many
    weights, or all of them wait for ever. Hash it (`fingerprint`) before it is sharded.

    Args:
        model: a `PreTrainedModel`, loaded on the CPU by every process; changed in place.
        sharding: None: what accelerate was launched with. (`device_map` is decided where a model is loaded.)
        deepspeed_config: None: that of accelerate.

    Raises:
        ValueError: a model that cannot be sharded.
    """
    sharding = sharding_of(accelerator) if sharding is None else sharding
    model.requires_grad_(False)
    placed = getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
    if sharding in ("replicated", "device_map"):
        return model if placed else model.to(accelerator.device)
    if placed:
        raise ValueError(
            f"a model that is quantised or spread by device_map cannot be sharded ({sharding}) as well: load "
            "it plain, or launch with configs/accelerate/ddp.yaml."
        )
    if sharding == "fsdp2":
        _fully_shard_(model, accelerator)
    else:
        if deepspeed_config is None:
            deepspeed_config = accelerator.state.deepspeed_plugin.deepspeed_config
        _partition_(model, accelerator, deepspeed_config)
    _SHARDED[model] = sharding
    return model


def is_sharded(model: nn.Module) -> bool:
    """True where every process has to take part in each forward of this model."""
    return model in _SHARDED


def _fully_shard_(model: nn.Module, accelerator: Accelerator) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers: Any = base_model(model).layers
    mesh = init_device_mesh(accelerator.device.type, (_num_processes(),))
    for layer in layers:
        # Moves this layer alone to the device, and keeps a part of it: the whole model never lies there. Not
        # the model around it: a root would have to be called first, and both the decoder and the model with
        # its head are.
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    inside = {id(tensor) for tensor in layers.parameters()} | {id(tensor) for tensor in layers.buffers()}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for tensor in store.values():
                if tensor is not None and id(tensor) not in inside:
                    tensor.data = tensor.data.to(accelerator.device)


def _partition_(model: nn.Module, accelerator: Accelerator, config: Mapping[str, Any]) -> None:
    """By `zero.Init` and not by the engine, which would first bring the whole model to the device. Only where
    things lie is the user's config to say: a batch size, precision or optimiser of its own means nothing to a
    frozen model."""
    require("deepspeed", "deepspeed", what="this accelerate config")
    import deepspeed

    dtype = next(model.parameters()).dtype
    zero = {k: v for k, v in config["zero_optimization"].items() if v != "auto"}
    told = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "steps_per_print": 2**31}
    deepspeed.zero.Init(module=model, config_dict_or_path=told, dtype=dtype)
    for module in model.modules():
        for name, tensor in module._buffers.items():
            if tensor is not None:
                module._buffers[name] = tensor.to(accelerator.device)
    deepspeed.initialize(model=model, config=told)

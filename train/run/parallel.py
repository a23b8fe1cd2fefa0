"""Synchronises gates over processes once a step, and shards a frozen model too large for one device.

Gates are small and whole on every process, and they meet once a step, in one all-reduce of one flat buffer.
The backward passes before it, many and small, communicate nothing; whatever the backend, the mean gradient is
looked at, clipped and found finite before anything is touched.

| accelerate says | gates' gradients | optimiser | frozen model |
| --- | --- | --- | --- |
| one process, or `device_map` | as they are | AdamW | where it was loaded |
| DDP | all-reduce | AdamW, the same on every process | a replica per process |
| FSDP | all-reduce | AdamW, the same on every process | `fully_shard` per decoder layer |
| ZeRO-1, ZeRO-2 | all-reduce, then DeepSpeed's | AdamW inside DeepSpeed, its state sharded | a replica |
| ZeRO-3 | the same | the same, its copy of the parameters sharded too | partitioned |

Accelerate's `mixed_precision`, gradient accumulation and clipping reach none of this: nothing here runs under
autocast, goes through a loss scaler, or is divided by accumulation steps. Gates and their optimiser are
float32; the frozen model's precision is `dtype` of the training config; clipping is `training.clip`.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from retain.hf.model.decoder import base_model
from retain.process.extras import deferred, require

with deferred("train", "accelerate", "accelerate.utils", what="training"):
    from accelerate import Accelerator as Accelerator  # other modules take both from here
    from accelerate.utils import DistributedType
    from accelerate.utils import gather_object as gather_object

X = TypeVar("X")
# How frozen weights lie on several devices: whole on each, in parts (two ways), or spread by one process.
Sharding = Literal["replicated", "fsdp2", "zero3", "device_map"]
# Of a sharded model's outermost module: which of the two.
_SHARDED: "WeakKeyDictionary[nn.Module, Sharding]" = WeakKeyDictionary()
# State of AdamW for every parameter, beside the number of steps.
MOMENTS = ("exp_avg", "exp_avg_sq")


class Surrogate(nn.Module):
    """A copy of all of the gates' parameters, end to end, and a loss with any given gradient.

    `forward(g) = <p, g>`, so `d forward / dp = g` exactly: one forward and backward of it hands a ready
    gradient to an engine that insists on running the backward pass itself (DeepSpeed). The engine may
    flatten, move and partition the copy, which is padded to a multiple of the processes (its parts are
    equal); the gates that the objectives see stay ordinary parameters. AdamW works number by number, so that
    it makes no difference which parameter a number belongs to."""

    def __init__(self, parameters: Iterable[nn.Parameter], num_processes: int = 1):
        super().__init__()
        self.flat = nn.Parameter(_flat(parameters, num_processes))

    def forward(self, gradient: Tensor) -> Tensor:
        """A scalar that means nothing, with the gradient that was given (padding may be left out)."""
        return torch.dot(self.flat[: len(gradient)], gradient)


class Synchroniser:
    """The optimiser of the gates, over all processes.

    A step: `g_p <- mean over processes of p.grad`, `n = ||g||_2` over all parameters together; if `n` is
    finite, `g <- g * min(1, clip / n)` and AdamW ("Decoupled weight decay regularization", arXiv 1711.05101)
    takes its step. A parameter without a gradient counts as one with zeros.

    Args:
        accelerator: of this process; says how many there are, and what is sharded.
        gates: all of its parameters that require gradients are trained (a tied one once); they must be the
            same on every process.
        deepspeed_config: DeepSpeed's settings; None: those of accelerate, if it runs DeepSpeed.

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
        deepspeed_config: Mapping[str, Any] | None = None,
    ):
        self.accelerator, self.gates = accelerator, gates
        self.parameters = {name: p for name, p in gates.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError(
                "these gates have no parameter that requires gradients: there is nothing to train."
            )
        self.num_updates = 0
        if deepspeed_config is None and accelerator.distributed_type == DistributedType.DEEPSPEED:
            deepspeed_config = accelerator.state.deepspeed_plugin.deepspeed_config
        self._surrogate: Surrogate | None = None
        self._engine: Any = None
        trained: list[nn.Parameter] = list(self.parameters.values())
        # ZeRO-0 shards nothing: DeepSpeed would only stand in the way.
        if deepspeed_config is not None and zero_stage(deepspeed_config) > 0:
            self._surrogate = Surrogate(trained, num_processes=_num_processes())
            trained = [self._surrogate.flat]
        self.optimizer = torch.optim.AdamW(trained, lr=lr, betas=betas, weight_decay=weight_decay, eps=eps)
        if self._surrogate is not None:
            assert deepspeed_config is not None
            self._engine = _deepspeed_engine(self._surrogate, self.optimizer, deepspeed_config)

    def lr_(self, lr: float) -> None:
        """Set the learning rate of the steps to come; the schedule is the caller's."""
        optimizer = self.optimizer if self._engine is None else self._engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr

    def zero_(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step_(self, clip: float) -> float:
        """Takes one optimiser step over all processes; every process must call it.

        Returns the norm of the mean gradient before it is clipped to the norm `clip`, the same number on
        every process. If it is not finite, on whichever process that came from, nothing was touched.
        """
        gradients = self._mean_gradients()
        home = next(iter(gradients)).device
        norms = [torch.linalg.vector_norm(flat, dtype=torch.float64).to(home) for flat in gradients]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        if not math.isfinite(norm):
            return norm
        if norm > clip:
            for flat in gradients:
                flat.mul_(clip / norm)
        if self._surrogate is None:
            for flat, parameters in zip(gradients, self._by_device().values(), strict=True):
                for parameter, part in _parts(flat, parameters):
                    parameter.grad = part.to(parameter.dtype)
            self.optimizer.step()
        else:
            (flat,) = gradients
            self._engine_step_(flat)
            with _whole(self._surrogate.flat):
                for parameter, part in _parts(self._surrogate.flat, self.parameters.values()):
                    parameter.copy_(part)
        self.zero_()
        self.num_updates += 1
        return norm

    def _by_device(self) -> dict[torch.device, list[nn.Parameter]]:
        """Gates follow their layers, which `device_map` may have spread."""
        where: dict[torch.device, list[nn.Parameter]] = {}
        for parameter in self.parameters.values():
            where.setdefault(parameter.device, []).append(parameter)
        return where

    def _mean_gradients(self) -> list[Tensor]:
        """The mean gradient, float32, one flat buffer for each of `_by_device`."""
        means = []
        for device, parameters in self._by_device().items():
            flat = torch.zeros(sum(p.numel() for p in parameters), device=device)
            for parameter, part in _parts(flat, parameters):
                if parameter.grad is not None:
                    part.copy_(parameter.grad)
            means.append(self.accelerator.reduce(flat, reduction="mean"))
        return means

    def _engine_step_(self, gradient: Tensor) -> None:
        """DeepSpeed reduces once more, which leaves a mean as it is, and each process steps its part."""
        with torch.enable_grad():
            self._engine.backward(self._engine(gradient))
        self._engine.step()

    @torch.no_grad()
    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The moments of AdamW, whole and on the CPU, as `<moment>/<parameter>`; on every process."""
        tensors: dict[str, Tensor] = {}
        for moment in MOMENTS:
            values: Iterable[Tensor]
            if self.num_updates == 0:
                values = [torch.zeros_like(parameter) for parameter in self.parameters.values()]
            elif self._surrogate is None:
                values = [self.optimizer.state[p][moment] for p in self.parameters.values()]
            else:
                from deepspeed.utils import safe_get_full_optimizer_state

                flat = safe_get_full_optimizer_state(self._surrogate.flat, moment)
                values = [part for _, part in _parts(flat, self.parameters.values())]
            for name, value in zip(self.parameters, values, strict=True):
                tensors[f"{moment}/{name}"] = value.detach().to("cpu", copy=True)
        return tensors

    @torch.no_grad()
    def load_(self, gates: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], num_updates: int) -> None:
        """Goes on from a saved `state_dict` of the gates and `optimizer_tensors`, whatever the number of
        processes and the backend they were saved under."""
        self.gates.load_state_dict(gates)
        self.num_updates = num_updates
        if self._surrogate is not None:
            self._load_engine_(self._surrogate, optimizer)
        elif num_updates:
            for name, parameter in self.parameters.items():
                moments = {moment: optimizer[f"{moment}/{name}"] for moment in MOMENTS}
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(num_updates)),
                    **{k: v.to(parameter.device, parameter.dtype, copy=True) for k, v in moments.items()},
                }

    def _load_engine_(self, surrogate: Surrogate, optimizer: Mapping[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        count, flat = _num_processes(), _flat(self.parameters.values(), _num_processes())
        if self.num_updates:
            # DeepSpeed makes its state at the first step: at a rate of 0 this one moves nothing.
            rates = [group["lr"] for group in self._engine.optimizer.param_groups]
            self.lr_(0.0)
            self._engine_step_(torch.zeros_like(flat))
            for group, rate in zip(self._engine.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        with _whole(surrogate.flat, written=True):
            surrogate.flat.copy_(flat)
        safe_set_full_fp32_param(surrogate.flat, flat)
        for moment in MOMENTS if self.num_updates else ():
            value = _flat([optimizer[f"{moment}/{name}"] for name in self.parameters], count)
            safe_set_full_optimizer_state(surrogate.flat, value.to(flat.device), moment)
        for state in self._engine.optimizer.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.full_like(torch.as_tensor(state["step"]), float(self.num_updates))


def _flat(tensors: Iterable[Tensor], num_processes: int) -> Tensor:
    """Tensors end to end, in float32, padded to a multiple of the processes."""
    flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors])
    return nn.functional.pad(flat, (0, -len(flat) % num_processes))


def _parts(flat: Tensor, parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Each parameter with its stretch of a flat buffer, in its own shape; what is left over is padding."""
    parts, start = [], 0
    for parameter in parameters:
        parts.append((parameter, flat[start : start + parameter.numel()].view(parameter.shape)))
        start += parameter.numel()
    return parts


def _num_processes() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def zero_stage(config: Mapping[str, Any]) -> int:
    """Which stage of ZeRO DeepSpeed's settings ask for; 0: none."""
    return int(config.get("zero_optimization", {}).get("stage", 0))


def engine_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the user's DeepSpeed settings that the gates' engine is given.

    Only where things lie is theirs to say (`zero_optimization`, and logging). Batch sizes, precision,
    clipping, optimiser and schedule belong to the training config: an engine that knew them too would scale,
    cast or clip a second time. Values of "auto" are left to DeepSpeed's defaults.
    """
    zero = {k: v for k, v in config.get("zero_optimization", {}).items() if v != "auto"}
    every = config.get("steps_per_print", "auto")
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # Our AdamW, not the one that DeepSpeed compiles: where the state lies is all that offloading changes.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 if every == "auto" else every,
        "wall_clock_breakdown": bool(config.get("wall_clock_breakdown", False)),
    }


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


def _deepspeed_engine(module: nn.Module, optimizer: Any, config: Mapping[str, Any]) -> Any:
    require("deepspeed", "deepspeed", what="this accelerate config")
    import deepspeed

    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=engine_config(config))
    return engine


def sharding_of(accelerator: Accelerator) -> Sharding:
    """The placement of the frozen model that the launcher asks for."""
    if accelerator.distributed_type == DistributedType.FSDP:
        return "fsdp2"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        return "zero3" if zero_stage(config) == 3 else "replicated"
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
    """By `zero.Init` and not by the engine, which would first bring the whole model to the device."""
    require("deepspeed", "deepspeed", what="this accelerate config")
    import deepspeed

    dtype = next(model.parameters()).dtype
    deepspeed.zero.Init(module=model, config_dict_or_path=engine_config(config), dtype=dtype)
    for module in model.modules():
        for name, tensor in module._buffers.items():
            if tensor is not None:
                module._buffers[name] = tensor.to(accelerator.device)
    _deepspeed_engine(model, None, config)


def _whole(parameter: nn.Parameter, *, written: bool = False) -> Any:
    """Inside, a parameter that ZeRO-3 keeps in parts is whole; `written`: what the first process writes
    there stays."""
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if written else None)

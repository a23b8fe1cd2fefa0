"""Puts gates beside the attention layers of vLLM's models, and checks that no weight of a checkpoint is lost.

Each class is vLLM's own with three additions where the engine is asked to evict: a hook that shows the gate
its layer's attention input, a copy of the output projections where a score reads them, and a refusal of
biases that the engine's model has no place for. Otherwise it is vLLM's.
"""

import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention

from retain.attention.rotary import Rotary
from retain.fingerprint import earlier_fingerprint_of, fingerprint_of, sample_of_weight, shape_and_sample
from retain.vllm.backend import worker_here
from retain.vllm.check import MODULES
from retain.vllm.settings import reads_output, settings_from

# Names of checkpoints -> the fused modules of vLLM that hold them.
FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}

# A decoder's embeddings, whose name in a checkpoint shows the prefix of the decoder's weights.
EMBEDDINGS = "embed_tokens.weight"
# What transformers does not read from checkpoints; and what it stacks, under names of its own.
UNREAD, STACKED = "inv_freq", re.compile(r"\.experts\.\d+\.")

# What an output projection is called beside an attention layer.
OUTPUTS = ("o_proj", "out_proj", "dense", "wo", "c_proj")


def __getattr__(name: str) -> Any:
    """The class of an architecture, made when vLLM first asks for it."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = getattr(import_module(f"vllm.model_executor.models.{MODULES[name]}"), name)
    made = globals()[name] = type(name, (_Evicting, base), {"__module__": __name__, "__doc__": base.__doc__})
    return made


class _Evicting:
    """What is added to a model of vLLM."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        settings = settings_from(vllm_config.additional_config)
        if settings is None:
            self._evicts = False
            return
        self._evicts, policy = True, settings.load_policy()
        self._reads_output = reads_output(policy)
        if not policy.learned:
            return
        assert isinstance(self, nn.Module)
        for name, module in list(self.named_modules()):
            if isinstance(module, Attention):
                parent = self.get_submodule(name.rpartition(".")[0])
                width = vllm_config.model_config.get_hidden_size()
                parent.register_forward_pre_hook(_hook(module.layer_name, width), with_kwargs=True)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint.

        Raises:
            ValueError: the model has no place for a bias of the checkpoint that is not zero.
        """
        if not self._evicts:
            return super().load_weights(weights)  # type: ignore[misc]
        biases: list[str] = []
        samples: dict[str, tuple[bytes, bytes]] = {}

        def seen() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name.endswith(".bias") and bool(tensor.any()):
                    biases.append(name)
                samples[name] = shape_and_sample(tensor), sample_of_weight(tensor)
                yield name, tensor

        loaded = super().load_weights(seen())  # type: ignore[misc]
        _refuse_lost(self, biases)
        if self._reads_output:
            _remember_outputs(self)
        _remember_rotary(self)
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, Attention):
                module.retain_samples = samples
        return loaded


def fingerprint_here(
    samples: Mapping[str, tuple[bytes, bytes]], dims: Mapping[str, Any], *, earlier: bool = False
) -> dict[str, str | int] | None:
    """The fingerprint of a model whose layers all evict; None where it cannot be told from its checkpoint, as
    of a mixture of experts, which transformers stacks under other names.

    Args:
        samples: of its weights, with their shapes and without, as `load_weights` left them.
        dims: its dimensions, as in a fingerprint.
        earlier: by the earlier hash.
    """
    found = next((name for name in samples if f".{name}".endswith(f".{EMBEDDINGS}")), None)
    if found is None:
        return None
    prefix = found.removesuffix(EMBEDDINGS)
    own = {
        name.removeprefix(prefix): sample
        for name, sample in samples.items()
        if name.startswith(prefix) and not name.endswith(UNREAD)
    }
    if not earlier:
        stacked = any(map(STACKED.search, own))
        return None if stacked else fingerprint_of(dims, {name: both for name, (both, _) in own.items()})
    names = [EMBEDDINGS]
    for layer in range(dims["num_layers"]):
        where = f"layers.{layer}.self_attn"
        keys = f"{where}.k_proj.weight"
        names += [keys if keys in own else f"{where}.qkv_proj.weight", f"{where}.o_proj.weight"]
    if not all(name in own for name in names):
        return None
    return earlier_fingerprint_of(dims, (own[name][1] for name in names))


def _refuse_lost(model: Any, biases: Iterable[str]) -> None:
    """Refuse biases that no parameter of the model has taken in."""
    there = {name.removeprefix("model.") for name, _ in model.named_parameters()}
    lost = []
    for bias in biases:
        *path, module, kind = bias.removeprefix("model.").split(".")
        if not {".".join([*path, name, kind]) for name in (module, FUSED.get(module, module))} & there:
            lost.append(bias)
    if lost:
        raise ValueError(
            f"vLLM's {type(model).__name__} has no place for {len(lost)} biases of this checkpoint, the "
            f"first is {lost[0]!r}: it would answer wrongly without a word. Start the engine with "
            "model_impl='transformers'."
        )


def _remember_outputs(model: Any) -> None:
    """Keep the output projection of every attention layer, which a CPU repacks once it is loaded."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, Attention):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        wide = module.num_heads * module.head_size
        found = [getattr(parent, own) for own in OUTPUTS if hasattr(parent, own)]
        weights = [one.weight for one in found if getattr(getattr(one, "weight", None), "ndim", 0) == 2]
        weights = [weight for weight in weights if weight.shape[1] == wide]
        if len(weights) != 1 or not weights[0].is_floating_point():
            raise ValueError(
                f"the output projection of {name} is not found as a plain matrix [E, {wide}] beside it (it "
                f"may be quantised), and the policy's score reads it: take a score that does not, such as "
                "'snapkv', or an unquantised checkpoint."
            )
        weight = weights[0].detach()
        module.retain_output_QDE = (weight.clone() if weight.device.type == "cpu" else weight).T.unflatten(
            0, (module.num_heads, module.head_size)
        )


class TableRotary(Rotary):
    """A rotary embedding read off the tables of a model of vLLM.

    Args:
        cosine_sine_PR: `cos_sin_cache`: of each position, R / 2 cosines and as many sines.
    """

    def __init__(self, cosine_sine_PR: Float[Tensor, "P R"]):
        cosines, sines = cosine_sine_PR.float().chunk(2, dim=-1)
        super().__init__(cosines.new_empty(0), float(cosines[0, 0]))
        object.__setattr__(self, "cosines_PF", cosines)
        object.__setattr__(self, "sines_PF", sines)

    def tables(self, positions: Int[Tensor, "*rows T"]) -> tuple[Tensor, Tensor]:
        both = (getattr(self, name)[positions] for name in ("cosines_PF", "sines_PF"))
        cosines, sines = (torch.cat([table, table], dim=-1) for table in both)
        return cosines, sines


def _remember_rotary(model: Any) -> None:
    """Keep the rotary embedding beside every attention layer, where it is understood: the halves convention,
    one table for all layers or one beside each."""
    shared = [module for module in model.modules() if hasattr(module, "inv_freq")]
    whole = None
    if len(shared) == 1 and isinstance(shared[0].inv_freq, Tensor):
        whole = Rotary(shared[0].inv_freq, float(getattr(shared[0], "attention_scaling", 1.0)))
    for name, module in list(model.named_modules()):
        if not isinstance(module, Attention):
            continue
        beside = getattr(model.get_submodule(name.rpartition(".")[0]), "rotary_emb", None)
        table = getattr(beside, "cos_sin_cache", None)
        halves = getattr(beside, "is_neox_style", False)
        if isinstance(table, Tensor) and table.dtype == torch.float32 and halves:
            module.retain_rotary = TableRotary(table)
        elif whole is not None:
            module.retain_rotary = whole


def _hook(layer_name: str, width: int) -> Any:
    """A hook on the module around an attention layer, which shows the gate its input."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [kwargs["hidden_states"]] if "hidden_states" in kwargs else args
        for value in given:
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1] == width:
                torch.ops.retain.note(value, layer_name)
                return
        got = [tuple(value.shape) for value in given if isinstance(value, Tensor)]
        raise ValueError(
            f"the module around {layer_name} is given tensors of {got}, and hidden states of width {width} "
            "are wanted for its gate: take model_impl='transformers', or a policy without gates."
        )

    return hook


def _note(hidden: Tensor, layer_name: str) -> None:
    """Note what the gate says of this step's tokens; nothing in a step that reads no prompt to evict from."""
    worker = worker_here()
    if worker is None or worker.batch is None or not worker.batch.notes:
        return
    place = worker.order.get(layer_name)
    if place is None or worker.gates is None or "hidden" not in worker.gates.inputs:
        return
    slots_N = get_forward_context().slot_mapping[layer_name]
    hidden = hidden.reshape(-1, hidden.shape[-1])[: len(slots_N)]
    worker.note_(place, slots_N[: len(hidden)], hidden_BTE=hidden[None])


def _no_note(hidden: Tensor, layer_name: str) -> None:
    """The same while a graph is traced."""


# One op, so that a compiled graph holds the hook as it is; it says that it changes its input, which it does
# not, so that no compiler drops it.
_LIBRARY = torch.library.Library("retain", "FRAGMENT")
if not hasattr(torch.ops.retain, "note"):
    _LIBRARY.define("note(Tensor(a!) hidden, str layer_name) -> ()")
    _LIBRARY.impl("note", _note, dispatch_key="CompositeExplicitAutograd")
    _LIBRARY._register_fake("note", _no_note)

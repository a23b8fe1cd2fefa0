"""Attaches what gates and scores read to the attention layers of vLLM's models.

Each class is vLLM's with two additions where the engine is asked to evict: a hook that shows the gate its
layer's attention input, and copies of what is read of a checkpoint (output projections, and samples of the
weights, by which gates know their model).
"""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from retain.process.fingerprint import shape_and_sample
from retain.vllm.backend import worker_here
from retain.vllm.check import MODULES
from retain.vllm.settings import settings_from


def __getattr__(name: str) -> Any:
    """The class of an architecture, made when vLLM first asks for it."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = getattr(import_module(f"vllm.model_executor.models.{MODULES[name]}"), name)
    made = globals()[name] = type(name, (_Evicting, base), {"__module__": __name__, "__doc__": base.__doc__})
    return made


class _Evicting:
    """The additions to a model of vLLM."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        settings = settings_from(vllm_config.additional_config)
        self._policy = None if settings is None else settings.load_policy()
        if self._policy is not None and self._policy.learned:
            width = vllm_config.model_config.get_hidden_size()
            for module, parent in _attention_of(self):
                parent.register_forward_pre_hook(_hook(module.layer_name, width), with_kwargs=True)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint, and put on the attention layers what scores and gates read of it."""
        if self._policy is None:
            return super().load_weights(weights)  # type: ignore[misc]
        samples: dict[str, bytes] = {}

        def seen() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                samples[name] = shape_and_sample(tensor)
                yield name, tensor

        loaded = super().load_weights(seen())  # type: ignore[misc]
        projects = not {"value_norm", "output_weight"}.isdisjoint(self._policy.needs)
        for module, parent in _attention_of(self):
            if projects:
                module.retain_output_QDE = _output_of(module, parent)
            module.retain_samples = samples
        return loaded


def _attention_of(model: Any) -> list[tuple[Any, nn.Module]]:
    """Attention layers of a model, each with the module around it."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, Attention)]
    return [(module, model.get_submodule(name.rpartition(".")[0])) for name, module in found]


def _output_of(module: Any, parent: Any) -> Float[Tensor, "Q D E"]:
    """The output projection of an attention layer; a copy, since a CPU repacks it once it is loaded."""
    wide = module.num_heads * module.head_size
    weight = getattr(getattr(parent, "o_proj", None), "weight", None)
    if weight is None or weight.shape[1:] != (wide,) or not weight.is_floating_point():
        raise ValueError(
            f"no matrix o_proj [E, {wide}] stands beside {module.layer_name} (it may be quantised), and the "
            "policy's score reads it: take 'snapkv', which does not, or an unquantised checkpoint."
        )
    return weight.detach().clone().T.unflatten(0, (module.num_heads, module.head_size))


def _hook(layer_name: str, width: int) -> Any:
    """A hook on the module around an attention layer, which shows the gate its input."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        hidden = [value for value in given if value.is_floating_point() and value.shape[-1] == width]
        torch.ops.retain.score_tokens(hidden[0], layer_name)

    return hook


def _score_tokens(hidden: Tensor, layer_name: str) -> None:
    """Store the gate's scores of this step's tokens; nothing in a step that reads no prompt to evict from."""
    if (worker := worker_here()) is not None:
        worker.score_tokens_(layer_name, hidden.flatten(0, -2))


# One op, so that a compiled graph holds the hook as it is; it says that it changes its input, which it does
# not, so that no compiler drops it.
_LIBRARY = torch.library.Library("retain", "FRAGMENT")
if not hasattr(torch.ops.retain, "score_tokens"):
    _LIBRARY.define("score_tokens(Tensor(a!) hidden, str layer_name) -> ()")
    _LIBRARY.impl("score_tokens", _score_tokens, dispatch_key="CompositeExplicitAutograd")
    _LIBRARY._register_fake("score_tokens", lambda hidden, layer_name: None)

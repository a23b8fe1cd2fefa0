"""Lookahead gates: a few learned tokens behind the prompt predict what the answer will attend to.

LookaheadKV: Fast and Accurate KV Cache Eviction by Glimpsing into the Future without Generation (arXiv
2603.10899). `retain.hf.intercept.lookahead_pass` runs the tokens through the model behind the prompt; an
entry's score is the attention that they give to it. The gate itself has no parameters: the tokens and the
low-rank adapters on their path alone are trained (`LookaheadExtension`). Adapters are forward hooks, so they
go with modules of any kind: packed weights, weights on several devices, modules that others have wrapped.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from retain.attention.received import received_attention
from retain.evidence import Evidence, attention_probs
from retain.gates.base import Gate, GateInputs

# The pass of this context (threads differ) whose hooks add adapters; None: the model runs as it is.
_ACTIVE: ContextVar[object | None] = ContextVar("retain_lookahead", default=None)


class LookaheadExtension(nn.Module):
    """Lookahead tokens `[n, E]`, and for each named linear module `W` the adapter of their path.

    On that path `W x` becomes `W x + alpha / rank * up (down x)`; `down` is `[rank, in]`, `up` is
    `[out, rank]` and begins at zero.

    Args:
        num_tokens: n (paper: 32).
        rank: of the adapters (paper: 8).
        alpha: their scale, times the rank (paper: 32).
        modules: name of a linear module in the decoder -> (features in, features out).
    """

    def __init__(
        self,
        *,
        E: int,
        modules: Mapping[str, tuple[int, int] | list[int]],
        num_tokens: int = 32,
        rank: int = 8,
        alpha: float = 32.0,
    ):
        super().__init__()
        if num_tokens < 1 or rank < 1 or not alpha > 0:
            raise ValueError(
                f"lookahead gates: got num_tokens={num_tokens}, rank={rank}, alpha={alpha}: wanted at least "
                "one token, a rank of at least 1 and an alpha above 0."
            )
        self.num_tokens, self.E, self.rank, self.alpha = num_tokens, E, rank, float(alpha)
        self.modules_of = {name: (int(wide), int(tall)) for name, (wide, tall) in modules.items()}
        self.tokens_SE = nn.Parameter(torch.randn(num_tokens, E) * 0.02)
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for name, (wide, tall) in self.modules_of.items():
            bound = 1 / math.sqrt(wide)  # as peft draws it, which the paper uses
            self.down[_key(name)] = nn.Parameter(torch.empty(rank, wide).uniform_(-bound, bound))
            self.up[_key(name)] = nn.Parameter(torch.zeros(tall, rank))

    def dims(self) -> dict[str, Any]:
        """Keyword arguments that rebuild this extension (plain JSON values)."""
        sizes = {name: getattr(self, name) for name in ("num_tokens", "E", "rank", "alpha")}
        return {**sizes, "modules": {name: list(widths) for name, widths in self.modules_of.items()}}

    @contextmanager
    def extend(self, model: nn.Module) -> Iterator[None]:
        """Context in which the named modules run with the adapters; afterwards they are as before.

        Other threads run the plain model meanwhile, or lookahead tokens of their own. Where gradients are
        wanted the adapters are there for all threads, since autograd's compute checkpointed layers again.
        `model` is a causal language model of transformers, or its decoder. ValueError: it is extended
        already.
        """
        decoder: Any = getattr(model, "base_model", model)
        trains, active = torch.is_grad_enabled(), object()
        found = {name: decoder.get_submodule(name) for name in self.modules_of}
        if _ACTIVE.get() is not None:
            raise ValueError("lookahead gates extend a model already: leave their extend(model) first.")

        def added(name: str, module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            """The output and the adapter's, computed in the adapter's precision, in the module's."""
            if not trains and _ACTIVE.get() is not active:
                return output
            x = arguments[0]
            down, up = (part[_key(name)].to(x.device) for part in (self.down, self.up))
            lower = functional.linear(functional.linear(x.to(down.dtype), down), up)
            return (output + lower * (self.alpha / self.rank)).to(output.dtype)

        token = _ACTIVE.set(active)
        handles = [module.register_forward_hook(partial(added, name)) for name, module in found.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            _ACTIVE.reset(token)


class LookaheadGate(Gate):
    """`s_h(i) = mean_p mean_{q in group(h)} a_qp[i]`: attention of the lookahead tokens `p` to entry `i`.

    `a_qp` is the softmax of `cap(scaling q_p . k)` over the prompt's entries, the lookahead tokens up to `p`
    itself, and the layer's sink, if it has one. So a head's scores sum to its attention to the prompt, at
    most 1. The paper's score, by which a prompt is cut once, when it has been read.
    """

    family = "lookahead"
    inputs = frozenset({"lookahead", "keys"})
    unit = "mass"
    contextual = True
    extension = LookaheadExtension

    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        """Scores by the queries and keys of the tokens, in float32 (float64 if the keys are); 0 on padding.
        Memory is linear in T, but where a gradient is asked for, and all rows are held."""
        queries, keys, behind = inputs.lookahead_BQSD, inputs.keys_BHTD, inputs.lookahead_keys_BHSD
        assert queries is not None and keys is not None and behind is not None and inputs.scaling is not None
        (B, Q, S, D), T = queries.shape, keys.shape[2]
        exists_BA = torch.ones(B, T + S, dtype=torch.bool, device=keys.device)
        if inputs.valid_BT is not None:
            exists_BA[:, :T] = inputs.valid_BT
        both_BHAD = torch.cat([keys, behind], dim=2)
        layer = Evidence(
            layer_idx=0,
            queries_BQSD=queries,
            keys_BHTD=both_BHAD,
            values_BHTD=both_BHAD,
            output_weight_QDE=keys.new_zeros(1).expand(Q, D, 1),
            scaling=inputs.scaling,
            positions_BT=exists_BA.cumsum(-1) - 1,
            valid_BT=exists_BA,
            soft_cap=inputs.soft_cap,
            sinks_Q=inputs.sinks_Q,
        )
        if torch.is_grad_enabled() and (queries.requires_grad or both_BHAD.requires_grad):
            paid_BQT = attention_probs(layer, 0, S)[..., :T].sum(2)
        else:
            (paid_BQT,) = received_attention(layer, "sum", entries=T)
        return (paid_BQT / S).unflatten(1, (keys.shape[1], -1)).mean(2)


def _key(name: str) -> str:
    """A module's name as a parameter name."""
    return name.replace(".", "/")

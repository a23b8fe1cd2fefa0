"""Lookahead gates: a few learned tokens behind the prompt predict what the answer will attend to.

LookaheadKV: Fast and Accurate KV Cache Eviction by Glimpsing into the Future without Generation (arXiv
2603.10899). `retain.hf.intercept.lookahead_pass` runs the tokens through the model behind the prompt; an
entry's score is the attention that they give to it. The gate itself has no parameters: the tokens and the
low-rank adapters on their path alone are trained (`LookaheadExtension`), as plain parameters, so that an
artifact is read without peft; peft is needed only when they enter a model.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retain.gates.base import Extension, Gate, GateInputs
from retain.kernels.attention_stats import attention_stats
from retain.process.extras import require

# Under which our adapter stands in peft's layers.
ADAPTER = "retain_lookahead"
# Attributes that peft reads to know how weights are packed.
PACKED = ("is_loaded_in_8bit", "is_loaded_in_4bit", "hf_quantizer")
# Modules of a decoder that peft wrapped for an extension, which takes it longer than the pass itself: kept
# beside both, while both live, so that later prompts only lend them.
_WRAPPED: "WeakKeyDictionary[LookaheadExtension, WeakKeyDictionary[nn.Module, dict[str, Any]]]"
_WRAPPED = WeakKeyDictionary()
# Modules that this context runs with an adapter: a model's module -> its wrapper of peft.
_RUNNING: ContextVar[Mapping[nn.Module, nn.Module]] = ContextVar(
    "retain_lookahead", default=MappingProxyType({})
)
# The module that runs with its adapter in this context, at this moment.
_INSIDE: ContextVar[nn.Module | None] = ContextVar("retain_lookahead_inside", default=None)
# Held while modules are lent or given back, not while they run.
_LOCK = threading.Lock()
_TWICE = (
    "lookahead gates extend this model already: leave their extend(model) before others enter one, and train "
    "one set of them at a time on a model."
)


class _Lent:
    """A module's `forward` while lookahead tokens run in some thread: with an adapter there, plain
    elsewhere."""

    def __init__(self, module: nn.Module):
        self.module, self.users = module, 0
        self.replaced = vars(module).get("forward")  # set by another wrapper (accelerate does)
        self.plain = module.forward
        self.everyone: nn.Module | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        adapted = _RUNNING.get().get(self.module, self.everyone)
        # Some of peft's modules for packed weights come back by the module itself.
        if adapted is None or _INSIDE.get() is self.module:
            return self.plain(*args, **kwargs)
        token = _INSIDE.set(self.module)
        try:
            return adapted(*args, **kwargs)
        finally:
            _INSIDE.reset(token)


class _Plain(nn.Module):
    """Stand-in for the wrapped module that peft calls: its `forward`, whose hooks have run already."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._module = (module,)  # in a tuple: it is no child of ours

    @property
    def module(self) -> nn.Module:
        return self._module[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._module[0], name)


def _borrow(adapters: Mapping[nn.Module, nn.Module], *, everyone: bool) -> list[_Lent]:
    """Replace the modules' forward, counting users."""
    lent: list[_Lent] = []
    for module in adapters:
        known = vars(module).get("forward")
        lent.append(known if isinstance(known, _Lent) else _Lent(module))
    if everyone and any(each.everyone is not None for each in lent):
        raise ValueError(_TWICE)
    for each in lent:
        each.users += 1
        each.everyone = adapters[each.module] if everyone else each.everyone
        each.module.forward = each
    return lent


def _give_back(lent: Sequence[_Lent], adapters: Mapping[nn.Module, nn.Module]) -> None:
    """Remove one user; the last one restores the modules' forward."""
    for each in lent:
        each.users -= 1
        each.everyone = None if each.everyone is adapters[each.module] else each.everyone
        if each.users or vars(each.module).get("forward") is not each:
            continue
        if each.replaced is None:
            del each.module.forward
        else:
            each.module.forward = each.replaced


class LookaheadExtension(Extension):
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
        num_tokens: int = 32,
        E: int,
        rank: int = 8,
        alpha: float = 32.0,
        modules: Mapping[str, tuple[int, int] | list[int]],
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
        for name, (width_in, width_out) in self.modules_of.items():
            bound = 1 / math.sqrt(width_in)  # as peft draws it
            down = torch.empty(rank, width_in).uniform_(-bound, bound)
            self.down[_key(name)] = nn.Parameter(down)
            self.up[_key(name)] = nn.Parameter(torch.zeros(width_out, rank))

    def dims(self) -> dict[str, Any]:
        return {
            "num_tokens": self.num_tokens,
            "E": self.E,
            "rank": self.rank,
            "alpha": self.alpha,
            "modules": {name: list(widths) for name, widths in self.modules_of.items()},
        }

    def embeds(self, num_sequences: int, like: Tensor) -> Float[Tensor, "B lookahead E"]:
        """The tokens as input embeddings of the decoder, one copy a sequence, in device and precision as
        `like`."""
        return self.tokens_SE.to(like).expand(num_sequences, -1, -1)

    @contextmanager
    def extend(self, model: nn.Module) -> Iterator[Self]:
        """Context in which the named modules run with the adapters, through peft; afterwards they are
        restored.

        For this context alone (`contextvars`): other threads run the plain model meanwhile, or lookahead
        tokens of their own. Where gradients are wanted (`torch.is_grad_enabled`) it is for all threads, since
        checkpointed layers are computed again in threads of autograd's: nothing else should use a model whose
        lookahead gates are being trained.

        Only the `forward` of the modules is lent out: names, modules and parameters of the model stay. peft
        wraps them in a container of ours and never sees the model.

        Args:
            model: a causal language model of transformers (on which `PACKED` is), or its decoder.

        Raises:
            ValueError: the model does not have the modules, carries another peft adapter on them, is extended
                by lookahead gates already, or peft is not installed.
        """
        decoder = _decoder(model)
        found = {name: _module(decoder, name, widths) for name, widths in self.modules_of.items()}
        running = _RUNNING.get()
        if any(module in running for module in found.values()):
            raise ValueError(_TWICE)
        with _LOCK:
            known = _WRAPPED.setdefault(self, WeakKeyDictionary())
            wrapped = known.get(decoder, {})
            if [module.base_layer.module for module in wrapped.values()] != list(found.values()):
                wrapped = known[decoder] = self._wrapped(model, found)
            for name, module in wrapped.items():
                self._lend(name, module, found[name])
            own = {module: wrapped[name] for name, module in found.items()}
            lent = _borrow(own, everyone=torch.is_grad_enabled())
        token = _RUNNING.set({**running, **own})
        try:
            yield self
        finally:
            _RUNNING.reset(token)
            with _LOCK:
                _give_back(lent, own)

    def _wrapped(self, model: nn.Module, found: Mapping[str, nn.Module]) -> dict[str, Any]:
        """The modules wrapped by peft, on this extension's parameters."""
        if not found:
            return {}
        require("train", "peft", what="a lookahead gate, whose tokens run through adapters of peft,")
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        if taken := [name for name, module in found.items() if isinstance(module, BaseTunerLayer)]:
            raise ValueError(
                f"the model carries an adapter of peft on {taken[0]} already, and {len(taken) - 1} more: "
                "merge it (model.merge_and_unload()) before lookahead gates add theirs."
            )
        names = {name: f"module{number}" for number, name in enumerate(found)}
        container: Any = nn.ModuleDict({names[name]: module for name, module in found.items()})
        for flag in PACKED:
            if hasattr(model, flag):
                setattr(container, flag, getattr(model, flag))
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # a fraction is as good
            lora_dropout=0.0,
            target_modules=list(names.values()),
        )
        trained = {parameter: parameter.requires_grad for parameter in container.parameters()}
        # Empty adapters: to draw weights that are replaced at once would move the global random numbers.
        inject_adapter_in_model(config, container, adapter_name=ADAPTER, low_cpu_mem_usage=True)
        for parameter, requires_grad in trained.items():
            parameter.requires_grad_(requires_grad)
        wrapped: dict[str, Any] = {name: container[names[name]] for name in found}
        for name, module in wrapped.items():
            module.base_layer = _Plain(found[name])
        return wrapped

    def _lend(self, name: str, module: Any, base: nn.Module) -> None:
        """Put this extension's parameters into a module that peft has wrapped."""
        device = next((parameter.device for parameter in base.parameters()), self.tokens_SE.device)
        for adapters, own in ((module.lora_A, self.down), (module.lora_B, self.up)):
            adapters[ADAPTER].weight = _followed(own[_key(name)], device)
        module.train(base.training)


class LookaheadGate(Gate):
    """`s_h(i) = mean_p mean_{q in group(h)} a_qp[i]`: attention of the lookahead tokens `p` to entry `i`.

    `a_qp` is the softmax of `cap(scaling q_p . k)` over the prompt's entries, the lookahead tokens up to `p`
    itself, and the layer's sink, if it has one; in a layer with a sliding window over the entries that `p`
    reaches. So a head's scores sum to its attention to the prompt, at most 1. The paper's score, by which a
    prompt is cut once, when it has been read.

    Args:
        reduce: of the query heads of a group: their `mean`, or the largest (`max`).
    """

    family = "lookahead"
    inputs = frozenset({"lookahead", "keys"})
    unit = "mass"
    contextual = True
    extension = LookaheadExtension

    def __init__(self, *, E: int, H: int, reduce: str = "mean"):
        super().__init__(E=E, H=H)
        if reduce not in ("mean", "max"):
            raise ValueError(f"lookahead gates: reduce is {reduce!r}, and must be 'mean' or 'max'.")
        self.reduce = reduce

    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        """Mean attention of the lookahead tokens to every entry, from their queries and all keys."""
        queries, keys, own = inputs.lookahead_BQSD, inputs.keys_BHTD, inputs.lookahead_keys_BHSD
        assert queries is not None and keys is not None
        if own is None or inputs.scaling is None:
            raise ValueError(
                "a lookahead gate takes the lookahead tokens' keys and the layer's scaling too: pass "
                "lookahead_keys_BHSD and scaling (retain.hf.intercept.lookahead_pass.look_ahead gives both)."
            )
        paid_BQT = lookahead_attention(
            queries,
            keys,
            own,
            scaling=inputs.scaling,
            valid_BT=inputs.valid_BT,
            soft_cap=inputs.soft_cap,
            window=inputs.window,
            sinks_Q=inputs.sinks_Q,
        )
        paid_BHGT = paid_BQT.unflatten(1, (keys.shape[1], -1))
        return paid_BHGT.mean(2) if self.reduce == "mean" else paid_BHGT.amax(2)


def lookahead_attention(
    queries_BQSD: Float[Tensor, "B Q S D"],
    keys_BHTD: Float[Tensor, "B H T D"],
    own_BHSD: Float[Tensor, "B H S D"],
    *,
    scaling: float,
    valid_BT: Bool[Tensor, "B T"] | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks_Q: Float[Tensor, " Q"] | None = None,
) -> Float[Tensor, "B Q T"]:
    """Mean attention of S tokens behind a prompt to each of its entries; 0 on padding.

    `mean_p softmax_{i or j <= p}(cap(scaling q_p . k))[i]`, in float32 (float64 if the keys are). Without a
    gradient the one op for statistics of attention finds it, in memory linear in T; where one is asked for,
    all rows are held (`lookahead_attention_rows`).

    Args:
        queries_BQSD: of the tokens.
        keys_BHTD: of the prompt.
        own_BHSD: keys of the tokens themselves, which are causal among themselves.
        scaling: factor on the logits.
        soft_cap: of the logits; None: none.
        window: entries that a token reaches back to, itself included; None: all.
        sinks_Q: a logit per query head that takes part in the softmax and pays for nothing.
    """
    T, S = keys_BHTD.shape[2], queries_BQSD.shape[2]
    parts = (queries_BQSD, keys_BHTD, own_BHSD)
    exists_BT = None
    if valid_BT is not None:
        exists_BT = torch.cat([valid_BT, valid_BT.new_ones(valid_BT.shape[0], S)], dim=1)
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return lookahead_attention_rows(
            *parts, scaling=scaling, exists_BT=exists_BT, soft_cap=soft_cap, window=window, sinks_Q=sinks_Q
        )
    # Padding may hold anything; without any, no places are passed to the op.
    stats = attention_stats(
        queries_BQSD,
        torch.cat([keys_BHTD, own_BHSD], dim=2),
        scaling=scaling,
        wanted=("sum",),
        first_query=T,
        keys=(0, T),
        window=window,
        exists_BHT=None if exists_BT is None else exists_BT[:, None],
        place_BT=None if exists_BT is None or window is None else exists_BT.cumsum(-1) - 1,
        soft_cap=soft_cap,
        sinks_Q=sinks_Q,
    )
    assert stats.sum is not None
    return stats.sum / S


def lookahead_attention_rows(
    queries_BQSD: Float[Tensor, "B Q S D"],
    keys_BHTD: Float[Tensor, "B H T D"],
    own_BHSD: Float[Tensor, "B H S D"],
    *,
    scaling: float,
    exists_BT: Bool[Tensor, "B asked"] | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks_Q: Float[Tensor, " Q"] | None = None,
) -> Float[Tensor, "B Q T"]:
    """Definition of `lookahead_attention`, row by row, with gradients; `exists_BT` is of prompt and
    tokens."""
    B, H, T, _ = keys_BHTD.shape
    Q, S, device = queries_BQSD.shape[1], queries_BQSD.shape[2], keys_BHTD.device
    dtype = torch.promote_types(keys_BHTD.dtype, torch.float32)
    all_BHTD = torch.cat([keys_BHTD, own_BHSD], dim=2).to(dtype)
    if exists_BT is None:
        exists_BT = torch.ones(B, T + S, dtype=torch.bool, device=device)
    queries = queries_BQSD.to(dtype).reshape(B, H, -1, queries_BQSD.shape[-1])
    logits = (queries @ all_BHTD.transpose(-1, -2)).view(B, Q, S, T + S) * scaling
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    own_S = torch.arange(T, T + S, device=device)
    seen_BST = exists_BT[:, None] & (torch.arange(T + S, device=device) <= own_S[:, None])
    if window is not None:
        place_BT = exists_BT.cumsum(-1)
        seen_BST = seen_BST & (place_BT[:, None] > place_BT[:, own_S][..., None] - window)
    logits = logits.masked_fill(~seen_BST[:, None], float("-inf"))
    if sinks_Q is not None:
        sinks = sinks_Q.to(dtype).view(1, Q, 1, 1).expand(B, Q, S, 1)
        logits = torch.cat([logits, sinks], dim=-1)
    return torch.softmax(logits, dim=-1)[..., :T].sum(2) / S


def _key(name: str) -> str:
    """A module's name as a parameter name."""
    return name.replace(".", "/")


def _decoder(model: Any) -> nn.Module:
    """Module that holds the layers of a causal language model (in a wrapper of peft, or not)."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(inner, "base_model", inner)


def _module(decoder: nn.Module, name: str, widths: tuple[int, int]) -> nn.Module:
    """Find the module of an adapter; a ValueError if it is not there, or of other widths."""
    try:
        module: Any = decoder.get_submodule(name)
    except AttributeError:
        module = None
    got = None if module is None else (getattr(module, "in_features", 0), getattr(module, "out_features", 0))
    if got != widths:
        found = "does not have it" if got is None else f"has one with {got}"
        raise ValueError(
            f"these lookahead gates adapt {name} with (features in, out) {widths}, and "
            f"{type(decoder).__name__} {found}: load gates that were trained on this model."
        )
    return module


def _followed(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """The parameter on the device of its module (a model may lie on several devices)."""
    if parameter.device != device:
        with torch.inference_mode(False):
            parameter.data = parameter.data.to(device)
    return parameter

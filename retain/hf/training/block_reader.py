"""Reads documents and what follows them with a frozen decoder, as one packed row, and shows each layer once.

Texts lie end to end in one row without padding, `[document | branch | branch | document | ...]`, and
attention goes block by block, so that a document is read once however many branches it has, nothing is
computed on padding, and memory is linear in the row and that of one layer, whatever the number of layers.
For every layer that evicts, what it shows of each document, and of each branch behind its document, is handed
to a visitor as soon as the layer's queries, keys and values are there, and forgotten behind it.

Positions restart with every document, and those of a branch go on from its document's end. Layers with a
recurrent state cannot be packed: such a model reads every branch in a separate forward, behind its document
again, and the visitor is called at the last of them. What every layer showed of the earlier branches is held
until then: there, memory grows with the number of layers times the tokens of all branches.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from retain.attention.rotary import Rotary
from retain.evidence import Evidence
from retain.hf.intercept.chunked_feed_forward import token_wise_in_pieces
from retain.hf.intercept.interceptor import (
    STEP,
    configs_of,
    hidden_of,
    intercepted,
    pointed_to,
    register,
)
from retain.hf.model.decoder import base_model, layout_of, rotary_of
from retain.hf.model.families import FULL, SLIDING, Kind, kinds_of
from retain.hf.model.layout import LayerSpec, Layout
from retain.hf.training.causal_attention import causal_attention
from retain.hf.version_names import CACHE

# Takes what one layer shows of a whole row.
Show = Callable[[Evidence], None]
# Name of our attention among transformers'.
NAME = "retain_blocks"
CHUNKED = "chunked_attention"
# Layers whose outcome at a token depends on no other text of the row, if attention goes block by block.
PACKABLE = (FULL, SLIDING, CHUNKED, "mlp", "moe")
# Rotary embeddings that look at how long a sequence is, of which a row with others says nothing.
BY_LENGTH = ("dynamic", "longrope")
JOINED = ("hidden", "stream")


@dataclass(frozen=True)
class Text:
    """Token ids of a document, and of the branches that are read after it, each alone."""

    document: Sequence[int]
    branches: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, eq=False)
class Shown:
    """Evidence of one layer and text.

    Args:
        row: index of the text in what is read.
        document: over the document alone, with a query for each entry.
        branches: over `[document | branch]`, with the branch's queries; made when asked for, since behind the
            first branch keys and values of the document (and what is `joined`) are copied.
    """

    row: int
    document: Evidence
    branches: Sequence[Evidence]


class _Lazy(Sequence[Evidence]):
    """Evidence that is made whenever it is asked for, and not kept."""

    def __init__(self, makers: Sequence[Callable[[], Evidence]]):
        self.makers = makers

    def __len__(self) -> int:
        return len(self.makers)

    def __getitem__(self, idx: Any) -> Any:
        return _Lazy(self.makers[idx]) if isinstance(idx, slice) else self.makers[idx]()


@dataclass(frozen=True)
class _Span:
    """Where a text lies in the row: its document, and its branches, the first of which follows it."""

    document: slice
    branches: tuple[slice, ...] = ()


def _cut(row: Evidence, entries: slice, queries: slice) -> Evidence:
    """Evidence of consecutive tokens of a row, in views."""
    by_token: dict[str, Any] = {
        name: one if one is None else one[:, entries] for name, one in _by_token(row).items()
    }
    return replace(
        row,
        queries_BQSD=row.queries_BQSD[:, :, queries],
        keys_BHTD=row.keys_BHTD[:, :, entries],
        values_BHTD=row.values_BHTD[:, :, entries],
        **by_token,
    )


def _branch(row: Evidence, document: slice, branch: slice, joined: Collection[str]) -> Evidence:
    """Evidence over `[document | branch]` of a row, with the branch's queries."""
    if branch.start == document.stop:
        return _bare(_cut(row, slice(document.start, branch.stop), branch), joined)
    return _behind(_cut(row, document, document), _cut(row, branch, branch), joined)


def _by_token(evidence: Evidence) -> dict[str, Any]:
    names = ("positions_BT", "valid_BT", "hidden_BTE", "token_ids_BT", "stream_BTE")
    return {name: getattr(evidence, name) for name in names}


def _bare(evidence: Evidence, joined: Collection[str]) -> Evidence:
    """The same, without those of `JOINED` that are not to be joined."""
    left_out: dict[str, Any] = {f"{name}_BTE": None for name in JOINED if name not in joined}
    return replace(evidence, **left_out)


def _behind(document: Evidence, branch: Evidence, joined: Collection[str]) -> Evidence:
    """Evidence over `[document | branch]` with the branch's queries, of evidence over either (copies)."""
    document, branch = _bare(document, joined), _bare(branch, joined)
    by_token: dict[str, Any] = {
        name: None if one is None else torch.cat([one, getattr(branch, name)], 1)
        for name, one in _by_token(document).items()
    }
    return replace(
        document,
        queries_BQSD=branch.queries_BQSD,
        keys_BHTD=torch.cat([document.keys_BHTD, branch.keys_BHTD], 2),
        values_BHTD=torch.cat([document.values_BHTD, branch.values_BHTD], 2),
        **by_token,
    )


@dataclass(eq=False)
class _Forward:
    """State of a forward over a row."""

    spans: Sequence[_Span]
    positions: Tensor
    token_ids: Tensor
    show: Show | None = None  # of a layer that evicts, over the row
    last: int | None = None  # layer behind which nothing is needed
    rotary: Rotary | None = None
    hidden: Tensor | None = None
    stream: Tensor | None = None
    placed: dict[torch.device, list[Tensor]] = field(default_factory=dict)

    def on(self, device: torch.device) -> list[Tensor]:
        """Positions, token ids and which are no padding (all), where a layer is."""
        if device not in self.placed:
            parts = (self.positions, self.token_ids, torch.ones_like(self.positions, dtype=torch.bool))
            self.placed[device] = [part.to(device) for part in parts]
        return self.placed[device]


class _Enough(Exception):
    """Ends a forward behind the last layer that is read."""


@dataclass(frozen=True, eq=False)
class _Step:
    """State that an attention module's hook hands to the attention function."""

    forward: _Forward
    kind: Kind
    spec: LayerSpec | None
    scaling: float | None  # as the module says it

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, dense: Any, given: Mapping[str, Any]
    ) -> tuple[Tensor, None]:
        """Show the layer, and attend block by block."""
        forward, spec, bound = self.forward, self.spec, self.kind.window
        # A rotation in float32 leaves queries and keys wider than values.
        query, key = query.to(value.dtype), key.to(value.dtype)
        scaling, soft_cap = given.get("scaling"), given.get("softcap")
        if scaling is None:
            scaling = query.shape[3] ** -0.5 if self.scaling is None else float(self.scaling)
        if spec is not None and forward.show is not None:
            positions_BT, token_ids_BT, valid_BT = forward.on(key.device)
            evidence = spec.evidence(
                scaling=scaling,
                soft_cap=soft_cap,
                queries_BQSD=query,
                keys_BHTD=key,
                values_BHTD=value,
                positions_BT=positions_BT,
                valid_BT=valid_BT,
                hidden_BTE=forward.hidden,
                token_ids_BT=token_ids_BT,
                rotary=forward.rotary,
                stream_BTE=forward.stream,
            )
            forward.hidden = forward.stream = None
            forward.show(evidence)
            del evidence
            if forward.last == spec.layer_idx:
                raise _Enough
        chunked = self.kind.name == CHUNKED
        attend = partial(
            causal_attention,
            scaling=scaling,
            window=None if chunked else bound,
            within=bound if chunked else None,
            soft_cap=soft_cap,
            sinks_Q=given.get("s_aux"),
        )
        # One token behind a cache, which may have forgotten the first entries.
        if key.shape[2] != query.shape[2]:
            if chunked and bound is not None:
                seen_here = int(forward.positions[0, -1]) % bound + 1
                key, value = key[:, :, -seen_here:], value[:, :, -seen_here:]
            return attend(query, key, value).transpose(1, 2), None
        out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))
        for span in forward.spans:
            document = span.document
            # A document and its first branch are one causal sequence.
            whole = slice(document.start, span.branches[0].stop if span.branches else document.stop)
            parts = [part[:, :, whole] for part in (query, key, value)]
            out[:, whole] = attend(*parts).transpose(1, 2)
            for branch in span.branches[1:]:
                keys, values = (torch.cat([x[:, :, document], x[:, :, branch]], 2) for x in (key, value))
                out[:, branch] = attend(query[:, :, branch], keys, values).transpose(1, 2)
        return out, None


@torch.no_grad()
def read_texts(
    model: nn.Module,
    texts: Sequence[Text],
    visit: Callable[[list[Shown]], None],
    *,
    wanted: Collection[str] = (),
    joined: Collection[str] = JOINED,
    chunk: int | None = None,
    layout: Layout | None = None,
    rotary: Rotary | None = None,
    finish: bool = False,
) -> list[tuple[Float[Tensor, "document E"], list[Float[Tensor, "branch E"]]]]:
    """Read texts with the frozen decoder, without its language-model head, and show its evicting layers.

    What is shown of a text is what a forward of `[document; branch]` alone would show, to rounding, whatever
    the other texts and branches. The model is as it was before when this returns, or raises.

    Args:
        model: a causal language model of transformers, or its decoder; attached or not.
        texts: at least one, none empty.
        visit: called with what one layer shows, layers in order; of all texts at once, or (models with
            recurrent layers, and with rotary embeddings that look at the length) text by text. It is called
            without gradients, and may enable them for its tensors; it must not run the model. What it is
            given is forgotten behind it.
        wanted: `stream` for the residual stream before the input norm.
        joined: of `hidden` and `stream`, the ones that evidence of a branch holds of document and branch;
            each costs a copy.
        chunk: tokens that token-wise modules (feed-forward, norms) take at a time; None: all.
        layout: of the model, if it is known (`retain.hf.model.decoder.layout_of`).
        rotary: likewise (`rotary_of`); looked up with the layout.
        finish: run the forward to its end, for the hidden states that it returns; else what comes after the
            last evicting layer's evidence is left out.

    Returns:
        with `finish`, per text, the decoder's output over the document, and over each branch; else nothing.

    Raises:
        ValueError: nothing to read, an unknown name, or a model that is not understood.
    """
    empty = [i for i, text in enumerate(texts) if not len(text.document) or not all(map(len, text.branches))]
    if not texts or empty:
        what = f"text {empty[0]} has an empty document or branch" if texts else "there are no texts"
        raise ValueError(f"nothing to read: {what}. Pass at least one token of each.")
    if strange := sorted(set(joined) - set(JOINED)):
        raise ValueError(f"joined={strange}: of branches, {' and '.join(JOINED)} may be joined.")
    if layout is None:
        layout, rotary = layout_of(model), rotary_of(model)
    reader = _Reader(model, layout, rotary, finish=finish, joined=joined)
    read = forward_of(model, layout)
    with reader.reading(stream="stream" in wanted), token_wise_in_pieces(reader.base.layers, chunk):
        if read == "branch":
            return [reader.one_by_one(text, row, visit) for row, text in enumerate(texts)]
        rows = [[i] for i in range(len(texts))] if read == "text" else [list(range(len(texts)))]
        return [out for row in rows for out in reader.packed([texts[i] for i in row], row, visit)]


def forward_of(model: nn.Module, layout: Layout) -> Literal["row", "text", "branch"]:
    """The unit that a forward of `read_texts` reads: all texts in a row; one text and its branches, where the
    rotary embedding looks at the length; or a text and one branch, where layers are recurrent."""
    config = base_model(model).config
    if any(kind.name not in PACKABLE for kind in kinds_of(config, layout.num_layers)):
        return "branch"
    kind = str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))
    return "text" if kind in BY_LENGTH else "row"


@torch.no_grad()
def write_greedily(
    model: nn.Module,
    ids: Sequence[int],
    tokens: int,
    *,
    ends: Collection[int] = (),
    chunk: int | None = None,
    layout: Layout | None = None,
) -> tuple[int, ...]:
    """Continue a text by the likeliest token each time, up to an end token (left out).

    One sequence, no mask, nothing of the generation config: what is written is a function of model and text.
    Memory is linear in the text: its KV cache, and one layer's activations.

    Args:
        model: a causal language model of transformers with its head.
        ids: the text, at least one token.
        tokens: at most so many.
        ends: token ids that end it.
        chunk: tokens that token-wise modules take at a time; None: all.
        layout: of the model, if it is known.
    """
    head: Any = model.get_output_embeddings()
    reader = _Reader(model, layout_of(model) if layout is None else layout)
    written: list[int] = []
    new, cache = list(ids), None
    with reader.reading(), token_wise_in_pieces(reader.base.layers, chunk):
        while len(written) < tokens:
            first = len(ids) + len(written) - len(new)
            forward = reader.forward_over(new, range(first, first + len(new)), [_Span(slice(0, len(new)))])
            output = reader.run(forward, **{CACHE: cache}, use_cache=True)
            cache = output[CACHE]
            token = int(head(output.last_hidden_state[:, -1]).argmax())
            if token in ends:
                break
            written.append(token)
            new = [token]
    return tuple(written)


class _Reader:
    """A model while it is read with."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        rotary: Rotary | None = None,
        *,
        finish: bool = True,
        joined: Collection[str] = (),
    ):
        self.base: Any = base_model(model)
        self.layout, self.rotary, self.finish, self.joined = layout, rotary, finish, joined
        self.kinds = kinds_of(self.base.config, layout.num_layers)
        # Wrappers that gather weights around each layer want every forward to end as it began.
        gathered = any("FSDP" in cls.__name__ for layer in self.base.layers for cls in type(layer).__mro__)
        gathered |= any(hasattr(parameter, "ds_id") for parameter in self.base.parameters())
        self.last = None if finish or gathered else layout.evicting[-1].layer_idx
        self.forward: _Forward | None = None

    @contextmanager
    def reading(self, *, stream: bool = False) -> Iterator[None]:
        """Inside, the model attends block by block."""
        register(NAME, intercepted(None), _no_mask)
        specs = self.layout.spec_of
        attention = type(self.layout.evicting[0].module)
        with ExitStack() as undo:
            for idx, layer in enumerate(self.base.layers[: self.layout.num_layers]):
                if stream and idx in specs:
                    hook = layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)
                    undo.callback(hook.remove)
                for module in layer.children():
                    if type(module) is attention or idx in specs and module is specs[idx].module:
                        before = partial(self._before_attention, idx)
                        hook = module.register_forward_pre_hook(before, with_kwargs=True)
                        undo.callback(hook.remove)
            undo.enter_context(pointed_to(configs_of(self.base), NAME))
            yield

    def _before_layer(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        assert self.forward is not None
        self.forward.stream = hidden_of(args, kwargs)

    def _before_attention(
        self, idx: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        forward, spec = self.forward, self.layout.spec_of.get(idx)
        assert forward is not None
        if spec is not None and forward.show is not None:
            forward.hidden = hidden_of(args, kwargs)
        step = _Step(forward, self.kinds[idx], spec, getattr(module, "scaling", None))
        return args, {**kwargs, STEP: step}

    def forward_over(
        self, ids: Sequence[int], positions: Sequence[int], spans: Sequence[_Span], show: Show | None = None
    ) -> _Forward:
        device = self.base.get_input_embeddings().weight.device
        ids_1T, positions_1T = (torch.tensor([[*row]], device=device) for row in (ids, positions))
        return _Forward(spans, positions_1T, ids_1T, show, self.last, self.rotary)

    def run(self, forward: _Forward, **how: Any) -> Any:
        """The decoder's output over a row."""
        self.forward = forward
        try:
            return self.base(input_ids=forward.token_ids, position_ids=forward.positions, **how)
        finally:
            self.forward = None

    def read(self, forward: _Forward) -> Tensor | None:
        """Show a row's layers; the decoder's output `[T, E]`, if it is to be run to its end."""
        try:
            output = self.run(forward, use_cache=False)
        except _Enough:
            return None
        return output.last_hidden_state[0] if self.finish else None

    def packed(
        self, texts: Sequence[Text], rows: Sequence[int], visit: Callable[[list[Shown]], None]
    ) -> list[tuple[Tensor, list[Tensor]]]:
        """All texts in one forward."""
        ids: list[int] = []
        positions: list[int] = []
        spans = []
        for text in texts:
            places: list[slice] = []
            for part in (text.document, *text.branches):
                first = len(text.document) if places else 0
                places.append(slice(len(ids), len(ids) + len(part)))
                ids += part
                positions += range(first, first + len(part))
            spans.append(_Span(places[0], tuple(places[1:])))

        def show(layer: Evidence) -> None:
            shown = []
            for row, span in zip(rows, spans, strict=True):
                document = span.document
                makers = [partial(_branch, layer, document, branch, self.joined) for branch in span.branches]
                shown.append(Shown(row, _cut(layer, document, document), _Lazy(makers)))
            visit(shown)

        hidden = self.read(self.forward_over(ids, positions, spans, show))
        if hidden is None:
            return []
        return [(hidden[span.document], [hidden[branch] for branch in span.branches]) for span in spans]

    def one_by_one(
        self, text: Text, row: int, visit: Callable[[list[Shown]], None]
    ) -> tuple[Tensor, list[Tensor]]:
        """A forward for each branch; what every layer showed of the earlier branches themselves is held for
        the last, where visitors see all branches of a layer at once."""
        held: dict[int, list[Evidence]] = {spec.layer_idx: [] for spec in self.layout.evicting}
        document = slice(0, len(text.document))
        branches = list(text.branches) or [()]
        outputs = []
        for number, branch in enumerate(branches):
            ids = [*text.document, *branch]
            here = slice(document.stop, len(ids))

            def show(layer: Evidence, here: slice = here, last: bool = number + 1 == len(branches)) -> None:
                earlier = held[layer.layer_idx]
                if not last:
                    earlier.append(_kept(_bare(_cut(layer, here, here), self.joined)))
                    return
                shown = _cut(layer, document, document)
                makers: list[Callable[[], Evidence]] = [
                    partial(_behind, shown, one, self.joined) for one in earlier
                ]
                if here.start < here.stop:
                    makers.append(partial(_branch, layer, document, here, self.joined))
                visit([Shown(row, shown, _Lazy(makers))])
                earlier.clear()

            whole = [_Span(slice(0, len(ids)))]
            hidden = self.read(self.forward_over(ids, range(len(ids)), whole, show))
            if hidden is not None:
                outputs.append(hidden)
        if not outputs:
            return torch.empty(0, 0), []
        return outputs[-1][document], [out[document.stop :] for out in outputs if len(text.branches)]


def _kept(evidence: Evidence) -> Evidence:
    """The same, without the row that it is a view of."""
    names = ("queries_BQSD", "keys_BHTD", "values_BHTD", "hidden_BTE", "stream_BTE")
    views = {name: getattr(evidence, name) for name in names}
    copies: dict[str, Any] = {name: x if x is None else x.clone() for name, x in views.items()}
    return replace(evidence, **copies)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """The mask function: who sees whom is in the blocks."""

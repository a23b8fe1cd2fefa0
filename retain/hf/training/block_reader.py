"""Reads documents and what follows them with a frozen decoder, as one packed row, and shows each layer once.

Texts lie end to end in one row without padding, `[document | branch | branch | document | ...]`, and
attention goes block by block, so that a document is read once however many branches it has, nothing is
computed on padding, and memory is linear in the row and that of one layer, whatever the number of layers.
For every layer that evicts, the evidence of each document, and of each branch behind its document, is handed
to a visitor as soon as the layer's queries, keys and values are there, and forgotten behind it.

Positions restart with every document, and those of a branch go on from its document's end. Layers with a
recurrent state cannot be packed: such a model reads text by text, with at most one branch.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retain.attention.causal import causal_attention
from retain.evidence import Evidence
from retain.hf.intercept.attach import attach
from retain.hf.intercept.interceptor import STEP, hidden_of, masks_unmade
from retain.hf.model.decoder import base_model, layout_of, rotary_of
from retain.hf.model.families import FIXED, FULL, SLIDING
from retain.hf.model.layout import Layout


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
        branches: functions that make the evidence over `[document | branch]`, with the branch's queries and
            without the residual stream: behind the first branch keys and values of the document are copied.
    """

    row: int
    document: Evidence
    branches: Sequence[Callable[[], Evidence]]


def _cut(row: Evidence, entries: Sequence[slice], queries: slice) -> Evidence:
    """Evidence of some runs of tokens of a row: views where it is one, else copies."""

    def of(row: Tensor, dim: int) -> Tensor:
        parts = [row.narrow(dim, run.start, run.stop - run.start) for run in entries]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    names = ("positions_BT", "valid_BT", "hidden_BTE", "stream_BTE")
    found = {name: getattr(row, name) for name in names}
    by_token: dict[str, Any] = {name: None if one is None else of(one, 1) for name, one in found.items()}
    return replace(
        row,
        queries_BQSD=row.queries_BQSD[:, :, queries],
        keys_BHTD=of(row.keys_BHTD, 2),
        values_BHTD=of(row.values_BHTD, 2),
        **by_token,
    )


def _branch(row: Evidence, document: slice, branch: slice) -> Evidence:
    """Evidence over `[document | branch]` of a row, with the branch's queries."""
    follows = branch.start == document.stop
    entries = [slice(document.start, branch.stop)] if follows else [document, branch]
    return _cut(replace(row, stream_BTE=None), entries, branch)


@torch.no_grad()
def read_texts(
    model: nn.Module,
    texts: Sequence[Text],
    visit: Callable[[list[Shown]], None],
    *,
    wanted: Collection[str] = (),
) -> None:
    """Read texts with the frozen decoder, without its language-model head, and show its evicting layers.

    The evidence of a text is that of a forward of `[document; branch]` alone, to rounding, whatever the other
    texts and branches. The model is as it was before when this returns, or raises.

    Args:
        model: a causal language model of transformers, or its decoder; attached or not.
        texts: at least one, none empty.
        visit: called with one layer's evidence, layers in order; of all texts at once, or (models with
            recurrent layers, and with rotary embeddings that look at the length) text by text. It is called
            without gradients, and may enable them for its tensors; it must not run the model.
        wanted: `stream` for the residual stream of the documents before the input norm.

    Raises:
        ValueError: nothing to read, a model that is not understood, or several branches behind one document
            with recurrent layers.
    """
    empty = [i for i, text in enumerate(texts) if not len(text.document) or not all(map(len, text.branches))]
    if not texts or empty:
        what = f"text {empty[0]} has an empty document or branch" if texts else "there are no texts"
        raise ValueError(f"nothing to read: {what}. Pass at least one token of each.")
    layout = layout_of(model)
    unit = forward_of(layout)
    if unit == "branch" and any(len(text.branches) > 1 for text in texts):
        raise ValueError(
            f"{type(model).__name__} has recurrent layers, which read at most one branch behind a document: "
            "take fewer sources of queries."
        )
    rows = [range(len(texts))] if unit == "row" else [[i] for i in range(len(texts))]
    reader = _Reader(model, layout, visit)
    with reader.hooked("stream" in wanted):
        for row in rows:
            reader.read({i: texts[i] for i in row})


def forward_of(layout: Layout) -> Literal["row", "text", "branch"]:
    """The unit that a forward of `read_texts` reads: all texts in a row; one text and its branches, where the
    rotary embedding looks at the length; or a text and its only branch, where layers are recurrent."""
    if any(kind.name not in (FULL, SLIDING) for kind in layout.kinds):
        return "branch"
    kind = str((getattr(layout.base.config, "rope_parameters", None) or {}).get("rope_type", "default"))
    return "row" if kind in FIXED else "text"


class _Reader:
    """A model while it is read with, and the row of its running forward."""

    def __init__(self, model: nn.Module, layout: Layout, visit: Callable[[list[Shown]], None]):
        self.base: Any = base_model(model)
        self.layout, self.rotary, self.visit = layout, rotary_of(model), visit
        self.spans: dict[int, list[slice]] = {}  # of each text: its document, and its branches
        self.hidden: Tensor | None = None
        self.stream: Tensor | None = None

    @contextmanager
    def hooked(self, stream: bool) -> Iterator[None]:
        """Inside, the model attends block by block."""
        with ExitStack() as undo:
            undo.enter_context(attach(self.base))
            undo.enter_context(masks_unmade("all"))
            for idx, layer in enumerate(self.base.layers[: len(self.layout.kinds)]):
                hooks: list[tuple[nn.Module, Callable[..., Any]]] = []
                if stream and idx in self.layout.spec_of:
                    hooks.append((layer, self._before_layer))
                if hasattr(layer, "self_attn"):
                    hooks.append((layer.self_attn, partial(self._before_attention, idx)))
                for module, hook in hooks:
                    undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def _before_layer(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.stream = hidden_of(args, kwargs)

    def _before_attention(
        self, idx: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        if idx in self.layout.spec_of:
            self.hidden = hidden_of(args, kwargs)
        return args, {**kwargs, STEP: _Step(self, idx)}

    def read(self, texts: Mapping[int, Text]) -> None:
        """Read texts in one forward."""
        ids: list[int] = []
        positions: list[int] = []
        spans: dict[int, list[slice]] = {}
        self.spans = spans
        for row, text in texts.items():
            spans[row] = []
            for part in (text.document, *text.branches):
                first = len(text.document) if spans[row] else 0
                spans[row].append(slice(len(ids), len(ids) + len(part)))
                ids += part
                positions += range(first, first + len(part))
        device = self.base.get_input_embeddings().weight.device
        ids_1T, self.positions = (torch.tensor([row], device=device) for row in (ids, positions))
        self.base(input_ids=ids_1T, position_ids=self.positions, use_cache=False)

    def show(self, idx: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Hand a layer's evidence to the visitor."""
        positions_BT = self.positions.to(key.device)
        row = self.layout.spec_of[idx].evidence(
            queries_BQSD=query,
            keys_BHTD=key,
            values_BHTD=value,
            positions_BT=positions_BT,
            valid_BT=torch.ones_like(positions_BT, dtype=torch.bool),
            hidden_BTE=self.hidden,
            rotary=self.rotary,
            stream_BTE=self.stream,
        )
        self.hidden = self.stream = None
        shown = []
        for text, (document, *branches) in self.spans.items():
            makers = [partial(_branch, row, document, branch) for branch in branches]
            shown.append(Shown(text, _cut(row, [document], document), makers))
        self.visit(shown)


@dataclass(frozen=True, eq=False)
class _Step:
    """Travels from an attention module's hook to the attention function."""

    reader: _Reader
    layer_idx: int

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, dense: Any, given: Mapping[str, Any]
    ) -> tuple[Tensor, None]:
        """Show the layer, and attend block by block."""
        reader, idx = self.reader, self.layer_idx
        # A rotation in float32 leaves queries and keys wider than values.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if idx in reader.layout.spec_of:
            reader.show(idx, query, key, value)
        attend = partial(
            causal_attention,
            scaling=given["scaling"],
            window=reader.layout.kinds[idx].window,
            soft_cap=given.get("softcap"),
            sinks_Q=given.get("s_aux"),
        )
        out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))
        for document, *branches in reader.spans.values():
            # A document and its first branch are one causal sequence.
            whole = slice(document.start, branches[0].stop if branches else document.stop)
            out[:, whole] = attend(*(part[:, :, whole] for part in (query, key, value))).transpose(1, 2)
            for branch in branches[1:]:
                keys, values = (torch.cat([x[:, :, document], x[:, :, branch]], 2) for x in (key, value))
                out[:, branch] = attend(query[:, :, branch], keys, values).transpose(1, 2)
        return out, None

"""Loads the frozen model, and shows its layers one at a time.

A visitor looks at a layer while the model runs, and nothing is kept for it; so memory is linear in the tokens
of a batch and does not grow with the number of layers.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from retain.evidence import Evidence
from retain.hf.model.decoder import layout_of
from retain.hf.model.layout import Layout
from retain.hf.training.block_reader import Shown, Text, read_texts
from retain.models.named import load, load_named_tokenizer, named_config
from retain.train.data.chat import Chat, chat_of
from retain.train.data.document import Encode, Reading
from retain.train.run.parallel import loaded_whole


@dataclass(frozen=True)
class Frozen:
    """A loaded model, in eval mode; no parameter requires a gradient.

    Args:
        encode: text -> token ids; None if there is no tokenizer.
        pad_id: token id under the padding (never attended to).
        tokenizer: as transformers loads it; None if there is none.
        written: continuations that the model wrote before, by document and length: it would write the same.
    """

    model: Any
    encode: Encode | None
    pad_id: int
    tokenizer: Any = None
    written: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def layout(self) -> Layout:
        """The model's layers, looked at once."""
        return layout_of(self.model)

    @cached_property
    def chat(self) -> Chat | None:
        """Messages -> token ids of context and appendix; None if there is no tokenizer."""
        return None if self.tokenizer is None else chat_of(self.tokenizer)


@dataclass(frozen=True, eq=False)
class View:
    """A layer's evidence of one document and its branches. It holds parts of the running forward: look at it,
    and keep nothing of it.

    Args:
        row: index of the reading in what is walked over.
        key: of its document, for keyed draws.
        document: over the document, a query for each entry.
        sources: of the branches.
        behind: makes evidence over `[document | branch]` with the branch's queries, for each branch: of all
            but the first, keys and values of the document are copied.
    """

    layer_idx: int
    row: int
    key: int
    document: Evidence
    sources: Sequence[str]
    behind: Sequence[Callable[[], Evidence]]

    @property
    def branches(self) -> Iterator[tuple[str, Evidence]]:
        """Sources and evidence of the branches, one at a time."""
        return ((source, make()) for source, make in zip(self.sources, self.behind, strict=True))


def walk(
    frozen: Frozen,
    readings: Sequence[Reading],
    visit: Callable[[list[View]], None],
    *,
    wanted: Collection[str] = (),
) -> None:
    """Runs the frozen model over documents and their branches, and shows every evicting layer once.

    One forward of the decoder, without its head, over the packed row `[document | branch | branch | document
    | ...]` in which attention goes block by block (`retain.hf.training.block_reader`); the views equal
    separate forwards of each `[document; branch]`. `visit` is called with the views of one layer, of all
    readings, layers in order. Nothing behind the last evicting layer's keys and values is run.

    Models with recurrent layers, which cannot be packed, read one reading a forward, with at most one branch.

    Args:
        visit: looks at a layer; called without gradients, and may enable them. It must not run the model.
        wanted: of `retain.gates.base.INPUTS`, those that gates will look at; `stream` is recorded only if it
            is here, all else always.

    Raises:
        ValueError: nothing to read, or a model that is not understood.
    """

    def show(shown: list[Shown]) -> None:
        views = []
        for one in shown:
            reading, layer_idx = readings[one.row], one.document.layer_idx
            sources = [branch.source for branch in reading.branches]
            views.append(View(layer_idx, one.row, reading.document.key, one.document, sources, one.branches))
        visit(views)

    texts = [Text(one.document.context_ids, tuple(b.ids for b in one.branches)) for one in readings]
    read_texts(frozen.model, texts, show, wanted=[name for name in ("stream",) if name in wanted])


def load_frozen(name: str, **how: Any) -> Frozen:
    """Loads a model by `retain.models.named.load`, which takes `how`, onto the CPU or where its `device_map`
    says. ValueError: the name cannot be resolved, or the model cannot be loaded like this."""
    model, tokenizer = load(name, loading=loaded_whole(), **how)
    frozen = _frozen(model.eval().requires_grad_(False), tokenizer)
    # Looked at now, while every weight is whole: later the model may be in parts (FSDP, ZeRO-3).
    _ = frozen.layout
    return frozen


def load_unread(name: str, **origin: Any) -> Frozen:
    """Loads tokenizer and config of a model (its `origin`: revision, trust_remote_code) alone, with which
    documents are checked before the weights are read.

    Raises:
        ValueError: the name cannot be resolved.
    """
    model = SimpleNamespace(config=named_config(name, **origin))
    return _frozen(model, load_named_tokenizer(name, **origin))


def _frozen(model: Any, tokenizer: Any) -> Frozen:
    pads = (getattr(model.config, name, None) for name in ("pad_token_id", "eos_token_id"))
    pad_id = next((i for i in pads if isinstance(i, int)), 0)

    def encode(text: str, special: bool) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])

    return Frozen(model, None if tokenizer is None else encode, pad_id, tokenizer)

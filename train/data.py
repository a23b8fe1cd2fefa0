"""Documents to learn from: where they come from, which of them are held out, and in which order they are
read.

In: a source (the reference generator, a local jsonl, a hub data set) and settings. Out: `Corpus`, two lists
of tokenised `Document`s. The one decision taken here: the documents of a step are a pure function of
(seed, step), and the share of one process is every `num_processes`-th of them; so a resumed run reads on
where the killed one stopped without any state, and two processes read the very documents that one would.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm import tqdm

Encode = Callable[[str, bool], list[int]]  # (text, with the tokenizer's own special tokens) -> ids


@dataclass(frozen=True)
class DataSettings:
    """Where documents come from.

    Args:
        source: `reference` (generated, seen families only), `jsonl` (a local file) or `hub` (a data set by
            name).
        path: the jsonl file, or the hub data set's name.
        subset: configuration of the hub data set.
        split: split of the hub data set.
        revision: of the hub data set; state it, and the artifact records it.
        documents: how many to train on (`reference`: generated; else at most; 0 = all).
        held_out: how many never to train on, for the overlap that is reported.
        min_tokens: `reference`: shortest context; else: shorter ones are refused or skipped.
        max_tokens: longest context; longer texts are cut.
        short: what to do with a document that is too short: `error` or `skip`.
        appendix: how a question and its answer are written after the context.
    """

    source: Literal["reference", "jsonl", "hub"] = "reference"
    path: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    documents: int = 1600
    held_out: int = 32
    min_tokens: int = 256
    max_tokens: int = 768
    short: Literal["error", "skip"] = "error"
    appendix: str = "\n{question}\n{answer}"


@dataclass(frozen=True)
class Document:
    """A context, and what is appended after it (question and answer; may be empty), as token ids."""

    context_ids: tuple[int, ...]
    appendix_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.context_ids) + len(self.appendix_ids)


@dataclass(frozen=True)
class Corpus:
    """Documents split by document: none is on both sides, context and appendix taken together.

    Parts may be: a context with another question counts as another document; documents of the reference
    generator take their filler from windows of one stream of text, and windows of the two sides can overlap.
    """

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


@dataclass(frozen=True)
class Batch:
    """Documents padded on the left to one width: `[pads | context | appendix]`.

    Args:
        input_ids_BT: token ids.
        valid_BT: False on padding.
        document_length_B: tokens of the context (without padding, without appendix).
        appendix_length_B: tokens of the appendix.
        keys: an integer per document that seeds what is drawn for it.
    """

    input_ids_BT: Int[Tensor, "B T"]
    valid_BT: Bool[Tensor, "B T"]
    document_length_B: Int[Tensor, " B"]
    appendix_length_B: Int[Tensor, " B"]
    keys: tuple[int, ...]


def load_corpus(
    settings: DataSettings, *, shortest: int, seed: int, encode: Encode | None, progress: bool = False
) -> Corpus:
    """Read or generate all documents, check them, and hold some out.

    Args:
        settings: where from.
        shortest: a context must be longer than this (the horizon: nearer entries are never evicted).
        seed: of the generator and of the split.
        encode: the model's tokenizer; may be None if rows hold token ids already.
        progress: show a bar.

    Raises:
        ValueError: an empty data set, a document that is too short, rows without the fields that are needed.
        FileNotFoundError: a jsonl that is not there.
    """
    check_data(settings)
    if settings.source == "reference":
        documents = list(_reference_documents(settings, seed, progress))
    else:
        rows = _jsonl_rows(settings) if settings.source == "jsonl" else _hub_rows(settings)
        documents = [_document(row, number, settings, encode) for number, row in rows]
    where = "the reference generator" if settings.source == "reference" else f"{settings.path!r}"
    documents = list(
        dict.fromkeys(documents)
    )  # a text that occurs twice could fall on both sides of the split
    shortest = max(shortest, settings.min_tokens - 1)
    short = [i for i, document in enumerate(documents) if len(document.context_ids) <= shortest]
    if short and settings.short == "error":
        first = documents[short[0]]
        raise ValueError(
            f"{len(short)} of {len(documents)} documents from {where} are too short: the first is number "
            f"{short[0]} with "
            f"{len(first.context_ids)} tokens, and more than {shortest} are needed (target.horizon, "
            "data.min_tokens: nearer "
            "entries are never evicted). Use longer documents, data.short=skip, or a smaller target.horizon."
        )
    documents = [document for document in documents if len(document.context_ids) > shortest]
    wanted = settings.held_out + 1
    if len(documents) < wanted:
        raise ValueError(
            f"empty data set: {where} gives {len(documents)} usable documents, and "
            f"data.held_out={settings.held_out} wants "
            f"at least {wanted}. Check data.path, data.min_tokens and data.short, or hold out fewer."
        )
    order = np.random.default_rng([seed, 1]).permutation(len(documents))
    chosen = [documents[i] for i in order]
    train = chosen[settings.held_out :]
    if settings.documents:
        train = train[: settings.documents]
    return Corpus(tuple(train), tuple(chosen[: settings.held_out]))


def check_data(settings: DataSettings) -> None:
    """Settings that contradict each other, before anything is read."""
    problems = []
    if settings.source != "reference" and not settings.path:
        problems.append(
            f"data.source={settings.source} needs data.path (a jsonl file, or a hub data set's name)"
        )
    if settings.source == "reference" and settings.documents < 1:
        problems.append(
            f"data.documents={settings.documents}: the generator needs to know how many, at least 1"
        )
    if not 1 <= settings.min_tokens <= settings.max_tokens:
        problems.append(
            f"data.min_tokens={settings.min_tokens} must be between 1 and "
            f"data.max_tokens={settings.max_tokens}"
        )
    if settings.held_out < 0 or settings.documents < 0:
        problems.append("data.held_out and data.documents must not be negative")
    if problems:
        raise ValueError("; ".join(problems) + ".")


def _reference_documents(settings: DataSettings, seed: int, progress: bool) -> Iterator[Document]:
    from retain.reference.documents import Writer, distill_document

    writer = Writer(split="train", seed=seed)
    lengths = np.random.default_rng([seed, 2])
    count = settings.documents + settings.held_out
    for _ in tqdm(range(count), desc="documents", disable=not progress, leave=False):
        written = distill_document(
            writer, int(lengths.integers(settings.min_tokens, settings.max_tokens + 1))
        )
        yield Document(tuple(written.context_ids), tuple(written.appendix_ids))


def _jsonl_rows(settings: DataSettings) -> Iterator[tuple[int, Mapping[str, Any]]]:
    path = Path(settings.path or "")
    if not path.is_file():
        raise FileNotFoundError(
            f"no such data file: {path}. Set data.path to a .jsonl with one object a line."
        )
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} line {number} is not JSON: {error}.") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path} line {number}: wanted an object, got {type(row).__name__}.")
            yield number, row


def _hub_rows(settings: DataSettings) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            'data.source=hub needs the `datasets` package: pip install "retain[train]".'
        ) from None
    dataset = datasets.load_dataset(
        settings.path, settings.subset, split=settings.split, revision=settings.revision, streaming=True
    )
    wanted = settings.documents + settings.held_out if settings.documents else None
    yield from enumerate(dataset.take(wanted) if wanted else dataset, start=1)


def _document(row: Mapping[str, Any], number: int, settings: DataSettings, encode: Encode | None) -> Document:
    """A row as token ids. Rows hold `text`, or `context` + `question` + `answer`, or `context_ids` (+
    `appendix_ids`)."""
    if "context_ids" in row:
        context_ids, appendix_ids = list(row["context_ids"]), list(row.get("appendix_ids") or ())
    elif "text" in row or {"context", "question", "answer"} <= row.keys():
        if encode is None:
            raise ValueError(
                f"row {number} of {settings.path!r} holds text, and the model has no tokenizer to encode it "
                "with."
            )
        context_ids, appendix_ids = encode(row["text"] if "text" in row else row["context"], True), []
        if "text" not in row:
            answer = row["answer"] if isinstance(row["answer"], str) else ", ".join(map(str, row["answer"]))
            appendix_ids = encode(settings.appendix.format(question=row["question"], answer=answer), False)
    else:
        raise ValueError(
            f"row {number} of {settings.path!r} has fields {sorted(row)}; wanted `text`, or `context` + "
            "`question` + "
            "`answer`, or `context_ids` (and `appendix_ids`)."
        )
    return Document(tuple(context_ids[: settings.max_tokens]), tuple(appendix_ids))


def step_indices(step: int, *, num_documents: int, batch_documents: int, seed: int) -> list[int]:
    """Which documents step `step` (from 0) reads, over all processes: a new shuffle each time through the
    corpus."""
    places = range(step * batch_documents, (step + 1) * batch_documents)
    epochs = range(places[0] // num_documents, places[-1] // num_documents + 1)
    order = {epoch: np.random.default_rng([seed, 3, epoch]).permutation(num_documents) for epoch in epochs}
    return [int(order[place // num_documents][place % num_documents]) for place in places]


def share_of(
    indices: Sequence[int], documents: Sequence[Document], *, process: int, num_processes: int
) -> list[int]:
    """The part of one process: every `num_processes`-th document, by falling length, so that the shares cost
    alike."""
    ordered = sorted(indices, key=lambda i: (-documents[i].num_tokens, i))
    return ordered[process::num_processes]


def collate(
    documents: Sequence[Document], keys: Sequence[int], *, pad_id: int, device: torch.device | str
) -> Batch:
    """Pad documents on the left to the longest of them."""
    width = max(document.num_tokens for document in documents)
    input_ids_BT = torch.full((len(documents), width), pad_id, dtype=torch.long)
    valid_BT = torch.zeros((len(documents), width), dtype=torch.bool)
    for row, document in enumerate(documents):
        start = width - document.num_tokens
        input_ids_BT[row, start:] = torch.tensor(
            document.context_ids + document.appendix_ids, dtype=torch.long
        )
        valid_BT[row, start:] = True
    return Batch(
        input_ids_BT.to(device),
        valid_BT.to(device),
        torch.tensor([len(document.context_ids) for document in documents], device=device),
        torch.tensor([len(document.appendix_ids) for document in documents], device=device),
        tuple(keys),
    )

"""What is read after a document, so that its queries stand for the future: each branch on its own.

In: documents, and which future is asked for. Out: `Reading`s: a document and its branches, as token ids. The
one decision taken here: a branch sees the document and itself, and no other branch; so a document is read
once for all of them, and what one asks changes nothing for the next.

- `appendix`: the question and answer that came with the document.
- `repeat`: the document once more, a chunk at a time, each after a prompt that asks for it (KVzip, arXiv
  2505.23416: what the model needs to rebuild its context is what any question may need). The second and later
  chunks are asked for by the last tokens of the chunk before.
- `continuation`: what the frozen model itself writes greedily (its own queries are those that will come).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from retain.train.data import Document

if TYPE_CHECKING:
    from retain.train.targets import TargetSettings
    from retain.train.teacher import Frozen

# Tokens of the chunk before that say where the next one begins (KVzip's number).
TAIL = 8
# Tokens allowed for a prompt where there is no tokenizer at hand to count them.
PROMPT_TOKENS = 32
# Documents whose continuations are written together.
AT_ONCE = 8
# Continuations that are remembered: a corpus that is read again, and the documents of every look.
REMEMBERED = 2**16


@dataclass(frozen=True)
class Branch:
    """Token ids that are read after a document, and which source of queries they are."""

    source: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """One document and what is read after it, each branch on its own.

    Args:
        document: the document; its appendix counts only as a branch.
        branches: none of them empty.
        key: of the document, for what is drawn for it.
    """

    document: Document
    branches: tuple[Branch, ...]
    key: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the document and of all branches: what a walk reads."""
        return len(self.document.context_ids) + sum(len(branch.ids) for branch in self.branches)


def readings_of(documents: Sequence[Document], settings: "TargetSettings", frozen: "Frozen") -> list[Reading]:
    """Documents with the branches that the sources of the target ask for.

    A document without an appendix has no such branch, and a continuation that ends at once is none. Nothing
    is drawn at random: the same documents have the same branches, at any step.

    Args:
        documents: what is read.
        settings: which sources; how chunks are asked for, and how long a continuation is.
        frozen: writes the continuations; its tokenizer encodes the prompts (without one there is none, and
            chunks follow the document directly).

    Returns:
        a reading per document, in order.

    Raises:
        ValueError: a document for which no source is left, or a branch that is longer than the model takes.
    """
    continuations: list[tuple[int, ...]] = [() for _ in documents]
    if "continuation" in settings.sources:
        continuations = continue_greedily(frozen, documents, settings.continuation_tokens)
    readings = []
    for number, (document, continuation) in enumerate(zip(documents, continuations, strict=True)):
        branches = []
        if "appendix" in settings.sources and document.appendix_ids:
            branches.append(Branch("appendix", document.appendix_ids))
        if "repeat" in settings.sources:
            branches += repeats(document, settings, frozen)
        if continuation:
            branches.append(Branch("continuation", continuation))
        if not branches and "own" not in settings.sources:
            raise ValueError(
                f"target.sources=[{', '.join(settings.sources)}] needs something after every document, and "
                f"document {number} has nothing: add `own`, or give rows with context, question and answer."
            )
        reading = Reading(document, tuple(branches), document.key)
        _check_length(frozen, reading, number)
        readings.append(reading)
    return readings


def row_tokens(document: Document, settings: "TargetSettings") -> int:
    """Tokens that a document and its branches take in a packed row, known without a model: at most as many
    (continuations can end early), but for prompts beyond `PROMPT_TOKENS`.

    Args:
        document: what is read.
        settings: which sources.
    """
    tokens = len(document.context_ids)
    row = tokens
    if "appendix" in settings.sources:
        row += len(document.appendix_ids)
    if "repeat" in settings.sources:
        row += tokens + -(-tokens // settings.repeat_chunk) * (PROMPT_TOKENS + TAIL)
    if "continuation" in settings.sources:
        row += settings.continuation_tokens
    return row


def repeats(document: Document, settings: "TargetSettings", frozen: "Frozen") -> list[Branch]:
    """The document once more, `settings.repeat_chunk` tokens a branch: `[prompt | chunk]`, from the second
    on `[next prompt | last tokens of the chunk before | chunk]`.

    KVzip's released code asks like this; between prompt and chunk it puts the chat template's turn to the
    assistant, which is left out here (put it into the prompts where it matters).

    Args:
        document: what is repeated.
        settings: prompts and size of a chunk.
        frozen: for its tokenizer.
    """
    encode = frozen.encode
    first, after = (
        () if encode is None or not text else tuple(encode(text, False))
        for text in (settings.repeat_prompt, settings.repeat_next_prompt)
    )
    ids, size = document.context_ids, settings.repeat_chunk
    branches = []
    for start in range(0, len(ids), size):
        prompt = first if not start else after + ids[max(0, start - TAIL) : start]
        branches.append(Branch("repeat", prompt + ids[start : start + size]))
    return branches


@torch.no_grad()
def continue_greedily(frozen: "Frozen", documents: Sequence[Document], tokens: int) -> list[tuple[int, ...]]:
    """What the frozen model writes after each document, greedily, up to its end token (left out).

    Documents are padded on the left and continued a few together; nothing is drawn, and what was written is
    remembered. Beside which others a document is continued changes nothing but rounding.

    Args:
        frozen: the model.
        documents: their contexts are continued.
        tokens: at most so many.

    Returns:
        per document its continuation; empty where the model ends at once.
    """
    keys = [(document.key, tokens) for document in documents]
    known = {key: frozen.written[key] for key in keys if key in frozen.written}
    missing = {key: document for key, document in zip(keys, documents, strict=True) if key not in known}
    for start in range(0, len(missing), AT_ONCE):
        some = dict(list(missing.items())[start : start + AT_ONCE])
        for key, ids in zip(some, _write(frozen, list(some.values()), tokens), strict=True):
            known[key] = ids
            if len(frozen.written) < REMEMBERED:
                frozen.written[key] = ids
    return [known[key] for key in keys]


def _write(frozen: "Frozen", documents: Sequence[Document], tokens: int) -> list[tuple[int, ...]]:
    """Continuations of some documents, made together."""
    model = frozen.model
    device = model.get_input_embeddings().weight.device
    ends = _ends(model)
    contexts = [document.context_ids for document in documents]
    width = max(map(len, contexts))
    ids_BT = torch.tensor([[frozen.pad_id] * (width - len(ids)) + list(ids) for ids in contexts])
    mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in contexts])
    out_BT = model.generate(
        input_ids=ids_BT.to(device),
        attention_mask=mask_BT.to(device),
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        # Checkpoints may state them, for sampling; said here, nothing is drawn and nobody is warned.
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=frozen.pad_id,
        eos_token_id=sorted(ends) or None,
    )
    written = []
    for row in out_BT[:, width:].tolist():
        stop = next((place for place, token in enumerate(row) if token in ends), len(row))
        written.append(tuple(row[:stop]))
    return written


def _ends(model: "torch.nn.Module") -> frozenset[int]:
    """Token ids at which the model stops writing."""
    found: set[int] = set()
    for config in (getattr(model, "generation_config", None), model.config):
        value = getattr(config, "eos_token_id", None)
        found |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(found)


def _check_length(frozen: "Frozen", reading: Reading, number: int) -> None:
    config = frozen.model.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(text_config, "max_position_embeddings", None)
    tokens = len(reading.document.context_ids)
    for branch in reading.branches:
        if longest is not None and tokens + len(branch.ids) > longest:
            raise ValueError(
                f"document {number} has {tokens} tokens, {tokens + len(branch.ids)} with its "
                f"{branch.source}, and the model takes {longest}: lower data.max_tokens, target.repeat_chunk "
                "or target.continuation_tokens."
            )

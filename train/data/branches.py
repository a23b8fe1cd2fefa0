"""Appends to a document the texts whose queries stand for the future, each on its own branch.

A branch sees the document and itself, and no other branch; so a document is read once for all of them.

- `appendix`: the question and answer that came with the document.
- `repeat`: the document once more, a chunk at a time, each after a prompt that asks for it (KVzip, arXiv
  2505.23416: what the model needs to rebuild its context is what any question may need). The second and later
  chunks are asked for by the last tokens of the chunk before.
- `continuation`: what the frozen model itself writes greedily (its own queries are those that will come).
"""

from collections.abc import Sequence
from typing import Any

from retain.hf.training.block_reader import write_greedily
from retain.train.data.document import Branch, Document, Reading
from retain.train.objectives.targets import TargetSettings
from retain.train.teacher import Frozen

# Tokens of the chunk before that say where the next one begins (KVzip's number).
TAIL = 8
# Tokens allowed for a prompt where there is no tokenizer at hand to count them.
PROMPT_TOKENS = 32
# Continuations that are remembered: a corpus that is read again, and the documents of every look.
REMEMBERED = 2**16


def readings_of(documents: Sequence[Document], settings: TargetSettings, frozen: Frozen) -> list[Reading]:
    """Returns documents with the branches that the sources of the target ask for, in order.

    A document without an appendix has no such branch, and a continuation that ends at once is none. Nothing
    is drawn at random: the same documents have the same branches, at any step. Where the model has no
    tokenizer, repeated chunks follow the document without a prompt.

    Raises:
        ValueError: a document for which no source is left, or that the model cannot take.
    """
    for number, document in enumerate(documents):
        check_document(document, frozen, settings, document.origin or f"document {number}")
    readings = []
    for number, document in enumerate(documents):
        found: list[Branch] = []
        if "appendix" in settings.sources:
            found.append(Branch("appendix", document.appendix_ids))
        if "repeat" in settings.sources:
            found += repeats(document, settings, frozen)
        if "continuation" in settings.sources:
            (ids,) = continue_greedily(frozen, [document], settings.continuation_tokens)
            found.append(Branch("continuation", ids))
        branches = tuple(branch for branch in found if branch.ids)
        if not branches and "own" not in settings.sources:
            raise ValueError(
                f"target.sources=[{', '.join(settings.sources)}] needs something after every document, and "
                f"{document.origin or f'document {number}'} has nothing: add `own`, or give rows with "
                "context, question and answer."
            )
        readings.append(Reading(document, branches))
    return readings


def lengths_of(document: Document, settings: TargetSettings) -> tuple[int, ...]:
    """Returns the tokens of a document and of each of its branches, known without a model: at most as many
    (continuations can end early), but for prompts beyond `PROMPT_TOKENS`."""
    tokens = len(document.context_ids)
    lengths = [tokens]
    if "appendix" in settings.sources and document.appendix_ids:
        lengths.append(len(document.appendix_ids))
    if "repeat" in settings.sources:
        lengths += [
            PROMPT_TOKENS + TAIL + min(settings.repeat_chunk, tokens - start)
            for start in range(0, tokens, settings.repeat_chunk)
        ]
    if "continuation" in settings.sources:
        lengths.append(settings.continuation_tokens)
    return tuple(lengths)


def row_tokens(document: Document, settings: TargetSettings) -> int:
    """Returns the tokens that a document and its branches take in a packed row."""
    return sum(lengths_of(document, settings))


def repeats(document: Document, settings: TargetSettings, frozen: Frozen) -> list[Branch]:
    """Returns the document once more, `settings.repeat_chunk` tokens a branch: `[prompt | chunk]`, from the
    second on `[next prompt | last tokens of the chunk before | chunk]`.

    KVzip's released code asks like this; between prompt and chunk it puts the chat template's turn to the
    assistant, which is left out here (put it into the prompts where it matters).
    """
    first, after = (
        () if frozen.encode is None or not text else tuple(frozen.encode(text, False))
        for text in (settings.repeat_prompt, settings.repeat_next_prompt)
    )
    ids, size = document.context_ids, settings.repeat_chunk
    prompts = [first, *(after + ids[max(0, start - TAIL) : start] for start in range(size, len(ids), size))]
    return [
        Branch("repeat", prompt + ids[number * size : (number + 1) * size])
        for number, prompt in enumerate(prompts)
    ]


def continue_greedily(frozen: Frozen, documents: Sequence[Document], tokens: int) -> list[tuple[int, ...]]:
    """Returns greedy continuations of the documents by the frozen model, up to its end token (left out).

    Each document is continued alone, without a mask, and the result is remembered: it is the same to the last
    token whatever was asked for before, in whichever company, also after a resume. It is empty where the
    model ends at once.
    """
    written = []
    for document in documents:
        key = (document.key, tokens)
        ids = frozen.written.get(key)
        if ids is None:
            ids = write_greedily(
                frozen.model,
                document.context_ids,
                tokens,
                ends=_ends(frozen.model),
                layout=frozen.layout,
            )
            if len(frozen.written) < REMEMBERED:
                frozen.written[key] = ids
        written.append(ids)
    return written


def _ends(model: Any) -> frozenset[int]:
    """Token ids at which the model stops writing."""
    configs = (getattr(model, "generation_config", None), model.config)
    values = [getattr(config, "eos_token_id", None) for config in configs]
    return frozenset(i for value in values for i in ([value] if isinstance(value, int) else value or ()))


def check_document(document: Document, frozen: Frozen, settings: TargetSettings, name: str) -> None:
    """Refuses token ids that the model does not have, and a document longer than it takes, with what is read
    after it; `name` is the document's in the message. Only the model's config and tokenizer are looked at,
    and nothing is written: a continuation is taken to be as long as it may get.

    Raises:
        ValueError: token ids that the model lacks, or a branch that is too long; says which.
    """
    config = frozen.model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(config, "max_position_embeddings", None)
    largest, tokens = max(document.context_ids + document.appendix_ids), len(document.context_ids)
    if largest >= config.vocab_size:
        raise ValueError(
            f"{name} holds token id {largest} and the model knows {config.vocab_size} tokens: it was "
            "encoded with another model's tokenizer. Give text instead of ids, or the right model."
        )
    if longest is None:
        return
    if document.num_tokens > longest:
        raise ValueError(
            f"{name} has {document.num_tokens} tokens with its appendix and the model takes {longest}: lower "
            "data.max_tokens, or use shorter documents."
        )
    branches = {}
    if "repeat" in settings.sources:
        branches["repeat"] = max(len(branch.ids) for branch in repeats(document, settings, frozen))
    if "continuation" in settings.sources:
        branches["continuation"] = settings.continuation_tokens
    for source, length in branches.items():
        if tokens + length > longest:
            raise ValueError(
                f"{name} has {tokens} tokens, {tokens + length} with its {source}, and the model takes "
                f"{longest}: lower data.max_tokens, target.repeat_chunk or target.continuation_tokens."
            )

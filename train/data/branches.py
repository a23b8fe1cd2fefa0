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

import torch

from retain.hf.version_names import CACHE
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
        ValueError: a document for which no source is left.
    """
    readings = []
    for number, document in enumerate(documents):
        found: list[Branch] = []
        if "appendix" in settings.sources:
            found.append(Branch("appendix", document.appendix_ids))
        if "repeat" in settings.sources:
            found += repeats(document, settings, frozen)
        if "continuation" in settings.sources:
            ids = continuation_of(frozen, document, settings.continuation_tokens)
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


def row_tokens(document: Document, settings: TargetSettings) -> int:
    """Returns the tokens that a document and its branches take in a packed row, known without a model: at
    most as many (continuations can end early), but for prompts beyond `PROMPT_TOKENS`."""
    tokens, count = len(document.context_ids), len(document.context_ids)
    if "appendix" in settings.sources:
        count += len(document.appendix_ids)
    if "repeat" in settings.sources:
        count += tokens + (PROMPT_TOKENS + TAIL) * -(-tokens // settings.repeat_chunk)
    if "continuation" in settings.sources:
        count += settings.continuation_tokens
    return count


def repeats(document: Document, settings: TargetSettings, frozen: Frozen) -> list[Branch]:
    """Returns the document once more, `settings.repeat_chunk` tokens a branch: `[prompt | chunk]`, from the
    second on `[next prompt | last tokens of the chunk before | chunk]`.

    KVzip's released code asks like this, with the chat template's turn to the assistant before a chunk, which
    is left out here.
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


def continuation_of(frozen: Frozen, document: Document, tokens: int) -> tuple[int, ...]:
    """Returns the greedy continuation of a document by the frozen model, up to its end token (left out).

    The document is continued alone, without a mask, and the result is remembered: it is the same to the last
    token whatever was asked for before, also after a resume. It is empty where the model ends at once.
    """
    ids = frozen.written.get((document.key, tokens))
    if ids is None:
        ids = _written(frozen.model, document.context_ids, tokens)
        if len(frozen.written) < REMEMBERED:
            frozen.written[document.key, tokens] = ids
    return ids


@torch.no_grad()
def _written(model: Any, ids: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Continue one text by the likeliest token each time, whatever the model's generation config says."""
    ends, device = _ends(model), model.get_input_embeddings().weight.device
    written: list[int] = []
    new, cache = list(ids), None
    while len(written) < tokens:
        given = {"input_ids": torch.tensor([new], device=device), CACHE: cache}
        output = model(**given, use_cache=True, logits_to_keep=1)
        cache, token = output[CACHE], int(output.logits[0, -1].argmax())
        if token in ends:
            break
        written.append(token)
        new = [token]
    return tuple(written)


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
    branches = {"appendix": len(document.appendix_ids)}
    if "repeat" in settings.sources:
        branches["repeat"] = max(len(branch.ids) for branch in repeats(document, settings, frozen))
    if "continuation" in settings.sources:
        branches["continuation"] = settings.continuation_tokens
    for source, length in branches.items():
        if longest is not None and tokens + length > longest:
            raise ValueError(
                f"{name} has {tokens} tokens, {tokens + length} with its {source}, and the model takes "
                f"{longest}: lower data.max_tokens, target.repeat_chunk or target.continuation_tokens."
            )

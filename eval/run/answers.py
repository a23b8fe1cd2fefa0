"""Generates greedy answers from a cache and cuts them at their end.

Settings of generation that come with a checkpoint (penalties, suppressed tokens, sampling) are set aside:
the likeliest token is taken, whichever model answers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig

from retain.hf.version_names import CACHE

# Stands behind an answer that ended before others.
PAD = 0


def respond(
    model: Any, cache: Any, input_ids: Int[Tensor, "N T"], *, new_tokens: int, end_ids: Sequence[int] = ()
) -> list[tuple[int, ...]]:
    """Generates the likeliest token at every step, and returns the answers without their end tokens.

    Args:
        model: That answers.
        cache: Ids that it has not seen are read first.
        input_ids: All that each sequence has read, the question last.
        new_tokens: Most tokens to generate; without end tokens, exactly so many.
        end_ids: Tokens that end an answer.
    """
    ends = {"eos_token_id": list(end_ids)} if end_ids else {"eos_token_id": model.config.eos_token_id}
    least = {} if end_ids else {"min_new_tokens": new_tokens}
    how = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=PAD,
        disable_compile=True,  # a graph would serve a few tokens
        **least,
        **ends,
    )
    given = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), CACHE: cache}
    # `generate` takes what it is not told from there.
    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        output = model.generate(**given, generation_config=how)
    finally:
        model.generation_config = before
    return [cut(tokens, end_ids) for tokens in output[:, input_ids.shape[1] :].tolist()]


def cut(tokens: Sequence[int], end_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens before the first that ends an answer."""
    stop = next((place for place, token in enumerate(tokens) if token in end_ids), len(tokens))
    return tuple(tokens[:stop])

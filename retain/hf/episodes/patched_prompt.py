"""Reads a context block by block, and keeps of it what a patched prompt attends to.

Behind each block the patched prompt is read, all that is held is scored by its queries and cut to the budget,
and the prompt is forgotten. So no more than budget, block and prompt are ever held.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from retain.hf.cache.batch_context import prompt_from, whole
from retain.hf.cache.cache import Cache
from retain.hf.cache.changes import forget_read, stop_evicting
from retain.hf.model.decoder import base_model
from retain.hf.model.layout import Layout
from retain.hf.version_names import CACHE
from retain.policy import load_policy
from retain.presets import Policy
from retain.scores.trial import known_settings


@torch.no_grad()
def prefill_patched(
    model: nn.Module,
    input_ids: Int[Tensor, "B T"],
    prompt_ids: Int[Tensor, "prompts S"],
    *,
    tokens_per_head: int,
    policy: str | Policy = "snapkv:patched",
    chunk_size: int | None = None,
    **settings: Any,
) -> Cache:
    """A cache of a context, kept by the attention that a patched prompt pays it.

    After block c, of the entries held with it, `score_h(i) = max_{j in prompt} max_{q in group(h)} a_qj[i]`
    with `a` the attention of the prompt read behind the block (`snapkv:patched`), and the best
    `tokens_per_head` a head stay, in the mean over a layer's heads.

    EpiCache's released code leaves the prompt's own keys out of the softmax and puts the prompt one position
    earlier, upon the block's last token; here both are as if the prompt had been written behind the block.

    Args:
        model: attached.
        input_ids: the context, one sequence.
        prompt_ids: the patched prompt.
        tokens_per_head: entries of the context that a KV head holds, in the mean over a layer's heads.
        policy: whose score looks at a window of last queries, which here is the prompt.
        chunk_size: tokens of a block; None: the context is one block.
        **settings: of the policy, as `retain.Cache` takes them; gates, seeds and slack too.

    Returns:
        a cache that has seen the context alone, and evicts no more.

    Raises:
        ValueError: ids that are none, no budget, a policy without a window, or a model with layers that
            cannot forget what they read.

    Examples:
        >>> cache = prefill_patched(model, ids, prompt_ids, tokens_per_head=256)  # doctest: +SKIP
    """
    chosen = policy if isinstance(policy, Policy) else load_policy(policy)
    _check_settings(chosen, settings)
    vocabulary = base_model(model).config.get_text_config().vocab_size
    input_ids, prompt_ids = (prompt_from(ids, None, vocabulary)[0] for ids in (input_ids, prompt_ids))
    if len(input_ids) != 1 or len(prompt_ids) != 1:
        raise ValueError(
            f"a context and its patched prompt are one sequence each, got {len(input_ids)} and "
            f"{len(prompt_ids)}: read sequences one by one, and stack them with retain.Cache.concat."
        )
    tokens_per_head = whole(tokens_per_head, "tokens_per_head", "entries of the context a head", 1)
    total, asked = input_ids.shape[1], prompt_ids.shape[1]
    size = total if chunk_size is None else whole(chunk_size, "chunk_size", "tokens a block", 1)
    for section, own in (("observed_settings", {"window": asked}), ("protection", {"recent": asked})):
        settings[section] = {**settings.get(section, {}), **own}
    cache = Cache(
        model,
        chosen,
        tokens_per_head=tokens_per_head + asked,
        regime="chunked",
        capacity=None,
        short="raise",
        **settings,
    )
    _check_windows(cache.state.layout, total + asked)
    for start in range(0, total, size):
        stop = min(start + size, total)
        read_ids = torch.cat([input_ids[:, start:stop], prompt_ids.to(input_ids.device)], dim=1)
        seen = torch.ones(1, stop + asked, dtype=torch.int64, device=read_ids.device)
        positions = torch.arange(start, stop + asked, device=read_ids.device)[None]
        base_model(model)(
            input_ids=read_ids,
            attention_mask=seen,
            position_ids=positions,
            use_cache=True,
            output_attentions=False,
            **{CACHE: cache},
        )
        forget_read(cache.state, stop)
    stop_evicting(cache.state)
    return cache


def _check_settings(policy: Policy, settings: Mapping[str, Any]) -> None:
    """Refuse a policy that would not ask the prompt, and settings that are stated by it."""
    if policy.observed is None or "window" not in known_settings(policy.observed):
        raise ValueError(
            f"policy {policy.name!r} looks at no window of queries, so a patched prompt would not be asked: "
            "take one that does, such as 'snapkv:patched'."
        )
    stated = [name for name in ("regime", "capacity", "short", "every") if name in settings]
    for section, name in (("observed_settings", "window"), ("protection", "recent")):
        stated += [f"{section}.{name}"] if name in settings.get(section, {}) else []
    if stated:
        raise ValueError(
            f"{', '.join(stated)}: a patched prompt states these itself (it is the window, and is kept until "
            "it is forgotten): leave them out."
        )


def _check_windows(layout: Layout, reach: int) -> None:
    """Refuse a model of which some layer lets go of tokens by itself, so that it cannot go back to what it
    held before a patched prompt."""
    shortest = min([layout.shortest_window, *(left.window or 0 for left in layout.alone.values())])
    if reach >= shortest:
        raise ValueError(
            f"context and patched prompt are {reach} tokens, and a layer of this model lets go of tokens "
            f"after {shortest} (0: it has a recurrent state), so it cannot forget the prompt: take a shorter "
            "context, or a model whose layers attend to all of it."
        )

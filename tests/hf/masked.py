"""The oracle of the ragged cache: a full DynamicCache in which evicted entries get -inf, per (layer, KV
head).

Nothing of `retain` runs here. Each attention module whose layer evicts is given its own 4D mask by a hook:
entry `t` is visible to query `s` if it is causal, no padding, and,
unless it came in the same forward, still kept by that layer and head. What is kept may change between
forwards: a query sees what was kept when its forward began, so every forward is a moment of its own. Other
layers run as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from retain.hf.intercept.attach import cache_in
from retain.hf.version_names import CACHE


def evicting(model: PreTrainedModel) -> list[int]:
    """Layers that evict: those with full attention."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    return [idx for idx, kind in enumerate(kinds) if kind == "full_attention"]


def full_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache that holds every entry of the layers that evict."""
    cache = DynamicCache(config=model.config)
    for idx in evicting(model):
        cache.layers[idx] = DynamicLayer()
    return cache


@contextmanager
def masked(
    model: PreTrainedModel,
    keep: Sequence[Tensor] | None,
    attention_mask: Tensor,
    weights: Sequence[Tensor | None] | None = None,
) -> Iterator[list[Tensor]]:
    """Inside, forwards on a DynamicCache see only kept entries of the past.

    Args:
        model: an unattached model.
        keep: True = kept, `[B, H, T]` for each layer that evicts, in order; entries behind T are kept. None:
            everything is.
        attention_mask: 2D, over all tokens that will ever be seen (more columns than needed are cut).
        weights: what each entry counts, `[B, H, T]` of each layer that evicts: the logarithm is added to its
            logits. None: 1, as entries behind T do. May be replaced between forwards.

    Yields:
        what is kept, a list like `keep`: replace its tensors between forwards to evict at that moment.
    """
    layers = evicting(model)
    none = torch.ones(attention_mask.shape[0], model.config.num_key_value_heads, 0, dtype=torch.bool)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    kept = [none] * len(layers) if keep is None else list(keep)
    place = {idx: number for number, idx in enumerate(layers)}

    def give_mask(module, args, kwargs):
        cache = cache_in(kwargs)
        S = kwargs["hidden_states"].shape[1]
        seen = cache.get_seq_length(module.layer_idx)
        keep_BHT = kept[place[module.layer_idx]][:, :, :seen]
        column = torch.arange(seen + S)
        valid = attention_mask[:, : seen + S].bool()
        visible = (column <= torch.arange(seen, seen + S)[:, None])[None, None] & valid[:, None, None]
        B, H, T = keep_BHT.shape
        later = torch.ones(B, H, seen + S - T, dtype=torch.bool)
        visible = visible & torch.cat([keep_BHT, later], dim=-1)[:, :, None]
        visible = visible.repeat_interleave(group, dim=1)
        # A pad's own query may see nothing; let it see itself, nobody looks at what comes out.
        visible = visible | (column == torch.arange(seen, seen + S)[:, None])
        dtype = kwargs["hidden_states"].dtype
        mask = torch.zeros(visible.shape, dtype=dtype)
        counts = None if weights is None else weights[place[module.layer_idx]]
        if counts is not None:
            known = counts.log().to(dtype).repeat_interleave(group, dim=1)
            mask[..., : counts.shape[-1]] += known[:, :, None]
        mask = mask.masked_fill(~visible, float("-inf"))
        return args, {**kwargs, "attention_mask": mask}

    hooks = [
        model.model.layers[idx].self_attn.register_forward_pre_hook(give_mask, with_kwargs=True)
        for idx in layers
    ]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def random_keep(model: PreTrainedModel, attention_mask: Tensor, *, seed: int = 0) -> list[Tensor]:
    """Keep masks of very different lengths per (sequence, layer, head): 10 % to 80 % of the real tokens.

    One for each layer that evicts, in order.
    """
    generator = torch.Generator().manual_seed(seed)
    B, T = attention_mask.shape
    H = model.config.num_key_value_heads
    masks = []
    for _ in evicting(model):
        ratio = 0.1 + 0.7 * torch.rand(B, H, 1, generator=generator)
        masks.append((torch.rand(B, H, T, generator=generator) < ratio) & attention_mask[:, None].bool())
    return masks


def positions_of(attention_mask: Tensor) -> Tensor:
    """Positions as `generate` counts them."""
    return (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 0)


@torch.no_grad()
def masked_logits(
    model: PreTrainedModel,
    keep: Sequence[Tensor] | None,
    chunks: Sequence[Tensor],
    attention_mask: Tensor,
    *,
    positions: bool = True,
    after: Callable[[int, list[Tensor]], None] | None = None,
) -> list[Tensor]:
    """Logits of each chunk of token ids in turn, through the oracle.

    Args:
        model: an unattached model.
        keep: what is kept of the entries that come first; None: everything.
        chunks: token ids `[B, S]`.
        attention_mask: 2D, over all chunks.
        positions: whether to pass positions that count a sequence's own tokens.
        after: called with a chunk's number once it was read, and with what is kept, which it may change.
    """
    cache, logits, seen = full_cache(model), [], 0
    with masked(model, keep, attention_mask) as kept:
        for number, ids in enumerate(chunks):
            mask = attention_mask[:, : seen + ids.shape[1]]
            where = {"position_ids": positions_of(mask)[:, seen:]} if positions else {}
            logits.append(model(input_ids=ids, attention_mask=mask, **{CACHE: cache}, **where).logits)
            seen += ids.shape[1]
            if after is not None:
                after(number, kept)
    return logits

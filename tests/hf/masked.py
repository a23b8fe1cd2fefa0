"""The oracle of the ragged cache: a full DynamicCache in which evicted entries get -inf, per (layer, KV
head).

Nothing of `retain` runs here. Each attention module is given its own 4D mask by a hook: entry `t` is visible
to query `s` if it is causal, no padding, and, for queries that come after the prefill, kept by that layer and
head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@contextmanager
def masked(model: PreTrainedModel, keep: Sequence[Tensor], attention_mask: Tensor) -> Iterator[None]:
    """Inside, forwards on a DynamicCache see only kept entries of the first `T` (`keep[layer]` is `[B, H,
    T]`).

    Args:
        model: an unattached model.
        keep: True = kept, per layer; the queries of the first T tokens themselves still see everything.
        attention_mask: 2D, over all tokens that will ever be seen (more columns than needed are cut).
    """

    def give_mask(module, args, kwargs):
        cache = kwargs["past_key_values"]
        S = kwargs["hidden_states"].shape[1]
        seen = cache.get_seq_length(module.layer_idx)
        keep_BHT = keep[module.layer_idx]
        B, H, T = keep_BHT.shape
        column = torch.arange(seen + S)
        visible = (column <= torch.arange(seen, seen + S)[:, None])[None, None]
        visible = visible & attention_mask[:, None, None, : seen + S].bool()
        if seen:
            kept = torch.cat([keep_BHT, torch.ones(B, H, seen + S - T, dtype=torch.bool)], dim=-1)
            visible = visible & kept[:, :, None]
        visible = visible.expand(B, H, S, seen + S).repeat_interleave(module.num_key_value_groups, dim=1)
        # A pad's own query may see nothing; let it see itself, nobody looks at what comes out.
        visible = visible | (column == torch.arange(seen, seen + S)[:, None])
        dtype = kwargs["hidden_states"].dtype
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))
        return args, {**kwargs, "attention_mask": mask}

    hooks = [
        layer.self_attn.register_forward_pre_hook(give_mask, with_kwargs=True) for layer in model.model.layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def random_keep(model: PreTrainedModel, attention_mask: Tensor, *, seed: int = 0) -> list[Tensor]:
    """Keep masks of very different lengths per (sequence, layer, head): 10 % to 80 % of the real tokens."""
    generator = torch.Generator().manual_seed(seed)
    B, T = attention_mask.shape
    H = model.config.num_key_value_heads
    masks = []
    for _ in range(model.config.num_hidden_layers):
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
) -> list[Tensor]:
    """Logits of each chunk of token ids in turn, through the oracle (`keep` None: the plain full cache)."""
    cache, logits, seen = DynamicCache(config=model.config), [], 0
    everything = torch.ones(
        chunks[0].shape[0], model.config.num_key_value_heads, chunks[0].shape[1], dtype=torch.bool
    )
    with masked(model, keep or [everything] * model.config.num_hidden_layers, attention_mask):
        for ids in chunks:
            mask = attention_mask[:, : seen + ids.shape[1]]
            where = {"position_ids": positions_of(mask)[:, seen:]} if positions else {}
            logits.append(model(input_ids=ids, attention_mask=mask, past_key_values=cache, **where).logits)
            seen += ids.shape[1]
    return logits

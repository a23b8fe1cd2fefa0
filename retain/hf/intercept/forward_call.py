"""Checks what one forward of the decoder was given, and refuses what would go wrong silently later.

Padding stands before the tokens of a sequence, in the first prompt and in each later turn. Both are checked
before the first layer runs, with a single transfer from the device. A decoding step is not looked at: all of
its tokens are real, and nothing waits for the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

# In the order in which they are looked for.
PROBLEMS = (
    "attention_mask holds other values than 1 and 0 (NaN, or logits of an additive mask): pass 1 on tokens "
    "and 0 on padding.",
    "right padding: a row of the attention mask has 0 behind tokens of a prompt, or ends in 0: set "
    "tokenizer.padding_side = 'left'.",
    "a sequence of this prompt is all padding: drop it from the batch.",
    "attention_mask calls tokens padding that were read as tokens (generate puts them behind a sequence that "
    "has ended): show them as tokens, or continue such sequences in separate caches (batch_select_indices).",
    "attention_mask shows tokens as real that were padding when the cache saw them: continue the mask of the "
    "earlier call.",
    "position_ids of a sequence do not increase from token to token: give each sequence a row, and let "
    "positions go on where they were. After a prompt with padding, continue through generate or pass "
    "position_ids: without them transformers counts padding too. And without an attention_mask generate "
    "takes every token that equals pad_token_id for padding: pass one.",
)


@dataclass(frozen=True, eq=False)
class Call:
    """Holds what one forward was given.

    Args:
        is_prefill: the first tokens of the cache.
        mask_BT: True on real tokens, over the past and the new tokens.
        valid_BS: the new tokens' part of it; None when it is known that nothing of it is padding.
        positions_BS: int64 RoPE positions of the new tokens.
    """

    is_prefill: bool
    mask_BT: Bool[Tensor, "B T"]
    valid_BS: Bool[Tensor, "B S"] | None
    positions_BS: Int[Tensor, "B S"]


def read_call(
    given: Mapping[str, Any],
    past_BT: Bool[Tensor, "B P"] | None = None,
    last_B: Int[Tensor, " B"] | None = None,
    *,
    width: int | None = None,
    reads_prompt: bool = True,
) -> Call:
    """Check a forward's arguments against what was seen.

    Args:
        given: `input_ids` or `inputs_embeds`; `attention_mask`, 2D over past and new tokens, or None for no
            padding; `position_ids` of the new tokens, or None to count on from what was seen, padding
            included, as transformers does.
        past_BT, last_B: real tokens among those seen, and the position of each sequence's last; None: none.
        width: tokens of the whole prompt, padding included, where it is read in chunks; a sequence may begin
            after the first of them.
        reads_prompt: the call is part of the first prompt.

    Raises:
        ValueError: right padding, a mask of another width or kind or that shows earlier padding as tokens,
            positions that do not increase, another batch size.
    """
    input_ids, attention_mask, position_ids = map(given.get, ("input_ids", "attention_mask", "position_ids"))
    name = "inputs_embeds" if input_ids is None else "input_ids"
    tokens = given.get(name)
    if tokens is None:
        raise ValueError("the decoder got neither input_ids nor inputs_embeds.")
    if tokens.ndim < 2 or tokens.shape[1] == 0:
        raise ValueError(
            f"{name} are {tuple(tokens.shape)}: pass [B, S], at least one token in each of B sequences."
        )
    (B, S), device = tokens.shape[:2], tokens.device
    past_BT = torch.ones(B, 0, dtype=torch.bool, device=device) if past_BT is None else past_BT.to(device)
    seen = past_BT.shape[1]
    if past_BT.shape[0] != B:
        raise ValueError(
            f"the cache holds {past_BT.shape[0]} sequences, but the call has {B}: use "
            "batch_repeat_interleave (beams, several returned sequences) or batch_select_indices first."
        )
    if attention_mask is not None and (shape := getattr(attention_mask, "shape", ())) != (B, seen + S):
        raise ValueError(
            f"attention_mask is {tuple(shape)}, but the cache has seen {seen} tokens and {S} are new: pass "
            f"the 2D mask [{B}, {seen + S}] over the past and the new tokens (1 = token, 0 = padding)."
        )
    if position_ids is None:
        position_ids = torch.arange(seen, seen + S, device=device)[None]
    if position_ids.ndim != 2 or position_ids.shape[1] != S:
        raise ValueError(f"position_ids are {tuple(position_ids.shape)}: pass [{B}, {S}].")
    positions_BS = position_ids.to(device=device, dtype=torch.int64).expand(B, S)
    if not reads_prompt and S == 1:
        mask_BT = torch.cat([past_BT, past_BT.new_ones(B, 1)], dim=1)
        return Call(False, mask_BT, None, positions_BS)
    mask_BT, strange = torch.cat([past_BT, past_BT.new_ones(B, S)], dim=1), past_BT.new_zeros(())
    if attention_mask is not None:
        mask_BT = attention_mask.to(device=device, dtype=torch.bool)
        strange = ((attention_mask != 0) & (attention_mask != 1)).any().to(device)
    valid_BS, before_BT = mask_BT[:, seen:], mask_BT[:, :seen]
    forgotten, revived = (past_BT & ~before_BT).any(), (before_BT & ~past_BT).any()
    if reads_prompt:
        right = (mask_BT[:, :-1] & ~mask_BT[:, 1:]).any() | forgotten
    else:  # a token that nobody has read yet may stand before the padding of a turn
        right = (valid_BS.any(1) & ~valid_BS[:, -1]).any()
    empty = ~mask_BT.any(1).all() & (seen + S >= (width or 0))
    problems = (strange, right, empty, forgotten, revived, _disorder(valid_BS, positions_BS, last_B))
    *found, padded = torch.stack([*problems, ~valid_BS.all()]).tolist()
    for is_there, message in zip(found, PROBLEMS, strict=True):
        if is_there:
            raise ValueError(message)
    return Call(seen == 0, mask_BT, valid_BS if padded else None, positions_BS)


def _disorder(
    valid_BS: Bool[Tensor, "B S"], positions_BS: Int[Tensor, "B S"], last_B: Int[Tensor, " B"] | None
) -> Tensor:
    """Returns whether positions do not increase among the new tokens, or from the last one seen."""
    before_BS = positions_BS.masked_fill(~valid_BS, -1).cummax(-1).values
    disorder = ((positions_BS[:, 1:] <= before_BS[:, :-1]) & valid_BS[:, 1:]).any()
    if last_B is None:
        return disorder
    return disorder | ((positions_BS <= last_B.to(valid_BS.device)[:, None]) & valid_BS).any()

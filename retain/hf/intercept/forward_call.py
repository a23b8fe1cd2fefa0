"""Checks what one forward of the decoder was given, and refuses what would go wrong silently later.

Right padding, a mask that contradicts the past, and packed sequences are found before the first layer runs,
with a single transfer from the device (two where past tokens are forgotten).

Where kernels run, the host is ahead of the device, and to look at a number would hold it back at every token.
So the answers about a decoding step are copied to the host without waiting (`MaskCheck`), and read when a
later step finds that they have come; whatever reads a prompt, evicts, ends a `generate`, changes what is held
or reports on it waits for them first. A wrong mask is then refused some tokens late, and the cache with it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.cache.dense_view import tokens_last

MASK_VALUES = (
    "attention_mask holds other values than 1 and 0 (NaN, or logits of an additive mask): pass 1 on tokens "
    "and 0 on padding."
)


def shown(value: Any) -> str:
    """The shape of what should be a tensor, or what it is instead, for a message."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


LATE = (
    "It was noticed only after that step had run, since decoding does not wait for the device: reset() the "
    "cache."
)
WRONG = {
    "forgotten": "a decoding step's attention_mask declared tokens padding that the cache had seen as real: "
    "declare a token padding with the step that brings it, or with the first call after a prompt, a turn or "
    "a generate.",
    "revived": "a decoding step's attention_mask shows tokens as real that were padding when the cache saw "
    "them, and padding is never stored: continue the mask that the earlier call had.",
    "back": "a decoding step's position_ids do not go on after the positions that its sequences have: let "
    "positions go on where they were.",
    "gap": "a decoding step has padding after tokens that its sequences have seen already, and the model "
    "has layers that are left to transformers, which take it for tokens: decode such sequences in caches of "
    "their own (batch_select_indices).",
}


class MaskCheck:
    """One step's questions, on their way: names of `WRONG`, each with a boolean of no dimension."""

    def __init__(self, found: Mapping[str, Tensor]):
        self.names = list(found)
        answers = torch.stack(list(found.values()))
        self.arrival: torch.cuda.Event | None = None
        self.answers = answers.to("cpu", non_blocking=True)
        if answers.is_cuda:
            self.arrival = torch.cuda.Event()
            self.arrival.record(torch.cuda.current_stream(answers.device))

    @property
    def arrived(self) -> bool:
        return self.arrival is None or self.arrival.query()

    def settle(self) -> None:
        """Wait for the answers, and raise `ValueError` where something was wrong."""
        if self.arrival is not None:
            self.arrival.synchronize()
        for name, wrong in zip(self.names, self.answers.tolist(), strict=True):
            if wrong:
                raise ValueError(f"{WRONG[name]} {LATE}")


@dataclass(frozen=True, eq=False)
class Call:
    """One forward.

    Args:
        is_prefill: the first tokens of the cache.
        mask_BT: True on real tokens, over the past and the new tokens.
        valid_BS: the new tokens' part of it; None when it is known that nothing of it is padding.
        positions_BS: int64 RoPE positions of the new tokens.
        token_ids_BS: None if the caller passed embeddings.
        forgotten_BT: past tokens that this call's mask declares padding; None when there are none.
        rotary: the model's rotary embedding, where it is understood.
        mask_check: what is still to be found out about it; None: nothing.
        gaps: some sequence has padding behind tokens of this call: an unread token before a padded turn, or
            virtual tokens (peft's prompt tuning) before a padded prompt.
    """

    is_prefill: bool
    mask_BT: Bool[Tensor, "B T"]
    valid_BS: Bool[Tensor, "B S"] | None
    positions_BS: Int[Tensor, "B S"]
    token_ids_BS: Int[Tensor, "B S"] | None
    forgotten_BT: Bool[Tensor, "B P"] | None
    rotary: Rotary | None = None
    mask_check: MaskCheck | None = None
    gaps: bool = False

    def left_padded(self) -> "Call":
        """A first call with all padding before its sequences' tokens, as evidence has it."""
        if not self.gaps:
            return self
        mask_BT, ids_BT = self.mask_BT, self.token_ids_BS
        left_BT = tokens_last(mask_BT, mask_BT)
        positions_BT = tokens_last(self.positions_BS, mask_BT)
        ids_BT = None if ids_BT is None else tokens_last(ids_BT, mask_BT)
        return Call(True, left_BT, left_BT, positions_BT, ids_BT, None, self.rotary, self.mask_check)


def read_call(
    past_BT: Bool[Tensor, "B P"] | None = None,
    last_B: Int[Tensor, " B"] | None = None,
    positions: Callable[[], Int[Tensor, "B P"]] | None = None,
    *,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    rotary: Rotary | None = None,
    width: int | None = None,
    another: bool = False,
    later: bool = False,
    alone: bool = False,
) -> Call:
    """Check a forward's arguments against what was seen.

    Args:
        past_BT: True on real tokens among those seen; None before the first.
        last_B: position of the last real token of each sequence; None before the first.
        positions: gives those of all tokens seen; asked only where past tokens are forgotten.
        attention_mask: 2D over past and new tokens, or None for no padding.
        position_ids: of the new tokens, or None to count on from what was seen, padding included, as
            transformers does.
        rotary: the model's rotary embedding, for those who look at queries before it.
        width: tokens of the whole prompt, padding included, where it is read in chunks; a sequence may begin
            after the first of them.
        another: the call is a decoding step after another one, whose mask may not take tokens back: where
            nobody waits for it, that would be known too late, so it is refused everywhere.
        later: it is, and what is wrong with it may be noticed after it has run.
        alone: then also whether there is padding after a sequence's own tokens, which layers that are left
            alone cannot have.

    Raises:
        ValueError: right padding (behind a sequence's last token), a mask of another width or kind or that
            goes back on an earlier one, positions that do not increase, another batch size.
    """
    tokens = input_ids if input_ids is not None else inputs_embeds
    if tokens is None:
        raise ValueError("the decoder got neither input_ids nor inputs_embeds.")
    name = "input_ids" if input_ids is not None else "inputs_embeds"
    if tokens.ndim < 2 or tokens.shape[1] == 0:
        raise ValueError(
            f"{name} are {tuple(tokens.shape)}: pass [B, S], at least one token in each of B sequences."
        )
    B, S, device = *tokens.shape[:2], tokens.device
    if past_BT is None:
        past_BT = torch.ones(B, 0, dtype=torch.bool, device=device)
    past_BT, seen = past_BT.to(device), past_BT.shape[1]
    mask_BT, positions_BS = _shaped(past_BT, tokens, attention_mask, position_ids)
    valid_BS, before_BT = mask_BT[:, seen:], mask_BT[:, :seen]
    if another and not later and S == 1 and _goes_on(past_BT, last_B, mask_BT, positions_BS, attention_mask):
        return Call(False, mask_BT, None, positions_BS, input_ids, None, rotary)
    forgotten_BT, revived_BT = past_BT & ~before_BT, before_BT & ~past_BT

    if later:
        assert another and S == 1 and last_B is not None
        found = {"back": (positions_BS[:, 0] <= last_B.to(device)) & mask_BT[:, -1]}
        if attention_mask is not None:  # else the mask is of our making
            found |= {"forgotten": forgotten_BT, "revived": revived_BT}
            if alone:
                found["gap"] = past_BT.any(-1) & ~mask_BT[:, -1]
        check = MaskCheck({name: wrong.any() for name, wrong in found.items()})
        shown_BS = None if attention_mask is None else valid_BS
        return Call(False, mask_BT, shown_BS, positions_BS, input_ids, None, rotary, check)

    strange = valid_BS.new_zeros(())
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        strange = ((attention_mask != 0) & (attention_mask != 1)).any().to(device)
    answers = (strange, ~valid_BS.all(), ~valid_BS.any(1).all(), forgotten_BT.any(), revived_BT.any())
    other, padded, empty, forgotten, revived, gaps, right, disorder, back = torch.stack(
        [*answers, *_order(valid_BS, positions_BS, last_B)]
    ).tolist()
    ends = seen + S >= (width or 0)  # of the prompt, all has come
    if other:
        raise ValueError(MASK_VALUES)
    if back and forgotten and positions is not None:
        # `last_B` may be that of a pad which `generate` put behind a finished row: what stays counts.
        last_B1 = positions().to(device).masked_fill(~(past_BT & ~forgotten_BT), -1).amax(1, keepdim=True)
        back = bool(((positions_BS <= last_B1) & valid_BS).any())
    if right and ends:
        raise ValueError(
            "right padding: a row of the attention mask ends in 0 behind tokens of this call. Decoding "
            "continues after the last column, so pads there would stand between a prompt and its "
            "continuation: set tokenizer.padding_side = 'left'."
        )
    if empty and ends and not bool(mask_BT.any(1).all()):
        raise ValueError("a sequence of this prompt is all padding: drop it from the batch.")
    if another and forgotten:
        raise ValueError(WRONG["forgotten"])
    if revived:
        raise ValueError(
            "attention_mask shows tokens as real that were padding when the cache saw them, and padding is "
            "never stored: continue the mask that the earlier call had, with 0 for what generate put "
            "behind a sequence that has ended."
        )
    if disorder or back:
        raise ValueError(
            "position_ids of a sequence do not increase from token to token (packed sequences, or a "
            "continuation at an earlier position): give each sequence its own row, and let positions go on "
            "where they were. After cache.prefill, or generate with padding, continue through generate or "
            "pass position_ids: without them transformers counts padding too. And without an attention_mask "
            "generate takes every token that equals pad_token_id for padding: pass one."
        )
    known_BS, gone_BT = valid_BS if padded else None, forgotten_BT if forgotten else None
    return Call(seen == 0, mask_BT, known_BS, positions_BS, input_ids, gone_BT, rotary, gaps=gaps)


def _goes_on(
    past_BT: Bool[Tensor, "B P"],
    last_B: Int[Tensor, " B"] | None,
    mask_BT: Bool[Tensor, "B T"],
    positions_BS: Int[Tensor, "B 1"],
    attention_mask: Any,
) -> bool:
    """Whether a decoding step is like the one before: nothing padded or taken back, positions that go on."""
    if last_B is None:
        return False
    same = attention_mask is None or bool(mask_BT[:, -1].all()) and torch.equal(mask_BT[:, :-1], past_BT)
    return same and bool((positions_BS[:, 0] > last_B.to(positions_BS.device)).all())


def _order(
    valid_BS: Bool[Tensor, "B S"], positions_BS: Int[Tensor, "B S"], last_B: Int[Tensor, " B"] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whether padding stands behind tokens, whether it ends a row of some, and whether positions do not
    increase among the new tokens, or from the last one seen."""
    between = behind = disorder = back = valid_BS.new_zeros(())
    if valid_BS.shape[1] > 1:
        before_BS = positions_BS.masked_fill(~valid_BS, -1).cummax(-1).values
        disorder = ((positions_BS[:, 1:] <= before_BS[:, :-1]) & valid_BS[:, 1:]).any()
        between = (valid_BS[:, :-1] & ~valid_BS[:, 1:]).any()
        behind = (valid_BS.any(1) & ~valid_BS[:, -1]).any()
    if last_B is not None:
        back = ((positions_BS <= last_B.to(valid_BS.device)[:, None]) & valid_BS).any()
    return between, behind, disorder, back


def _shaped(
    past_BT: Bool[Tensor, "B P"], tokens: Tensor, attention_mask: Any, position_ids: Tensor | None
) -> tuple[Bool[Tensor, "B T"], Int[Tensor, "B S"]]:
    """Mask over the past and the new tokens, and positions of the new ones."""
    (B, S), device, seen = tokens.shape[:2], tokens.device, past_BT.shape[1]
    if past_BT.shape[0] != B:
        raise ValueError(
            f"the cache holds {past_BT.shape[0]} sequences, but the call has {B}: use "
            "batch_repeat_interleave (beams, several returned sequences) or batch_select_indices first."
        )
    if attention_mask is None:
        mask_BT = torch.cat([past_BT, past_BT.new_ones(B, S)], dim=1)
    elif not isinstance(attention_mask, Tensor) or attention_mask.shape != (B, seen + S):
        raise ValueError(
            f"attention_mask is {shown(attention_mask)}, but the cache has seen {seen} tokens and {S} are "
            f"new: pass the 2D mask [{B}, {seen + S}] over the past and the new tokens (1 = token, "
            "0 = padding)."
        )
    else:
        mask_BT = attention_mask.to(device=device, dtype=torch.bool)
    if position_ids is None:
        position_ids = torch.arange(seen, seen + S, device=device)[None]
    if position_ids.ndim != 2 or position_ids.shape[1] != S:
        raise ValueError(f"position_ids are {tuple(position_ids.shape)}: pass [{B}, {S}].")
    positions_BS = position_ids.to(device=device, dtype=torch.int64).expand(B, S)
    return mask_BT, positions_BS

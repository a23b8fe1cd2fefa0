"""What a running `generate` has said to a cache: that it runs, and which sequences have ended."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from retain.hf.cache.state import State


class Generation:
    """The side of a cache that hears from `generate`."""

    def __init__(self) -> None:
        self.runs = False
        self.opens = False  # a `generate` has begun, and its first forward is to come
        self.forget()

    def forget(self) -> None:
        """Forget which sequences have ended."""
        # Sequences that have ended, and those of which the next token is padding behind the end.
        self.ended_B: Bool[Tensor, " B"] | None = None
        self.filled_B: Bool[Tensor, " B"] | None = None
        self.opens = False

    @contextmanager
    def running(
        self, state: State, width: int | None, attention_mask: Tensor | None
    ) -> Iterator[Callable[[Tensor], None]]:
        """While the `generate` of an attached model runs; gives a function that hears which sequences end.

        Args:
            state: of the cache.
            width: tokens, padding included, of a prompt that it reads in chunks; None: at once.
            attention_mask: of that prompt.
        """
        state.take()
        before, self.runs = self.runs, True
        self.forget()
        state.steps, self.opens = False, True
        if width is not None:
            state.announce(width, attention_mask)

        def hear_ends(ended_B: Bool[Tensor, " B"]) -> None:
            # Beam search asks about candidates, of which there are more than sequences, and fills nothing. A
            # single sequence ends with `generate`.
            if len(ended_B) == state.batch_size > 1:
                self.ended_B = ended_B if self.ended_B is None else self.ended_B | ended_B

        try:
            yield hear_ends
            state.settle(wait=True)
        finally:
            self.forget()
            self.runs, state.steps = before, False
            if not before:
                state.release()
            if width is not None:
                state.announce(None)

    def mask_as_meant(
        self, state: State, tokens: Tensor | None, attention_mask: Tensor | None, *, waits: bool
    ) -> Tensor | None:
        """The mask of a call, with what `generate` put behind sequences that have ended as the padding that
        it is. Its own mask calls that tokens; or it passes none where no prompt was padded (as transformers
        5.23 does).

        Args:
            state: of the cache, before the call.
            tokens: of the call, ids or embeddings.
            attention_mask: as the call has it.
            waits: the device may be waited for.
        """
        past, filled_B, opens = state.history, self.filled_B, self.opens
        self.filled_B, self.opens = self.ended_B, False
        if past is None or tokens is None:
            return attention_mask
        if opens and attention_mask is None:
            return past.valid_BT.new_ones(past.batch_size, past.num_seen + tokens.shape[1])
        if filled_B is None or tokens.shape[1] != 1:
            return attention_mask
        if state.layout.alone:  # transformers' own layers take it for tokens, and all layers go by one mask
            return attention_mask
        if waits and not bool(filled_B.any()):
            return attention_mask
        real_BT = torch.cat([past.valid_BT, ~filled_B[:, None].to(past.valid_BT.device)], dim=1)
        if attention_mask is None:
            return real_BT
        fits = isinstance(attention_mask, Tensor) and attention_mask.shape == real_BT.shape
        return attention_mask.bool() & real_BT.to(attention_mask.device) if fits else attention_mask

    def select_batch(self, indices: Tensor) -> None:
        """Keep these sequences, in this order."""
        for name in ("ended_B", "filled_B"):
            if (told_B := getattr(self, name)) is not None:
                setattr(self, name, told_B[indices.to(told_B.device)])


def check_ids(state: State, ids: Any, attention_mask: Any) -> None:
    """Refuse ids that leave out what the cache has read: `generate` wants all, and reads what is new.

    Raises:
        ValueError: fewer of them than were read, without a mask over both; or others; or a broken cache.
    """
    state.check_whole()
    past = state.history
    if past is None or past.token_ids_BT is None or not isinstance(ids, Tensor) or ids.ndim != 2:
        return
    own_BT, num_ids, seen = past.token_ids_BT, ids.shape[1], past.num_seen
    if isinstance(attention_mask, Tensor) and attention_mask.shape[-1] == seen + num_ids:
        return  # transformers takes ids alone that a mask over both comes with
    wanted = (
        "pass generate the ids of both, those that were read and those that come (torch.cat([context_ids, "
        "question_ids], dim=1)); it reads only the new ones."
    )
    if num_ids <= seen:
        raise ValueError(f"input_ids has {num_ids} tokens a row, and this cache has read {seen}: {wanted}")
    if len(own_BT) != len(ids):
        return
    differs_BT = (ids[:, :seen].to(own_BT.device) != own_BT) & past.valid_BT.to(own_BT.device)
    if bool(differs_BT.any()):
        raise ValueError(
            f"input_ids does not begin with the {seen} tokens that this cache has read: {wanted} For another "
            "context make another cache, or reset() it."
        )

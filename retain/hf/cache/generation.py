"""What a running `generate` has said to a cache: that it runs, and which sequences have ended."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retain.hf.cache.state import State
from retain.hf.cache.static_decoding import StaticDecoding, refused, steps_unseen, unlike


class Generation:
    """The side of a cache that hears from `generate`."""

    def __init__(self) -> None:
        self.runs = False
        self.opens = False  # a `generate` has begun, and its first forward is to come
        self.static: StaticDecoding | None = None  # while steps are one graph
        self.as_written = False  # torch.compile was told to run what it compiled as written
        self.forget()

    def forget(self) -> None:
        """Forget which sequences have ended."""
        # Tokens that may come, where the steps are to be compiled, and whether transformers has asked for it.
        self.room: int | None = None
        self.asked = False
        # Of tokens that were sampled: as `generate` has them, and which sequences had ended behind each.
        self.ids_BT: Int[Tensor, "B T"] | None = None
        self.endings: list[Bool[Tensor, " B"]] = []
        self.sampled = self.in_graph = 0
        self.rows: StaticDecoding | None = None  # while this `generate` runs: the last that was
        # Sequences that have ended, and those of which the next token is padding behind the end.
        self.ended_B: Bool[Tensor, " B"] | None = None
        self.filled_B: Bool[Tensor, " B"] | None = None
        self.opens = False

    @contextmanager
    def running(
        self, state: State, width: int | None, attention_mask: Tensor | None, room: int | None = None
    ) -> Iterator[Callable[[Tensor, Tensor], None]]:
        """While the `generate` of an attached model runs; gives a function that hears of each sampled token
        which sequences have ended, and the ids.

        Args:
            state: of the cache.
            width: tokens, padding included, of a prompt that it reads in chunks; None: at once.
            attention_mask: of that prompt.
            room: tokens that may come, where steps are to be compiled; None: they are not.
        """
        state.take()
        before, self.runs = self.runs, True
        self.forget()
        state.steps, self.opens = False, True
        why = refused(state) if room is not None else None
        self.room = None if why else room
        if room is not None:
            state.decoded = f"as written: {why}" if why else None
        if width is not None:
            state.announce(width, attention_mask)

        def hear_ends(ended_B: Bool[Tensor, " B"], ids_BT: Int[Tensor, "B T"]) -> None:
            self.sampled, self.ids_BT = self.sampled + 1, ids_BT
            # Beam search asks about candidates, of which there are more than sequences, and fills nothing. A
            # single sequence ends with `generate`.
            if len(ended_B) == state.batch_size > 1:
                self.ended_B = ended_B if self.ended_B is None else self.ended_B | ended_B
                self.endings.append(self.ended_B)
            if self.static is not None and self.static.is_full(self.sampled):
                self.decode_as_written(state)
                self.decode_static(state)
            if self.room is not None:
                self._run_as_written(self.static is None)

        try:
            yield hear_ends
            state.settle(wait=True)
        finally:
            self.decode_as_written(state)
            self._run_as_written(False)
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

    def _run_as_written(self, on: bool) -> None:
        """While rows are not static, what transformers has compiled runs as written."""
        if on != self.as_written:
            torch.compiler.set_stance("force_eager" if on else "default")
            self.as_written = on

    def compiles(self) -> bool:
        """Whether transformers may compile a step. It asks first of all, before the prompt is read, whether
        to compile the steps behind it; then of each forward, whose masks are ours until rows are static."""
        if self.static is not None:
            return True
        first, self.asked = self.room is not None and not self.asked, True
        return first

    def decode_static(self, state: State) -> None:
        """Decode in one graph from here on, if steps are to be compiled."""
        if self.room is None:
            return
        read = max(0, self.sampled - 1)  # of the sampled tokens the last is still to come
        if (steps := steps_unseen(state, self.room - read)) < 1:
            return
        if (why := unlike(state)) is not None:
            state.decoded = f"as written: {why}"
            return
        if self.rows is None or not self.rows.is_whole():
            self.rows = StaticDecoding(state, self.room - read)
        self.static = self.rows
        self.static.enter(steps, read)

    def decode_as_written(self, state: State) -> None:
        """Go on as written."""
        static, self.static = self.static, None
        if static is not None:
            self.in_graph += static.came
            state.decoded = f"{self.in_graph} tokens in one graph"
            static.leave(*self._decoded(static.before, static.came))

    def _decoded(self, before: int, came: int) -> tuple[Tensor | None, Tensor | None]:
        """Ids of tokens that were decoded, and which of them are no padding behind an end; None: not known,
        or all.

        Args:
            before: tokens that were sampled before them.
            came: how many.
        """
        ids_BN = None if self.ids_BT is None else self.ids_BT[:, self.ids_BT.shape[1] - self.sampled :]
        if ids_BN is not None:
            ids_BN = ids_BN[:, before : before + came]
        if not self.endings or not came:
            return ids_BN, None
        first_B = torch.zeros_like(self.endings[0])
        ended = [self.endings[token - 1] if token else first_B for token in range(before, before + came)]
        return ids_BN, ~torch.stack(ended, dim=1)

    def select_batch(self, indices: Tensor) -> None:
        """Keep these sequences, in this order."""
        for name in ("ended_B", "filled_B"):
            if (told_B := getattr(self, name)) is not None:
                setattr(self, name, told_B[indices.to(told_B.device)])


def check_ids(
    state: State, ids: Any, attention_mask: Any, inputs_embeds: Any, embedding: Callable[[Tensor], Tensor]
) -> None:
    """Refuse ids or embeddings that leave out what the cache has read: `generate` wants all, and reads what
    is new.

    Args:
        state: of the cache.
        ids: as `generate` was given them.
        attention_mask: beside them.
        inputs_embeds: in place of ids. Where both are given, these are read.
        embedding: of ids, the model's own.

    Raises:
        ValueError: fewer of them than were read, unless they are ids with a mask over both; or others; or a
            broken cache.
    """
    state.check_whole()
    past, by_ids = state.history, not isinstance(inputs_embeds, Tensor)
    given = ids if by_ids else inputs_embeds
    if past is None or not isinstance(given, Tensor) or given.ndim != (2 if by_ids else 3):
        return
    own_BT, num_given, seen = past.token_ids_BT, given.shape[1], past.num_seen
    over_both = isinstance(attention_mask, Tensor) and attention_mask.shape[-1] == seen + num_given
    # transformers takes ids alone that a mask over both comes with, and cuts embeddings all the same.
    if over_both and by_ids:
        return
    name, kind, parts = "inputs_embeds", "embeddings", "context_embeds, question_embeds"
    if by_ids:
        name, kind, parts = "input_ids", "ids", "context_ids, question_ids"
    wanted = (
        f"pass generate the {kind} of both, those that were read and those that come (torch.cat([{parts}], "
        "dim=1)); it reads only the new ones."
    )
    if by_ids and own_BT is None:
        wanted = "what was read were embeddings: pass the new ids with an attention_mask over both."
    if num_given <= seen or over_both:
        beside = f", attention_mask {seen + num_given}" if over_both else ""
        raise ValueError(
            f"{name} has {num_given} tokens a row{beside}, and this cache has read {seen}: {wanted}"
        )
    if own_BT is None or len(own_BT) != len(given):
        return
    first = given[:, :seen]
    differs_BT = first.to(own_BT.device) != own_BT if by_ids else _differ(first, own_BT, embedding)
    if bool((differs_BT & past.valid_BT.to(differs_BT.device)).any()):
        raise ValueError(
            f"{name} does not begin with the {seen} tokens that this cache has read: {wanted} For another "
            "context make another cache, or reset() it."
        )


@torch.no_grad()
def _differ(embeds_BTE: Tensor, ids_BT: Tensor, embedding: Callable[[Tensor], Tensor]) -> Bool[Tensor, "B T"]:
    """Where embeddings are not those of ids, but for rounding (of another precision, of an adapter)."""
    own_BTE = embedding(ids_BT).float()
    if own_BTE.shape != embeds_BTE.shape:
        return torch.zeros_like(ids_BT, dtype=torch.bool)  # of another width, which the decoder is not given
    apart_BTE = embeds_BTE.to(own_BTE.device).float() - own_BTE
    return apart_BTE.norm(dim=-1) > 0.1 * own_BTE.norm(dim=-1)

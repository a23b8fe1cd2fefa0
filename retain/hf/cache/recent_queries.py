"""Keeps the queries and attention inputs of the last tokens until an eviction has looked at them.

A decoding step only puts references in a list, so that what an eviction costs is paid when it happens, for
all tokens since the last one together.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Ends of reads that can be gone back to, however much was decoded since.
MARKS = 4


@dataclass(eq=False)
class Recent:
    """Of one layer; the last token seen is the last of each list.

    Args:
        queries: `[B, Q, s, D]` a forward, after norm and RoPE.
        hidden: `[B, s, E]` a forward, attention inputs.
        stream: `[B, s, E]` a forward, the residual stream before them.
        marks: tokens seen when a read ended -> the queries that were held then, for going back there.
    """

    queries: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    stream: list[Tensor] = field(default_factory=list)
    marks: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_queries(self) -> int:
        """Tokens whose queries are held."""
        return sum(chunk.shape[2] for chunk in self.queries)

    def last_queries(self, num_tokens: int) -> Float[Tensor, "B Q s D"]:
        """Queries of the last tokens; a view where they came at once."""
        assert 0 < num_tokens <= self.num_queries, (
            f"{num_tokens} queries were asked for, {self.num_queries} held"
        )
        chunks = self.queries if len(self.queries) == 1 else [torch.cat(self.queries, dim=2)]
        return chunks[0][:, :, chunks[0].shape[2] - num_tokens :]

    def last_hidden(self) -> Float[Tensor, "B s E"]:
        """Attention inputs of all tokens that are held here."""
        return self.hidden[0] if len(self.hidden) == 1 else torch.cat(self.hidden, dim=1)

    def last_stream(self) -> Float[Tensor, "B s E"]:
        """Residual streams of all tokens that are held here."""
        return self.stream[0] if len(self.stream) == 1 else torch.cat(self.stream, dim=1)

    def keep_queries(self, num_tokens: int) -> None:
        """Let go of all queries but those of the last tokens."""
        if num_tokens == 0:
            self.queries = []
        elif num_tokens < self.num_queries:
            self.queries = [self.last_queries(num_tokens).clone()]  # a view would hold what it is a view of

    def mark(self, num_seen: int) -> None:
        """Remember, without a copy, what is held now; and forget the oldest such mark."""
        if self.num_queries:
            marks = {**self.marks, num_seen: self.last_queries(self.num_queries)}
            self.marks = {seen: marks[seen] for seen in sorted(marks)[-MARKS:]}

    def cut(self, num_tokens: int, num_seen: int) -> "Recent":
        """The same without the last `num_tokens` tokens, so that `num_seen` were seen."""
        queries = self.queries
        if queries:
            whole = torch.cat(queries, dim=2)
            queries = [whole[:, :, : max(0, whole.shape[2] - num_tokens)].clone()]
        hidden, stream = _without(self.hidden, num_tokens), _without(self.stream, num_tokens)
        marks = {seen: held for seen, held in self.marks.items() if seen <= num_seen}
        return Recent([marks[num_seen]] if num_seen in marks else queries, hidden, stream, marks)

    def fork(self) -> "Recent":
        """The same, to go on apart: no tensor here is changed in place."""
        return Recent(list(self.queries), list(self.hidden), list(self.stream), {**self.marks})

    def select_batch(self, idx: Int[Tensor, " N"]) -> "Recent":
        """Of some of the sequences; chunks are joined, since beams ask for this at every step."""
        if len(self.queries) > 1:
            self.queries = [torch.cat(self.queries, dim=2)]
        if len(self.hidden) > 1:
            self.hidden = [torch.cat(self.hidden, dim=1)]
        if len(self.stream) > 1:
            self.stream = [torch.cat(self.stream, dim=1)]
        return Recent(
            [chunk.index_select(0, idx.to(chunk.device)) for chunk in self.queries],
            [chunk.index_select(0, idx.to(chunk.device)) for chunk in self.hidden],
            [chunk.index_select(0, idx.to(chunk.device)) for chunk in self.stream],
            {seen: held.index_select(0, idx.to(held.device)) for seen, held in self.marks.items()},
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages behind what is held here."""
        held = (*self.queries, *self.hidden, *self.stream, *self.marks.values())
        storages = {chunk.untyped_storage().data_ptr(): chunk.untyped_storage().nbytes() for chunk in held}
        return sum(storages.values())


def _without(chunks: list[Tensor], num_tokens: int) -> list[Tensor]:
    """`[B, s, E]` chunks without their last tokens."""
    if not chunks:
        return []
    whole = torch.cat(chunks, dim=1)
    return [whole[:, : max(0, whole.shape[1] - num_tokens)].clone()]

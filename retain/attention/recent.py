"""Holds what the last tokens showed, until an eviction has looked at it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

# The axis of tokens in a chunk of each kind.
AXES = {"queries": 2, "hidden": 1, "stream": 1}


class Recent:
    """Tensors of the last tokens of one layer, held until an eviction has looked at them. A decoding step
    only puts references in a list, so that what an eviction costs is paid when it happens.

    Args:
        chunks: tensors a forward, by kind: `queries` `[B, Q, s, D]`, after norm and RoPE; `hidden`
            `[B, s, E]`, attention inputs; `stream` `[B, s, E]`, the residual stream before them. The last
            token of each list is the last token seen.
    """

    def __init__(self, chunks: dict[str, list[Tensor]] | None = None):
        self.chunks = {kind: [] if chunks is None else [*chunks[kind]] for kind in AXES}

    def add(self, kind: str, tensor: Tensor) -> None:
        self.chunks[kind].append(tensor)

    def num_tokens(self, kind: str) -> int:
        return sum(chunk.shape[AXES[kind]] for chunk in self.chunks[kind])

    def last(self, kind: str, num_tokens: int) -> Float[Tensor, "..."]:
        """The last tokens; a view where they came in one forward."""
        axis, chunks = AXES[kind], self.chunks[kind]
        held = self.num_tokens(kind)
        assert 0 < num_tokens <= held, f"{num_tokens} {kind} were asked for, {held} held"
        if len(chunks) > 1:  # beams ask at every step
            chunks[:] = [torch.cat(chunks, axis)]
        return chunks[0].narrow(axis, held - num_tokens, num_tokens)

    def keep(self, kind: str, num_tokens: int) -> None:
        """Free all but the last tokens."""
        if num_tokens == 0:
            self.chunks[kind] = []
        elif num_tokens < self.num_tokens(kind):
            # A view would hold what it is a view of.
            self.chunks[kind] = [self.last(kind, num_tokens).clone()]

    def forget(self, num_tokens: int) -> None:
        """Free the last tokens."""
        for kind, held in self.tensors().items():
            left = max(0, held.shape[AXES[kind]] - num_tokens)
            self.chunks[kind] = [held.narrow(AXES[kind], 0, left).clone()] if left else []

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is held, one tensor a kind."""
        return {kind: self.last(kind, num) for kind in AXES if (num := self.num_tokens(kind))}

    def fork(self) -> "Recent":
        return Recent(self.chunks)  # no tensor here is changed in place

    def select_batch(self, idx: Int[Tensor, " N"]) -> "Recent":
        held = {
            kind: tensor.index_select(0, idx.to(tensor.device)) for kind, tensor in self.tensors().items()
        }
        return Recent({kind: [held[kind]] if kind in held else [] for kind in AXES})

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages behind the tensors."""
        held = [chunk.untyped_storage() for chunks in self.chunks.values() for chunk in chunks]
        return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())

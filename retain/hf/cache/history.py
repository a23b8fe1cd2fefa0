"""Records what a cache has seen, token by token: padding, positions and token ids.

Chunks are kept as they came and joined when asked for, so that a decoding step copies nothing.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retain.cache.dense_view import last_tokens
from retain.hf.intercept.forward_call import Call


@dataclass(eq=False)
class History:
    """All tokens of a batch, padding included.

    Args:
        valid_BT: True on real tokens.
        position_chunks: int64 RoPE positions `[B, S]` of each call.
        id_chunks: token ids of each call; None once a call passed embeddings.
        last_B: position of the last real token of each sequence, -1 where there is none yet.
    """

    valid_BT: Bool[Tensor, "B T"]
    position_chunks: list[Tensor]
    id_chunks: list[Tensor] | None
    last_B: Int[Tensor, " B"]

    _lengths_B: list[int] | None = field(default=None, repr=False)
    _first_of_last: dict[int, int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, call: Call) -> "History":
        """What the first call shows."""
        last_B = _last(call.mask_BT, call.positions_BS)
        ids = None if call.token_ids_BS is None else [call.token_ids_BS]
        return cls(call.mask_BT, [call.positions_BS], ids, last_B)

    def add_(self, call: Call) -> None:
        """Another call has gone through."""
        last_B = call.positions_BS[:, -1]
        if call.valid_BS is not None:
            last_B = torch.maximum(_last(call.valid_BS, call.positions_BS), self.last_B.to(last_B.device))
        if self.id_chunks is not None and call.token_ids_BS is not None:
            self.id_chunks.append(call.token_ids_BS)
        else:
            self.id_chunks = None
        self.position_chunks.append(call.positions_BS)
        self.valid_BT, self.last_B, self._lengths_B = call.mask_BT, last_B, None
        self._first_of_last = {}

    def after(self, call: Call) -> "History":
        """The same once this call has gone through."""
        other = self.fork()
        other.add_(call)
        return other

    @property
    def num_seen(self) -> int:
        return self.valid_BT.shape[1]

    @property
    def batch_size(self) -> int:
        return self.valid_BT.shape[0]

    @property
    def positions_BT(self) -> Int[Tensor, "B T"]:
        """RoPE position of every token."""
        if len(self.position_chunks) > 1:
            self.position_chunks = [torch.cat(self.position_chunks, dim=1)]
        return self.position_chunks[0]

    @property
    def token_ids_BT(self) -> Int[Tensor, "B T"] | None:
        """Every token's id; None if a caller ever passed embeddings."""
        if self.id_chunks is None:
            return None
        if len(self.id_chunks) > 1:
            self.id_chunks = [torch.cat(self.id_chunks, dim=1)]
        return self.id_chunks[0]

    @property
    def lengths_B(self) -> list[int]:
        """Real tokens of each sequence (asks the device once)."""
        if self._lengths_B is None:
            self._lengths_B = self.valid_BT.sum(-1).tolist()
        return self._lengths_B

    def first_of_last(self, num_tokens: int) -> int:
        """The first token that is among the last `num_tokens` of some sequence (asks the device once)."""
        if num_tokens not in self._first_of_last:
            self._first_of_last[num_tokens] = int(last_tokens(self.valid_BT, num_tokens).min())
        return self._first_of_last[num_tokens]

    def fork(self) -> "History":
        """The same, to go on apart."""
        ids = None if self.id_chunks is None else list(self.id_chunks)
        return History(self.valid_BT, list(self.position_chunks), ids, self.last_B)

    def select_batch(self, idx: Int[Tensor, " N"]) -> "History":
        idx = idx.to(self.valid_BT.device)
        ids = None if self.token_ids_BT is None else [self.token_ids_BT[idx]]
        return History(self.valid_BT[idx], [self.positions_BT[idx]], ids, self.last_B[idx])

    def cut(self, length: int) -> "History":
        """The first `length` tokens."""
        valid_BT, positions_BT = self.valid_BT[:, :length], self.positions_BT[:, :length]
        ids = None if self.token_ids_BT is None else [self.token_ids_BT[:, :length]]
        return History(valid_BT, [positions_BT], ids, _last(valid_BT, positions_BT))

    def without(self, forgotten_BT: Bool[Tensor, "B P"]) -> "History":
        """The same, with these tokens declared padding."""
        valid_BT = self.valid_BT & ~forgotten_BT
        ids = None if self.id_chunks is None else list(self.id_chunks)
        last_B = _last(valid_BT, self.positions_BT)
        return History(valid_BT, list(self.position_chunks), ids, last_B)

    @classmethod
    def concat(cls, parts: "list[History]") -> "History":
        """Stacked along the batch; all of one length."""
        ids = [part.token_ids_BT for part in parts]
        known = [own for own in ids if own is not None]
        return cls(
            torch.cat([part.valid_BT for part in parts]),
            [torch.cat([part.positions_BT for part in parts])],
            [torch.cat(known)] if len(known) == len(parts) else None,
            torch.cat([part.last_B for part in parts]),
        )


def _last(valid_BT: Bool[Tensor, "B T"], positions_BT: Int[Tensor, "B T"]) -> Int[Tensor, " B"]:
    return positions_BT.masked_fill(~valid_BT, -1).amax(1)

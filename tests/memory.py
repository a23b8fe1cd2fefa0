"""Counts bytes of all tensors that are alive, and the most that ever were, for claims about peak memory.

Storages are counted when an operation returns them and forgotten when the last tensor on them is gone, so
that views cost nothing and a temporary inside an operation of PyTorch is not seen.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """Inside, every tensor that an operation makes is counted while it lives.

    Attributes:
        live: bytes alive now, of what was made inside.
        peak: the most that ever were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.known:
                    self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

        def removed() -> None:
            self.known.discard(key)
            self.live -= num_bytes

        weakref.finalize(storage, removed)

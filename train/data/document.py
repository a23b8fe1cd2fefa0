"""Defines a document, a padded batch of documents, and the hashes by which a document is known.

A document is known by its tokens alone, not by its place in a file; so its draws and its side of the split
are the same in any order, beside any other documents, for any seed and any number of processes.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Encode = Callable[[str, bool], list[int]]  # (text, with the tokenizer's own special tokens) -> ids


@dataclass(frozen=True)
class Document:
    """A context, and what is appended after it (question and answer; may be empty), as token ids.

    Documents of the same tokens are equal wherever they are from; `origin` (file and line) is for messages.
    """

    context_ids: tuple[int, ...]
    appendix_ids: tuple[int, ...] = ()
    origin: str = field(default="", compare=False)

    @property
    def num_tokens(self) -> int:
        return len(self.context_ids) + len(self.appendix_ids)

    @cached_property
    def key(self) -> int:
        """Names the document in logs and seeds what is drawn for it: 48 bits, which JSON keeps whole."""
        return int.from_bytes(_digest(b"key", self.context_ids, self.appendix_ids)[:6], "big")


@dataclass(frozen=True)
class Batch:
    """Documents padded on the left to one width: `[pads | context | appendix]`.

    Args:
        valid_BT: False on padding.
        keys: of the documents; they seed what is drawn for them.
    """

    input_ids_BT: Int[Tensor, "B T"]
    valid_BT: Bool[Tensor, "B T"]
    keys: tuple[int, ...]


def fraction_of(context_ids: Sequence[int], purpose: str) -> float:
    """A number in [0, 1) that depends on the context's tokens alone, as if drawn at random: the first 53 bits
    of a BLAKE2b hash over 2^53. Numbers of two purposes are independent of each other."""
    return (int.from_bytes(_digest(purpose.encode(), context_ids)[:8], "big") >> 11) / 2**53


def held_out_fraction(context_ids: Sequence[int]) -> float:
    """The split's hash: a context is held out where this is below `data.held_out_share`."""
    return fraction_of(context_ids, "held out")


def tokens_digest(documents: Sequence[Document]) -> str:
    """SHA-256 of documents, token by token, in their order."""
    digest = hashlib.sha256(np.int64(len(documents)).tobytes())
    for document in documents:
        digest.update(_bytes(document.context_ids))
        digest.update(_bytes(document.appendix_ids))
    return digest.hexdigest()


def _digest(purpose: bytes, *parts: Sequence[int]) -> bytes:
    digest = hashlib.blake2b(digest_size=16, person=purpose[:16])
    for ids in parts:
        digest.update(_bytes(ids))
    return digest.digest()


def _bytes(ids: Sequence[int]) -> bytes:
    """Length first, so that no two lists of parts look alike."""
    return np.array([len(ids), *ids], dtype="<i8").tobytes()


def collate(documents: Sequence[Document], *, pad_id: int, device: torch.device | str) -> Batch:
    """Pads documents on the left to the longest of them."""
    ids = [torch.tensor(document.context_ids + document.appendix_ids) for document in documents]
    there = [torch.ones(len(one), dtype=torch.bool) for one in ids]
    input_ids_BT, valid_BT = (
        pad_sequence(rows, batch_first=True, padding_value=value, padding_side="left")
        for rows, value in ((ids, pad_id), (there, False))
    )
    return Batch(input_ids_BT.to(device), valid_BT.to(device), tuple(document.key for document in documents))


@dataclass(frozen=True)
class Branch:
    """Token ids that are read after a document, and which source of queries they are."""

    source: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """A document and what is read after it, each branch on its own and none of them empty; the document's
    appendix counts only as a branch."""

    document: Document
    branches: tuple[Branch, ...] = ()

"""The engine's memory as pages: the keys and values of one KV head of one layer in one block.

Backends lay entries out as their kernels want them (the CPU kernel stores a block's keys transposed), so
where each number of a key and value lies is found out at the start by writing a block through the backend
itself. A memory that is not understood is refused.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from retain.vllm.packing.tables import Layout

# Digits that every floating-point type of a cache tells apart.
BASE = 8


class PageStore:
    """All pages of the layers that evict.

    Args:
        caches: of each layer, in order: `[num_blocks, H, page, 2 D]`, parts of one allocation.
        write: writes keys and values `[page, H, D]` into a cache of one block, as the backend does.

    Raises:
        ValueError: the layers differ, do not lie in one allocation side by side, or a block's numbers are not
            those that were written.
    """

    def __init__(self, caches: Sequence[Tensor], write: Callable[[Tensor, Tensor, Tensor], None]):
        first = caches[0]
        if first.dim() != 4 or len({(tuple(cache.shape), cache.dtype) for cache in caches}) > 1:
            shapes = sorted({tuple(cache.shape) for cache in caches})
            raise ValueError(
                f"the engine's caches are {shapes}, and alike ones of [blocks, heads, page, 2 D] are wanted: "
                "this version of vLLM, or its attention backend, is not one that retain was tested with."
            )
        num_blocks, num_heads, page, width = first.shape
        size = first[0].numel() * num_blocks
        offsets = [cache.storage_offset() for cache in caches]
        wanted = [min(offsets) + size * place for place in range(len(caches))]
        if (
            len({cache.untyped_storage().data_ptr() for cache in caches}) > 1
            or sorted(offsets) != wanted
            or not all(cache.is_contiguous() for cache in caches)
        ):
            raise ValueError(
                f"the engine's layers do not lie side by side in one allocation (they begin at {offsets}, "
                f"wanted {wanted}): take a version of vLLM, an attention backend and a cache layout that "
                "retain was tested with (docs/serving.md)."
            )
        self.layout = Layout(len(caches), num_blocks, num_heads, page)
        self.head_dim = width // 2
        # Place of each layer in the allocation.
        self.places = [(offset - min(offsets)) // size for offset in offsets]
        number_of_pages = len(caches) * num_blocks * num_heads
        self.pages = first.as_strided((number_of_pages, page * width), (page * width, 1), min(offsets))
        self.where_keys, self.where_values = _probe(first, write)
        # Pages entry by entry, where their numbers lie at regular distances: rows are copied faster so.
        self.key_entries = _regular(self.pages, self.where_keys)
        self.value_entries = _regular(self.pages, self.where_values)
        both = self.pages.view(number_of_pages, 2, page, self.head_dim)
        # As the engine's kernel takes a cache of so many blocks and one KV head.
        self.keys, self.values = both[:, :1], both[:, 1:]

    def read(
        self, pages_N: Int[Tensor, " N"], entries_N: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        """Keys and values of entries.

        Args:
            pages_N: the page of each.
            entries_N: its place in the page.
        """
        if self.key_entries is not None and self.value_entries is not None:
            return self.key_entries[pages_N, entries_N], self.value_entries[pages_N, entries_N]
        rows_N1 = pages_N[:, None]
        keys = self.pages[rows_N1, self.where_keys[entries_N]]
        return keys, self.pages[rows_N1, self.where_values[entries_N]]

    def put_(
        self,
        pages_N: Int[Tensor, " N"],
        entries_N: Int[Tensor, " N"],
        keys_ND: Float[Tensor, "N D"],
        values_ND: Float[Tensor, "N D"],
    ) -> None:
        """Write what `read` gave."""
        if self.key_entries is not None and self.value_entries is not None:
            self.key_entries[pages_N, entries_N] = keys_ND
            self.value_entries[pages_N, entries_N] = values_ND
            return
        rows_N1 = pages_N[:, None]
        self.pages[rows_N1, self.where_keys[entries_N]] = keys_ND
        self.pages[rows_N1, self.where_values[entries_N]] = values_ND


def _probe(
    cache: Tensor, write: Callable[[Tensor, Tensor, Tensor], None]
) -> tuple[Int64[Tensor, "page D"], Int64[Tensor, "page D"]]:
    """Where in a page each number of its keys and its values lies.

    Every number is told apart by the digits of its place, written one digit at a time.
    """
    if not cache.is_floating_point():
        raise ValueError(_NOT_UNDERSTOOD)
    _, _, page, width = cache.shape
    count = page * width // 2
    number = torch.arange(2 * count, device=cache.device)
    found = torch.zeros(page * width, dtype=torch.int64, device=cache.device)
    step = 1
    while step < 2 * count:
        digits = (number // step % BASE).to(cache.dtype)
        block = torch.full((1, 1, page, width), float("nan"), dtype=cache.dtype, device=cache.device)
        keys, values = digits.view(2, page, 1, width // 2)
        write(keys, values, block)
        seen = block.flatten()
        if seen.isnan().any() or not torch.equal(seen, seen.round()):
            raise ValueError(_NOT_UNDERSTOOD)
        found += seen.long() * step
        step *= BASE
    if not torch.equal(found.sort().values, number):
        raise ValueError(_NOT_UNDERSTOOD)
    where = torch.empty_like(found).scatter_(0, found, number)
    keys, values = where.view(2, page, width // 2)
    return keys.contiguous(), values.contiguous()


def _regular(
    pages: Float[Tensor, "pages numbers"], where: Int64[Tensor, "page D"]
) -> Float[Tensor, "pages page D"] | None:
    """View pages as entries if `where[e, d] = first + e * a + d * b`; None if they lie otherwise."""
    page, D = where.shape
    first, a, b = (int(where[e, d]) for e, d in ((0, 0), (min(1, page - 1), 0), (0, min(1, D - 1))))
    e_P, d_D = (torch.arange(count, device=where.device) for count in (page, D))
    a, b = a - first, b - first
    if min(a, b) < 0 or not torch.equal(where, first + e_P[:, None] * a + d_D * b):
        return None
    offset = pages.storage_offset() + first
    return pages.as_strided((len(pages), page, D), (pages.stride(0), a, b), offset)


_NOT_UNDERSTOOD = (
    "a block of the engine's cache does not hold the keys and values that were written to it, number by "
    "number: take kv_cache_dtype 'auto', and a version of vLLM and a backend that retain was tested with "
    "(docs/serving.md)."
)

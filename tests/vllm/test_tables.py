"""Tables of virtual sequences, against three plain loops; pages, written as a backend writes them."""

import random

import pytest
import torch

from retain.vllm.packing.pages import PageStore
from retain.vllm.packing.tables import Layout, build_tables
from tests.refused import refused
from tests.vllm.memory import make_store, read_page, write


def made(seed: int):
    """A layout and requests, packed ones and untouched ones mixed."""
    draw = random.Random(seed)
    L, H, page = draw.randint(1, 3), draw.randint(1, 4), draw.choice([1, 3, 4])
    R = draw.randint(1, 5)
    layout = Layout(L, 50, H, page)
    blocks, lengths, full, starts = [], [], [], []
    for _ in range(R):
        count = draw.randint(1, 9)
        row = draw.sample(range(1, 50), count)
        length = draw.randint((count - 1) * page + 1, count * page)
        whole = draw.randint(0, length // page) if draw.random() < 0.6 else 0
        held = [0] * (L * H)
        kept = 0
        if whole:
            kept = draw.randint(1, whole)
            for _ in range(kept * L * H):  # of at most `whole` pages a head
                held[draw.choice([i for i in range(L * H) if held[i] < whole])] += 1
        row[kept:whole] = [0] * (whole - kept)
        blocks.append(row + [0] * (12 - count))
        lengths.append(length)
        full.append(whole)
        starts.append([sum(held[:i]) for i in range(L * H + 1)])
    return layout, blocks, lengths, full, starts


def plain(layout, blocks, lengths, full, starts) -> dict:
    """(layer, request, head) -> pages and length, one after the other."""
    L, num_blocks, H, page = layout
    tables = {}
    for l in range(L):
        for r, length in enumerate(lengths):
            for h in range(H):
                first, last = starts[r][l * H + h], starts[r][l * H + h + 1]
                pages = []
                for order in range(first, last):
                    block, inside = blocks[r][order // (L * H)], order % (L * H)
                    pages.append((inside // H * num_blocks + block) * H + inside % H)
                for place in range(full[r], -(-length // page)):
                    pages.append((l * num_blocks + blocks[r][place]) * H + h)
                tables[l, r, h] = pages, (last - first) * page + length - full[r] * page
    return tables


@pytest.mark.parametrize("seed", range(40))
def test_tables_are_those_of_three_loops(seed):
    given = layout, *rows = made(seed)
    integers = [torch.tensor(row, dtype=torch.int32) for row in rows]
    pages_LNW, lengths_LN = build_tables(layout, *integers)
    assert pages_LNW.dtype == lengths_LN.dtype == torch.int32
    assert pages_LNW.is_contiguous() and lengths_LN.is_contiguous()  # the engine's kernel looks at no strides
    for (l, r, h), (pages, length) in plain(*given).items():
        row = pages_LNW[l, r * layout.num_heads + h].tolist()
        assert row == pages + [0] * (len(row) - len(pages))
        assert int(lengths_LN[l, r * layout.num_heads + h]) == length


def test_pages_read_as_they_were_written():
    store, pages = make_store(Layout(2, 4, 3, 5), head_dim=6), [17, 3]
    both = torch.randn(2, 2, 5, 6)
    for number, *given in zip(pages, *both, strict=True):
        for page_ED, x_ED in zip(read_page(store, number), given, strict=True):
            page_ED.copy_(x_ED)
    assert torch.equal(torch.stack(store.read(torch.tensor(pages))), both)


def _lossy(keys, values, cache):
    write(keys, (values // 2) * 2, cache)


def _partly(keys, values, cache):
    write(keys, values, cache)
    cache[0, 0, 0, 0] = float("nan")


@pytest.mark.parametrize("writes", [_lossy, _partly], ids=["rounded", "unwritten"])
def test_a_block_that_does_not_hold_what_was_written_is_refused(writes):
    whole = torch.zeros(1, 2, 1, 4, 8)
    refused("number by number.*kv_cache_dtype 'auto'", PageStore, list(whole), writes)


def test_layers_that_lie_apart_or_differ_are_refused():
    one, other, whole = torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8), torch.zeros(3, 2, 1, 4, 8)
    turned = torch.zeros(2, 4, 3, 8).transpose(1, 2)
    for caches in ([one, other], [one, other[:, :, :2]], [one[0]], [whole[0], whole[2]], [turned]):
        refused("alike ones of .blocks, heads, page, 2 D., side by side", PageStore, caches, write)

"""Pages of a memory, written as a backend writes them; one that is not understood is refused."""

import pytest
import torch

from retain.vllm.packing.pages import Layout, PageStore
from tests.refused import refused
from tests.vllm.memory import make_store, read_page, write


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

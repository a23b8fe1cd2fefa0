"""Precision: what it costs, against stores; and budgets in bytes."""

import pytest
import torch

from retain.cache.precision import Precision
from retain.cache.store import RaggedStore
from retain.policy import load_policy
from tests.refused import refused

COSTS = {
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
    "2 bits": {"bits": 2},
    "no recent": {"bits": 4, "recent": 0},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [9, 68, 69])
@pytest.mark.parametrize("D", [16, 40])
@pytest.mark.parametrize("name", COSTS)
def test_cost_is_that_of_a_store(name, D, length, dtype):
    """Never less than a store holds, and at most one group a head more."""
    precision = Precision(**{"recent": 4, **COSTS[name]})
    H = 4
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, H, length, D, generator=draw).to(dtype) for _ in range(2))
    exists = torch.ones(1, H, length, dtype=torch.bool)
    store = RaggedStore.from_dense(keys, values, torch.arange(length)[None], exists)
    store.precision = precision
    store.pack_()
    each, head = precision.cost(D, D, dtype.itemsize)
    most = H * (length * each + head)
    # A group that is not full.
    assert most - H * 4 * D <= store.bytes_held <= most
    assert store.bytes_held < H * length * 2 * D * dtype.itemsize or length == 9


def test_settings_that_make_no_sense_are_refused():
    refused("missing key 'precision.bits'", load_policy, "snapkv", ("precision={recent: 3}",))
    refused("bits", load_policy, "snapkv", ("precision={bits: 3}",))
    refused("recent", Precision, bits=4, recent=-1)

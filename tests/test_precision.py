"""Precision: what it costs, against stores; and budgets in bytes."""

from fractions import Fraction

import pytest
import torch

from retain.budget.statement import Budget
from retain.cache.layer_store import Store
from retain.cache.precision import Precision
from retain.cache.store import RaggedStore
from retain.policy import decide_layers, load_policy, shape_of
from tests.evictions import EVICTING, make_evidence, small
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
    store = Store(RaggedStore.from_dense(keys, values, torch.arange(length)[None], exists), precision)
    store.pack_()
    each, head = precision.cost(D, D, dtype.itemsize)
    most = H * (length * each + head)
    # A group that is not full.
    assert most - H * 4 * D <= store.bytes_held <= most
    assert store.bytes_held < H * length * 2 * D * dtype.itemsize or length == 9


@pytest.mark.parametrize("ratio", [0.37, 0.5])
@pytest.mark.parametrize("name", [name for name in EVICTING if not load_policy(name).learned])
def test_a_byte_ratio_without_precision_is_so_many_bytes(name, ratio, heads_file):
    policy, layers = small(name, heads_file), make_evidence(1, 2, 31, (0,))
    shape = shape_of(layers[0])
    stated = int(Fraction(str(ratio)) * len(layers) * shape.num_heads * 31 * shape.entry_bytes)
    want, got = (
        decide_layers(policy, layers, budget, seeds_B=(1,))
        for budget in (Budget(bytes=stated), Budget(byte_ratio=ratio))
    )
    assert all(torch.equal(a.keep_BHT, b.keep_BHT) for a, b in zip(want, got, strict=True))
    assert sum(int(one.keep_BHT.sum()) for one in got) * (shape.entry_bytes + policy.metadata_bytes) <= stated
    assert any(bool((~one.keep_BHT & own.exists_BHT).any()) for one, own in zip(got, layers, strict=True))


def test_settings_that_make_no_sense_are_refused():
    refused("missing key 'precision.bits'", load_policy, "snapkv", ("precision={recent: 3}",))
    refused("bits", load_policy, "snapkv", ("precision={bits: 3}",))
    refused("recent", Precision, bits=4, recent=-1)

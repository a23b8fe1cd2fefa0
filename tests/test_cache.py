import pytest
import torch

from retain.cache import WASTE, RaggedStore, plan_rooms

B, H, T, D = 3, 2, 50, 4


def dense(seed=0, T=T):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(B, H, T, D, generator=generator) for _ in range(2))
    positions = torch.arange(T).expand(B, T) + torch.tensor([[0], [100], [200]])
    ratio = 0.1 + 0.8 * torch.rand(B, H, 1, generator=generator)
    return keys, values, positions, torch.rand(B, H, T, generator=generator) < ratio


def rows_of(store):
    return [[store.row(b, h) for h in range(store.num_heads)] for b in range(store.batch_size)]


def assert_rows(store, keys, values, positions, keep):
    """Every row holds exactly the kept entries, in order, bit for bit."""
    assert torch.equal(store.lengths_BH, keep.sum(-1))
    for b, heads in enumerate(rows_of(store)):
        for h, (k, v, p) in enumerate(heads):
            mine = keep[b, h]
            assert torch.equal(k, keys[b, h, mine]) and torch.equal(v, values[b, h, mine])
            assert torch.equal(p, positions[b, mine])


@pytest.mark.parametrize("slack", [0, 1, 32])
def test_from_dense_holds_exactly_the_kept_entries(slack):
    inputs = dense()
    store = RaggedStore.from_dense(*inputs, slack=slack)
    assert_rows(store, *inputs)
    assert store.entries_held == int(inputs[3].sum())
    assert store.bytes_held == store.entries_held * 2 * D * 4
    assert store.offsets_R1.dtype == torch.int64 and store.lengths_R.dtype == torch.int32
    assert store.bytes_allocated >= store.bytes_held
    assert store.keys_CD.untyped_storage().nbytes() == int(store.offsets_R1[-1]) * D * 4


@pytest.mark.parametrize(
    "lengths", [[], [0], [5], [8, 7, 8], [100, 1], [1, 100, 50, 2, 2, 99], [0, 0, 9], list(range(64))]
)
@pytest.mark.parametrize("slack", [0, 3])
def test_rooms_fit_and_waste_at_most_a_quarter(lengths, slack):
    order, blocks = plan_rooms(lengths, slack)
    order = list(range(len(lengths))) if order is None else order
    assert sorted(order) == list(range(len(lengths)))
    capacity, row = 0, 0
    for block in blocks:
        assert (block.row_start, block.entry_start) == (row, capacity)
        inside = [lengths[order[i]] for i in range(block.row_start, block.row_stop)]
        assert max(inside) == block.longest and block.room == block.longest + slack
        row, capacity = block.row_stop, capacity + block.num_rows * block.room
    assert row == len(lengths)
    assert capacity <= (1 + WASTE) * (sum(lengths) + slack * len(lengths))


def test_close_lengths_are_one_block_in_natural_order():
    order, blocks = plan_rooms([90, 100, 95, 99] * 50, slack=32)
    assert order is None and len(blocks) == 1


@pytest.mark.parametrize("slack", [0, 2, 8])
def test_appending_token_by_token_and_in_padded_chunks(slack):
    keys, values, positions, keep = dense(T=80)
    split = 50
    keep[:, :, split:] = True
    keep[1, :, 60:63] = False  # a chunk in which sequence 1 has three pads
    store = RaggedStore.from_dense(
        *(x[..., :split, :] for x in (keys, values)), positions[:, :split], keep[..., :split], slack
    )
    at, steps = split, [1] * 10 + [10] + [1] * 10
    for size in steps:
        cut = slice(at, at + size)
        valid = keep[:, 0, cut]
        held = store.lengths_BH
        seen = store.append_(
            keys[:, :, cut], values[:, :, cut], positions[:, cut], None if valid.all() else valid
        )
        stored = torch.arange(B * H) if store.order_R is None else store.order_R
        want = (held[..., None] + valid.cumsum(-1)[:, None]).masked_fill(~valid[:, None], 0).view(B * H, size)
        assert torch.equal(seen, want[stored])
        at += size
    assert at == 80
    assert_rows(store, keys, values, positions, keep)


def test_appending_is_amortised():
    store = RaggedStore.from_dense(*dense(), slack=1)
    rebuilt, storage = 0, store.keys_CD.data_ptr()
    for step in range(400):
        store.append_(*(torch.zeros(B, H, 1, D),) * 2, torch.full((B, 1), 1000 + step))
        rebuilt += storage != store.keys_CD.data_ptr()
        storage = store.keys_CD.data_ptr()
    assert rebuilt < 25


def test_compacting_in_place_keeps_the_storage_and_filtering_returns_it():
    inputs = dense()
    keys, values, positions, keep = inputs
    store, other = RaggedStore.from_dense(*inputs, slack=3), RaggedStore.from_dense(*inputs, slack=3)
    fewer = keep & (torch.rand(B, H, T) < 0.5)
    where = fewer[keep]
    storage, room = store.keys_CD.data_ptr(), store.bytes_allocated
    store.compact_(where)
    other.filter_(where)
    for one in (store, other):
        assert_rows(one, keys, values, positions, fewer)
    assert (store.keys_CD.data_ptr(), store.bytes_allocated) == (storage, room)
    assert other.bytes_allocated < room and other.bytes_held == store.bytes_held
    for _ in range(4):  # the freed room is used again
        store.append_(*(torch.zeros(B, H, 1, D),) * 2, torch.full((B, 1), 999))
    assert store.keys_CD.data_ptr() == storage


def test_crop_goes_by_position():
    keys, values, positions, keep = dense()
    store = RaggedStore.from_dense(keys, values, positions, keep)
    before = torch.tensor([10, 125, 0])
    store.crop_(before)
    assert_rows(store, keys, values, positions, keep & (positions < before[:, None])[:, None])
    assert int(store.lengths_BH[2].sum()) == 0


def test_fork_select_and_concat():
    keys, values, positions, keep = inputs = dense()
    store = RaggedStore.from_dense(*inputs)
    fork = store.fork()
    fork.append_(*(torch.ones(B, H, 1, D),) * 2, torch.full((B, 1), 999))
    fork.keys_CD.zero_()
    assert_rows(store, *inputs)
    for one in (
        store,
        RaggedStore.from_dense(keys, values, positions, torch.ones_like(keep)),
    ):  # many blocks, one
        kept = keep if one is store else torch.ones_like(keep)
        idx = torch.tensor([2, 0, 2, 1])
        assert_rows(one.select_batch(idx), keys[idx], values[idx], positions[idx], kept[idx])
    both = RaggedStore.concat([store, store.select_batch(torch.tensor([1]))])
    idx = torch.tensor([0, 1, 2, 1])
    assert_rows(both, keys[idx], values[idx], positions[idx], keep[idx])


def test_refusals():
    keys, values, positions, keep = dense()
    with pytest.raises(ValueError, match=r"pass a bool tensor \[3, 2, 50\], True = kept"):
        RaggedStore.from_dense(keys, values, positions, keep[:, :1])
    store = RaggedStore.from_dense(keys, values, positions, keep)
    with pytest.raises(ValueError, match="2 sequences x 2 KV heads, but the store holds 3 x 2"):
        store.append_(*(torch.ones(2, H, 1, D),) * 2, torch.zeros(2, 1, dtype=torch.int64))

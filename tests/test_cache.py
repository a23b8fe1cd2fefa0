"""The ragged store: its layout, in-place changes, memory, and what running out of memory leaves behind."""

import pytest
import torch

from retain.cache.layout import PIECE, bytes_of
from retain.cache.store import RaggedStore
from retain.kernels.ragged_attention.pages import PAGE
from tests.memory import Watch

B, H, T, D, G = 3, 2, 150, 4, 2


def dense(seed=0, T=T):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(B, H, T, D, generator=generator) for _ in range(2))
    positions = torch.arange(T).expand(B, T) + torch.tensor([[0], [100], [200]])
    ratio = 0.1 + 0.8 * torch.rand(B, H, 1, generator=generator)
    return keys, values, positions, torch.rand(B, H, T, generator=generator) < ratio


def side(T=T, seed=1):
    """A side column of one number an entry, one of G, and one of whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "learned": torch.randn(B, H, T, generator=generator),
        "value_norm": torch.randn(B, H, T, G, generator=generator),
        "last_access": torch.randint(0, 1000, (B, H, T), generator=generator),
    }


def make(slack=32, seed=0, T=T):
    """A store with side columns, and what it was made of."""
    inputs, extra = dense(seed, T), side(T)
    return RaggedStore.from_dense(*inputs, slack=slack, side=extra), inputs, extra


def assert_holds(store, inputs, extra):
    """Every row holds exactly the kept entries and their side columns, in order, bit for bit, and counts them
    as what they are."""
    keys, values, positions, keep = inputs
    assert torch.equal(store.lengths_BH, keep.sum(-1)) and store.num_heads == H
    flat = (*(x[keep] for x in (keys, values, positions[:, None].expand_as(keep))), store.rows_N())
    for actual, wanted in zip(store.flat(), flat, strict=True):
        assert torch.equal(actual, wanted) and actual.dtype == wanted.dtype
    assert store.side.keys() == extra.keys()
    for name, column in extra.items():
        assert torch.equal(store.side[name][store.index_N()], column[keep])
    assert_counts(store)


def assert_counts(store):
    """Counts are those of the entries held, and free slots hold zeros where zeros matter."""
    columns = (store.keys_CD, store.values_CD, store.positions_C, *store.side.values())
    tables = (store.offsets_R1, store.lengths_R, store.pages.row_pages, store.pages.first_pages)
    assert bytes_of(store.storages()) == sum(x.untyped_storage().nbytes() for x in (*columns, *tables))
    assert store.entries_held == int(store.lengths_R.sum()) == store.index_N().shape[0]
    width, size = store.keys_CD.shape[1], store.keys_CD.element_size()
    assert store.entry_bytes == 2 * width * size
    assert all(x.shape[0] == int(store.offsets_R1[-1]) for x in columns)
    assert store.offsets_R1.dtype == torch.int64 and store.lengths_R.dtype == torch.int32
    room = store.offsets_R1.diff() - store.lengths_R
    free = torch.ones(len(store.keys_CD), dtype=torch.bool, device=store.keys_CD.device)
    free[store.index_N()] = False
    assert not any(column[free].any() for column in (store.values_CD, *store.side.values()))
    assert store.free <= int(room.min()) and not (store.offsets_R1 % PAGE).any()


def test_appending_is_amortised():
    store = RaggedStore.from_dense(*dense(), slack=1)
    layouts = [store.pages]
    for step in range(400):
        store.append_(*(torch.zeros(B, H, 1, D),) * 2, torch.full((B, 1), 1000 + step))
        if store.pages is not layouts[-1]:
            layouts.append(store.pages)
            assert_counts(store)
    assert len(layouts) < 30


@pytest.mark.parametrize("piece", [1, 40, 1 << 18])
@pytest.mark.parametrize("evicted", ["first", "last", "all", "none", "a row", "middle"])
def test_compacting_in_place_in_pieces(monkeypatch, evicted, piece):
    monkeypatch.setattr("retain.cache.layout.PIECE", piece)
    store, (keys, values, positions, keep), extra = make()
    place = keep.cumsum(-1) - 1
    removed = {
        "first": place == 0,
        "last": place == keep.sum(-1, keepdim=True) - 1,
        "all": keep,
        "none": torch.zeros_like(keep),
        "a row": keep & (torch.arange(B * H).view(B, H, 1) == 3),
        "middle": (place > 7) & (place % 3 == 0),
    }[evicted]
    store.compact_(~removed[keep])
    assert_holds(store, (keys, values, positions, keep & ~removed), extra)


@pytest.mark.parametrize("how", ["compact_", "filter_"])
def test_an_eviction_holds_one_column_twice_at_most(how):
    """In place a piece of a column and indices; laid out anew, one column of what stays."""
    T, width = 32_768, 128
    keys = torch.zeros(1, 2, T, width)
    store = RaggedStore.from_dense(keys, keys, torch.arange(T)[None], torch.ones(1, 2, T, dtype=torch.bool))
    keep, before = torch.arange(2 * T) % 2 == 0, bytes_of(store.storages())
    with Watch() as watch:
        getattr(store, how)(keep)
    # Beyond what was held when it began, and what came of it.
    peak = watch.peak - watch.live + bytes_of(store.storages()) - before
    indices = 12 * 8 * 2 * T
    assert peak <= indices + 2 * PIECE + (0 if how == "compact_" else 1.05 * keys.nbytes / 2)
    assert indices + 2 * PIECE < keys.nbytes / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("new", [32, 100, 128, 256])
def test_slack_is_small_at_4096_entries_a_head(new, dtype):
    """All storage, positions and tables too, beside the bytes that are held: after a prefill, a crop, and
    decoding with growth, at the narrowest heads that are in use."""
    width, heads, seen = 64, 2, 5000
    keys = torch.zeros(1, heads, seen, width, dtype=dtype)
    keep = torch.zeros(1, heads, seen, dtype=torch.bool)
    keep[0, 0, :4096], keep[0, 1, 500:4596] = True, True

    def slack(store):
        return bytes_of(store.storages()) / (store.entries_held * store.entry_bytes) - 1

    store = RaggedStore.from_dense(keys, keys, torch.arange(seen)[None], keep)
    found = [slack(store)]
    for step in range(new):
        store.append_(*(torch.zeros(1, heads, 1, width, dtype=dtype),) * 2, torch.tensor([[seen + step]]))
        found.append(slack(store))
    store.crop_(torch.tensor([seen + new // 2]))
    assert store.lengths_BH.tolist() == [[4096 + new // 2] * 2]
    found.append(slack(store))
    store.crop_(torch.tensor([seen]))
    found.append(slack(store))
    assert max(found) <= 0.06

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from retain.cache.store import RaggedStore
from retain.kernels import backend
from retain.kernels.ragged_attention.pages import PAGE
from tests.kernels.device import DEVICE
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


def make(slack=32, seed=0, T=T, device="cpu"):
    """A store with side columns, and what it was made of."""
    inputs = tuple(x.to(device) for x in dense(seed, T))
    beside = {name: column.to(device) for name, column in side(T).items()}
    return RaggedStore.from_dense(*inputs, slack=slack, beside=beside), inputs, beside


def assert_holds(store, inputs, beside, idx=None):
    """Exactly the kept entries, and counted as what they are."""
    assert_entries(store, inputs, beside, idx)
    assert_counts(store)


def assert_entries(store, inputs, beside, idx=None):
    """Every row holds exactly the kept entries and their side columns, in order, bit for bit."""
    idx = torch.arange(B) if idx is None else idx
    keys, values, positions, keep = (x[idx] for x in inputs)
    beside = {name: column[idx] for name, column in beside.items()}
    assert torch.equal(store.lengths_BH, keep.sum(-1))
    assert store.batch_size == len(idx) and store.num_heads == H
    for b in range(len(idx)):
        for h in range(H):
            mine = keep[b, h]
            for actual, wanted in zip(
                store.row(b, h), (keys[b, h, mine], values[b, h, mine], positions[b, mine]), strict=True
            ):
                assert torch.equal(actual, wanted) and actual.dtype == wanted.dtype
    index_N, rows_N = store.index_N(), store.rows_N()
    flat = (*(x[keep] for x in (keys, values, positions[:, None].expand_as(keep))), rows_N)
    for actual, wanted in zip(store.flat(), flat, strict=True):
        assert torch.equal(actual, wanted) and actual.dtype == wanted.dtype
    assert store.beside.keys() == beside.keys()
    for name, column in beside.items():
        assert torch.equal(store.beside[name][index_N], column[keep])


def assert_counts(store):
    """What is counted is what is there, and free slots hold zeros where zeros matter."""
    columns = (store.keys_CD, store.values_CD, store.positions_C, *store.beside.values())
    tables = (store.offsets_R1, store.lengths_R, store.pages.row_pages, store.pages.first_pages)
    assert store.bytes_allocated == sum(x.untyped_storage().nbytes() for x in (*columns, *tables))
    assert store.entries_held == int(store.lengths_R.sum()) == store.index_N().shape[0]
    assert store.bytes_held == store.entries_held * store.entry_bytes
    assert store.entry_bytes == 2 * store.keys_CD.shape[1] * store.keys_CD.element_size()
    assert all(x.shape[0] == store.capacity == int(store.offsets_R1[-1]) for x in columns)
    assert store.offsets_R1.dtype == torch.int64 and store.lengths_R.dtype == torch.int32
    room = store.offsets_R1.diff() - store.lengths_R
    free = torch.ones(store.capacity, dtype=torch.bool, device=store.keys_CD.device)
    free[store.index_N()] = False
    assert not any(column[free].any() for column in (store.values_CD, *store.beside.values()))
    assert store.free <= int(room.min()) and not (store.offsets_R1 % PAGE).any()


@pytest.mark.parametrize("slack", [0, 1, 32, 70])
def test_from_dense_holds_exactly_the_kept_entries(slack):
    store, inputs, beside = make(slack)
    assert_holds(store, inputs, beside)
    assert int((store.offsets_R1.diff() - store.lengths_R).min()) == store.free >= slack
    assert not torch.equal(store.lengths_BH[0, :1].expand(B, H), store.lengths_BH)
    assert store.keys_CD.untyped_storage().nbytes() == int(store.offsets_R1[-1]) * D * 4


def test_inputs_that_are_not_contiguous_and_rows_that_are_empty():
    keys, values, positions, keep = dense()
    keep[0, 1], keep[2] = False, False
    strided = keys.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    store = RaggedStore.from_dense(strided, values, positions, keep, slack=0)
    assert_holds(store, (keys, values, positions, keep), {})
    assert store.pages.counts[1] == 0
    store.append_(*(torch.zeros(B, 1, H, D).transpose(1, 2),) * 2, torch.full((B, 1), 999))
    assert store.lengths_BH[2].tolist() == [1, 1]


def test_a_store_takes_no_part_in_training():
    keys, values, positions, keep = dense()
    store = RaggedStore.from_dense(keys.requires_grad_(), values.requires_grad_(), positions, keep)
    store.append_(*(torch.ones(B, H, 1, D, requires_grad=True),) * 2, torch.full((B, 1), 999))
    assert not store.keys_CD.requires_grad and not store.values_CD.requires_grad


@pytest.mark.parametrize("slack", [0, 2, 8])
def test_appending_token_by_token_and_in_padded_chunks(slack):
    keys, values, positions, keep = dense(T=230)
    split, beside = 150, side(T=230)
    keep[:, :, split:] = True
    keep[1, :, 160:163] = False  # a chunk in which sequence 1 has three pads
    store = RaggedStore.from_dense(
        *(x[..., :split, :] for x in (keys, values)), positions[:, :split], keep[..., :split], slack
    )
    beside["learned"][:, :, :split] = 0  # a column that comes with the first new tokens
    beside = {"learned": beside["learned"]}
    at, steps = split, [1] * 10 + [10] + [1] * 30 + [30]
    for size in steps:
        cut = slice(at, at + size)
        valid = keep[:, 0, cut]
        held, padded = store.lengths_BH, None if valid.all() else valid
        seen = store.append_(keys[:, :, cut], values[:, :, cut], positions[:, cut], padded)
        want = (held[..., None] + valid.cumsum(-1)[:, None]).masked_fill(~valid[:, None], 0).view(B * H, size)
        assert torch.equal(seen, want)
        if "learned" in store.beside:
            index, real = store.tail_index_RS(size if padded is None else padded)
            assert not store.beside["learned"][index[real]].any()  # zeros until they are set
        store.set_beside_("learned", beside["learned"][:, :, cut], padded)
        at += size
    assert at == 230
    assert_holds(store, (keys, values, positions, keep), beside)


def test_where_the_last_tokens_lie():
    store, _, _ = make()
    valid = torch.tensor([[True] * 4, [False, True, False, True], [False] * 4])
    positions = 1000 + torch.arange(4).expand(B, 4)
    store.append_(*(torch.ones(B, H, 4, D),) * 2, positions, valid)
    index, real = store.tail_index_RS(valid)
    assert torch.equal(real, valid.repeat_interleave(H, 0))
    assert torch.equal(store.positions_C[index][real], positions.int().repeat_interleave(H, 0)[real])
    assert index.min() >= 0 and index.max() < store.capacity
    store.append_(*(torch.ones(B, H, 2, D),) * 2, positions[:, :2] + 10)
    index, real = store.tail_index_RS(2)
    assert real.all() and store.positions_C[index].tolist() == [[1010, 1011]] * (B * H)


def test_appending_is_amortised():
    store = RaggedStore.from_dense(*dense(), slack=1)
    layouts = [store.pages]
    for step in range(400):
        store.append_(*(torch.zeros(B, H, 1, D),) * 2, torch.full((B, 1), 1000 + step))
        if store.pages is not layouts[-1]:
            layouts.append(store.pages)
            assert_counts(store)
    assert len(layouts) < 30


def test_padding_that_was_counted_does_not_make_a_store_grow():
    store, _, _ = make(slack=64)
    pages, pad = store.pages, torch.zeros(B, 30, dtype=torch.bool)
    for _ in range(10):
        store.append_(*(torch.ones(B, H, 30, D),) * 2, torch.zeros(B, 30, dtype=torch.int64), pad)
    assert store.pages is pages


def test_compacting_in_place_keeps_the_storage_and_filtering_returns_it():
    (store, inputs, beside), (other, _, _) = make(slack=3, T=400), make(slack=3, T=400)
    keys, values, positions, keep = inputs
    fewer = keep & (torch.rand(keep.shape) < 0.5)
    where = fewer[keep]
    storage, room = store.keys_CD.data_ptr(), store.bytes_allocated
    store.compact_(where)
    other.filter_(where)
    for one in (store, other):
        assert_holds(one, (keys, values, positions, fewer), beside)
    assert (store.keys_CD.data_ptr(), store.bytes_allocated) == (storage, room)
    assert other.bytes_allocated < room and other.bytes_held == store.bytes_held
    assert store.free > 10
    for _ in range(4):  # the freed room is used again, and its side columns are zeros again
        store.append_(*(torch.zeros(B, H, 1, D),) * 2, torch.full((B, 1), 999))
    assert store.keys_CD.data_ptr() == storage
    index, _ = store.tail_index_RS(4)
    assert not any(column[index].any() for column in store.beside.values())


@pytest.mark.parametrize("piece", [1, 40, 1 << 18])
@pytest.mark.parametrize("evicted", ["first", "last", "all", "none", "a row", "middle"])
def test_compacting_in_place_in_pieces(monkeypatch, evicted, piece):
    monkeypatch.setattr("retain.kernels.compact.reference.PIECE", piece)
    store, (keys, values, positions, keep), beside = make()
    place = keep.cumsum(-1) - 1
    gone = {
        "first": place == 0,
        "last": place == keep.sum(-1, keepdim=True) - 1,
        "all": keep,
        "none": torch.zeros_like(keep),
        "a row": keep & (torch.arange(B * H).view(B, H, 1) == 3),
        "middle": (place > 7) & (place % 3 == 0),
    }[evicted]
    store.compact_(~gone[keep])
    assert_holds(store, (keys, values, positions, keep & ~gone), beside)


def test_compacting_moves_only_what_lies_behind_the_first_hole(monkeypatch):
    moved = []
    copy = torch.Tensor.index_copy_
    monkeypatch.setattr(
        torch.Tensor,
        "index_copy_",
        lambda self, dim, index, source: moved.append(len(index)) or copy(self, dim, index, source),
    )
    store, _, _ = make()
    lengths, moved[:] = store.lengths_R.tolist(), []
    keep = torch.ones(store.entries_held, dtype=torch.bool)
    keep[sum(lengths[:3]) - 5] = False  # row 2 loses its fifth entry from the end
    store.compact_(keep)
    assert moved == [4] * 6  # of each column, four


def test_evicted_garbage_leaves_nothing_behind():
    store, (keys, values, positions, keep), beside = make()
    store.values_CD[store.index_N()[::7]] = float("nan")
    store.beside["learned"][store.index_N()[::7]] = float("inf")
    keep_N = torch.ones(store.entries_held, dtype=torch.bool)
    keep_N[::7] = False
    store.compact_(keep_N)
    keep[keep.clone()] = keep_N
    assert store.values_CD.isfinite().all()
    assert_holds(store, (keys, values, positions, keep), beside)


def test_crop_and_drop_go_by_position():
    for how in ("crop", "drop"):
        store, (keys, values, positions, keep), beside = make()
        before = torch.tensor([10, 125, 0])
        if how == "crop":
            store.crop_(before)
        else:
            store.drop_(torch.arange(400) >= before[:, None])
        left = keep & (positions < before[:, None])[:, None]
        assert_holds(store, (keys, values, positions, left), beside)
        assert int(store.lengths_BH[2].sum()) == 0


def test_fork_select_and_concat():
    store, inputs, beside = make()
    fork = store.fork()
    assert_holds(fork, inputs, beside)
    fork.append_(*(torch.ones(B, H, 1, D),) * 2, torch.full((B, 1), 999))
    fork.set_beside_("mass", torch.ones(B, H, 1))
    for column in (fork.keys_CD, fork.values_CD, *fork.beside.values()):
        column.zero_()
    assert_holds(store, inputs, beside)
    for idx in (torch.tensor([2, 0, 2, 1]), torch.tensor([1]), torch.tensor([0, 1, 2])):
        chosen = store.select_batch(idx)
        assert_holds(chosen, inputs, beside, idx)
        shares = {chosen.keys_CD.data_ptr(), chosen.lengths_R.data_ptr(), chosen.beside["learned"].data_ptr()}
        assert not shares & {
            store.keys_CD.data_ptr(),
            store.lengths_R.data_ptr(),
            store.beside["learned"].data_ptr(),
        }
    both = RaggedStore.concat([store, store.select_batch(torch.tensor([1]))])
    assert_holds(both, inputs, beside, torch.tensor([0, 1, 2, 1]))
    assert RaggedStore.concat([store, store], slack=200).free >= 200


def test_saved_and_loaded_it_is_the_same():
    store, inputs, beside = make()
    store.append_(*(torch.ones(B, H, 3, D),) * 2, torch.full((B, 3), 999))
    keep = torch.ones(store.entries_held, dtype=torch.bool)
    index = store.tail_index_RS(3)[0].flatten()
    keep[torch.isin(store.index_N(), index)] = False
    store.compact_(keep)  # slack, and used slots that are free again
    tensors = store.tensors()
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert tensors["keys"].shape[0] == store.entries_held
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())
    assert held < store.bytes_allocated
    loaded = RaggedStore.from_tensors(tensors, H, slack=5)
    assert_holds(loaded, inputs, beside)
    assert loaded.slack == 5
    loaded.append_(*(torch.ones(B, H, 1, D),) * 2, torch.full((B, 1), 999))
    assert torch.equal(tensors["lengths"], store.lengths_R)  # no memory is shared


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
        return store.bytes_allocated / store.bytes_held - 1

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


def test_refusals():
    keys, values, positions, keep = dense()
    with pytest.raises(ValueError, match=r"pass a bool tensor \[3, 2, 150\], True = kept"):
        RaggedStore.from_dense(keys, values, positions, keep[:, :1])
    with pytest.raises(ValueError, match=r"side column 'mass' is \(3, 2, 7\), .* pass \[3, 2, 150\] or"):
        RaggedStore.from_dense(keys, values, positions, keep, beside={"mass": torch.ones(B, H, 7)})
    store, _, _ = make()
    with pytest.raises(ValueError, match="2 sequences x 2 KV heads, but the store holds 3 x 2"):
        store.append_(*(torch.ones(2, H, 1, D),) * 2, torch.zeros(2, 1, dtype=torch.int64))
    for change in (store.compact_, store.filter_):
        with pytest.raises(ValueError, match="one element an entry, in the order of flat"):
            change(torch.ones(store.entries_held + 1, dtype=torch.bool))
    with pytest.raises(
        ValueError, match=r"side column 'value_norm' got values \(3, 2, 1\), .* \(2,\) an entry"
    ):
        store.set_beside_("value_norm", torch.ones(B, H, 1))
    other = RaggedStore.from_dense(*dense())
    with pytest.raises(ValueError, match="stores to stack have side columns .* or set the missing columns"):
        RaggedStore.concat([store, other])
    tensors = store.tensors()
    with pytest.raises(ValueError, match="lacks lengths among .* save it again, with tensors"):
        RaggedStore.from_tensors({k: v for k, v in tensors.items() if k != "lengths"}, H)
    with pytest.raises(ValueError, match=r"but keys \(3, 4\): the file was cut"):
        RaggedStore.from_tensors({**tensors, "keys": tensors["keys"][:3]}, H)
    with pytest.raises(
        ValueError, match="for 4 KV heads, but 6 rows: the file was cut, or is another model's"
    ):
        RaggedStore.from_tensors(tensors, 4)


class RunsOut(TorchDispatchMode):
    """Memory runs out at the n-th operation inside, whatever it is; launches of kernels count."""

    inside = None

    def __init__(self, number):
        super().__init__()
        self.left = number

    def __enter__(self):
        RunsOut.inside = self
        return super().__enter__()

    def __exit__(self, *args):
        RunsOut.inside = None
        return super().__exit__(*args)

    def step(self):
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("out of memory")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.step()
        return func(*args, **(kwargs or {}))


class Launched:
    """A kernel whose launch is one operation, as it is on a GPU: the interpreter makes it of many."""

    def __init__(self, kernel):
        self.kernel, self.number = kernel, 0

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            if RunsOut.inside is not None:
                RunsOut.inside.step()
            self.number += 1
            with _disable_current_modes():
                self.kernel[grid](*args, **kwargs)

        return launch


def two_of_three(store, device="cpu"):
    return torch.arange(store.entries_held, device=device) % 3 > 0


def fresh(num_new, device):
    """Keys, values and positions of new tokens."""
    keys, values, positions = (x.to(device) for x in NEW)
    return keys[:, :, :num_new], values[:, :, :num_new], positions[:, :num_new]


NEW = (torch.full((B, H, 90, D), 2.0), torch.full((B, H, 90, D), 3.0), 900 + torch.arange(90).expand(B, 90))
PADDED = torch.arange(90) >= torch.tensor([[0], [40], [90]])
# What changes a store in place, and whether it may come to a point from which there is no way back.
CHANGES = {
    "filter": (lambda store, on="cpu": store.filter_(two_of_three(store, on)), True),
    "compact": (lambda store, on="cpu": store.compact_(two_of_three(store, on)), True),
    "crop": (lambda store, on="cpu": store.crop_(torch.tensor([10, 125, 0])), True),
    "drop": (
        lambda store, on="cpu": store.drop_(torch.arange(400) >= torch.tensor([[10], [125], [0]])),
        True,
    ),
    "grow": (lambda store, on="cpu": store.append_(*fresh(90, on)), True),
    "grow, padded": (lambda store, on="cpu": store.append_(*fresh(90, on), PADDED.to(on)), True),
    "append": (lambda store, on="cpu": store.append_(*fresh(9, on)), False),
    "append, padded": (lambda store, on="cpu": store.append_(*fresh(9, on), PADDED[:, 35:44].to(on)), False),
    "write beside": (lambda store, on="cpu": store.set_beside_("last_access", torch.ones(B, H, 3)), False),
    "a new column": (lambda store, on="cpu": store.set_beside_("mass", torch.ones(B, H, 3)), False),
}
# What launches kernels where there are any.
KERNELS = {
    "compact": ("count", "move"),
    **dict.fromkeys(("grow", "grow, padded", "append", "append, padded"), ("append",)),
}
USES = {
    "keys_CD": lambda store: store.keys_CD,
    "beside": lambda store: store.beside,
    "lengths_BH": lambda store: store.lengths_BH,
    "bytes_held": lambda store: store.bytes_held,
    "bytes_allocated": lambda store: store.bytes_allocated,
    "capacity": lambda store: store.capacity,
    "flat": lambda store: store.flat(),
    "row": lambda store: store.row(0, 0),
    "fork": lambda store: store.fork(),
    "select_batch": lambda store: store.select_batch(torch.tensor([0])),
    "concat": lambda store: RaggedStore.concat([make()[0], store]),
    "tensors": lambda store: store.tensors(),
    "tail": lambda store: store.tail_index_RS(1),
    **{name: change for name, (change, _) in CHANGES.items()},
}


@pytest.mark.parametrize(
    ("name", "path"), [*((name, "reference") for name in CHANGES), *((name, "triton") for name in KERNELS)]
)
def test_a_change_that_runs_out_of_memory_leaves_a_store_as_it_was_or_refuses_every_use(
    name, path, monkeypatch
):
    launched = []
    for entry in KERNELS[name] if path == "triton" else ():
        from retain.kernels.compact import kernel

        launched.append(Launched(getattr(kernel, entry)))
        monkeypatch.setattr(kernel, entry, launched[-1])
    with backend.using(path):
        runs_out(*CHANGES[name], DEVICE if path == "triton" else "cpu")
    assert all(kernel.number > 0 for kernel in launched)


def runs_out(on_device, may_lose, device):
    def change(store):
        on_device(store, device)

    want, _, _ = make(device=device)
    change(want)
    outcomes = []
    for number in range(1, 1000):
        store, inputs, beside = make(device=device)
        aside = store.fork()
        try:
            with RunsOut(number):
                change(store)
        except torch.OutOfMemoryError:
            outcomes.append("lost" if not store.__dict__ else "kept")
        else:
            break
        assert_holds(aside, inputs, beside)  # a fork is what the message says to go on with
        if outcomes[-1] == "lost":
            for use in USES.values():
                with pytest.raises(ValueError, match=r"moved when that broke off .* reset\(\) the cache"):
                    use(store)
            continue
        assert_entries(store, inputs, beside)
        change(store)  # it may be tried again, as if nothing had been
        assert_counts(store)
        for one, two in zip(store.tensors().items(), want.tensors().items(), strict=True):
            assert one[0] == two[0] and torch.equal(one[1], two[1])
    assert set(outcomes) == {"kept", "lost"} if may_lose else {"kept"}
    # Indices are made, and where it is laid out anew the keys are copied, before a store is touched.
    assert outcomes[:8] == ["kept"] * 8
    assert torch.equal(store.flat()[0], want.flat()[0])


def test_making_a_store_of_others_that_runs_out_of_memory_leaves_those_alone():
    makers = {
        "fork": lambda store: store.fork(),
        "select": lambda store: store.select_batch(torch.tensor([2, 0, 2])),
        "concat": lambda store: RaggedStore.concat([store, store]),
        "save": lambda store: store.tensors(),
        "load": lambda store: RaggedStore.from_tensors(store.tensors(), H),
    }
    for maker in makers.values():
        store, inputs, beside = make()
        for number in range(1, 1000):
            try:
                with RunsOut(number):
                    maker(store)
            except torch.OutOfMemoryError:
                assert_holds(store, inputs, beside)
            else:
                break
        assert 3 < number < 999


@pytest.mark.parametrize("how", ["filter", "grow"])
def test_laying_out_anew_takes_what_is_kept_and_one_column_twice(how):
    width, seen = 256, 2000
    with Watch() as watch:
        keys, values = torch.zeros(1, H, seen, width), torch.ones(1, H, seen, width)
        keep = torch.ones(1, H, seen, dtype=torch.bool)
        store = RaggedStore.from_dense(keys, values, torch.arange(seen)[None], keep)
        del keys, values
        keep_N = torch.arange(store.entries_held) % 4 > 0
        before, watch.peak = watch.live, watch.live
        if how == "filter":
            store.filter_(keep_N)
        else:
            store.append_(*(torch.ones(1, H, 60, width),) * 2, 9000 + torch.arange(60)[None])
    column = store.keys_CD.untyped_storage().nbytes()
    indices = 8 * 8 * H * seen  # a few whole numbers an entry
    pieces = 2 * 2**20  # of the entries, as they are copied
    assert watch.peak - before <= column + indices + pieces
    assert column > indices + pieces  # or else a second column would go unseen


def grown():
    store = make()[0]
    store.append_(*NEW, PADDED)
    return store


def filtered():
    store = grown()
    store.filter_(two_of_three(store))
    return store


def noted():
    store = grown()
    store.set_beside_("mass", torch.ones(B, H, 90), PADDED)
    return store


# Everything that makes tensors of a store; each ends in what it is named after.
MADE = {
    "from_dense": lambda: make()[0],
    "append_": grown,
    "filter_": filtered,
    "set_beside_": noted,
    "fork": lambda: make()[0].fork(),
    "select_batch": lambda: make()[0].select_batch(torch.tensor([2, 0])),
    "concat": lambda: RaggedStore.concat([make()[0], make()[0]]),
    "from_tensors": lambda: RaggedStore.from_tensors(make()[0].tensors(), H),
}


def test_a_store_made_under_inference_mode_can_be_changed_afterwards():
    want = [maker() for maker in MADE.values()]
    with torch.inference_mode():
        made = [maker() for maker in MADE.values()]
        keys = torch.ones(B, H, 90, D)
        assert keys.is_inference()
    for store in made:
        columns = (store.keys_CD, store.values_CD, store.positions_C, *store.beside.values())
        tables = (store.offsets_R1, store.lengths_R, store.pages.row_pages, store.pages.first_pages)
        assert not any(x.is_inference() or x.requires_grad for x in (*columns, *tables))
    for store in (*made, *want):
        idx = torch.arange(store.batch_size) % B
        store.append_(*(x[idx] for x in NEW))
        store.set_beside_("mass", torch.ones(store.batch_size, H, 90))
        store.compact_(two_of_three(store))
        with torch.inference_mode():  # and to and fro
            store.append_(keys[idx], keys[idx], NEW[2][idx])
        store.crop_(torch.full((store.batch_size,), 930))
        store.append_(keys[idx], keys[idx], NEW[2][idx] + 90)
    for store, same in zip(made, want, strict=True):
        for one, two in zip(store.tensors().items(), same.tensors().items(), strict=True):
            assert one[0] == two[0] and torch.equal(one[1], two[1])


@pytest.mark.parametrize("enabled", [True, False])
def test_a_store_leaves_the_modes_of_its_caller_alone(enabled):
    with torch.set_grad_enabled(enabled), torch.inference_mode(not enabled):
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        for maker in MADE.values():
            maker()
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before

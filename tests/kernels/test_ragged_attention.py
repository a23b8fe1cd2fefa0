"""`ragged_attention`: the definition against loops, the kernel against the definition."""

import math
import traceback
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from retain.kernels import backend
from retain.kernels.ragged_attention import cases, path_of, ragged_attention, reference, tiles
from retain.kernels.ragged_attention.pages import Pages
from retain.kernels.ragged_attention.work import work_of
from tests.close import assert_close

CASES = cases.CASES
# Few rows and many, cut and whole, with and without everything: what a test takes that need not take all.
SOME = ("decode, all options", "an empty row and a long one", "padded turn", "chunk of 40, all options")
EXACT = (torch.float32, torch.float16)


def loops(case, given):
    """The formulas of the docstring, one query and one entry at a time, in float64: output, log-sum-exp."""
    queries = given["queries_BQSD"].double()
    keys, values = (cases.numbers_of(given[name], torch.float64) for name in ("keys_CD", "values_CD"))
    B, Q, S, _ = queries.shape
    lse = torch.full((B, Q, S), float("-inf"), dtype=torch.float64)
    out = torch.zeros(B, Q, S, values.shape[1], dtype=torch.float64)
    for b in range(B):
        for q in range(Q):
            row = b * case.kv_heads + q // case.group
            begin = int(given["offsets_R1"][row])
            for s in range(S):
                weights = {}
                for i in range(begin, begin + int(given["seen_RS"][row, s])):
                    if case.window is not None:
                        reach = int(given["query_positions_BS"][b, s]) - case.window
                        if int(given["positions_C"][i]) <= reach:
                            continue
                    logit = given["scaling"] * float(queries[b, q, s] @ keys[i])
                    if case.soft_cap is not None:
                        logit = case.soft_cap * math.tanh(logit / case.soft_cap)
                    if case.weighted:
                        logit += float(given["log_weight_C"][i])
                    weights[i] = math.exp(logit)
                mass = sum(weights.values())
                if given["sinks_Q"] is not None:
                    mass += math.exp(float(given["sinks_Q"][q]))
                for i, weight in weights.items():
                    out[b, q, s] += weight / mass * values[i]
                lse[b, q, s] = math.log(mass) if mass else float("-inf")
    return out, lse


def interpreted(given):
    with backend.using("triton"):
        return ragged_attention(**given)


@pytest.mark.parametrize("few", [0, 10**6], ids=["by rows", "by pages"])
@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_formulas(monkeypatch, name, few):
    monkeypatch.setattr(reference, "FEW", few)
    given = cases.inputs(CASES[name], torch.float64, "cpu")
    out, lse = ragged_attention(**{**given, "with_lse": True})
    assert out.dtype == lse.dtype == torch.float64
    for actual, wanted in zip((out, lse), loops(CASES[name], given), strict=True):
        assert_close(actual, wanted)
    assert torch.equal(ragged_attention(**{**given, "with_lse": False}), out)


# The interpreter's bfloat16 goes through float32: a few cases show that it does.
KERNEL = [(name, dtype) for name in CASES for dtype in EXACT]
KERNEL += [(name, torch.bfloat16) for name in ("decode", "chunk of 40, all options")]


@pytest.mark.parametrize(("name", "dtype"), KERNEL, ids=str)
def test_the_kernel_is_the_reference(name, dtype, monkeypatch):
    found = []
    own = cases.run
    monkeypatch.setattr(cases, "run", lambda case, given: found.append(own(case, given)) or found[-1])
    with backend.using("triton"):
        assert cases.check(CASES[name], dtype, "cpu") is None
    out, lse = found[0] if CASES[name].lse else (found[0], None)
    assert out.dtype == dtype and (lse is None or lse.dtype == torch.float32)


def test_the_check_finds_what_is_wrong(monkeypatch):
    """The control of all that `check` says: one entry too few or too many is seen."""
    case = CASES["padded turn"]
    assert cases.check(case, torch.float32, "cpu") is None

    def blind(case, kwargs):
        return ragged_attention(**{**kwargs, "seen_RS": (kwargs["seen_RS"] - 1).clamp_min(0)})

    monkeypatch.setattr(cases, "run", blind)
    problem = cases.check(case, torch.float32, "cpu")
    assert problem is not None and "output: error" in problem


@pytest.mark.parametrize("name", SOME)
def test_however_rows_are_cut(monkeypatch, name):
    """From a program a page to a program a row; and what is not cut is not combined."""
    from retain.kernels.ragged_attention import launch

    attended, combined = [], []
    monkeypatch.setattr(launch, "attend", Counted(launch.attend, attended))
    monkeypatch.setattr(launch, "combine", Counted(launch.combine, combined))
    monkeypatch.setattr(launch, "PARTS", 2)  # so that parts come in several goes
    given = cases.inputs(CASES[name], torch.float32, "cpu")
    exact = ragged_attention(**given)
    times = []
    for programs in (1, 3, 10**6):
        monkeypatch.setattr(tiles, "PROGRAMS", dict.fromkeys(tiles.PROGRAMS, programs))
        combined.clear()
        assert_close(interpreted(given), exact)
        times.append(len(combined))
    # A program a row and block of queries, where rows are whole; more, where some are cut.
    whole, *others = (grid[0] for grid in attended)
    blocks = -(-CASES[name].group * CASES[name].num_queries // tile_of(CASES[name]).m)
    assert whole == len(CASES[name].lengths) * blocks and others[-1] > whole
    assert times == [int(programs > whole) for programs in (whole, *others)]


class Counted:
    """A kernel that says with what grid it is launched."""

    def __init__(self, kernel, seen):
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid):
        self.seen.append(grid)
        return self.kernel[grid]


def tile_of(case):
    block = backend.block_of(max(case.width, case.values_wide))
    return tiles.tile(case.group * case.num_queries, torch.float32, block, 90)


@pytest.mark.parametrize("name", SOME)
def test_neither_another_run_nor_unknown_pages_change_a_bit(name):
    given = cases.inputs(CASES[name], torch.float32, "cpu")
    for path in ("triton", "reference"):
        with backend.using(path):
            known, again, read = (
                ragged_attention(**{**given, "pages": pages})
                for pages in (given["pages"], given["pages"], None)
            )
        assert torch.equal(known, again) and torch.equal(known, read)


def test_a_store_of_other_strides():
    """Keys that lie value by value, of which nothing may be copied: the kernel takes any strides."""
    case = CASES["decode"]
    given = cases.inputs(case, torch.float32, "cpu")
    want = interpreted(given)
    turned = {name: given[name].T.contiguous().T for name in ("keys_CD", "values_CD")}
    seen = given["seen_RS"].expand(-1, 2)[:, :1]
    queries = given["queries_BQSD"].transpose(0, 3).contiguous().transpose(0, 3)
    assert turned["keys_CD"].stride(0) == 1 and queries.stride(3) != 1
    with Operations() as operations:
        got = interpreted({**given, **turned, "seen_RS": seen, "queries_BQSD": queries})
    assert torch.equal(got, want)
    assert not {name for name in operations.seen if "copy" in name or "clone" in name}


class Operations(TorchDispatchMode):
    """The operators that are called inside, except by Triton's interpreter, which looks at all memory."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not any("triton" in Path(frame.filename).parts for frame in traceback.extract_stack()):
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::_to_copy", "aten::copy_"}


@pytest.mark.parametrize("name", ["decode, all options", "chunk of 40"])
def test_a_known_layout_is_cut_once_and_never_waited_for(name):
    given = cases.inputs(CASES[name], torch.float32, "cpu")
    interpreted(given)
    planned = {**given["pages"].planned}
    assert planned
    with Operations() as operations:
        interpreted(given)
    assert operations.seen and not WAITS & {*operations.seen}
    assert all(given["pages"].planned[entries] is work for entries, work in planned.items())
    assert len(given["pages"].planned) == len(planned)


def test_a_layout_keeps_the_way_of_cutting_it_that_is_used_and_forgets_others():
    """Decoding goes on between chunks of ever new sizes."""
    pages = Pages.of([3, 1], "cpu")
    decoding = pages.work(64)
    for entries in range(128, 64 * 40, 64):
        pages.work(entries)
        assert pages.work(64) is decoding
    assert len(pages.planned) < 16


@pytest.mark.parametrize("rooms", [[64, 0, 640, 128], [1], [0, 0], [65] * 7, [8192] + [0] * 20])
@pytest.mark.parametrize("entries", [64, 128, 10**6])
def test_work_covers_every_entry_once(rooms, entries):
    work = work_of(rooms, entries, "cpu")
    row_I, first_I, slot_I = work.items_3I.tolist()
    covered = {row: [] for row in range(len(rooms))}
    slots, sizes = {}, []
    for row, first, slot in zip(row_I, first_I, slot_I, strict=True):
        stop = min(first + entries, rooms[row])
        covered[row] += range(first, stop)
        sizes.append(stop - first)
        slots.setdefault(row, []).append((first, slot))
    assert all(sorted(covered[row]) == [*range(room)] for row, room in enumerate(rooms))
    assert sizes == sorted(sizes, reverse=True)
    assert set(slots) == set(range(len(rooms)))  # an empty row has an item too, which writes its zeros
    cut = {row: sorted(items) for row, items in slots.items() if len(items) > 1}
    assert work.cut_2X[0].tolist() == sorted(cut)
    assert [slot for row in sorted(cut) for _, slot in cut[row]] == [*range(work.num_slots)]
    assert work.cut_2X[1].tolist() == [cut[row][0][1] for row in sorted(cut)]
    assert all(items == [(0, -1)] for row, items in slots.items() if row not in cut)
    assert work.items_3I.dtype == work.cut_2X.dtype == torch.int32


@pytest.mark.parametrize(
    "lengths", [cases.unequal(64, 26_214, 10), (131_072, *[0] * 63), (3,) * 64, (10**6,)]
)
@pytest.mark.parametrize("num_rows", [4, 64, 1000, 8192])
def test_parts_are_bounded_and_programs_enough(monkeypatch, lengths, num_rows):
    """The README's bound, and its balance: on 132 multiprocessors."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda device, interpreted: 132)
    cut = tiles.tile(num_rows, torch.bfloat16, 128, 90)
    blocks = -(-num_rows // cut.m)
    rooms = [64 * -(-length // 64) for length in lengths]
    entries = tiles.item_entries(sum(rooms), blocks, cut, torch.device("cpu"))
    work = work_of(rooms, entries, "cpu")
    wanted = tiles.PROGRAMS[cut.m] * 132
    assert work.num_slots * num_rows <= 2 * wanted * cut.m
    # No program has more than its share, rounded up to whole pages.
    assert entries <= sum(rooms) * blocks / wanted + 64
    assert work.num_items * blocks <= wanted + len(rooms) * blocks


def test_where_it_runs():
    half, wide = torch.zeros(64, 64, dtype=torch.float16), torch.zeros(64, 512)
    assert path_of(half, half) == "reference"
    with backend.using("triton"):
        assert path_of(half, half) == "triton"
    given = cases.inputs(CASES["decode"], torch.float32, "cpu")
    with backend.using("triton"):
        with pytest.raises(ValueError, match="was forced, but queries.* precisions .float16, float32."):
            ragged_attention(**{**given, "queries_BQSD": given["queries_BQSD"].half()})
        with pytest.raises(ValueError, match="heads are 512 wide, which is more than 256"):
            queries, store = torch.zeros(1, 1, 1, 512), {"keys_CD": wide, "values_CD": wide}
            one = {**given, "seen_RS": torch.ones(1, 1, dtype=torch.int64), "pages": None}
            one |= {"offsets_R1": torch.tensor([0, 64]), "lengths_R": torch.ones(1, dtype=torch.int32)}
            ragged_attention(**{**one, **store, "queries_BQSD": queries})


@pytest.mark.parametrize("path", ["triton", "reference"])
def test_no_gradient_is_lost_silently(path):
    """A forward outside of no_grad runs; only who asks for its gradient is told that there is none."""
    given = cases.inputs(CASES["decode"], torch.float32, "cpu")
    queries = given["queries_BQSD"].clone().requires_grad_()
    with backend.using(path):
        want = ragged_attention(**given)
        out = ragged_attention(**{**given, "queries_BQSD": queries})
    assert torch.equal(out, want) and out.requires_grad
    with pytest.raises(ValueError, match="has no gradient.* run the model under torch.no_grad"):
        out.sum().backward()


def test_what_cannot_be_is_refused():
    given = cases.inputs(CASES["chunk of 40"], torch.float32, "cpu")
    room, device = given["keys_CD"].shape[0], "cpu"
    wide = {"positions_C": torch.zeros(room, dtype=torch.int32), "window": 4}
    wide |= {"query_positions_BS": torch.zeros(1, 40, dtype=torch.int64)}
    for change, text in [
        ({"sinks_Q": torch.zeros(1)}, r"sinks are \(1,\), where \(4,\) are needed"),
        (
            {"pages": Pages.of([1], device)},
            f"a layout of 1 rows with 64 entries for 2 rows and a store of {room}",
        ),
        ({"seen_RS": given["seen_RS"][:, :3]}, r"seen is \(2, 3\) for 2 rows and 40 queries"),
        ({"offsets_R1": given["offsets_R1"][:-1]}, r"offsets are \(2,\) for 2 rows, which need \[3\]"),
        ({"keys_CD": given["keys_CD"][:, :9]}, "keys are 9 wide and queries 64"),
        ({"lengths_R": given["lengths_R"].repeat(4)}, "8 rows are not 1 sequences x a number of KV heads"),
        ({"window": 4}, "a window of 4 got no positions: pass positions_C and query_positions_BS"),
    ]:
        with pytest.raises(ValueError, match=text):
            ragged_attention(**{**given, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", backend.DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name, dtype):
    case = CASES[name]
    given = cases.inputs(case, dtype, "cuda")
    assert path_of(given["keys_CD"], given["values_CD"]) == "triton"
    assert cases.check(case, dtype, "cuda") is None
    given["with_lse"] = True
    for one, again in zip(ragged_attention(**given), ragged_attention(**given), strict=True):
        assert torch.equal(one, again)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.paged])
def test_a_gpu_is_never_waited_for(name):
    given = cases.inputs(CASES[name], torch.bfloat16, "cuda")
    ragged_attention(**given)  # kernels are compiled
    given["pages"] = Pages.of(given["pages"].counts, "cuda")  # a layout whose rows are still to be cut
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ragged_attention(**given)
    finally:
        torch.cuda.set_sync_debug_mode("default")

"""`ragged_attention`: the definition against loops, the kernel against it; codes; merged stores."""

import math
import traceback
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from retain.kernels import backend
from retain.kernels.codes import decode
from retain.kernels.measure import check
from retain.kernels.ragged_attention import cases, launch, merged, path_of, ragged_attention, reference
from retain.kernels.ragged_attention.cases import CASES, Case
from retain.kernels.ragged_attention.pages import Pages
from retain.kernels.ragged_attention.work import work_of
from tests.close import assert_close
from tests.kernels.device import never_waiting

PATHS = ["triton", "reference"]
# Few rows and many, cut and whole, with and without everything: enough where a test need not take all.
SOME = ("decode, all options", "an empty row and a long one", "padded turn", "chunk of 40, all options")


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
    out, lse = ragged_attention(**given)
    assert out.dtype == lse.dtype == torch.float64
    for actual, wanted in zip((out, lse), loops(CASES[name], given), strict=True):
        assert_close(actual, wanted)


# The interpreter's bfloat16 goes through float32: a few cases show that it does.
KERNEL = [(name, dtype) for name in CASES for dtype in (torch.float32, torch.float16)]
KERNEL += [(name, torch.bfloat16) for name in ("decode", "chunk of 40, all options")]


@pytest.mark.parametrize(("name", "dtype"), KERNEL, ids=str)
def test_the_kernel_is_the_reference(name, dtype):
    with backend.using("triton"):
        assert check(cases, CASES[name], dtype, "cpu") is None
    results = interpreted(cases.inputs(CASES[name], dtype, "cpu"))
    assert [result.dtype for result in results] == [dtype, torch.float32]


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("span", [1, 16, 33])
def test_the_kernel_reads_any_bits_and_spans(bits, span):
    """Also of widths that are no multiple of a byte's codes, of a span, or of the tile."""
    case = Case(1, 2, 2, 2, 21, (5, 70), value_width=33, bits=bits, span=span)
    with backend.using("triton"):
        assert check(cases, case, torch.float32, "cpu") is None


@pytest.mark.parametrize("name", SOME)
def test_however_rows_are_cut(monkeypatch, name):
    """From a program a page to a program a row; and rows that are whole are not combined."""
    attended, combined = [], []
    monkeypatch.setattr(launch, "attend", Counted(launch.attend, attended))
    monkeypatch.setattr(launch, "combine", Counted(launch.combine, combined))
    monkeypatch.setattr(launch, "PARTS", 2)  # so that parts come in several goes
    given = cases.inputs(CASES[name], torch.float32, "cpu")
    exact, times = ragged_attention(**given), []
    for programs in (1, 3, 10**6):
        monkeypatch.setattr(launch, "PROGRAMS", dict.fromkeys(launch.PROGRAMS, programs))
        combined.clear()
        for found, wanted in zip(interpreted(given), exact, strict=True):
            assert_close(found, wanted)
        times.append(len(combined))
    # A program a row and block of queries, where rows are whole; more, where some are cut.
    whole, *others = (grid[0] for grid in attended)
    assert whole % len(CASES[name].lengths) == 0 and others[-1] > whole
    assert times == [int(programs > whole) for programs in (whole, *others)]


class Counted:
    """A kernel whose grids are kept."""

    def __init__(self, kernel, seen):
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid):
        self.seen.append(grid)
        return self.kernel[grid]


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
    assert given["pages"].planned == planned


def test_a_layout_does_not_remember_chunks_of_ever_new_sizes():
    pages = Pages.of([3, 1], "cpu")
    for entries in range(128, 64 * 40, 64):
        assert pages.work(entries) is pages.work(entries)
    assert len(pages.planned) < 16


@pytest.mark.parametrize("rooms", [[64, 0, 640, 128], [1], [0, 0], [65] * 7, [8192] + [0] * 20])
@pytest.mark.parametrize("entries", [64, 128, 10**6])
def test_work_covers_every_entry_once(rooms, entries):
    work = work_of(rooms, entries, "cpu")
    covered = {row: [] for row in range(len(rooms))}
    slots, sizes = {}, []
    for row, first, slot in zip(*work.items_3I.tolist(), strict=True):
        stop = min(first + entries, rooms[row])
        covered[row] += range(first, stop)
        sizes.append(stop - first)
        slots.setdefault(row, []).append((first, slot))
    assert all(sorted(covered[row]) == [*range(room)] for row, room in enumerate(rooms))
    assert sizes == sorted(sizes, reverse=True)
    assert set(slots) == set(range(len(rooms)))  # an empty row has an item too, which writes its zeros
    cut = {row: sorted(items) for row, items in slots.items() if len(items) > 1}
    assert work.cut_2X.tolist() == [sorted(cut), [cut[row][0][1] for row in sorted(cut)]]
    assert [slot for row in sorted(cut) for _, slot in cut[row]] == [*range(work.num_slots)]
    assert all(items == [(0, -1)] for row, items in slots.items() if row not in cut)


@pytest.mark.parametrize("lengths", [cases.unequal(64, 26_214, 10), (131_072, *[0] * 63), (3,) * 64])
@pytest.mark.parametrize("num_rows", [4, 64, 1000, 8192])
def test_parts_are_bounded_and_programs_enough(monkeypatch, lengths, num_rows):
    """On 132 multiprocessors no program has more than its share, rounded up to whole pages."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device, interpreted: 132)
    cut = launch.tile(num_rows, torch.bfloat16, 128, 90)
    blocks, rooms = -(-num_rows // cut.m), [64 * -(-length // 64) for length in lengths]
    entries = launch.item_entries(sum(rooms), blocks, cut, torch.device("cpu"))
    work, wanted = work_of(rooms, entries, "cpu"), launch.PROGRAMS[cut.m] * 132
    assert work.num_slots * num_rows <= 2 * wanted * cut.m
    assert entries <= sum(rooms) * blocks / wanted + 64
    assert work.items_3I.shape[1] * blocks <= wanted + len(rooms) * blocks


def test_where_it_runs():
    half = torch.zeros(64, 64, dtype=torch.float16)
    assert path_of(half, half) == "reference"
    given = cases.inputs(CASES["decode"], torch.float32, "cpu")
    wide = cases.inputs(Case(1, 1, 1, 1, 512, (9,)), torch.float32, "cpu")
    with backend.using("triton"):
        assert path_of(half, half) == "triton"
        with pytest.raises(ValueError, match="was forced, but queries.* precisions .float16, float32."):
            ragged_attention(**{**given, "queries_BQSD": given["queries_BQSD"].half()})
        with pytest.raises(ValueError, match="heads are 512 wide, which is more than 256"):
            ragged_attention(**wide)


@pytest.mark.parametrize("path", PATHS)
def test_no_gradient_is_lost_silently(path):
    """A forward outside of no_grad runs; only who asks for its gradient is told that there is none."""
    given = cases.inputs(CASES["decode"], torch.float32, "cpu")
    queries = given["queries_BQSD"].clone().requires_grad_()
    with backend.using(path):
        want, _ = ragged_attention(**given)
        out, _ = ragged_attention(**{**given, "queries_BQSD": queries})
    assert torch.equal(out, want) and out.requires_grad
    with pytest.raises(ValueError, match="has no gradient.* run the model under torch.no_grad"):
        out.sum().backward()


@pytest.mark.parametrize("few", [0, 10**6], ids=["by rows", "by pages"])
def test_the_reference_never_decodes_a_whole_store(monkeypatch, few):
    monkeypatch.setattr(reference, "FEW", few)
    monkeypatch.setattr(reference, "MAX_LOGITS", 64 * 64)
    given, seen = cases.inputs(CASES["decode, 4 bits"], torch.float32, "cpu"), []
    monkeypatch.setattr(reference, "decode", lambda part, dtype: seen.append(part) or decode(part, dtype))
    ragged_attention(**given)
    assert max(part.shape[0] for part in seen) <= (64 if few else max(CASES["decode, 4 bits"].lengths))


@pytest.mark.parametrize("sinks", [None, [0.5, float("-inf")]], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_queries", [1, 40])
def test_a_query_that_sees_nothing_has_its_sink_alone(num_queries, path, sinks):
    given = cases.inputs(Case(1, 1, 2, num_queries, 32, (0,)), torch.float32, "cpu")
    if sinks is not None:
        given["sinks_Q"] = torch.tensor(sinks)
    with backend.using(path):
        out, lse = ragged_attention(**given)
    wanted = torch.tensor(sinks or [float("-inf")] * 2)
    assert not out.any() and torch.equal(lse, wanted[None, :, None].expand_as(lse))


@pytest.mark.parametrize("sinks", [None, [0.5, -1.0, 3.0, 0.0]], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("path", PATHS)
def test_merged_stores_are_one_softmax_over_all_entries(path, sinks):
    """Entries of two rows that lie in numbers, in 4 bits and in 2; the second row has none in the middle."""
    calls = []
    for seed, (bits, lengths) in enumerate(((0, (40, 3)), (4, (70, 0)), (2, (90, 65)))):
        case = Case(1, 2, 2, 2, 20, lengths, value_width=24, bits=bits, span=16)
        given = cases.inputs(case, torch.float32, "cpu", seed)
        given["seen_RS"] = torch.tensor(lengths)[:, None].expand(-1, 2)
        calls.append({**given, "queries_BQSD": (calls or [given])[0]["queries_BQSD"]})
    with backend.using(path):
        outs, lses = zip(*(ragged_attention(**given) for given in calls), strict=True)
    out = merged(outs, lses, None if sinks is None else torch.tensor(sinks))
    for row in range(2):
        parts = []
        for given in calls:
            start = int(given["offsets_R1"][row])
            held = slice(start, start + int(given["seen_RS"][row, 0]))
            stores = (cases.numbers_of(given[name], torch.float64) for name in ("keys_CD", "values_CD"))
            parts.append([store[held] for store in stores])
        keys, values = (torch.cat(rows) for rows in zip(*parts, strict=True))
        heads = slice(2 * row, 2 * row + 2)
        weights = (calls[0]["scaling"] * calls[0]["queries_BQSD"][0, heads].double() @ keys.T).exp()
        total = weights.sum(-1)
        if sinks is not None:
            total = total + torch.tensor(sinks[heads]).double().exp()[:, None]
        assert_close(out[0, heads], weights @ values / total[..., None])


def test_merged_in_half_precision_is_added_up_in_float32():
    draw = torch.Generator().manual_seed(0)
    outs = [torch.randn(1, 2, 3, 8, generator=draw).bfloat16() for _ in range(40)]
    lses = [torch.randn(1, 2, 3, generator=draw) for _ in range(40)]
    exact = merged([out.double() for out in outs], [lse.double() for lse in lses])
    assert torch.equal(merged(outs, lses), exact.bfloat16())


def test_merged_of_nothing_seen_is_zeros_and_a_store_of_nothing_changes_nothing():
    nothing = (torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1), float("-inf")))
    for sinks in (None, torch.zeros(2), torch.full((2,), float("-inf"))):
        assert not merged([nothing[0]] * 2, [nothing[1]] * 2, sinks).any()
    some = (torch.ones(1, 2, 1, 4), torch.zeros(1, 2, 1))
    assert torch.equal(merged([nothing[0], some[0]], [nothing[1], some[1]]), some[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", backend.DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name, dtype):
    given = cases.inputs(CASES[name], dtype, "cuda")
    assert path_of(given["keys_CD"], given["values_CD"]) == "triton"
    assert check(cases, CASES[name], dtype, "cuda") is None
    for one, again in zip(ragged_attention(**given), ragged_attention(**given), strict=True):
        assert torch.equal(one, again)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_is_never_waited_for(name):
    given = cases.inputs(CASES[name], torch.bfloat16, "cuda")
    ragged_attention(**given)  # kernels are compiled
    given["pages"] = Pages.of(given["pages"].counts, "cuda")  # a layout whose rows are still to be cut
    torch.cuda.synchronize()
    with never_waiting():
        ragged_attention(**given)

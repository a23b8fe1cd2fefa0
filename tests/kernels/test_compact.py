import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from retain.kernels import backend
from retain.kernels.compact import append_, compact_, move_, planned, reference
from retain.kernels.compact.cases import CASES, SPEED, Case, check, cost, inputs, of_width, rivals, run
from tests.close import error
from tests.kernels.device import DEVICE

PATHS = ["reference", "triton"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
COMPACTING = [name for name, case in CASES.items() if case.kept is not None]
APPENDING = [name for name, case in CASES.items() if case.kept is None]
# Whatever an entry is made of.
KINDS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
KINDS += [*DTYPES, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.uint16]


def slots(column):
    """The bytes of every slot of a column, one list of numbers each."""
    words = column.detach().cpu().contiguous()
    return words.view(torch.uint8).view(column.shape[0], -1).tolist() if words.numel() else []


def packed(column, keep, offsets, lengths):
    """A column's slots as they must be afterwards, and how many entries each row keeps."""
    want, kept, mask = slots(column), [], iter(keep.tolist())
    nothing = [0] * len(want[0]) if want else []
    for start, length in zip(offsets.tolist(), lengths.tolist(), strict=False):
        stay = [slot for slot in want[start : start + length] if next(mask)]
        want[start : start + length] = stay + [nothing] * (length - len(stay))
        kept.append(len(stay))
    return want, kept


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", COMPACTING)
def test_rows_are_packed_and_nothing_else_changes(name, dtype, path):
    kwargs = inputs(CASES[name], dtype, DEVICE, seed=1)
    columns, lengths = kwargs["columns"], kwargs["lengths_R"].clone()
    around = [column._base.clone() for column in columns if column._base is not None]
    want = [packed(column, kwargs["keep_N"], kwargs["offsets_R1"], lengths) for column in columns]
    with backend.using(path):
        kept = compact_(**kwargs)
    assert kept.dtype == torch.int32 and torch.equal(kwargs["lengths_R"], lengths)
    for column, (slots_wanted, kept_wanted) in zip(columns, want, strict=True):
        assert slots(column) == slots_wanted and kept.tolist() == kept_wanted
    wider = [column for column in columns if column._base is not None]
    for column, before in zip(wider, around, strict=True):
        assert torch.equal(column._base[..., column.shape[-1] :], before[..., column.shape[-1] :])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", APPENDING)
def test_new_entries_lie_behind_each_row_and_nothing_else_changes(name, dtype, path):
    case, kwargs = CASES[name], inputs(CASES[name], dtype, DEVICE, seed=1)
    columns, offsets, valid = kwargs["columns"], kwargs["offsets_R1"].tolist(), kwargs["valid_BS"]
    want, sees = [slots(column) for column in columns], []
    new = [slots(one.flatten(0, 2)) for one in kwargs["new"]]
    for row, length in enumerate(case.lengths):
        sees.append([0] * case.tokens)
        for s in [*range(case.tokens)] * case.times:
            real = valid is None or bool(valid[row // (len(case.lengths) // case.batch), s])
            for column, entries in zip(want, new, strict=True):
                if real:
                    column[offsets[row] + length] = entries[row * case.tokens + s]
            length += real
            sees[-1][s] = length if real else 0
    with backend.using(path):
        seen = run(case, kwargs)
    assert seen.dtype == torch.int64 and seen.tolist() == sees
    assert kwargs["lengths_R"].dtype == torch.int32
    members = len(case.lengths) // case.batch
    added = case.tokens if valid is None else valid.sum(-1).repeat_interleave(members)
    assert torch.equal(kwargs["lengths_R"], (kwargs["start_R"] + case.times * added).int())
    assert [slots(column) for column in columns] == want


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_are_right_on_a_gpu(name, dtype):
    assert check(CASES[name], dtype, torch.device("cuda")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["longer than a block", "D = 128, side columns", "append many, padded"])
def test_results_do_not_change_from_run_to_run_on_a_gpu(name):
    runs = []
    for _ in range(5):
        kwargs = inputs(CASES[name], torch.bfloat16, "cuda")
        result = run(CASES[name], kwargs)
        runs.append([result.tolist(), *(slots(column) for column in kwargs["columns"])])
    assert all(one == runs[0] for one in runs[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rows of any length", "append one", "append many, padded"])
def test_nothing_waits_for_the_device(name):
    kwargs = inputs(CASES[name], torch.bfloat16, "cuda")
    run(CASES[name], kwargs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(CASES[name], kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CASES)
def test_a_benchmark_checks_what_it_times(name):
    assert check(CASES[name], torch.float16, DEVICE) is None
    kwargs = inputs(CASES[name], torch.float32, DEVICE)
    # A rival does the same work; what of it is comparable is equal.
    once = inputs(CASES[name], torch.float32, DEVICE)
    run(CASES[name], once)
    next(iter(rivals(CASES[name], kwargs).values()))()
    assert [slots(x) for x in kwargs["columns"]] == [slots(x) for x in once["columns"]]


def test_the_least_work_is_what_moves():
    lengths = (4, 3)
    columns = (((2,), torch.float32), ((), torch.int16))
    late = Case(lengths=lengths, columns=columns, kept="late", batch=1)
    # One hole: the first row's first entry; three entries move, one slot is zeroed; the mask is read.
    assert cost(late, torch.float32).bytes == (2 * 3 + 1) * 10 + 7
    assert cost(Case(lengths=lengths, columns=columns, kept=1.0), torch.float32).bytes == 7
    new = Case(lengths=lengths, columns=columns, kept=None, tokens=5, batch=1, slack=5)
    assert cost(new, torch.float32).bytes == 2 * 2 * 5 * 10
    assert SPEED["cuda"]["64 rows of 26K, half stays"].lengths[-1] == pytest.approx(
        10 * SPEED["cuda"]["64 rows of 26K, half stays"].lengths[0], rel=0.01
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_bit_of_every_type_comes_through(kind, path):
    """Also of what is not a number, which arithmetic might change."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    case = Case(lengths=(9, 0, 40), columns=(), batch=1, slack=2, kept=0.5)
    kwargs = inputs(case, torch.float32, DEVICE)
    for shape in ((), (1,), (3,), (2, 4)):
        size = (kwargs["offsets_R1"][-1], *shape)
        most = 2 if kind == torch.bool else 256
        whole = torch.randint(0, most, (*size, kind.itemsize), generator=generator, device=DEVICE)
        kwargs["columns"].append(whole.to(torch.uint8).view(kind).view(size))
    want = [
        packed(x, *(kwargs[name] for name in ("keep_N", "offsets_R1", "lengths_R")))
        for x in kwargs["columns"]
    ]
    with backend.using(path):
        compact_(**kwargs)
    assert [slots(column) for column in kwargs["columns"]] == [slots_wanted for slots_wanted, _ in want]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_storage_that_begins_anywhere(offset, path):
    """Words are narrower where a column does not begin on a whole one."""
    case = Case(lengths=(70, 30), columns=(), batch=1, slack=1)
    kwargs, generator = inputs(case, torch.float32, DEVICE), torch.Generator(DEVICE).manual_seed(offset)
    C = int(kwargs["offsets_R1"][-1])
    flat = torch.randn(C * 8 + offset, generator=generator, device=DEVICE).half()
    kwargs["columns"] = [flat[offset:].view(C, 8)]
    assert reference.as_words(kwargs["columns"][0]).element_size() == {1: 2, 2: 4, 3: 2}[offset]
    keep, offsets, lengths = (kwargs[name] for name in ("keep_N", "offsets_R1", "lengths_R"))
    want, kept = packed(kwargs["columns"][0], keep, offsets, lengths)
    with backend.using(path):
        lengths.copy_(compact_(**kwargs))
        assert slots(kwargs["columns"][0]) == want
        new = torch.randn(8 + offset, generator=generator, device=DEVICE)[offset:]
        new = new.view(1, 1, 1, 8).expand(1, 2, 1, 8)
        append_(kwargs["columns"], [new], offsets, lengths)
    for row in range(2):
        assert torch.equal(kwargs["columns"][0][int(offsets[row]) + kept[row]], new[0, 0, 0].half())
        assert lengths[row] == kept[row] + 1


@pytest.mark.parametrize("path", PATHS)
def test_new_entries_are_converted_and_may_be_strided(path):
    columns = [torch.zeros(16, 6, device=DEVICE), torch.zeros(16, dtype=torch.int32, device=DEVICE)]
    # An entry's numbers lie apart.
    new = torch.randn(1, 2, 3, 6, device=DEVICE).half().mT.contiguous().mT
    positions = torch.arange(3, device=DEVICE)[None, None].expand(1, 2, 3)
    lengths = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    with backend.using(path):
        append_(columns, [new, positions], torch.tensor([0, 8, 16], device=DEVICE), lengths)
    assert torch.equal(columns[0][1:4], new[0, 0].float())
    assert torch.equal(columns[0][10:13], new[0, 1].float())
    assert columns[1].tolist() == [0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0]


WHOLE = [torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("held", [*WHOLE, torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("came", [*WHOLE, torch.uint8], ids=str)
def test_whole_numbers_are_converted_as_pytorch_does(came, held, path):
    """Also what does not fit, and signs: a kernel does it as it writes."""
    numbers = torch.tensor([-1, -(2**7), 2**7, 2**15 + 3, -(2**31), 2**40 + 5, 0, 9], device=DEVICE).to(came)
    for shape in ((), (2,)):
        new = numbers.view(2, 1, -1, *shape)
        column, lengths = (
            torch.zeros(64, *shape, dtype=held, device=DEVICE),
            torch.zeros(2, dtype=torch.int32, device=DEVICE),
        )
        with backend.using(path):
            append_([column], [new], torch.tensor([0, 32, 64], device=DEVICE), lengths)
        for row in range(2):
            assert torch.equal(column[32 * row :][: new.shape[2]], new[row, 0].to(held))
        assert int(column.count_nonzero()) == int(new.to(held).count_nonzero())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [*KINDS, torch.complex128], ids=str)
def test_every_bit_of_what_is_new_comes_through(kind, path):
    generator = torch.Generator(DEVICE).manual_seed(4)
    most = 2 if kind == torch.bool else 256
    for shape in ((), (1,), (3,), (2, 4)):
        new = torch.randint(0, most, (2, 1, 5, *shape, kind.itemsize), generator=generator, device=DEVICE)
        new = new.to(torch.uint8).view(kind).view(2, 1, 5, *shape)
        column = torch.zeros(64, *shape, dtype=kind, device=DEVICE)
        lengths = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        with backend.using(path):
            append_([column], [new], torch.tensor([0, 32, 64], device=DEVICE), lengths)
        for row in range(2):
            assert slots(column)[32 * row :][:5] == slots(new[row, 0])


class Operations(TorchDispatchMode):
    """Names of PyTorch's operations inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class NoLaunch:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def test_a_token_is_appended_with_few_operations_around_the_launch(monkeypatch):
    """Each takes longer on the host than the kernel does on the device: nothing is copied or converted, and
    keys and values are seen as words."""
    monkeypatch.setattr("retain.kernels.compact.kernel._append", NoLaunch())
    case = Case(lengths=(5, 9), columns=of_width(64), kept=None, tokens=1, slack=1, batch=1)
    kwargs = inputs(case, torch.bfloat16, DEVICE)
    kwargs["new"][2] = torch.arange(1, device=DEVICE)[None, None].expand(1, 2, 1)  # positions of 8 bytes
    del kwargs["start_R"]
    with backend.using("triton"), Operations() as seen:
        append_(**kwargs)
    # What is returned is filled under deterministic algorithms, and a view is detached inside such a mode.
    names = [name for name in seen.names if "fill" not in name and name != "aten::detach"]
    assert names == ["aten::empty.memory_format", *["aten::view.dtype"] * 4]


def test_columns_whose_entries_lie_apart_take_the_reference():
    kwargs = inputs(Case(lengths=(5, 9), columns=(), batch=1), torch.float32, DEVICE)
    column = torch.randn(3, int(kwargs["offsets_R1"][-1]), device=DEVICE).T
    rows = (kwargs["keep_N"], kwargs["offsets_R1"], kwargs["lengths_R"])
    want, _ = packed(column, *rows)
    with (
        backend.using("triton"),
        pytest.raises(ValueError, match=r"\(128, 3\) with strides \(1, 128\) scatters"),
    ):
        compact_([column], *rows)
    new = [torch.randn(1, 2, 1, 3, device=DEVICE)]
    with backend.using("triton"), pytest.raises(ValueError, match=r"append: .* but a column .* scatters"):
        append_([column], new, *rows[1:])
    compact_([column], *rows)
    assert slots(column) == want
    append_([column], new, *rows[1:])
    assert torch.equal(column[5], new[0][0, 0, 0]) and kwargs["lengths_R"].tolist() == [6, 10]


@pytest.mark.parametrize("path", PATHS)
def test_a_plan_changes_nothing_until_it_is_carried_out(path):
    kwargs = inputs(CASES["rows of any length"], torch.float32, DEVICE)
    before = [column.clone() for column in kwargs["columns"]]
    with backend.using(path):
        plan = planned(**kwargs)
    for column, same in zip(kwargs["columns"], before, strict=True):
        assert torch.equal(column, same)
    move_(plan)  # by the path that it was made for
    assert any(error(x, y) > 0 for x, y in zip(kwargs["columns"], before, strict=True))


def test_what_a_mask_lacks_counts_as_evicted_in_the_kernel():
    """It does not wait for the device to compare lengths, but nothing outside the mask is read."""
    kwargs = inputs(Case(lengths=(6, 5), columns=of_width(4), batch=1, kept=1.0), torch.float32, DEVICE)
    whole = kwargs["keep_N"] & (torch.arange(11, device=DEVICE) < 8)
    want = [packed(x, whole, kwargs["offsets_R1"], kwargs["lengths_R"])[0] for x in kwargs["columns"]]
    kwargs["keep_N"] = kwargs["keep_N"][:8]
    with backend.using("triton"):
        assert compact_(**kwargs).tolist() == [6, 2]
    assert [slots(column) for column in kwargs["columns"]] == want
    with (
        backend.using("reference"),
        pytest.raises(ValueError, match="8 elements, but the rows hold 11 entries"),
    ):
        compact_(**kwargs)


@pytest.mark.parametrize("path", PATHS)
def test_no_rows_at_all(path):
    columns = [torch.zeros(0, 4, device=DEVICE), torch.zeros(0, 3, 0, device=DEVICE)]
    rows = (
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
        torch.zeros(0, dtype=torch.int32, device=DEVICE),
    )
    with backend.using(path):
        assert compact_(columns, torch.zeros(0, dtype=torch.bool, device=DEVICE), *rows).shape == (0,)
        new = [torch.zeros(0, 2, 3, 4, device=DEVICE), torch.zeros(0, 2, 3, 3, 0, device=DEVICE)]
        assert append_(columns, new, *rows).shape == (0, 3)


def test_they_compile_as_one_operation_each():
    case = CASES["append many, padded"]
    kwargs, same = (inputs(case, torch.float32, DEVICE) for _ in range(2))
    keep = torch.rand(sum(case.lengths), device=DEVICE) < 0.5

    def evict_and_append(columns, new, offsets, lengths, valid):
        lengths = compact_(columns, keep, offsets, lengths) + 0
        return append_([column.view_as(column) for column in columns], new, offsets, lengths, valid), lengths

    results = []
    for function, given in (
        (torch.compile(evict_and_append, fullgraph=True, backend="aot_eager"), kwargs),
        (evict_and_append, same),
    ):
        names = ("columns", "new", "offsets_R1", "lengths_R", "valid_BS")
        results.append([*function(*(given[name] for name in names)), *given["columns"]])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["rows of any length", "append many, padded"])
def test_they_are_registered_as_what_they_do(name):
    case = CASES[name]
    kwargs = inputs(case, torch.float32, DEVICE)
    if case.kept is None:
        operation, names = (
            torch.ops.retain.append_.default,
            ("columns", "new", "offsets_R1", "lengths_R", "valid_BS"),
        )
    else:
        operation, names = torch.ops.retain.compact_.default, ("columns", "keep_N", "offsets_R1", "lengths_R")
    torch.library.opcheck(operation, tuple(kwargs[argument] for argument in names))


def test_refusals():
    offsets, lengths = torch.tensor([0, 4, 8]), torch.tensor([2, 3], dtype=torch.int32)
    column, keep = torch.zeros(8, 3), torch.ones(5, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=r"lengths torch.int64 \(2,\) .* pass int32 \[R\] and int64 \[R \+ 1\]"
    ):
        compact_([column], keep, offsets, lengths.long())
    with pytest.raises(ValueError, match=r"offsets torch.int64 \(2,\)"):
        compact_([column], keep, offsets[:2], lengths)
    with pytest.raises(ValueError, match=r"columns have shapes \[\(8, 3\), \(7,\)\]: pass at least one"):
        compact_([column, torch.zeros(7)], keep, offsets, lengths)
    with pytest.raises(ValueError, match=r"columns have shapes \[\]"):
        append_([], [], offsets, lengths)
    with pytest.raises(ValueError, match=r"torch.float32 \(5,\): pass a bool tensor"):
        compact_([column], keep.float(), offsets, lengths)
    for new in ([], [torch.zeros(1, 2, 1, 4)], [torch.zeros(2, 2, 1, 3)], [torch.zeros(2, 3)]):
        with pytest.raises(ValueError, match=r"2 rows of columns \[\(8, 3\)\]: pass \[B, H, S, ...\]"):
            append_([column], new, offsets, lengths)
    with pytest.raises(ValueError, match=r"validity is torch.bool \(1, 2\), but 1 new tokens of 1 sequences"):
        append_([column], [torch.zeros(1, 2, 1, 3)], offsets, lengths, torch.ones(1, 2, dtype=torch.bool))
    assert not column.any() and lengths.tolist() == [2, 3]


def test_tensors_on_several_devices_are_refused():
    offsets, lengths = torch.tensor([0, 4, 8]), torch.tensor([2, 3], dtype=torch.int32)
    column, keep, new = torch.zeros(8, 3), torch.ones(5, dtype=torch.bool), torch.zeros(1, 2, 1, 3)
    on_both = "the tensors lie on cpu, meta; move them to one device"
    for given in ([column.to("meta")], keep, offsets), ([column], keep.to("meta"), offsets):
        with pytest.raises(ValueError, match=f"compact: {on_both}"):
            compact_(*given, lengths)
    for given in (
        ([column.to("meta")], [new], offsets, lengths),
        ([column], [new.to("meta")], offsets, lengths),
        ([column], [new], offsets.to("meta"), lengths),
        ([column], [new], offsets, lengths, torch.ones(1, 1, dtype=torch.bool, device="meta")),
    ):
        with pytest.raises(ValueError, match=f"append: {on_both}"):
            append_(*given)
    assert not column.any() and lengths.tolist() == [2, 3]


def test_every_tile_is_built():
    from retain.kernels.compact import kernel

    built = kernel.builds()
    moves = {(x.constants["BLOCK_N"], x.constants["BLOCK_W"], x.num_warps) for x in built if "move" in x.name}
    put = {
        (int(x.signature[f"{name}_ptr"][2:]) // 8, x.constants[f"{name.upper()}_BLOCK"])
        for x in built
        for name in "abc"
        if x.name.startswith(f"append {kernel.TOKENS}") and x.constants[f"{name.upper()}_WIDTH"]
    }
    for size in (8, 4, 2, 1):
        for width in range(1, 300):
            tile = kernel.tile("move", width, size)
            assert (tile.entries, tile.words, tile.num_warps) in moves
            assert (size, kernel.tile("append", width, size).words) in put

import pytest
import torch

from retain.kernels import backend
from retain.kernels.compact import append_, cases, compact_, move_, planned, reference
from retain.kernels.compact.cases import (
    CASES,
    SPEED,
    Case,
    bits,
    check,
    cost,
    inputs,
    of_width,
    plain,
    rivals,
    run,
)
from tests.kernels.device import DEVICE

PATHS = ["reference", "triton"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Types of an entry's numbers.
KINDS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
KINDS += [*DTYPES, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.uint16]
NEW = ("columns", "new", "offsets_R1", "lengths_R", "valid_BS")
OLD = ("columns", "keep_N", "offsets_R1", "lengths_R")


def assert_bits(columns, want):
    for column, wanted in zip(columns, want, strict=True):
        assert torch.equal(bits(column), bits(wanted))


def random_bits(shape, kind, seed):
    """Every bit pattern, also NaNs, which arithmetic might change."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    most = 2 if kind == torch.bool else 256
    drawn = torch.randint(0, most, (*shape, kind.itemsize), generator=generator, device=DEVICE)
    return drawn.to(torch.uint8).view(kind).view(shape)


def two_rows():
    """Offsets and lengths of two empty rows of 32 slots."""
    return torch.tensor([0, 32, 64], device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_columns_lengths_and_counts_are_those_of_plain_loops(name, dtype, path):
    with backend.using(path):
        assert check(CASES[name], dtype, DEVICE, seed=1) is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["strided", "append many", "append a few, padded", "rows of any length"])
def test_nothing_beside_the_columns_changes(name, path):
    case, kwargs = CASES[name], inputs(CASES[name], torch.float16, DEVICE, seed=1)
    wide = [column for column in kwargs["columns"] if column._base is not None]
    around, lengths = [column._base.clone() for column in wide], kwargs["lengths_R"].clone()
    with backend.using(path):
        result = run(case, kwargs)
    assert kwargs["lengths_R"].dtype == torch.int32
    assert result.dtype == (torch.int64 if case.kept is None else torch.int32)
    assert case.kept is None or torch.equal(kwargs["lengths_R"], lengths)
    assert any(column._base.shape != column.shape for column in wide) == case.inner
    for column, before in zip(wide, around, strict=True):
        assert torch.equal(column._base[..., column.shape[-1] :], before[..., column.shape[-1] :])


@pytest.mark.parametrize("name", ["rows of any length", "append one", "append many, padded"])
def test_a_check_sees_what_is_wrong(name, monkeypatch):
    def changed(case, kwargs):
        found = run(case, kwargs)
        bits(kwargs["columns"][-1])[3] ^= 1
        return found

    assert check(CASES[name], torch.float32, DEVICE) is None
    monkeypatch.setattr(cases, "run", changed)
    assert "bytes differ" in check(CASES[name], torch.float32, DEVICE)
    monkeypatch.setattr(cases, "run", lambda case, kwargs: run(case, kwargs) + 1)
    assert check(CASES[name], torch.float32, DEVICE).endswith("differ")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_are_right_on_a_gpu(name, dtype):
    assert check(CASES[name], dtype, torch.device("cuda")) is None


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
def test_a_rival_does_the_same_work(name):
    kwargs, own = (inputs(CASES[name], torch.float32, DEVICE) for _ in range(2))
    run(CASES[name], own)
    next(iter(rivals(CASES[name], kwargs).values()))()
    assert_bits(kwargs["columns"], own["columns"])


def test_the_least_work_is_what_moves():
    lengths = (4, 3)
    columns = (((2,), torch.float32), ((), torch.int16))
    late = Case(lengths=lengths, columns=columns, kept="late", batch=1)
    # One hole: the first row's first entry; three entries move, one slot is zeroed; the mask is read.
    assert cost(late, torch.float32).bytes == (2 * 3 + 1) * 10 + 7
    assert cost(Case(lengths=lengths, columns=columns, kept=1.0), torch.float32).bytes == 7
    new = Case(lengths=lengths, columns=columns, kept=None, tokens=5, batch=1, slack=5)
    assert cost(new, torch.float32).bytes == 2 * 2 * 5 * 10
    spread = SPEED["cuda"]["64 rows of 26K, half stays"].lengths
    assert spread[-1] == pytest.approx(10 * spread[0], rel=0.01)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [*KINDS, torch.complex128], ids=str)
def test_every_bit_of_every_type_comes_through(kind, path):
    case = Case(lengths=(9, 0, 40), columns=(), batch=1, slack=2, kept=0.5)
    kwargs = inputs(case, torch.float32, DEVICE)
    for shape in ((), (1,), (3,), (2, 4)):
        kwargs["columns"].append(random_bits((int(kwargs["offsets_R1"][-1]), *shape), kind, seed=3))
        new = random_bits((2, 1, 5, *shape), kind, seed=4)
        column = torch.zeros(64, *shape, dtype=kind, device=DEVICE)
        with backend.using(path):
            append_([column], [new], *two_rows())
        assert_bits([column[:5], column[32:37]], [new[0, 0], new[1, 0]])
    want, _, _ = plain(case, kwargs)
    with backend.using(path):
        compact_(**kwargs)
    assert_bits(kwargs["columns"], want)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_storage_that_begins_anywhere(offset, path):
    """Words are narrower where a column does not begin on a whole one."""
    case = Case(lengths=(70, 30), columns=(), batch=1, slack=1)
    kwargs, generator = inputs(case, torch.float32, DEVICE), torch.Generator(DEVICE).manual_seed(offset)
    C, offsets, lengths = int(kwargs["offsets_R1"][-1]), kwargs["offsets_R1"], kwargs["lengths_R"]
    flat = torch.randn(C * 8 + offset, generator=generator, device=DEVICE).half()
    kwargs["columns"] = [flat[offset:].view(C, 8)]
    assert reference.as_words(kwargs["columns"][0]).element_size() == {1: 2, 2: 4, 3: 2}[offset]
    want, kept, _ = plain(case, kwargs)
    with backend.using(path):
        lengths.copy_(compact_(**kwargs))
        assert_bits(kwargs["columns"], want)
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
    """Also where they do not fit, and signs: a kernel does it as it writes."""
    numbers = torch.tensor([-1, -(2**7), 2**7, 2**15 + 3, -(2**31), 2**40 + 5, 0, 9], device=DEVICE).to(came)
    for shape in ((), (2,)):
        new, column = numbers.view(2, 1, -1, *shape), torch.zeros(64, *shape, dtype=held, device=DEVICE)
        with backend.using(path):
            append_([column], [new], *two_rows())
        for row in range(2):
            assert torch.equal(column[32 * row :][: new.shape[2]], new[row, 0].to(held))
        assert int(column.count_nonzero()) == int(new.to(held).count_nonzero())


def test_columns_whose_entries_lie_apart_take_the_reference():
    case = Case(lengths=(5, 9), columns=(), batch=1)
    kwargs = inputs(case, torch.float32, DEVICE)
    column = torch.randn(3, int(kwargs["offsets_R1"][-1]), device=DEVICE).T
    rows, new = [kwargs[name] for name in OLD[1:]], [torch.randn(1, 2, 1, 3, device=DEVICE)]
    want, _, _ = plain(case, {**kwargs, "columns": [column]})
    with backend.using("triton"):
        with pytest.raises(ValueError, match=r"\(128, 3\) with strides \(1, 128\) scatters"):
            compact_([column], *rows)
        with pytest.raises(ValueError, match=r"append: .* but a column .* scatters"):
            append_([column], new, *rows[1:])
    compact_([column], *rows)
    assert_bits([column], want)
    append_([column], new, *rows[1:])
    assert torch.equal(column[5], new[0][0, 0, 0]) and kwargs["lengths_R"].tolist() == [6, 10]


@pytest.mark.parametrize("path", PATHS)
def test_a_plan_changes_nothing_until_it_is_carried_out(path):
    kwargs = inputs(CASES["rows of any length"], torch.float32, DEVICE)
    before = [column.clone() for column in kwargs["columns"]]
    with backend.using(path):
        plan = planned(**kwargs)
    assert_bits(kwargs["columns"], before)
    move_(plan)  # by the path that it was made for
    assert not any(torch.equal(x, y) for x, y in zip(kwargs["columns"], before, strict=True))


def test_what_a_mask_lacks_counts_as_evicted_in_the_kernel():
    """It does not wait for the device to compare lengths, but nothing outside the mask is read."""
    case = Case(lengths=(6, 5), columns=of_width(4), batch=1, kept=1.0)
    kwargs = inputs(case, torch.float32, DEVICE)
    whole = kwargs["keep_N"] & (torch.arange(11, device=DEVICE) < 8)
    want, _, _ = plain(case, {**kwargs, "keep_N": whole})
    kwargs["keep_N"] = kwargs["keep_N"][:8]
    with backend.using("triton"):
        assert compact_(**kwargs).tolist() == [6, 2]
    assert_bits(kwargs["columns"], want)
    with (
        backend.using("reference"),
        pytest.raises(ValueError, match="8 elements, but the rows hold 11 entries"),
    ):
        compact_(**kwargs)


@pytest.mark.parametrize("path", PATHS)
def test_no_rows_at_all(path):
    columns = [torch.zeros(0, 4, device=DEVICE), torch.zeros(0, 3, 0, device=DEVICE)]
    offsets, lengths = (
        torch.zeros(n, dtype=kind, device=DEVICE) for n, kind in ((1, torch.int64), (0, torch.int32))
    )
    with backend.using(path):
        keep = torch.zeros(0, dtype=torch.bool, device=DEVICE)
        assert compact_(columns, keep, offsets, lengths).shape == (0,)
        new = [torch.zeros(0, 2, 3, 4, device=DEVICE), torch.zeros(0, 2, 3, 3, 0, device=DEVICE)]
        assert append_(columns, new, offsets, lengths).shape == (0, 3)


@pytest.mark.parametrize("name", ["rows of any length", "append many, padded"])
def test_they_are_registered_as_what_they_do(name):
    kwargs = inputs(CASES[name], torch.float32, DEVICE)
    appends = CASES[name].kept is None
    operation = torch.ops.retain.append_ if appends else torch.ops.retain.compact_
    torch.library.opcheck(
        operation.default, tuple(kwargs[argument] for argument in (NEW if appends else OLD))
    )


def test_refusals():
    offsets, lengths = torch.tensor([0, 4, 8]), torch.tensor([2, 3], dtype=torch.int32)
    column, keep, new = torch.zeros(8, 3), torch.ones(5, dtype=torch.bool), torch.zeros(1, 2, 1, 3)
    rows, valid = (offsets, lengths), torch.ones(1, 2, dtype=torch.bool)
    on_both = "the tensors lie on cpu, meta; move them to one device"
    for function, given, said in (
        (
            compact_,
            ([column], keep, offsets, lengths.long()),
            r"lengths torch.int64 \(2,\) .* pass int32 \[R\]",
        ),
        (compact_, ([column, torch.zeros(7)], keep, *rows), r"columns have shapes \[\(8, 3\), \(7,\)\]"),
        (compact_, ([column], keep.float(), *rows), r"torch.float32 \(5,\): pass a bool tensor"),
        (compact_, ([column], keep.to("meta"), *rows), f"compact: {on_both}"),
        (
            append_,
            ([column], [torch.zeros(2, 2, 1, 3)], *rows),
            r"2 rows of columns \[\(8, 3\)\]: pass \[B, H",
        ),
        (append_, ([column], [new], *rows, valid), r"validity is torch.bool \(1, 2\), but 1 new tokens"),
        (append_, ([column], [new], *rows, valid[:, :1].to("meta")), f"append: {on_both}"),
    ):
        with pytest.raises(ValueError, match=said):
            function(*given)
    assert not column.any() and lengths.tolist() == [2, 3]


def test_every_tile_is_built():
    from retain.kernels.compact import launch

    moves, put = set(), set()
    for build in launch.builds():
        constants = build.constants
        if build.name.startswith("move"):
            moves.add((constants["BLOCK_N"], constants["BLOCK_W"], build.tile.num_warps))
        if build.name.startswith(f"append {launch.TOKENS}"):
            for name in "abc":
                if constants[f"{name.upper()}_WIDTH"]:
                    size = int(build.signature[f"{name}_ptr"][2:]) // 8
                    put.add((size, constants[f"{name.upper()}_BLOCK"]))
    for size in (8, 4, 2, 1):
        for width in range(1, 300):
            tile = launch.tile("move", width, size)
            assert (tile.m, tile.n, tile.num_warps) in moves
            assert (size, launch.tile("append", width, size).n) in put

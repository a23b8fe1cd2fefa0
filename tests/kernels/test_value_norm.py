"""value_norm: the reference and the kernel against the projection made whole, in float64."""

import itertools

import pytest
import torch

from retain.kernels import backend
from retain.kernels.measure import cast, extra_bytes
from retain.kernels.value_norm import reference, value_norm
from retain.kernels.value_norm.cases import CASES, LARGE, Case, check, inputs, plain, run
from retain.kernels.value_norm.launch import chosen, tile
from tests.close import assert_close
from tests.kernels.device import DEVICE

HALF = [torch.float16, torch.bfloat16]


def formula(kwargs):
    """In float64: every head's projection, made whole."""
    values, weight = kwargs["values_BHTD"].double(), kwargs["output_weight_QDE"].double()
    H, p, members = values.shape[1], kwargs["p"], weight.shape[0] // values.shape[1]
    product = torch.einsum("bhtd,hgde->bhgte", values, weight.unflatten(0, (H, members)))
    norms = product.abs().pow(p).sum(-1) ** (1 / p)
    return norms.flatten(1, 2)


def assert_norms(norms, kwargs):
    single = norms.dtype == torch.float32
    assert norms.dtype == torch.promote_types(kwargs["values_BHTD"].dtype, torch.float32)
    assert_close(norms, formula(kwargs), plain(cast(kwargs, torch.float32)) if single else None, ops=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_formula(name, dtype):
    kwargs = inputs(CASES[name], dtype, DEVICE)
    with backend.using("reference"):
        assert_norms(run(CASES[name], kwargs), kwargs)
        assert check(CASES[name], dtype, DEVICE) is None


# With 1, as on many values: tall tiles, and no columns split off.
PROGRAMS = [(name, None) for name in CASES]
PROGRAMS += [(name, 1) for name, case in CASES.items() if case.batch > 1]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(("name", "programs"), PROGRAMS)
def test_the_kernel_is_the_formula(name, programs, dtype, monkeypatch):
    if programs is not None:
        monkeypatch.setattr("retain.kernels.value_norm.launch.PROGRAMS", programs)
    kwargs = inputs(CASES[name], dtype, DEVICE, seed=1)
    with backend.using("triton"):
        norms = run(CASES[name], kwargs)
    assert_norms(norms, kwargs)
    assert_close(norms, reference.value_norm(**kwargs), ops=4)


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [None, 1], ids=["short if few", "tall"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_the_kernel_is_right_on_a_gpu(name, dtype, programs, monkeypatch):
    if programs is not None:
        monkeypatch.setattr("retain.kernels.value_norm.launch.PROGRAMS", programs)
    assert check({**CASES, **LARGE}[name], dtype, torch.device("cuda")) is None


def test_every_tile_is_built():
    from retain.kernels.value_norm import launch

    built = set()
    for build in launch.builds():
        cut = tuple(build.constants[name] for name in ("BLOCK_T", "BLOCK_E", "BLOCK_K"))
        assert cut == (build.tile.m, build.tile.n, build.tile.depth)
        kind, block = build.signature["weight_ptr"], build.constants["BLOCK_D"]
        built |= {(kind == "*fp32", block, architecture, build.tile) for architecture in build.archs}
    for width, architecture, short in itertools.product(range(1, 257), (80, 90), (False, True)):
        for dtype in (torch.float32, *HALF):
            block = backend.block_of(width)
            cut = launch.tile(dtype, block, architecture, short=short)
            assert (dtype == torch.float32, block, architecture, cut) in built


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("p", [1, 2])
def test_what_is_not_a_number_stays_that(path, p):
    kwargs = inputs(Case(entries=66, p=p), torch.float32, DEVICE)
    kwargs["values_BHTD"][0, 1, 65, 3] = float("nan")
    with backend.using(path):
        norms = value_norm(**kwargs)
    assert norms[0, -1, 65].isnan() and norms[0, -1, :65].isfinite().all()
    assert norms[0, 0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entries", [1, 40, 256])
def test_what_is_held_is_bounded(entries, dtype, monkeypatch):
    """A block of the product, of entries and of W_O in float32."""
    case = Case(kv_heads=2, group_size=2, entries=entries, width=64, model_width=2048, dtype=dtype)
    floats = 2**16
    monkeypatch.setattr(reference, "CPU_FLOATS_AT_ONCE" if DEVICE == "cpu" else "FLOATS_AT_ONCE", floats)
    kwargs = inputs(case, dtype, DEVICE)
    with backend.using("reference"):
        extra = extra_bytes(lambda: value_norm(**kwargs), torch.device(DEVICE))
    # Sums of a block, and norms before they are roots.
    assert extra <= 3 * 4 * floats + 4 * (4 * floats // 64 + 3 * 4 * entries)
    assert 3 * 4 * floats < 4 * case.heads * case.width * case.model_width / 2  # or W_O would go unseen


def test_values_of_another_precision_than_the_weights():
    kwargs = inputs(CASES["p = 2"], torch.float16, DEVICE)
    kwargs["output_weight_QDE"] = kwargs["output_weight_QDE"].float() / 3
    for path in ("reference", "triton"):
        with backend.using(path):
            assert_norms(value_norm(**kwargs), kwargs)


def test_wider_heads_than_a_tile_take_the_reference():
    kwargs = inputs(Case(width=300, entries=4), torch.float32, DEVICE)
    assert_norms(value_norm(**kwargs), kwargs)
    with backend.using("triton"), pytest.raises(ValueError, match="a head width of 300 is more than 256"):
        value_norm(**kwargs)


@pytest.mark.parametrize("floats_at_once", [1, 200, 2**24])
def test_the_bound_on_memory_changes_no_result(floats_at_once, monkeypatch):
    for bound in ("FLOATS_AT_ONCE", "CPU_FLOATS_AT_ONCE"):
        monkeypatch.setattr(reference, bound, floats_at_once)
    for name in ("G = 1, odd lengths", "p = 2"):
        kwargs = inputs(CASES[name], torch.float32, DEVICE)
        assert_norms(value_norm(**kwargs), kwargs)


@pytest.mark.parametrize(
    ("entries", "rows", "is_tall", "full"),
    [(1, 4096, False, True), (64, 4096, False, True), (65, 4096, True, True), (5000, 1, False, False)],
)
def test_a_tile_is_tall_where_entries_fill_it_and_tiles_a_gpu(entries, rows, is_tall, full):
    tall, short = (tile(torch.bfloat16, 128, 90, short=short) for short in (False, True))
    cut = tall if is_tall else short
    assert chosen(torch.bfloat16, 128, 90, entries, rows) == (cut, full) and tall.m > short.m == 64


def test_no_gradient_passes():
    kwargs = inputs(Case(entries=3), torch.float32, DEVICE)
    for name in ("values_BHTD", "output_weight_QDE"):
        kwargs[name].requires_grad_()
    assert not value_norm(**kwargs).requires_grad


VALUES, WEIGHT = torch.ones(1, 2, 3, 4), torch.ones(4, 4, 5)


@pytest.mark.parametrize(
    ("values", "weight", "options", "said"),
    [
        (VALUES, WEIGHT, {"p": 3}, "p is 1 or 2; got 3"),
        (VALUES[0, 0], WEIGHT, {}, r"\(3, 4\) .* pass values \[B, H, T, D\]"),
        (VALUES, WEIGHT.mT, {}, r"one head width D; view W_O as \[Q, 4, E\]"),
        (VALUES, WEIGHT[:3], {}, "3 query heads are no multiple of 2 KV heads"),
        (VALUES, WEIGHT.to(torch.int8), {}, r"torch.int8.* made dense first"),
        (VALUES, WEIGHT.to("meta"), {}, "the tensors lie on cpu, meta; move them to one device"),
    ],
)
def test_refusals(values, weight, options, said):
    with pytest.raises(ValueError, match=said):
        value_norm(values, weight, **options)

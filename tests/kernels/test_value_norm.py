import pytest
import torch

from retain.kernels import backend
from retain.kernels.measure import cast, extra_bytes
from retain.kernels.value_norm import reference, value_norm
from retain.kernels.value_norm.cases import CASES, LARGE, SPEED, Case, check, inputs, plain, run
from tests.close import assert_close, error
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


def test_gram_cases_go_through_the_gram_matrix():
    for name, case in {**CASES, **LARGE, **SPEED["cpu"], **SPEED["cuda"]}.items():
        assert (case.via == "gram") == ("Gram" in name), name


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(("name", "programs"), PROGRAMS)
def test_the_kernel_is_the_formula(name, programs, dtype, monkeypatch):
    if programs is not None:
        monkeypatch.setattr("retain.kernels.value_norm.launch.PROGRAMS", programs)
    kwargs = inputs(CASES[name], dtype, DEVICE, seed=1)
    with backend.using("triton"):
        norms = run(CASES[name], kwargs)
    assert_norms(norms, kwargs)
    assert_close(norms, reference.value_norm(**kwargs, via=CASES[name].via), ops=4)


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

    kinds = {torch.float32: {"*fp32"}, torch.float16: {"*fp16", "*bf16"}, torch.bfloat16: {"*bf16"}}
    built = set()
    for build in launch.builds():
        what = build.kernel.fn.__name__.removesuffix("_kernel")
        cut = tuple(build.constants[name] for name in ("BLOCK_T", "BLOCK_E", "BLOCK_K"))
        assert cut == (build.tile.m, build.tile.n, build.tile.depth)
        for architecture in build.archs:
            whole = build.constants["BLOCK_D"] if what == "direct" else None
            built.add((what, build.signature["values_ptr"], architecture, build.tile, whole))
    for what in ("direct", "gram"):
        for dtype, names in kinds.items():
            for width in range(1, 257):
                for architecture in (80, 90):
                    for short in (False, True):
                        block = backend.block_of(width)
                        tile = launch.tile(what, dtype, block, architecture, short=short)
                        whole = block if what == "direct" else None
                        wanted = {(what, name, architecture, tile, whole) for name in names}
                        assert wanted & built, (what, dtype, block, architecture, short)


# Ways to a norm: of p = 2 both, whichever is cheaper.
WAYS = [(1, "direct"), (2, "direct"), (2, "gram")]


@pytest.fixture
def go(monkeypatch):
    """Norms by one of the ways."""

    def norms(values, weight, p, via):
        monkeypatch.setattr("retain.kernels.value_norm.cheaper", lambda *shapes: via)
        return value_norm(values, weight, p=p)

    return norms


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize(("p", "via"), WAYS)
def test_what_is_not_a_number_stays_that(path, p, via, go):
    kwargs = inputs(Case(entries=66), torch.float32, DEVICE)
    kwargs["values_BHTD"][0, 1, 65, 3] = float("nan")
    with backend.using(path):
        norms = go(kwargs["values_BHTD"], kwargs["output_weight_QDE"], p, via)
    assert norms[0, -1, 65].isnan() and norms[0, -1, :65].isfinite().all()
    assert norms[0, 0].isfinite().all()


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_what_the_projection_drops_is_nothing_and_never_nan(path, go):
    values = torch.randn(1, 2, 50, 24, device=DEVICE).repeat(1, 1, 1, 2)
    weight = torch.randn(4, 24, 30, device=DEVICE)
    # Rows that cancel: rounding makes some squares negative, of a form that is 0.
    weight = torch.cat([weight, -weight], dim=1)
    for p, via in WAYS:
        with backend.using(path):
            norms = go(values, weight, p, via)
        assert norms.isfinite().all() and float(norms.max()) < 0.1


def test_a_gram_matrix_in_pieces_is_that_matrix():
    from retain.kernels.value_norm import launch

    sizes = torch.tensor([1e-36, 1e-6, 1.0, 3e7, 1e36], device=DEVICE)
    matrix = torch.randn(5, 40, 40, device=DEVICE) * sizes[:, None, None]
    matrix[0, 0, 0] = 0.0
    for dtype, least in ((torch.float32, 0.0), (torch.bfloat16, 2.0**-23), (torch.float16, 2.0**-21)):
        pieces, root = launch.split(matrix, dtype)
        assert pieces.dtype == dtype and pieces.isfinite().all() and root.dtype == torch.float32
        together = pieces.double().sum(0) * root.double().square()[:, None, None]
        assert float(((together - matrix).abs() / matrix.abs().amax((1, 2), True)).max()) <= least
        assert torch.equal(root.frexp().mantissa, torch.full_like(root, 0.5)), "it rounds nothing"
    pieces, root = launch.split(torch.zeros(1, 4, 4, device=DEVICE), torch.float16)
    assert not pieces.any() and root.isfinite().all()


@pytest.mark.parametrize("size", [1e-18, 1e16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_as_small_or_large_as_their_squares_allow(dtype, size):
    kwargs = inputs(CASES["Gram"], dtype, DEVICE)
    kwargs["output_weight_QDE"] = kwargs["output_weight_QDE"] * size
    for path in ("reference", "triton"):
        with backend.using(path):
            norms = run(CASES["Gram"], kwargs)
        wanted = formula(kwargs)
        assert float(wanted.max()) > 0.1 * size
        assert error(norms / size, wanted / size) <= 1e-5 * float((wanted / size).max())


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_a_gram_matrix_is_float32_whatever_products_are_set_to(path, monkeypatch):
    kwargs = inputs(CASES["Gram, D = 128, G = 8"], torch.float32, DEVICE)
    weight, wanted = kwargs["output_weight_QDE"], kwargs["output_weight_QDE"].double()
    wanted = wanted @ wanted.mT
    library = torch.backends.cuda if DEVICE == "cuda" else torch.backends.mkldnn
    before, products = library.matmul.fp32_precision, []
    product = torch.Tensor.baddbmm_
    monkeypatch.setattr(
        torch.Tensor, "baddbmm_", lambda *x: (products.append(x[0].dtype), product(*x))[1], raising=True
    )
    try:
        for setting, dtype in (("ieee", torch.float32), ("tf32", torch.float64)):
            library.matmul.fp32_precision = setting
            gram = reference.gram(weight, torch.float32)
            assert gram.dtype == torch.float32 and set(products) == {dtype}
            assert_close(gram, wanted)
            products.clear()
            with backend.using(path):
                run(CASES["Gram, D = 128, G = 8"], kwargs)
            assert set(products) == {dtype}
            products.clear()
    finally:
        library.matmul.fp32_precision = before


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_the_cheaper_way_is_taken(path, monkeypatch):
    ways, gram = [], reference.gram
    monkeypatch.setattr(reference, "gram", lambda *args: (ways.append("gram"), gram(*args))[1])
    # Operations of a head: B T D E = 24 B T E, or D^2 (B T + E) = 576 (B T + E); E = 96: 32 entries.
    for batch, entries, model_width, way in (
        (1, 32, 96, []),
        (1, 33, 96, ["gram"]),
        (2, 16, 96, []),
        (2, 17, 96, ["gram"]),
        (1, 500, 24, []),
    ):
        case = Case(batch=batch, entries=entries, width=24, model_width=model_width, p=2)
        kwargs = inputs(case, torch.float32, DEVICE)
        with backend.using(path):
            norms = value_norm(**kwargs)
            assert ways == way
            ways.clear()
        assert_norms(norms, kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entries", [1, 40, 256])
def test_what_is_held_is_bounded(entries, dtype, go, monkeypatch):
    """The product, entries and W_O of float32, and through the Gram matrix that too."""
    case = Case(kv_heads=2, group_size=2, entries=entries, width=64, model_width=2048, dtype=dtype)
    floats = 2**16
    monkeypatch.setattr(reference, "CPU_FLOATS_AT_ONCE" if DEVICE == "cpu" else "FLOATS_AT_ONCE", floats)
    given = inputs(case, dtype, DEVICE)
    tensors = (given["values_BHTD"], given["output_weight_QDE"])
    for p, via in WAYS:
        with backend.using("reference"):
            extra = extra_bytes(lambda p=p, via=via: go(*tensors, p, via), torch.device(DEVICE))
        # Sums of a block, and norms before they are roots.
        small = 4 * (4 * floats // 64 + 3 * 4 * entries)
        gram = 4 * case.heads * case.width**2 if via == "gram" else 0
        assert extra <= 3 * 4 * floats + 2 * gram + small, (p, via)
    whole = 4 * case.heads * case.width * case.model_width
    assert 3 * 4 * floats + 2 * 4 * case.heads * case.width**2 < whole / 2  # or else W_O would go unseen


@pytest.mark.parametrize("name", ["p = 2", "Gram"])
def test_values_of_another_precision_than_the_weights(name):
    kwargs = inputs(CASES[name], torch.float16, DEVICE)
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
    for name in ("G = 1, odd lengths", "p = 2", "Gram"):
        kwargs = inputs(CASES[name], torch.float32, DEVICE)
        assert_norms(value_norm(**kwargs), kwargs)


def test_no_gradient_passes(go):
    kwargs = inputs(Case(entries=3), torch.float32, DEVICE)
    tensors = [kwargs[name].requires_grad_() for name in ("values_BHTD", "output_weight_QDE")]
    assert not any(go(*tensors, p, via).requires_grad for p, via in WAYS)


@pytest.mark.parametrize("name", ["G = 8", "Gram"])
def test_it_compiles_as_one_operation(name):
    kwargs = inputs(CASES[name], torch.float32, DEVICE)

    def norm(values, weight):
        return value_norm(values * 2, weight, p=kwargs["p"]) + 1

    tensors = (kwargs["values_BHTD"], kwargs["output_weight_QDE"])
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), norm(*tensors))
    torch.library.opcheck(torch.ops.retain.value_norm.default, (*tensors, kwargs["p"], CASES[name].via))


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

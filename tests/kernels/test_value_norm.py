import pytest
import torch

from retain.kernels import backend
from retain.kernels.value_norm import reference, value_norm
from retain.kernels.value_norm.cases import CASES, Case, check, inputs, run
from tests.close import assert_close

HALF = [torch.float16, torch.bfloat16]


def oracle(values_BHTD, output_weight_QDE, *, p, via=None, group=None):
    """The formula in float64: every head's projection, made whole."""
    values, weight = values_BHTD.double(), output_weight_QDE.double()
    members = weight.shape[0] // values.shape[1]
    norms = torch.stack(
        [
            torch.einsum("btd,de->bte", values[:, q // members], weight[q]).abs().pow(p).sum(-1) ** (1 / p)
            for q in range(weight.shape[0])
        ],
        dim=1,
    )
    if group is None:
        return norms
    of_groups = norms.split(members, dim=1)
    return torch.stack([x.mean(1) if group == "mean" else x.max(1).values for x in of_groups], dim=1)


def assert_norms(norms, kwargs):
    wanted = oracle(**kwargs)
    single = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
    dtype = torch.promote_types(kwargs["values_BHTD"].dtype, torch.float32)
    assert norms.dtype == dtype
    assert_close(norms, wanted, oracle(**single).to(dtype) if dtype == torch.float32 else None, ops=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_formula(name, dtype):
    kwargs = inputs(CASES[name], dtype, "cpu")
    assert_norms(run(CASES[name], kwargs), kwargs)
    assert check(CASES[name], dtype, "cpu") is None


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_the_formula(name, dtype):
    kwargs = inputs(CASES[name], dtype, "cpu", seed=1)
    with backend.using("triton"):
        norms = run(CASES[name], kwargs)
    assert_norms(norms, kwargs)
    assert_close(norms, reference.value_norm(**{**kwargs, "via": kwargs["via"] or "direct"}), ops=4)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.group or case.batch > 1])
def test_the_kernel_is_the_formula_as_it_runs_on_many_values(name, dtype, monkeypatch):
    """Tall tiles, no columns split off, and groups reduced by the program itself."""
    monkeypatch.setattr("retain.kernels.value_norm.kernel.PROGRAMS", 1)
    kwargs = inputs(CASES[name], dtype, "cpu", seed=2)
    with backend.using("triton"):
        norms = run(CASES[name], kwargs)
    assert_norms(norms, kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_right_on_a_gpu(name, dtype):
    assert check(CASES[name], dtype, torch.device("cuda")) is None


@pytest.mark.parametrize("name", ["strided", "split columns", "Gram, D = 33, G = 3"])
def test_results_do_not_change_from_run_to_run(name):
    kwargs = inputs(CASES[name], torch.float16, "cpu")
    with backend.using("triton"):
        assert torch.equal(run(CASES[name], kwargs), run(CASES[name], kwargs))


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_a_group_is_reduced_as_its_heads_are(path):
    kwargs = inputs(Case(group_size=4, entries=65), torch.float32, "cpu")
    with backend.using(path):
        each = value_norm(**kwargs).unflatten(1, (2, 4))
        for group, want in (("mean", each.mean(2)), ("max", each.amax(2))):
            assert_close(value_norm(**{**kwargs, "group": group}), want)


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_what_is_not_a_number_stays_that(path):
    for p, via in ((1, None), (2, "direct"), (2, "gram")):
        for group in (None, "mean", "max"):
            kwargs = {**inputs(Case(entries=66), torch.float32, "cpu"), "p": p, "via": via, "group": group}
            kwargs["values_BHTD"][0, 1, 65, 3] = float("nan")
            with backend.using(path):
                norms = value_norm(**kwargs)
            assert norms[0, -1, 65].isnan() and norms[0, -1, :65].isfinite().all()
            assert norms[0, 0].isfinite().all()


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_what_the_projection_drops_is_nothing_and_never_nan(path):
    values, weight = torch.randn(1, 2, 50, 24).repeat(1, 1, 1, 2), torch.randn(4, 24, 30)
    # Rows that cancel: rounding makes some squares negative, of a form that is 0.
    weight = torch.cat([weight, -weight], dim=1)
    for p, via in ((1, None), (2, "direct"), (2, "gram")):
        with backend.using(path):
            norms = value_norm(values, weight, p=p, via=via)
        assert norms.isfinite().all() and float(norms.max()) < 0.1


def test_a_gram_matrix_in_pieces_is_that_matrix():
    from retain.kernels.value_norm import kernel

    matrix = torch.randn(3, 40, 40) * torch.tensor([1e-6, 1.0, 3e7])[:, None, None]
    matrix[0, 0, 0] = 0.0
    for dtype, error in ((torch.float32, 0.0), (torch.bfloat16, 2.0**-23), (torch.float16, 2.0**-21)):
        pieces, scale = kernel.split(matrix, dtype)
        assert pieces.dtype == dtype and pieces.isfinite().all()
        together = pieces.double().sum(0) * scale[:, None, None]
        assert float(((together - matrix).abs() / matrix.abs().amax((1, 2), True)).max()) <= error
        assert torch.equal(scale.frexp().mantissa, torch.full((3,), 0.5)), "a power of two rounds nothing"
    pieces, scale = kernel.split(torch.zeros(1, 4, 4), torch.float16)
    assert not pieces.any() and scale.isfinite().all()


def test_values_of_another_precision_than_the_weights():
    kwargs = inputs(CASES["p = 2"], torch.float16, "cpu")
    kwargs["output_weight_QDE"] = kwargs["output_weight_QDE"].float() / 3
    for via in ("direct", "gram"):
        for path in ("reference", "triton"):
            with backend.using(path):
                assert_norms(value_norm(**{**kwargs, "via": via}), {**kwargs, "via": via})


def test_wider_heads_than_a_tile_take_the_reference():
    kwargs = inputs(Case(width=300, entries=4), torch.float32, "cpu")
    assert_norms(value_norm(**kwargs), kwargs)
    with backend.using("triton"), pytest.raises(ValueError, match="a head width of 300 is more than 256"):
        value_norm(**kwargs)


@pytest.mark.parametrize("floats_at_once", [1, 200, 2**24])
def test_the_bound_on_memory_changes_no_result(floats_at_once):
    for name in ("G = 1, odd lengths", "p = 2", "Gram"):
        kwargs = inputs(CASES[name], torch.float32, "cpu")
        assert_norms(value_norm(**kwargs, floats_at_once=floats_at_once), kwargs)


def test_no_gradient_passes():
    for via, p in ((None, 1), ("direct", 2), ("gram", 2)):
        kwargs = inputs(Case(entries=3), torch.float32, "cpu")
        for name in ("values_BHTD", "output_weight_QDE"):
            kwargs[name] = kwargs[name].requires_grad_()
        assert not value_norm(**{**kwargs, "p": p, "via": via}).requires_grad


@pytest.mark.parametrize("name", ["G = 8", "D = 80, max", "Gram"])
def test_it_compiles_as_one_operation(name):
    kwargs = inputs(CASES[name], torch.float32, "cpu")

    def norm(values, weight):
        settings = {setting: kwargs[setting] for setting in ("p", "via", "group")}
        return value_norm(values * 2, weight, **settings) + 1

    tensors = (kwargs["values_BHTD"], kwargs["output_weight_QDE"])
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), norm(*tensors))
    arguments = (*tensors, kwargs["p"], kwargs["via"] or "direct", kwargs["group"] or "", 0)
    torch.library.opcheck(torch.ops.retain.value_norm.default, arguments)


def test_refusals():
    values, weight = torch.ones(1, 2, 3, 4), torch.ones(4, 4, 5)
    with pytest.raises(ValueError, match="p is 1 or 2; got 3"):
        value_norm(values, weight, p=3)
    with pytest.raises(ValueError, match="via is for p = 2, .* got via='gram' with p = 1"):
        value_norm(values, weight, via="gram")
    with pytest.raises(ValueError, match="got via='cholesky' with p = 2"):
        value_norm(values, weight, p=2, via="cholesky")
    with pytest.raises(ValueError, match="group is 'mean', 'max' or None; got 'sum'"):
        value_norm(values, weight, group="sum")
    with pytest.raises(ValueError, match=r"\(3, 4\) .* pass values \[B, H, T, D\]"):
        value_norm(values[0, 0], weight)
    with pytest.raises(ValueError, match=r"one head width D; view W_O as \[Q, 4, E\]"):
        value_norm(values, weight.mT)
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2 KV heads"):
        value_norm(values, weight[:3])
    with pytest.raises(ValueError, match=r"torch.int8.* made dense first"):
        value_norm(values, weight.to(torch.int8))

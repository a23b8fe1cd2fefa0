"""gated_attention: the reference and its gradients against the formula, the kernel against the reference."""

import math
from dataclasses import replace

import pytest
import torch

from retain.kernels import backend
from retain.kernels.build import Tile
from retain.kernels.gated_attention import cases, gated_attention, reference
from retain.kernels.gated_attention.cases import CASES, DIFFERENTIABLE, Case, gradients, inputs, run
from retain.kernels.measure import cast, check
from tests.close import assert_close
from tests.kernels.device import DEVICE
from tests.memory import Watch


def doubled(kwargs):
    return cast(kwargs, torch.float64)


def formula(kwargs):
    """The docstring's, T x T logits and all, with autograd's gradients."""
    queries, keys, values = (kwargs[name] for name in DIFFERENTIABLE[:3])
    (B, Q, S, _), (H, T) = queries.shape, keys.shape[1:3]
    logits = (queries @ keys.repeat_interleave(Q // H, 1).mT) * kwargs["scaling"]
    if kwargs["soft_cap"] is not None:
        logits = torch.tanh(logits / kwargs["soft_cap"]) * kwargs["soft_cap"]
    distance = torch.arange(T - S, T)[:, None] - torch.arange(T)
    outside = distance >= kwargs["protected"]
    for name, factor in (("log_gate_BHT", 1.0), ("log_decay_BHT", distance)):
        if kwargs[name] is not None:
            bias = kwargs[name].repeat_interleave(Q // H, 1)[:, :, None]
            logits = logits + torch.where(outside, factor * bias, 0.0)
    seen = (distance >= 0).expand(B, 1, S, T)
    if (pads := kwargs["pads_B"]) is not None:
        exists = torch.arange(T) >= pads[:, None]
        seen = seen & exists[:, None, None] & exists[:, None, T - S :, None]
    logits = logits.masked_fill(~seen, -math.inf)
    if kwargs["sinks_Q"] is not None:
        sinks = kwargs["sinks_Q"].view(1, Q, 1, 1).expand(B, Q, S, 1)
        logits = torch.cat([logits, sinks.masked_fill(~seen.any(-1, keepdim=True), -math.inf)], -1)
    top = logits.amax(-1, keepdim=True).detach()
    weights = (logits - top.masked_fill(top == -math.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights[..., :T] / total.masked_fill(total == 0, 1.0)) @ values.repeat_interleave(Q // H, 1)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_and_its_gradients_are_the_formula(name):
    kwargs = doubled(inputs(CASES[name], torch.float32, "cpu"))
    out = formula(kwargs)
    for actual, wanted in zip(run(CASES[name], kwargs), [out, *gradients(kwargs, out)], strict=True):
        assert_close(actual, wanted, ops=20)


# The interpreter's bfloat16 goes through float32: a few cases show that it does.
KERNEL = [(name, dtype) for name in CASES for dtype in (torch.float32, torch.float16)]
KERNEL += [(name, torch.bfloat16) for name in ("one entry", "strided", "D = 128")]


@pytest.mark.parametrize(("name", "dtype"), KERNEL, ids=str)
def test_the_kernel_is_right(name, dtype):
    with backend.using("triton"):
        assert check(cases, CASES[name], dtype, DEVICE, seed=2) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", backend.DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_right_on_a_gpu(name, dtype):
    with backend.using("triton"):
        assert check(cases, CASES[name], dtype, torch.device("cuda")) is None


TILED = {
    "everything": Case(
        batch=2, heads=1, group=1, entries=150, decay=True, protected=40, pads=(20,), width=16, soft_cap=3.0,
        sinks=True,
    ),
    "whole": Case(heads=1, group=1, entries=256, queries=128, protected=17, width=16),
}  # fmt: skip


@pytest.mark.parametrize("tiles", [16, 64, (80, False), (80, True), (90, False), (90, True)], ids=str)
@pytest.mark.parametrize("name", TILED)
def test_every_tile_gives_the_same(name, tiles, monkeypatch):
    """GPUs take other tiles than the interpreter: squares here, and those of the tables."""
    from retain.kernels.gated_attention import launch

    used = []

    def chosen(kernel, queries, bias, settings):
        used.append(Tile(tiles, tiles, 4, 1) if isinstance(tiles, int) else None)
        if used[-1] is None:
            arch, fuller = tiles
            used[-1] = launch.tile(kernel, torch.float16, 64, arch, fuller=fuller)
        return used[-1]

    monkeypatch.setattr(launch, "_tile", chosen)
    with backend.using("triton"):
        assert check(cases, TILED[name], torch.float32, DEVICE) is None
    assert len(used) == 3


def test_every_tensor_counts_where_the_path_is_chosen():
    """A gate in float64 is not for the kernel."""
    kwargs = inputs(Case(entries=5), torch.float32, DEVICE)
    kwargs["log_gate_BHT"] = kwargs["log_gate_BHT"].detach().double()
    with backend.using("triton"), pytest.raises(ValueError, match="not float64"):
        gated_attention(**kwargs)
    assert gated_attention(**kwargs).dtype == torch.float32


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_padding_gets_zeros_and_gives_none(path):
    case = Case(batch=2, pads=(7,), entries=20, sinks=True, decay=True)
    kwargs = inputs(case, torch.float32, DEVICE)
    with torch.no_grad():  # what lies at padding reaches nothing
        kwargs["values_BHTD"][0, :, :7] = 1e30
        kwargs["keys_BHTD"][0, :, :7] = 1e3
    with backend.using(path):
        out, *grads = run(case, kwargs)
    assert not out[0, :, :7].any() and out.isfinite().all()
    for name, gradient in zip((n for n in DIFFERENTIABLE if kwargs[n] is not None), grads, strict=True):
        assert gradient.isfinite().all()
        if name != "sinks_Q":
            assert not gradient[0, :, :7].any(), name
            assert gradient[0, :, 7:].any(), name


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_only_gates_are_asked_for(path):
    """A frozen first layer: nothing but the gate needs a gradient, and it is the same."""
    kwargs = inputs(CASES["gate and decay"], torch.float32, DEVICE)
    frozen = {name: given.detach() if name in DIFFERENTIABLE[:3] else given for name, given in kwargs.items()}
    gates = [frozen["log_gate_BHT"], frozen["log_decay_BHT"]]
    with backend.using(path):
        out = gated_attention(**kwargs)
        wanted = torch.autograd.grad(out, gates, torch.ones_like(out))
        found = torch.autograd.grad(gated_attention(**frozen), gates, torch.ones_like(out))
    assert all(map(torch.equal, found, wanted)) and all(one.any() for one in found)


@pytest.mark.parametrize("name", ["strided", "everything", "the last queries", "decay"])
def test_the_operation_is_registered_as_it_should_be(name):
    kwargs = inputs(replace(CASES[name], width=16), torch.float32, "cpu")
    tensors = [kwargs[given] for given in (*DIFFERENTIABLE[:5], "pads_B", "sinks_Q")]
    numbers = [kwargs[given] for given in ("scaling", "protected", "soft_cap")]
    torch.library.opcheck(torch.ops.retain.gated_attention.default, (*tensors, *numbers))
    plainly = [None if given is None else given.detach() for given in tensors]
    out, lse = torch.ops.retain.gated_attention(*plainly, *numbers)
    for inner in (True, False):
        arguments = (torch.ones_like(out), *plainly[:3], out, lse, *plainly[3:], *numbers, inner)
        torch.library.opcheck(torch.ops.retain.gated_attention_backward.default, arguments)


def test_half_precision_gates_and_mixed_ones():
    kwargs = inputs(Case(entries=30, decay=True), torch.float32, DEVICE)
    half = {**kwargs, "log_gate_BHT": kwargs["log_gate_BHT"].detach().to(torch.float16).requires_grad_()}
    with backend.using("triton"):
        *_, d_gate, d_decay = run(CASES["decay"], half)
    assert d_gate.dtype == torch.float16 and d_decay.dtype == torch.float32
    assert_close(d_gate, run(CASES["decay"], doubled(half))[-2])


def test_blocks_change_nothing(monkeypatch):
    case = CASES["everything"]
    kwargs = doubled(inputs(case, torch.float32, "cpu"))
    wanted = run(case, kwargs)
    for cells, most, least in ((1, 5, 1), (400, 16, 3), (10**9, 10**9, 1)):
        for name, value in (("CELLS", cells), ("MOST", most), ("LEAST", least)):
            monkeypatch.setattr(reference, name, value)
        for actual, expected in zip(run(case, kwargs), wanted, strict=True):
            assert_close(actual, expected, ops=20)


def test_memory_is_linear_in_the_entries():
    """Far below the T x T logits of a head, at twice the entries no more than about twice as much."""
    held = []
    for entries in (2048, 4096):
        case = Case(heads=1, group=2, entries=entries, width=16)
        kwargs = inputs(case, torch.float32, "cpu")
        with Watch() as watch:
            run(case, kwargs)
        held.append(watch.peak)
    assert held[1] < 2.5 * held[0] < 4 * 2048**2


def test_wider_heads_than_a_tile_take_the_reference():
    case = Case(width=300, entries=6, heads=1)
    assert check(cases, case, torch.float32, "cpu") is None
    with backend.using("triton"), pytest.raises(ValueError, match="a head width of 300 is more than 256"):
        run(case, inputs(case, torch.float32, DEVICE))


def test_nothing_at_all():
    empty = torch.zeros(2, 4, 0, 16), torch.zeros(2, 2, 0, 16), torch.zeros(2, 2, 0, 16)
    assert gated_attention(*empty, scaling=1.0).shape == (2, 4, 0, 16)
    assert gated_attention(*(one[:0] for one in empty), scaling=1.0).shape == (0, 4, 0, 16)

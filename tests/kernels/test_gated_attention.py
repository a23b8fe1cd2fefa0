import math
from dataclasses import replace

import pytest
import torch

from retain.kernels import backend
from retain.kernels.build import ARCHS, Tile
from retain.kernels.gated_attention import cases, gated_attention, reference
from retain.kernels.gated_attention.cases import (
    CASES,
    DIFFERENTIABLE,
    Case,
    check,
    gradients,
    inputs,
    plain,
    run,
)
from retain.kernels.gated_attention.tiles import tile
from retain.kernels.measure import cast, extra_bytes
from tests.close import assert_close
from tests.kernels.device import DEVICE

OTHERS = [torch.float16, torch.bfloat16]


def doubled(kwargs):
    return cast(kwargs, torch.float64)


def loops(kwargs):
    """The docstring's formula in float64, one query at a time; `[B, Q, S, D]`."""
    given = [None if kwargs[name] is None else kwargs[name].detach() for name in DIFFERENTIABLE]
    (queries, keys, values, gate, decay, sinks), exists = given, kwargs["exists_BT"]
    (B, Q, S, D), (H, T) = queries.shape, keys.shape[1:3]
    out = torch.zeros(B, Q, S, D, dtype=torch.float64)
    for b in range(B):
        for q in range(Q):
            h = q // (Q // H)
            for s in range(S):
                j, logits, seen = T - S + s, [], []
                if exists is not None and not exists[b, j]:
                    continue
                for i in range(j + 1):
                    if exists is not None and not exists[b, i]:
                        continue
                    if kwargs["window"] is not None and j - i >= kwargs["window"]:
                        continue
                    logit = float(queries[b, q, s] @ keys[b, h, i]) * kwargs["scaling"]
                    if kwargs["soft_cap"] is not None:
                        logit = kwargs["soft_cap"] * math.tanh(logit / kwargs["soft_cap"])
                    if j - i >= kwargs["protected"]:
                        logit += 0.0 if gate is None else float(gate[b, h, i])
                        logit += 0.0 if decay is None else (j - i) * float(decay[b, h, i])
                    logits.append(logit)
                    seen.append(i)
                pays_nothing = [] if sinks is None else [float(sinks[q])]
                total = sum(math.exp(logit) for logit in logits + pays_nothing)
                if not total:
                    continue
                for logit, i in zip(logits, seen, strict=True):
                    out[b, q, s] += math.exp(logit) / total * values[b, h, i]
    return out


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.width <= 64])
def test_the_reference_is_the_formula_of_the_docstring(name):
    kwargs = doubled(inputs(replace(CASES[name], width=5), torch.float32, "cpu"))
    assert_close(gated_attention(**kwargs), loops(kwargs), ops=4)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_reference_are_those_of_the_formula(name):
    kwargs = doubled(inputs(CASES[name], torch.float32, "cpu"))
    out = plain(kwargs)
    found = run(CASES[name], kwargs)
    for actual, wanted in zip(found, [out, *gradients(kwargs, out)], strict=True):
        assert_close(actual, wanted, ops=20)


@pytest.mark.parametrize("dtype", [torch.float32, *OTHERS], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_right_in_every_precision(name, dtype):
    assert check(CASES[name], dtype, "cpu") is None


def kernel(case, kwargs):
    """The op on the Triton path: here in the interpreter."""
    with backend.using("triton"):
        return run(case, kwargs)


# The interpreter's bfloat16 goes through float32: a few cases show that it does.
KERNEL = [(name, dtype) for name in CASES for dtype in (torch.float32, torch.float16)]
KERNEL += [(name, torch.bfloat16) for name in ("one entry", "strided", "D = 128")]


@pytest.mark.parametrize(("name", "dtype"), KERNEL, ids=str)
def test_the_kernel_is_right(name, dtype):
    with backend.using("triton"):
        assert check(CASES[name], dtype, DEVICE, seed=2) is None


def test_a_check_sees_what_is_wrong(monkeypatch):
    def changed(case, kwargs):
        exact = kwargs["queries_BQSD"].dtype == torch.float64
        return run(case, kwargs if exact else {**kwargs, "protected": 9})

    monkeypatch.setattr(cases, "run", changed)
    assert "output: error" in check(CASES["decay"], torch.float32, DEVICE)


def test_a_check_allows_what_plain_pytorch_errs(monkeypatch):
    def changed(case, kwargs):
        output, *rest = run(case, kwargs)
        return [output if output.dtype == torch.float64 else output + 0.01, *rest]

    monkeypatch.setattr(cases, "run", changed)
    assert "output: error" in check(CASES["decay"], torch.float32, DEVICE)
    monkeypatch.setattr(cases, "plain", lambda kwargs: plain(kwargs) + 0.01)
    assert check(CASES["decay"], torch.float32, DEVICE) is None
    monkeypatch.setattr(cases, "PLAIN_CELLS", 1)  # it would hold too many logits
    assert "output: error" in check(CASES["decay"], torch.float32, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *OTHERS], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_right_on_a_gpu(name, dtype):
    with backend.using("triton"):
        assert check(CASES[name], dtype, torch.device("cuda")) is None


TILED = {
    "windowed": Case(
        batch=2, heads=1, group=1, entries=150, decay=True, window=70, protected=40, pads=(20,), width=16,
        soft_cap=3.0, sinks=True,
    ),
    "whole": Case(heads=1, group=1, entries=256, queries=128, protected=17, width=16),
}  # fmt: skip
TILES = {f"{n} and {n}": lambda name, n=n: Tile(n, n, 4, 1) for n in (16, 64)}
for number in ARCHS:
    for more in (False, True):
        TILES[f"sm_{number}{', fuller' if more else ''}"] = lambda name, number=number, more=more: tile(
            name, torch.float16, 64, number, fuller=more
        )


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", TILED)
def test_every_tile_gives_the_same(name, tiles, monkeypatch):
    """GPUs take other tiles than the interpreter."""
    from retain.kernels.gated_attention import launch

    used = []

    def chosen(kernel, queries, bias, settings):
        used.append(tile(kernel, torch.float16, 64, 80) if kernel == "prepare" else TILES[tiles](kernel))
        return used[-1]

    monkeypatch.setattr(launch, "_tile", chosen)
    with backend.using("triton"):
        assert check(TILED[name], torch.float32, DEVICE) is None
    assert len(used) == 4


@pytest.mark.parametrize(
    "huge", [{"window": 2**31 - 1}, {"protected": 2**31 - 1}, {"protected": 2**40}], ids=str
)
def test_windows_beyond_all_entries(huge):
    """Longer than a 32-bit number holds, with an entry beside it."""
    kwargs = {**inputs(Case(entries=20, heads=1), torch.float32, DEVICE), **huge}
    found = kernel(Case(), kwargs)
    wanted = kernel(Case(), {**kwargs, **dict.fromkeys(huge, 20)})
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert found[2].any() and found[3].any()


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
def test_the_window_that_is_protected_holds_so_many_queries(path):
    """An entry's own query and the `protected - 1` after it do not meet its gate."""
    kwargs = inputs(Case(entries=12, protected=3, heads=1, group=1), torch.float32, DEVICE)
    with torch.no_grad():
        kwargs["log_gate_BHT"].fill_(-math.inf)
    for protected in (1, 3, 12):
        with backend.using(path):
            out = gated_attention(**{**kwargs, "protected": protected, "window": None})
            windowed = gated_attention(
                **{**kwargs, "log_gate_BHT": None, "protected": 0, "window": protected}
            )
        assert_close(out, windowed.double())


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_only_gates_are_asked_for(path):
    """A frozen first layer: nothing but the gate needs a gradient, and it is the same."""
    case = CASES["gate and decay"]
    kwargs = inputs(case, torch.float32, DEVICE)
    frozen = {name: given.detach() if name in DIFFERENTIABLE[:3] else given for name, given in kwargs.items()}
    with backend.using(path):
        *_, d_gate, d_decay = run(case, kwargs)
        out = gated_attention(**frozen)
        found = torch.autograd.grad(
            out, [frozen["log_gate_BHT"], frozen["log_decay_BHT"]], torch.ones_like(out)
        )
        both = gated_attention(**kwargs)
        wanted = torch.autograd.grad(
            both, [kwargs["log_gate_BHT"], kwargs["log_decay_BHT"]], torch.ones_like(out)
        )
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert found[0].shape == d_gate.shape and found[1].shape == d_decay.shape


@pytest.mark.parametrize("name", ["strided", "everything", "the last queries", "decay"])
def test_the_operation_is_registered_as_it_should_be(name):
    kwargs = inputs(replace(CASES[name], width=16), torch.float32, "cpu")
    tensors = [kwargs[given] for given in (*DIFFERENTIABLE[:5], "exists_BT", "sinks_Q")]
    numbers = [kwargs[given] for given in ("scaling", "protected", "window", "soft_cap")]
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
        held.append(extra_bytes(lambda case=case, kwargs=kwargs: run(case, kwargs), torch.device("cpu")))
    assert held[1] < 2.5 * held[0] < 4 * 2048**2


def test_wider_heads_than_a_tile_take_the_reference():
    case = Case(width=300, entries=6, heads=1)
    assert check(case, torch.float32, "cpu") is None
    with backend.using("triton"), pytest.raises(ValueError, match="a head width of 300 is more than 256"):
        run(case, inputs(case, torch.float32, DEVICE))


def test_nothing_at_all():
    empty = torch.zeros(2, 4, 0, 16), torch.zeros(2, 2, 0, 16), torch.zeros(2, 2, 0, 16)
    assert gated_attention(*empty, scaling=1.0).shape == (2, 4, 0, 16)
    assert gated_attention(*(one[:0] for one in empty), scaling=1.0).shape == (0, 4, 0, 16)


Q, K = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 5, 16)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"keys": K[..., :8], "values": K[..., :8]}, "with the queries' batch and head width"),
        ({"queries": Q[:, :3]}, "3 query heads are no multiple of 2 KV heads; pass the keys of KV heads"),
        ({"log_gate": torch.zeros(1, 4, 5)}, r"log_gate is \(1, 4, 5\) .* wanted \(1, 2, 5\)"),
        ({"exists_BT": torch.ones(1, 5)}, r"exists is torch.float32: pass a boolean mask"),
        ({"sinks_Q": torch.zeros(2)}, r"sinks is \(2,\) .* wanted \(4,\), that is \[Q\]"),
        ({"log_gate": torch.zeros(1, 2, 5, dtype=torch.int64)}, "log_gate is torch.int64: pass floating"),
        ({"protected": -1}, "protected=-1 must be at least 0"),
        ({"log_gate": torch.zeros(1, 2, 5, device="meta")}, "lie on cpu, meta: move gates"),
    ],
)
def test_what_does_not_fit_is_said(given, said):
    tensors = {"queries": Q, "keys": K, "values": K, "log_gate": None, "log_decay": None}
    settings = {"scaling": 1.0} | {name: value for name, value in given.items() if name not in tensors}
    with pytest.raises(ValueError, match=said):
        gated_attention(*{**tensors, **{n: g for n, g in given.items() if n in tensors}}.values(), **settings)

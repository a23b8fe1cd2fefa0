"""A decoding step over static rows: plain PyTorch against attention made whole, C++ and kernel against it."""

import pytest
import torch

from retain.kernels import backend
from retain.kernels.codes import Codes, decode
from retain.kernels.decode_step import build, cases, decode_step, launch
from retain.kernels.decode_step.cases import CASES, inputs, run
from retain.kernels.measure import check
from tests.close import assert_close
from tests.kernels.device import DEVICE


def formula(given):
    """Attention of each query head over what its row holds after the step, in float64; `[B, 1, Q, V]`."""
    (B, Q, _, _), H, clock = given["queries_BQ1D"].shape, given["keys_BH1D"].shape[1], given["clock_1"]
    stores = [([given[name].double() for name in ("keys_PD", "values_PV")], given["log_weight_P"])]
    stores[0] += (given["offsets_R1"], given["base_R"] + clock)
    if packed := given.get("packed"):
        bits, keys, values = given["bits"], *given["keys_PD"].shape[1:], *given["values_PV"].shape[1:]
        keys = Codes(packed[0], packed[4], packed[3], bits, 1, keys)
        values = Codes(packed[1], packed[2], None, bits, given["span"], values)
        weight = packed[7] if len(packed) > 7 else None
        coded = [decode(keys, torch.float64), decode(values, torch.float64)]
        stores.append((coded, weight, packed[5], packed[6]))
    out = torch.zeros(B, 1, Q, given["values_PV"].shape[1], dtype=torch.float64)
    for q in range(B * Q):
        b, head = divmod(q, Q)
        row, weights, values = b * H + head // (Q // H), [], []
        for (keys, its_values), weight, offsets, held in stores:
            part = slice(int(offsets[row]), int(offsets[row] + held[row]))
            logits = given["scaling"] * keys[part] @ given["queries_BQ1D"][b, head, 0].double()
            if given["soft_cap"]:
                logits = given["soft_cap"] * torch.tanh(logits / given["soft_cap"])
            logits = logits if weight is None else logits + weight[part]
            if given["window"]:
                oldest = given["last_B"][b] + clock - given["window"]
                logits = logits.masked_fill(given["positions_P"][part] <= oldest, float("-inf"))
            weights.append(logits.exp())
            values.append(its_values[part])
        every = torch.cat(weights)
        sink = 0.0 if given["sinks_Q"] is None else given["sinks_Q"][head].double().exp()
        out[b, 0, head] = every @ torch.cat(values) / (every.sum() + sink)
    return out


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_formula(name):
    """And the token is written, and nothing else."""
    given, before = (inputs(CASES[name], torch.float64, "cpu") for _ in range(2))
    with backend.using("reference"):
        out = run(CASES[name], given)
    assert_close(out, formula(given), dtype=torch.float32 if CASES[name].weighted else None)
    at_R = given["offsets_R1"][:-1] + given["base_R"]
    now_R = (given["last_B"] + 1).repeat_interleave(CASES[name].kv_heads)
    new = given["keys_BH1D"].flatten(0, 2), given["values_BH1V"].flatten(0, 2), now_R.int()
    for column, written in zip(("keys_PD", "values_PV", "positions_P"), new, strict=True):
        before[column][at_R] = written
        torch.testing.assert_close(given[column], before[column], rtol=0, atol=0, equal_nan=True)


def load_step():
    """Skips only where there is no compiler: code that does not compile is an error."""
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    assert build.load()


@pytest.mark.parametrize("dtype", [torch.float64, *backend.DTYPES], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_step_in_cpp_is_the_reference(name, dtype):
    load_step()
    if dtype != torch.float64 or not CASES[name].bits:  # its codes stand for float32 numbers
        assert check(cases, CASES[name], dtype, "cpu") is None
    ours, plain = (inputs(CASES[name], dtype, "cpu") for _ in range(2))
    out = run(CASES[name], ours)
    with backend.using("reference"):
        torch.testing.assert_close(out, run(CASES[name], plain))
    for column in ("keys_PD", "values_PV", "positions_P"):
        torch.testing.assert_close(ours[column], plain[column], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("entries", [64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_the_reference(name, dtype, entries, monkeypatch):
    """In the interpreter: rows in one part and in several; and in any order of the parts to the last bit."""
    monkeypatch.setattr(launch, "ENTRIES", (entries,))
    with backend.using("triton"):
        assert check(cases, CASES[name], dtype, DEVICE) is None
        given, turned = (inputs(CASES[name], dtype, DEVICE) for _ in range(2))
        items, count, _, _ = turned["work"]
        items[:, : int(count[0])] = items[:, : int(count[0])].flip(1)
        assert torch.equal(run(CASES[name], given), run(CASES[name], turned))
    assert not given["work"][3].any() and not turned["work"][3].any()
    assert torch.equal(given["positions_P"], turned["positions_P"])


@pytest.mark.parametrize("way", ["reference", "triton", "cpp"])
def test_a_row_grows_from_step_to_step(way):
    case = CASES["all options"]
    path = None if way == "cpp" else way
    with backend.using("triton" if way == "triton" else "reference"):
        given = inputs(case, torch.float64 if way == "reference" else torch.float32, DEVICE)
    given["base_R"] -= 2
    for later in range(3):  # free places weigh nothing
        given["log_weight_P"][given["offsets_R1"][:-1] + given["base_R"] + later] = 0.0
    given["clock_1"].zero_()
    draw = torch.Generator(DEVICE).manual_seed(3)
    for _ in range(3):
        given["clock_1"] += 1
        for name in ("queries_BQ1D", "keys_BH1D", "values_BH1V"):
            given[name] = torch.randn(given[name].shape, generator=draw, device=DEVICE).to(given[name].dtype)
        if path is None:
            load_step()
            out = decode_step(**{**given, "work": None})
        else:
            with backend.using(path):
                out = decode_step(**given)
        want = formula({name: one.cpu() if torch.is_tensor(one) else one for name, one in given.items()})
        assert_close(out.cpu(), want, dtype=torch.float32)


@pytest.mark.parametrize("path", [None, "reference"], ids=["op", "reference"])
def test_a_row_without_a_free_place_is_refused(path):
    given = inputs(CASES["plain"], torch.float32, "cpu")
    given["base_R"][1] = int(given["offsets_R1"][2] - given["offsets_R1"][1])
    with pytest.raises((ValueError, RuntimeError), match="row 1 has a room of"):
        if path is None:
            decode_step(**given)
        else:
            with backend.using(path):
                decode_step(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", backend.DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_on_a_gpu(name, dtype):
    assert check(cases, CASES[name], dtype, torch.device("cuda")) is None


def test_a_build_leaves_small_numbers_as_they_are():
    """-ffast-math would make every later sum of this process take them for nothing."""
    load_step()
    assert float(torch.tensor([1e-39]) * 0.5) > 0


def test_opcheck():
    given = inputs(CASES["all options"], torch.float32, "cpu")
    numbers = (given["scaling"], given["soft_cap"] or 0.0, given["window"] or 0)
    tensors = [one for name, one in given.items() if name not in ("scaling", "soft_cap", "window")]
    torch.library.opcheck(torch.ops.retain.decode_step.default, (*tensors, *numbers, *[None] * 4, [], 0, 1))

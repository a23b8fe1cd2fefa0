"""A decoding step over static rows: plain PyTorch against attention made whole, C++ and kernel against it."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from retain.kernels import backend, codes
from retain.kernels.decode_step import build, cases, decode_step, launch, reference
from tests.kernels.device import DEVICE

B, H, G, D, V = 2, 2, 3, 24, 16
LAST = 39
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"weighted": True},
    "sinks": {"sunk": True},
    "cap": {"soft_cap": 5.0},
    "window": {"window": 30},
    "all": {"weighted": True, "sunk": True, "soft_cap": 5.0, "window": 30},
    "8 bits": {"bits": 8},
    "2 bits, all": {"bits": 2, "weighted": True, "sunk": True, "soft_cap": 5.0, "window": 150},
    "4 bits, window": {"bits": 4, "window": 150, "span": 5},
}


class Layer:
    """Rows of one layer in a pool, from place 7 on."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        weighted: bool = False,
        sunk: bool = False,
        bits: int = 0,
        span: int = 32,
        **how: Any,
    ):
        draw = torch.Generator().manual_seed(0)
        rooms = torch.randint(1, 6, (B * H,), generator=draw) * 64
        self.offsets = torch.cat([torch.tensor([7]), rooms]).cumsum(0)
        held = [int(torch.randint(0, int(room) - 8, (), generator=draw)) for room in rooms]
        self.base = torch.tensor(held, dtype=torch.int32)
        P = int(self.offsets[-1]) + 5
        self.keys, self.values = (torch.randn(P, width, generator=draw).to(dtype) for width in (D, V))
        self.positions = torch.zeros(P, dtype=torch.int32)
        self.weights = torch.zeros(P) if weighted else None
        for start, count in zip(self.offsets.tolist(), held, strict=False):
            self.positions[start : start + count] = torch.arange(LAST - count + 1, LAST + 1)
            if self.weights is not None:
                self.weights[start : start + count] = torch.randn(count, generator=draw)
        self.sinks = torch.randn(H * G, generator=draw).to(dtype) if sunk else None
        self.clock, self.last = torch.zeros(1, dtype=torch.int64), torch.full((B,), LAST)
        self.how = {"scaling": 0.3, **how}
        self.numbers: list[list[Tensor]] = []  # of each row's codes: keys, values, positions, log weights
        self.packed: list[Tensor] = []
        if bits:
            self._pack(bits, min(span, V), weighted, draw)

    def _pack(self, bits: int, span: int, weighted: bool, draw: torch.Generator) -> None:
        """Entries before those of the pool, as codes, in rooms of more places: of one row there are none."""
        held = torch.tensor([70, 0, 33, 129])
        offsets = torch.cat([torch.tensor([3]), torch.full((B * H,), 192)]).cumsum(0)
        P = int(offsets[-1]) + 2
        keys, values = (torch.randn(P, width, generator=draw) for width in (D, V))
        groups = torch.arange(P) // 32
        of_keys, of_values = codes.encode(keys, bits, 1, groups), codes.encode(values, bits, span)
        positions, weight = torch.zeros(P, dtype=torch.int32), torch.randn(P, generator=draw)
        decoded = codes.decode(of_keys, torch.float32), codes.decode(of_values, torch.float32)
        for row, (start, count) in enumerate(zip(offsets.tolist(), held.tolist(), strict=False)):
            own, first = slice(start, start + count), LAST - int(self.base[row])
            positions[own] = torch.arange(first - count + 1, first + 1)
            self.numbers.append([decoded[0][own], decoded[1][own], positions[own], weight[own]])
        tables = of_keys.groups_C, of_keys.scales_G2N, offsets, held.to(torch.int32)
        columns = of_keys.codes_CW, of_values.codes_CW, positions, of_values.scales_G2N
        self.packed = [*columns, *tables, *([weight] if weighted else [])]
        self.how |= {"bits": bits, "span": span}

    def step(self, *new: Tensor, run: Any = decode_step, **more: Any) -> Tensor:
        self.clock += 1
        held = self.keys, self.values, self.positions, self.offsets, self.base, self.clock, self.last
        more |= {"packed": self.packed} if self.packed else {}
        return run(*new, *held, self.weights, self.sinks, **self.how, **more)


def tokens(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one token, as models have them: heads behind tokens."""
    draw = torch.Generator().manual_seed(step)
    sizes = ((H * G, D), (H, D), (H, V))
    q, k, v = (torch.randn(B, 1, heads, width, generator=draw).to(dtype) for heads, width in sizes)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def by_reference(
    *given: Any, scaling: float, soft_cap: float = 0.0, window: int = 0, work: Any = (None,) * 4, **how: Any
) -> Tensor:
    return reference.decode_step(*given, scaling, soft_cap, window, *work, **how)


def by_kernel(
    work: Any, *given: Any, scaling: float, soft_cap: float = 0.0, window: int = 0, **how: Any
) -> Tensor:
    return launch.decode_step(*given, scaling, soft_cap, window, *work, **how)


def rooms_of(layer: Layer) -> list[list[int]]:
    """Of codes, where there are any, and of the pool."""
    coded = [layer.packed[6].diff().tolist()] if layer.packed else []
    return [*coded, layer.offsets.diff().tolist()]


def whole(layer: Layer, q: Tensor, row: int) -> Tensor:
    """Attention of one row over what it holds, in float64, as the formula says."""
    b, h = divmod(row, H)
    start = int(layer.offsets[row])
    held = slice(start, start + int(layer.base[row] + layer.clock))
    columns = [layer.keys[held], layer.values[held], layer.positions[held]]
    columns.append(torch.zeros(len(columns[0])) if layer.weights is None else layer.weights[held])
    if layer.packed:
        columns = [torch.cat(pair) for pair in zip(layer.numbers[row], columns, strict=True)]
    keys, values, positions, weights = columns
    logits = layer.how["scaling"] * q[b, h * G : (h + 1) * G, 0].double() @ keys.double().T
    if cap := layer.how.get("soft_cap"):
        logits = cap * torch.tanh(logits / cap)
    if layer.weights is not None:
        logits = logits + weights
    if window := layer.how.get("window"):
        logits = logits.masked_fill(positions <= LAST + layer.clock - window, float("-inf"))
    total = logits.exp().sum(-1)
    if layer.sinks is not None:
        total = total + layer.sinks[h * G : (h + 1) * G].double().exp()
    return (logits.exp() @ values.double()) / total[:, None]


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_formula(name: str) -> None:
    layer = Layer(torch.float32, **CASES[name])
    for step in range(5):
        q, k, v = tokens(step, torch.float32)
        out = layer.step(q, k, v, run=by_reference)
        for row in range(B * H):
            b, h = divmod(row, H)
            at = int(layer.offsets[row] + layer.base[row] + layer.clock) - 1
            assert torch.equal(layer.keys[at], k[b, h, 0]) and torch.equal(layer.values[at], v[b, h, 0])
            assert int(layer.positions[at]) == LAST + step + 1
            want = whole(layer, q, row)
            torch.testing.assert_close(out[b, 0, h * G : (h + 1) * G].double(), want, rtol=1e-5, atol=1e-6)


def load_step() -> None:
    """Skips only where there is no compiler: code that does not compile is an error."""
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    assert build.load()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_step_in_cpp_is_the_reference(name: str, dtype: torch.dtype) -> None:
    load_step()
    own, plain = Layer(dtype, **CASES[name]), Layer(dtype, **CASES[name])
    for step in range(3):
        new = tokens(step, dtype)
        torch.testing.assert_close(own.step(*new), plain.step(*new, run=by_reference))
    for mine, theirs in (
        (own.keys, plain.keys),
        (own.values, plain.values),
        (own.positions, plain.positions),
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("run", [decode_step, by_reference], ids=["op", "reference"])
def test_a_row_without_a_free_place_is_refused(run: Any) -> None:
    layer = Layer(torch.float32)
    layer.base[1] = int(layer.offsets[2] - layer.offsets[1])
    with pytest.raises((ValueError, RuntimeError), match="row 1 has a room of"):
        layer.step(*tokens(0, torch.float32), run=run)


@pytest.mark.parametrize("entries", [64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_the_reference(name: str, dtype: torch.dtype, entries: int, monkeypatch: Any) -> None:
    """In the interpreter: rows in one part and in several; and in any order of the parts to the last bit."""
    monkeypatch.setattr(launch, "ENTRIES", (entries,))
    plain = Layer(dtype, **CASES[name])
    want = [plain.step(*tokens(step, dtype), run=by_reference) for step in range(3)]
    outs = []
    for turned in (False, True):
        own = Layer(dtype, **CASES[name])
        (table,) = launch.tables([rooms_of(own)], G, V, torch.device(DEVICE), lambda size: size + 3)
        if turned:
            count = int(table.count_2[0])
            table.items_3I[:, :count] = table.items_3I[:, :count].flip(1)
        work = table.tensors()

        run = partial(by_kernel, work)
        outs.append([own.step(*tokens(step, dtype), run=run) for step in range(3)])
        for got, expected in zip(outs[-1], want, strict=True):
            torch.testing.assert_close(got, expected)
        assert torch.equal(own.keys, plain.keys) and torch.equal(own.positions, plain.positions)
        assert not table.arrived_R.any()
    assert all(map(torch.equal, *outs))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_on_a_gpu(name: str) -> None:
    assert backend.interpreting() is False
    plain, own = Layer(torch.bfloat16, **CASES[name]), Layer(torch.bfloat16, **CASES[name])
    for field, value in vars(own).items():
        if isinstance(value, Tensor):
            setattr(own, field, value.cuda())
    own.packed = [column.cuda() for column in own.packed]
    (table,) = launch.tables([rooms_of(own)], G, V, own.keys.device, lambda size: size)
    for step in range(3):
        new = tokens(step, torch.bfloat16)
        got = own.step(*(one.cuda() for one in new), work=table.tensors())
        torch.testing.assert_close(got.cpu(), plain.step(*new, run=by_reference))


def test_what_was_built_leaves_small_numbers_as_they_are() -> None:
    """-ffast-math would make every later sum of this process take them for nothing."""
    load_step()
    assert float(torch.tensor([1e-39]) * 0.5) > 0


@pytest.mark.parametrize("name", cases.CASES)
def test_the_cases_of_the_benchmark_are_right(name: str) -> None:
    assert cases.check(cases.CASES[name], torch.float32, "cpu") is None
    assert cases.cost(cases.CASES[name], torch.bfloat16).bytes > 0


def test_opcheck() -> None:
    layer = Layer(torch.float32, weighted=True, bits=4)
    layer.clock += 1
    held = layer.keys, layer.values, layer.positions, layer.offsets, layer.base, layer.clock, layer.last
    given = (
        *tokens(0, torch.float32),
        *held,
        layer.weights,
        None,
        0.3,
        0.0,
        0,
        None,
        None,
        None,
        None,
        [],
        0,
        1,
    )
    torch.library.opcheck(torch.ops.retain.decode_step.default, given)

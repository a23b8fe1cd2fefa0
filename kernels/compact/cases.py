"""Cases of `compact_` and `append_`: named shapes, inputs, check and rivals."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from retain.kernels.compact import append_, compact_, reference
from retain.kernels.measure import Claim, Cost, wrong

# A column: shape and type of an entry; None: the precision that is asked for.
Column = tuple[tuple[int, ...], torch.dtype | None]


def of_width(width: int, *beside: Column) -> tuple[Column, ...]:
    """Keys, values and positions of heads this wide, and what lies beside them."""
    return ((width,), None), ((width,), None), ((), torch.int32), *beside


@dataclass(frozen=True)
class Case:
    """One store, and an eviction or new tokens.

    Args:
        lengths: entries that each row holds.
        columns: of the store.
        kept: share that stays, `late` (all but one entry, four from each row's end), or None: tokens come.
        tokens: new ones of every row.
        padded: some of them are padding.
        times: steps, one after another, that bring so many tokens.
        batch: sequences that the rows belong to.
        slack: free slots of a row, at least.
        aligned: rooms are whole pages of 64 entries.
        inner: columns are the left part of wider ones, and new tokens views of `[B, S, H, D]`.
    """

    lengths: tuple[int, ...] = (5, 0, 130, 64, 1, 77)
    columns: tuple[Column, ...] = of_width(64)
    kept: float | str | None = 0.6
    tokens: int = 0
    padded: bool = False
    times: int = 1
    batch: int = 2
    slack: int = 0
    aligned: bool = True
    inner: bool = False


_SIDE: tuple[Column, ...] = (
    ((), torch.float32),
    ((8,), torch.float16),
    ((3, 2), torch.int64),
    ((1,), torch.bool),
)

CASES = {
    "rows of any length": Case(),
    "all kept": Case(kept=1.0),
    "nothing kept": Case(kept=0.0),
    "one hole, late": Case(kept="late"),
    "nothing held": Case(lengths=(0, 0)),
    "one entry": Case(lengths=(1,), batch=1, kept=0.0),
    "longer than a block": Case(lengths=(700, 1300), columns=of_width(32, _SIDE[0]), aligned=False),
    "longer than a block of narrow ones": Case(lengths=(5000, 2048), columns=(((), torch.int32),), kept=0.3),
    "D = 33, odd rooms": Case(columns=of_width(33), aligned=False, slack=3),
    "D = 80": Case(columns=of_width(80)),
    "D = 128, side columns": Case(columns=of_width(128, *_SIDE), kept=0.9),
    "D = 256": Case(columns=of_width(256), lengths=(90, 33)),
    "five of one shape": Case(columns=(((4,), torch.int16),) * 5),
    "strided": Case(columns=of_width(64, ((5,), torch.int8)), inner=True),
    "append one": Case(kept=None, tokens=1, slack=1),
    "append one to nothing": Case(lengths=(0,), batch=1, kept=None, tokens=1, slack=1),
    "append one, five columns": Case(kept=None, tokens=1, slack=9, columns=of_width(33, *_SIDE[:2])),
    "append one, padded": Case(kept=None, tokens=1, padded=True, slack=1),
    "append many": Case(kept=None, tokens=70, slack=80, columns=of_width(128), inner=True),
    "append many, padded": Case(kept=None, tokens=70, padded=True, slack=70, columns=of_width(80, *_SIDE)),
    "append a few, padded": Case(kept=None, tokens=9, padded=True, slack=9, aligned=False, inner=True),
    "append a few, padded, three times": Case(kept=None, tokens=9, padded=True, times=3, slack=27),
    "append no token": Case(kept=None, tokens=0, columns=of_width(16)),
}

# 64 rows of unequal length, the longest ten times the shortest, 26,214 entries a row: 20 % of 128K.
_SPREAD = tuple(round(26_214 * (2 + 18 * row / 63) / 11) for row in range(64))
_SCORED = of_width(128, ((), torch.float32))
_ONE = Case(columns=of_width(128), kept=None, tokens=1, times=64, slack=64)
SPEED = {
    "cpu": {
        "8 rows of 2K, half stays": Case(lengths=(2048,) * 8, columns=_SCORED, kept=0.5, batch=1),
        "append one token, 64 times": replace(_ONE, lengths=(2048,) * 8, batch=1),
    },
    "cuda": {
        "64 rows of 26K, half stays": Case(lengths=_SPREAD, columns=_SCORED, kept=0.5, batch=8),
        "64 rows of 26K, 90 % stay": Case(lengths=_SPREAD, columns=_SCORED, kept=0.9, batch=8),
        "append one token, 64 times": replace(_ONE, lengths=_SPREAD, batch=8),
        "append 2K tokens": replace(_ONE, lengths=_SPREAD, tokens=2048, times=1, batch=8, slack=2048),
    },
}

_CLAIM = "near the rate of a copy"
CLAIMS = {
    "cuda": [
        Claim(_CLAIM, "copy", at_least=0.7, case="64 rows of 26K, half stays"),
        Claim(_CLAIM, "copy", at_least=0.7, case="64 rows of 26K, 90 % stay"),
        Claim("no slower than indices", "index_copy_", at_most=1.0, case="append one token, 64 times"),
    ],
    "cpu": [Claim("packed in pieces", extra_mb_at_most=4, case="8 rows of 2K, half stays")],
}


def rows(case: Case, seed: int) -> tuple[list[int], Tensor]:
    """Where each row's room begins and ends, and which entries stay, on the host, for `cost` too."""
    offsets = [0]
    for length in case.lengths:
        room = length + case.slack
        offsets.append(offsets[-1] + (-(-room // 64) * 64 if case.aligned else room))
    draw = torch.rand(sum(case.lengths), generator=torch.Generator().manual_seed(seed))
    if case.kept == "late":
        draw.zero_()
        ends = torch.tensor(case.lengths).cumsum(0)
        draw[(ends - 4)[torch.tensor(case.lengths) >= 4]] = 2.0
        return offsets, draw < 1.0
    return offsets, draw < float(case.kept or 0.0)


def inputs(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of `compact_` or `append_`; of the latter also `start_R`, the lengths to start from."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(shape: Sequence[int], of: torch.dtype | None) -> Tensor:
        numbers = torch.randn(tuple(shape), generator=generator, device=device)
        kind = of or dtype
        return numbers.to(kind) if kind.is_floating_point else numbers.mul_(40).to(kind)

    offsets, keep_N = rows(case, seed)
    C, B, H, S = offsets[-1], case.batch, len(case.lengths) // case.batch, case.tokens
    columns, new = [], []
    for shape, of in case.columns:
        wider = (*shape[:-1], shape[-1] + 7) if case.inner and shape else shape
        column = random((C, *wider), of)
        columns.append(column[..., : shape[-1]] if shape else column)
        new.append(random((B, S, H, *wider), of).transpose(1, 2)[..., : shape[-1] if shape else S])
        if not case.inner:
            new[-1] = new[-1].contiguous()
    kwargs: dict[str, Any] = {
        "columns": columns,
        "offsets_R1": torch.tensor(offsets, device=device),
        "lengths_R": torch.tensor(case.lengths, dtype=torch.int32, device=device),
    }
    if case.kept is not None:
        return {**kwargs, "keep_N": keep_N.to(device)}
    valid_BS = torch.rand(B, S, generator=generator, device=device) < 0.6 if case.padded else None
    return {**kwargs, "new": new, "valid_BS": valid_BS, "start_R": kwargs["lengths_R"].clone()}


def run(case: Case, kwargs: dict[str, Any]) -> Tensor:
    """The op; it may be run again: the same entries move, or are written."""
    if case.kept is not None:
        return compact_(**kwargs)
    return _appended(append_, case, kwargs)


def _appended(append: Callable[..., Tensor], case: Case, kwargs: dict[str, Any]) -> Tensor:
    """All steps, from the lengths to start from; entries that the last tokens see."""
    kwargs["lengths_R"].copy_(kwargs["start_R"])
    arguments = {name: value for name, value in kwargs.items() if name != "start_R"}
    return [append(**arguments) for _ in range(case.times)][-1]


def cost(case: Case, dtype: torch.dtype) -> Cost:
    """Moved entries are read and written, freed and new ones are written."""
    entry = sum(math.prod(shape) * (of or dtype).itemsize for shape, of in case.columns)
    if case.kept is None:
        return Cost(0.0, 2.0 * len(case.lengths) * case.tokens * case.times * entry)
    offsets, keep_N = rows(case, 0)
    from_N, _, freed, _ = reference.packing(
        keep_N, torch.tensor(offsets), torch.tensor(case.lengths, dtype=torch.int32)
    )
    return Cost(0.0, float((2 * len(from_N) + len(freed)) * entry + len(keep_N)))


def rivals(case: Case, kwargs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """PyTorch's copies along indices; to append, also those of a dense cache."""
    if case.kept is not None:
        columns, rows = kwargs["columns"], (kwargs["keep_N"], kwargs["offsets_R1"], kwargs["lengths_R"])

        def along_indices() -> None:
            from_N, to_N, freed, _ = reference.packing(*rows)
            for column in columns:
                column.index_copy_(0, to_N, column.index_select(0, from_N))
                column.index_fill_(0, freed, 0)

        return {"index_select, index_copy_": along_indices}

    (B, H), shortest = kwargs["new"][0].shape[:2], min(case.lengths)
    dense = [column[: B * H * shortest].unflatten(0, (B, H, shortest)) for column in kwargs["columns"]]
    pairs = list(zip(dense, kwargs["new"], strict=True)) * case.times
    return {
        "index_copy_": lambda: _appended(reference.append_, case, kwargs),
        "torch.cat of the shortest rows": lambda: [torch.cat(pair, dim=2) for pair in pairs],
    }


def plain(case: Case, kwargs: dict[str, Any]) -> tuple[list[Tensor], list[int], list[list[int]]]:
    """Row by row as one would write it: columns, lengths, and entries that the last tokens see."""
    columns = [column.clone() for column in kwargs["columns"]]
    ends, sees, at = [], [], 0
    for row, (start, length) in enumerate(zip(kwargs["offsets_R1"].tolist(), case.lengths, strict=False)):
        if case.kept is not None:
            keep = kwargs["keep_N"][at : at + length]
            at += length
            for column in columns:
                stay = column[start : start + length][keep]
                column[start : start + length] = torch.zeros_like(column[:1])
                column[start : start + len(stay)] = stay
            ends.append(int(keep.sum()))
            continue
        b, h = divmod(row, len(case.lengths) // case.batch)
        valid = kwargs["valid_BS"]
        real = [s for s in range(case.tokens) if valid is None or bool(valid[b, s])]
        for step in range(case.times):
            end = start + length + step * len(real)
            for column, new in zip(columns, kwargs["new"], strict=True):
                column[end : end + len(real)] = new[b, h, real].to(column.dtype)
        ends.append(length + case.times * len(real))
        rank = {s: number for number, s in enumerate(real, start=ends[-1] - len(real) + 1)}
        sees.append([rank.get(s, 0) for s in range(case.tokens)])
    return columns, ends, sees


def bits(column: Tensor) -> Tensor:
    """Bytes of a column's slots, `[C, bytes]`."""
    flat = column.detach().contiguous().view(column.shape[0], math.prod(column.shape[1:]))
    return flat.view(torch.uint8) if flat.numel() else flat


def check(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> str | None:
    """Compares lengths, counts and every bit of every column with `plain`."""
    kwargs = inputs(case, dtype, device, seed)
    columns, ends, sees = plain(case, kwargs)
    result = run(case, kwargs)
    lengths = result if case.kept is not None else kwargs["lengths_R"]
    problems = [wrong(lengths.cpu(), torch.tensor(ends, dtype=torch.int32), what="lengths")]
    if case.kept is None:
        wanted = torch.tensor(sees, dtype=torch.int64).view(result.shape)
        problems.append(wrong(result.cpu(), wanted, what="entries seen"))
    for number, (actual, want) in enumerate(zip(kwargs["columns"], columns, strict=True)):
        differing = int((bits(actual) != bits(want)).sum())
        if differing:
            problems.append(f"column {number} {tuple(want.shape)}: {differing} bytes differ")
    return next((problem for problem in problems if problem), None)

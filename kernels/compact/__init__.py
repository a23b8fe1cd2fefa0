"""Moves entries of ragged rows in place: evicted ones are removed, new ones written behind.

Columns are a store's keys, values and whatever else follows each entry, `[C, ...]` of any types. Entries are
copied as whole numbers of their size, so that every bit of every type comes through, and all columns are
changed by one plan, made before any of them is touched. Where kernels run, nothing waits for the device; the
reference, which on a GPU takes columns that scatter an entry's numbers, does.

Row `r`'s entries lie at `offsets[r] .. offsets[r] + lengths[r]`; the slots behind them up to `offsets[r +
1]` are free. `keep_N` is packed: `lengths[0]` elements of row 0, then those of row 1, ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retain.kernels import backend
from retain.kernels.compact import reference


@dataclass(frozen=True, eq=False)
class Plan:
    """Checked eviction; `move_` carries it out.

    Args:
        columns: to be packed.
        kept_R: int32, entries that each row keeps.
        path: of the op.
        tables: further tensors that the path needs.
    """

    columns: tuple[Tensor, ...]
    kept_R: Int[Tensor, " R"]
    path: backend.Path
    tables: tuple[Tensor, ...]


def compact_(
    columns: Sequence[Tensor],
    keep_N: Bool[Tensor, " N"],
    offsets_R1: Int[Tensor, " R1"],
    lengths_R: Int[Tensor, " R"],
) -> Int[Tensor, " R"]:
    """Remove the entries that are not kept, in place; the others keep their order, and only what lies behind
    a row's first hole moves. Slots that become free are zeroed.

    Args:
        columns: `[C, ...]`, of any types, each entry's numbers one behind another.
        keep_N: True = kept, row after row. (A kernel does not compare its length with those of the rows: it
            would wait for the device. What it lacks counts as evicted.)
        offsets_R1: int64, where each row's room begins and ends.
        lengths_R: int32, entries that each row holds; not changed.

    Returns:
        int32, entries that each row keeps: its new length.

    Raises:
        ValueError: shapes or types do not fit together, or tensors are on several devices.

    Examples:
        >>> keys, positions = torch.tensor([[1.0], [2.0], [3.0], [0.0]]), torch.tensor([7, 8, 9, 0])
        >>> rows = torch.tensor([0, 4]), torch.tensor([3], dtype=torch.int32)
        >>> compact_([keys, positions], torch.tensor([True, False, True]), *rows).tolist()
        [2]
        >>> keys.flatten().tolist(), positions.tolist()
        ([1.0, 3.0, 0.0, 0.0], [7, 9, 0, 0])
    """
    if torch.compiler.is_compiling():
        return _compact_(list(columns), keep_N, offsets_R1, lengths_R)
    plan = planned(columns, keep_N, offsets_R1, lengths_R)
    move_(plan)
    return plan.kept_R


def planned(
    columns: Sequence[Tensor],
    keep_N: Bool[Tensor, " N"],
    offsets_R1: Int[Tensor, " R1"],
    lengths_R: Int[Tensor, " R"],
) -> Plan:
    """The first half of `compact_`, which changes nothing; for callers that must know when there is no way
    back."""
    _check(columns, offsets_R1, lengths_R)
    if keep_N.ndim != 1 or keep_N.dtype != torch.bool:
        raise ValueError(
            f"compact_: the keep mask is {keep_N.dtype} {tuple(keep_N.shape)}: pass a bool tensor of one "
            "element an entry, row after row, True = kept."
        )
    # Not left to `path_for`, which is not given columns: it would refuse numbers that are only moved here.
    backend.check_devices("compact", lengths_R, offsets_R1, keep_N, *columns)
    path = _path("compact", columns, lengths_R)
    if path == "triton":
        from retain.kernels.compact import launch

        kept_R, *tables = launch.plan(keep_N, offsets_R1, lengths_R)
    else:
        if int(lengths_R.sum()) != keep_N.shape[0]:
            raise ValueError(
                f"compact_: the keep mask has {keep_N.shape[0]} elements, but the rows hold "
                f"{int(lengths_R.sum())} entries: pass one element an entry, row after row."
            )
        *tables, gone_R = reference.packing(keep_N, offsets_R1, lengths_R)
        kept_R = (lengths_R - gone_R).to(torch.int32)
    return Plan(tuple(columns), kept_R, path, tuple(tables))


def move_(plan: Plan) -> None:
    """The second half of `compact_`. If it breaks off, the columns no longer belong together."""
    run: Callable[..., None] = reference.move_
    if plan.path == "triton":
        from retain.kernels.compact import launch

        run = launch.move_
    run(plan.columns, *plan.tables)


def append_(
    columns: Sequence[Tensor],
    new: Sequence[Tensor],
    offsets_R1: Int[Tensor, " R1"],
    lengths_R: Int[Tensor, " R"],
    valid_BS: Bool[Tensor, "B S"] | None = None,
) -> Int[Tensor, "R S"]:
    """Write new entries behind each row: O(new), and nothing waits for the device unless entries are padded
    and no kernel runs. There must be room: S free slots in every row, which is not checked.

    Args:
        columns: `[C, ...]`, of any types.
        new: `[B, H, S, ...]` for each column, any strides, `R = B * H` rows, head fastest; converted to the
            column's type.
        offsets_R1: int64, where each row's room begins and ends.
        lengths_R: int32, entries that each row holds; afterwards with the new ones. They are raised last:
            until then only free slots have been written to.
        valid_BS: False on padding, which is not stored; None: all are real.

    Returns:
        int64, for each row and new token, how many entries of the row it sees, itself included; 0 for
        padding.

    Raises:
        ValueError: shapes or types do not fit together, or tensors are on several devices.

    Examples:
        >>> keys, lengths = torch.zeros(4, 1), torch.tensor([1], dtype=torch.int32)
        >>> append_([keys], [torch.ones(1, 1, 2, 1)], torch.tensor([0, 4]), lengths).tolist()
        [[2, 3]]
        >>> keys.flatten().tolist(), lengths.tolist()
        ([0.0, 1.0, 1.0, 0.0], [3])
    """
    if torch.compiler.is_compiling():
        return _append_(list(columns), list(new), offsets_R1, lengths_R, valid_BS)
    _check(columns, offsets_R1, lengths_R)
    _check_new(columns, new, lengths_R, valid_BS)
    backend.check_devices("append", lengths_R, offsets_R1, valid_BS, *columns, *new)
    run = reference.append_
    if _path("append", columns, lengths_R) == "triton":
        from retain.kernels.compact import launch

        run = launch.append_
    return run(columns, new, offsets_R1, lengths_R, valid_BS)


@torch.library.custom_op("retain::compact_", mutates_args={"columns"})
def _compact_(columns: list[Tensor], keep: Tensor, offsets: Tensor, lengths: Tensor) -> Tensor:
    return compact_(columns, keep, offsets, lengths)


@_compact_.register_fake
def _(columns: list[Tensor], keep: Tensor, offsets: Tensor, lengths: Tensor) -> Tensor:
    return torch.empty_like(lengths, dtype=torch.int32)


@torch.library.custom_op("retain::append_", mutates_args={"columns", "lengths"})
def _append_(
    columns: list[Tensor], new: list[Tensor], offsets: Tensor, lengths: Tensor, valid: Tensor | None
) -> Tensor:
    return append_(columns, new, offsets, lengths, valid)


@_append_.register_fake
def _(
    columns: list[Tensor], new: list[Tensor], offsets: Tensor, lengths: Tensor, *_: Tensor | None
) -> Tensor:
    return lengths.new_empty(lengths.shape[0], new[0].shape[2], dtype=torch.int64)


def _check(columns: Sequence[Tensor], offsets: Tensor, lengths: Tensor) -> None:
    rows = lengths.dtype == torch.int32 and offsets.dtype == torch.int64 and lengths.ndim == offsets.ndim == 1
    if not rows or offsets.shape[0] != lengths.shape[0] + 1:
        raise ValueError(
            f"rows have lengths {lengths.dtype} {tuple(lengths.shape)} and offsets {offsets.dtype} "
            f"{tuple(offsets.shape)}: pass int32 [R] and int64 [R + 1]."
        )
    firsts = {column.shape[:1] for column in columns}
    if len(firsts) != 1 or () in firsts:
        raise ValueError(
            f"columns have shapes {[tuple(column.shape) for column in columns]}: pass at least one, all of "
            "one store, [C, ...]."
        )


def _check_new(
    columns: Sequence[Tensor], new: Sequence[Tensor], lengths: Tensor, valid: Tensor | None
) -> None:
    first = tuple(new[0].shape[:3]) if new and new[0].ndim >= 3 else (0, 0, 0)
    fits = len(new) == len(columns) and first[0] * first[1] == lengths.shape[0]
    for column, one in zip(columns, new, strict=False):
        fits = fits and one.shape == first + column.shape[1:]
    if not fits:
        raise ValueError(
            f"new entries are {[tuple(one.shape) for one in new]} for {lengths.shape[0]} rows of columns "
            f"{[tuple(column.shape) for column in columns]}: pass [B, H, S, ...] for each [C, ...], with "
            f"B * H = {lengths.shape[0]}."
        )
    if valid is not None and (valid.dtype != torch.bool or valid.shape != (first[0], first[2])):
        raise ValueError(
            f"validity is {valid.dtype} {tuple(valid.shape)}, but {first[2]} new tokens of {first[0]} "
            f"sequences came: pass bool [{first[0]}, {first[2]}], True = real, or None."
        )


def _path(op: str, columns: Sequence[Tensor], lengths: Tensor) -> backend.Path:
    """The path of a call. A kernel cannot move columns that do not hold each entry in one piece; elsewhere
    nobody looks whether they do."""
    unsupported = None
    for column in columns if backend.which(lengths) == "triton" else ():
        if not column.is_contiguous() and reference.as_words(column) is None:
            strides = f"strides {column.stride()}"
            unsupported = f"a column {tuple(column.shape)} with {strides} scatters an entry's numbers"
            break
    return backend.path_for(op, lengths, unsupported=unsupported)

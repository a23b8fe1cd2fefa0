"""Budgets: how many entries of one layer each sequence and each head may keep, in whole entries.

In: what the user states (a ratio, tokens per head, or bytes), the padding, and for a budget shared between
heads the scores. Out: integers whose sum is exact. The decision taken here: every share is a rational number
until it is apportioned by largest remainder; 0.2 of 100 is 20, where `int(100 * (1 - 0.8))` is 19.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from retain.apportion import apportion, exact
from retain.ranking import rank_entries, refuse_nan

Scope = Literal["head", "layer"]


@dataclass(frozen=True)
class Budget:
    """How much is kept. Exactly one of the first three is stated.

    Args:
        keep_ratio: kept / seen, in (0, 1].
        tokens_per_head: entries per KV head, at least 1 (capped at what a sequence has).
        bytes: of keys and values, per sequence, over the layers that the budget is given to (`layer_budget`
            splits it).
        scope: `head` gives every head the same, `layer` lets the heads of a layer share by score; None leaves
            it to the policy.
    """

    keep_ratio: float | None = None
    tokens_per_head: int | None = None
    bytes: int | None = None
    scope: Scope | None = None

    def __post_init__(self) -> None:
        stated = {
            name: value
            for name, value in (
                ("keep_ratio", self.keep_ratio),
                ("tokens_per_head", self.tokens_per_head),
                ("bytes", self.bytes),
            )
            if value is not None
        }
        if len(stated) != 1:
            given = ", ".join(f"{name}={value}" for name, value in stated.items()) or "none"
            raise ValueError(
                f"a budget is stated once, as keep_ratio, tokens_per_head or bytes; got {given}."
            )
        if self.keep_ratio is not None and not 0 < self.keep_ratio <= 1:
            raise ValueError(
                f"keep_ratio is kept / seen, above 0 and at most 1; got {self.keep_ratio} "
                "(to remove 80 %, pass keep_ratio=0.2)."
            )
        for name in ("tokens_per_head", "bytes"):
            value = stated.get(name)
            if value is not None and (value < 1 or value != int(value)):
                raise ValueError(f"{name} is a whole number of at least 1; got {value}.")
        if self.scope not in (None, "head", "layer"):
            raise ValueError(f"a budget's scope is 'head' or 'layer'; got {self.scope!r}.")


def layer_budget(budget: Budget, layer: int, num_layers: int, entry_bytes: int) -> Budget:
    """The share of one layer: bytes are split over layers in whole entries, what is stated per token stays.

    Args:
        budget: of the whole model.
        layer: place of the layer among those that evict, 0..num_layers-1 (not its index in the model).
        num_layers: layers that evict.
        entry_bytes: bytes of one key and value, the same in all of them.
    """
    if budget.bytes is None:
        return budget
    shares = apportion(budget.bytes // entry_bytes, [Fraction(1)] * num_layers)
    if not shares[layer]:
        raise ValueError(
            f"a budget of {budget.bytes} bytes holds {budget.bytes // entry_bytes} entries of {entry_bytes} "
            f"bytes, fewer than the {num_layers} layers: raise bytes."
        )
    return Budget(bytes=shares[layer] * entry_bytes, scope=budget.scope)


def budget_tokens(
    budget: Budget, valid_BT: Bool[Tensor, "B T"], num_heads: int, entry_bytes: int
) -> tuple[list[Fraction], Int64[Tensor, " B"]]:
    """Entries of one layer, per sequence.

    With `n_b` the valid length: `total_b = round(keep_ratio * n_b * H)`, `min(tokens_per_head, n_b) * H`, or
    `min(floor(bytes / entry_bytes), n_b * H)`; halves round up; all in exact arithmetic.

    Args:
        budget: what was stated.
        valid_BT: False on padding.
        num_heads: H, KV heads of the layer.
        entry_bytes: bytes of one key and value.

    Returns:
        per head `total_b / H` (exact, perhaps not whole), and `total_b`.

    Raises:
        ValueError: if a sequence would get fewer entries than heads: no head may be empty.
    """
    totals = []
    for row, length in enumerate(valid_BT.sum(-1).tolist()):
        if budget.keep_ratio is not None:
            total = math.floor(exact(budget.keep_ratio) * length * num_heads + Fraction(1, 2))
        elif budget.tokens_per_head is not None:
            total = int(budget.tokens_per_head) * num_heads
        else:
            assert budget.bytes is not None
            total = int(budget.bytes) // entry_bytes
        total = min(total, length * num_heads)
        if length and total < num_heads:
            raise ValueError(
                f"sequence {row} of {length} tokens gets {total} entries for {num_heads} KV heads, and no "
                f"head may be empty: state at least {num_heads} entries a layer (keep_ratio "
                f"{1 / length:.3g}, tokens_per_head 1, or {num_heads * entry_bytes} bytes)."
            )
        totals.append(total)
    total_B = torch.tensor(totals, dtype=torch.int64, device=valid_BT.device)
    return [Fraction(total, num_heads) for total in totals], total_B


def allocate_uniform(total_B: Int64[Tensor, " B"], capacity_BH: Int64[Tensor, "B H"]) -> Int64[Tensor, "B H"]:
    """The same for every head of a layer, by largest remainder, capped at what a head has.

    Args:
        total_B: entries of the layer, per sequence.
        capacity_BH: entries that each head has.

    Returns:
        budgets that sum to `total_B`.
    """
    ones = [Fraction(1)] * capacity_BH.shape[1]
    rows = zip(total_B.tolist(), capacity_BH.tolist(), strict=True)
    return torch.tensor(
        [apportion(total, ones, capacity) for total, capacity in rows],
        dtype=torch.int64,
        device=capacity_BH.device,
    )


def allocate_flat(
    score_BHT: Float[Tensor, "B H T"],
    protected_BHT: Bool[Tensor, "B H T"],
    total_B: Int64[Tensor, " B"],
    *,
    least: int = 1,
) -> Int64[Tensor, "B H"]:
    """Budgets of a joint top-k: the heads of a layer compete for one total.

    `budget[b, h] = #{i: (h, i) among the first total_b of (guaranteed, score)}`, where an entry is guaranteed
    if it is protected or among its head's first `least` of (protected, score). Equal scores go to the later
    position, then to the lower head. Afterwards a head's own top-`budget` is exactly its part of the joint
    top-k.

    Ada-KV (arXiv 2407.11550) flattens so; its floor is a larger `least`.

    Args:
        score_BHT: comparable across heads; -inf on padding.
        protected_BHT: kept first.
        total_B: entries of the layer, per sequence.
        least: entries that every head gets, at least 1, if it has them.

    Returns:
        budgets that sum to `total_B`.

    Raises:
        ValueError: if the guaranteed entries alone exceed the total, or the total exceeds what exists.
    """
    if least < 1:
        raise ValueError(f"no head may be empty: least is at least 1; got {least}.")
    refuse_nan(score_BHT)
    exists_BHT = score_BHT > float("-inf")
    own_rank = rank_entries(score_BHT.masked_fill(protected_BHT, float("inf")))
    guaranteed_BHT = protected_BHT | ((own_rank < least) & exists_BHT)
    free_B = total_B - guaranteed_BHT.sum((1, 2))
    rest_BHT = exists_BHT & ~guaranteed_BHT
    for row, (free, rest) in enumerate(zip(free_B.tolist(), rest_BHT.sum((1, 2)).tolist(), strict=True)):
        if free < 0:
            raise ValueError(
                f"sequence {row} has a budget of {int(total_B[row])} entries in this layer, {-free} fewer "
                f"than its heads are guaranteed (protected, and {least} a head): raise the budget, or "
                "protect less."
            )
        if free > rest:
            raise ValueError(
                f"sequence {row} has a budget of {int(total_B[row])} entries in this layer, {free - rest} "
                f"more than exist."
            )
    # Positions outside, heads inside and reversed: rank_entries then prefers the later position, then the
    # lower head.
    joint = score_BHT.masked_fill(~rest_BHT, float("-inf")).flip(1).transpose(1, 2)
    chosen_BTH = rank_entries(joint.flatten(1)).view(joint.shape) < free_B[:, None, None]
    return guaranteed_BHT.sum(-1) + chosen_BTH.sum(1).flip(-1)

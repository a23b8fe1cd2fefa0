"""What a batch brings to an eviction besides its evidence: seeds, pinned spans, what is known of a prefill.

In: what a user stated once, for prompts. Out: the same for sequences. The one decision taken here: `generate`
repeats a prompt for beams and for several returned sequences, and what belongs to the prompt is repeated with
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from retain.budget import Stock
from retain.protection import pinned_mask, spans_by_sequence


@dataclass(frozen=True, eq=False)
class Given:
    """What a batch brings to a rule besides its evidence.

    Args:
        seeds_B: for scores that draw numbers.
        pinned_BT: entries that the caller wants kept.
    """

    seeds_B: Sequence[int] | None = None
    pinned_BT: Bool[Tensor, "B T"] | None = None

    def select_batch(self, rows: list[int]) -> "Given":
        """Of some of the sequences."""
        seeds = None if self.seeds_B is None else [self.seeds_B[row] for row in rows]
        return Given(seeds, None if self.pinned_BT is None else self.pinned_BT[rows])


@dataclass(frozen=True, eq=False)
class Arriving:
    """What is known of a batch before a layer is scored.

    Args:
        valid_BT: False on padding.
        token_ids_BT: None if the caller passed embeddings.
        element_size: bytes of a number of the model's weights, and so, most likely, of its keys.
        stock: what there is to choose from, where that is not simply all of the tokens.
    """

    valid_BT: Bool[Tensor, "B T"]
    token_ids_BT: Int[Tensor, "B T"] | None
    element_size: int
    stock: Stock | None = None


def seeds_of(seeds: Sequence[int] | None, num_sequences: int) -> Sequence[int] | None:
    """One seed a sequence."""
    return None if seeds is None else _repeated(seeds, num_sequences, "seeds")


def pins_of(spans: Any, num_sequences: int) -> Any:
    """Pinned spans, one list a sequence, or one list that is meant for all; None without any.

    Raises:
        ValueError: lists for another number of sequences.
    """
    if spans is None or spans_by_sequence(spans) is None:
        return spans
    return list(_repeated(spans, num_sequences, "pinned span lists"))


def pinned_of(spans: Any, valid_BT: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"] | None:
    """The mask of pinned spans (`retain.protection.pinned_mask`); None without any.

    Raises:
        ValueError: a span that is none, or lists for another number of sequences.
    """
    spans = pins_of(spans, valid_BT.shape[0])
    return None if spans is None else pinned_mask(spans, valid_BT)


def _repeated(given: Sequence[Any], num_sequences: int, what: str) -> Sequence[Any]:
    """One a sequence: what belongs to a prompt that `generate` repeated (beams, ...) is repeated with it."""
    if len(given) == num_sequences:
        return given
    if not len(given) or num_sequences % len(given):
        raise ValueError(
            f"got {len(given)} {what} for {num_sequences} sequences: pass one per sequence (per prompt, "
            "where generate repeats prompts for beams or several returned sequences)."
        )
    return [one for one in given for _ in range(num_sequences // len(given))]

"""Hears from `generate` which sequences have ended, so that the padding behind them is not stored.

`generate` goes on with all sequences until the last has ended, and fills the others with its pad token; its
attention mask, where it passes one, calls that tokens. Which have ended is decided by its stopping criteria
(end tokens, stop strings, a user's own), which it asks after every token that it has sampled. So one more
criterion is put behind them, which ends nothing and hears what they said. What a prompt holds ends nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import StoppingCriteria


class Ended(StoppingCriteria):
    """A stopping criterion that ends nothing, to be put behind all others.

    Args:
        hear: called after every sampled token with what the others have said of it, `[B]`, True = ended.
    """

    def __init__(self, hear: Callable[[Bool[Tensor, " B"]], None]):
        self.hear = hear

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        nothing_B = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        answer_B = nothing_B.as_subclass(_Answer)
        answer_B.hear = self.hear
        return answer_B


class _Answer(Tensor):
    """The answer of `Ended`. transformers joins answers as `earlier | answer`: so it hears the others."""

    hear: Callable[[Tensor], None]

    def __ror__(self, earlier_B: Tensor) -> Tensor:  # type: ignore[override]
        self.hear(earlier_B)
        return earlier_B


def fills(eos_token_id: Any, criteria: Iterable[Any] | None) -> bool:
    """Whether `generate` puts padding behind a sequence that has ended: it does where one of its stopping
    criteria has end tokens. Else what it samples for such a sequence is returned, and stored.

    Args:
        eos_token_id: as `generate` is told; None for none.
        criteria: the user's own.
    """
    return eos_token_id is not None or any(hasattr(own, "eos_token_id") for own in criteria or ())

"""Validates the masks and positions of decoding steps asynchronously.

Where kernels run, the host is ahead of the device, and to look at a number would hold it back at every token.
So the answers of a step's checks are copied to the host without waiting, and read when a later step finds
that they have come; whatever reads a prompt, evicts, ends a `generate`, changes what is held or reports on it
waits for them first. A wrong mask is then refused some tokens late, and the cache with it; only `reset()`
drops a check unread.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

LATE = (
    "It was noticed only after that step had run, since decoding does not wait for the device: reset() the "
    "cache."
)
WRONG = {
    "forgotten": "a decoding step's attention_mask declared tokens padding that the cache had seen as real: "
    "declare a token padding with the step that brings it, or with the first call after a prompt, a turn or "
    "a generate.",
    "revived": "a decoding step's attention_mask shows tokens as real that were padding when the cache saw "
    "them, and padding is never stored: continue the mask that the earlier call had.",
    "back": "a decoding step's position_ids do not go on after the positions that its sequences have: let "
    "positions go on where they were.",
    "gap": "a decoding step has padding after tokens that its sequences have seen already, and the model "
    "has layers that are left to transformers, which take it for tokens: decode such sequences in caches of "
    "their own (batch_select_indices).",
}


class MaskCheck:
    """One step's questions, on their way.

    Args:
        found: names of `WRONG`, each with a boolean of no dimension, True = wrong.
    """

    def __init__(self, found: Mapping[str, Tensor]):
        self.names = list(found)
        answers = torch.stack(list(found.values()))
        self.arrival: torch.cuda.Event | None = None
        self.answers = answers.to("cpu", non_blocking=True)
        if answers.is_cuda:
            self.arrival = torch.cuda.Event()
            self.arrival.record(torch.cuda.current_stream(answers.device))

    @property
    def arrived(self) -> bool:
        """Whether the answers are there."""
        return self.arrival is None or self.arrival.query()

    def settle(self) -> None:
        """Wait for the answers, if they are not there, and read them.

        Raises:
            ValueError: something was wrong.
        """
        if self.arrival is not None:
            self.arrival.synchronize()
        for name, wrong in zip(self.names, self.answers.tolist(), strict=True):
            if wrong:
                raise ValueError(f"{WRONG[name]} {LATE}")

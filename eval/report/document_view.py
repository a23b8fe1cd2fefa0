"""Shows a text as each policy keeps it: every token shaded by the share of heads that hold it.

`retain try` writes such a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from retain.eval.report.page import html_page

# The share of heads at which a token's ground is darkest, and shades that are explained.
DARKEST = 0.5
KEYS = (("none", 0.0), ("1 in 8", 0.25), ("1 in 4", 0.5), ("half or more", 1.0))


@dataclass(frozen=True)
class Shown:
    """A policy on a text.

    Attributes:
        policy: Its name.
        answer: The answer that it gave.
        bytes_held: Bytes of keys and values that it answered from.
        kept: How many (layer, KV head) pairs hold each token of the text.
        of: How many pairs there are.
    """

    policy: str
    answer: str
    bytes_held: int
    kept: tuple[int, ...]
    of: int

    @property
    def depths(self) -> list[float]:
        """Depth of each token's ground, 0 to 1."""
        return [min(1.0, kept / self.of / DARKEST) for kept in self.kept]


def page(title: str, question: str, pieces: Sequence[str], shown: Sequence[Shown]) -> str:
    """A page with the answers of all policies, and the text as each of them keeps it.

    Args:
        title: Of the page.
        question: Asked after the text was read and evicted from.
        pieces: The text, one piece a token.
        shown: The policies; one that holds every token everywhere, as the full cache does, is shown with its
            answer alone.
    """
    assert all(len(one.kept) == len(pieces) for one in shown)
    return html_page(title, question=question, pieces=pieces, shown=shown, keys=KEYS)

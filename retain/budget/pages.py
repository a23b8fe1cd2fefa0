"""Rounds budgets to whole pages a head, so that a paged engine and `retain.Cache` keep the same entries.

A paged engine frees memory by the page: N entries of one head. Of T tokens, `F = T // N` pages are full, and
the *tail*, the `T - F N` entries of the unfilled last page, stays in every head. What a budget decides is how
many full pages each head fills with what it keeps. The total is rounded up once, to `K` pages a head in the
mean (`pages_a_head`, plain numbers: a scheduler can ask it before a model has run), and the budgets of heads,
spread with that total as ever, are rounded to pages of the same sum (`round_to_pages`).

So it is at later evictions: what a head holds beside the tail is whole pages already, since the tail of then
was kept, and what came since is all there. A head's pages are then bounded by those that it holds.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction


def pages_a_head(
    mean: int | Fraction, length: int, page: int, protected: int = 0, *, tail: int | None = None
) -> int:
    """Full pages that a head holds in the mean: `K = min(F, max(ceil((mean - tail) / N), ceil(p / N), 0))`.

    Over all layers a sequence then holds exactly `sum_l H_l (K N + tail)` entries, or all that there are.

    Args:
        mean: stated entries a head, in the mean over all heads (`Totals.per_head_B`), exact.
        length: T, tokens seen, padding apart, or announced: `F = (T - tail) // N`.
        page: N, entries a page.
        protected: p, protected entries of a head that do not lie in the tail.
        tail: tokens seen that fill no page; None: all T were seen.

    Examples:
        >>> pages_a_head(20, 100, 16), pages_a_head(21, 100, 16), pages_a_head(3, 100, 16, protected=2)
        (1, 2, 1)
    """
    tail = length % page if tail is None else tail
    full = (length - tail) // page
    return min(full, max(math.ceil(Fraction(mean - tail) / page), -(-protected // page), 0))


def round_to_pages(
    entries: Sequence[int], total: int, page: int, *, least: Sequence[int], most: Sequence[int]
) -> list[int]:
    """Round the entries of heads (or of layers) to whole pages of a given sum, by largest remainder.

    Each gets `floor(entries / N)` pages, within its bounds. While the sum is below the total, a page goes to
    the one that is furthest below its entries, of equal ones to the lower index. While it is above, which
    lower bounds can bring about, a page is taken from the one with the smallest remainder that is above its
    lower bound, of equal ones from the higher index.

    Args:
        entries: beside the tail, of each.
        total: pages of all.
        page: N.
        least, most: pages of each.

    Returns:
        pages of each, which sum to the total.

    Raises:
        ValueError: if the total does not lie between the sums of the bounds.

    Examples:
        >>> round_to_pages([23, 9, 0], 2, 16, least=[0, 0, 0], most=[9, 9, 9])
        [1, 1, 0]
        >>> round_to_pages([23, 9, 0], 2, 16, least=[0, 0, 1], most=[9, 9, 9])
        [1, 0, 1]
    """
    if not sum(least) <= total <= sum(most):
        raise ValueError(
            f"{total} pages of {page} entries do not fit {len(entries)} heads or layers, which need at least "
            f"{sum(least)} (guaranteed entries, rounded up) and can hold {sum(most)}: raise the budget, "
            "protect or guarantee less, or take a smaller page."
        )
    bounds = zip(entries, least, most, strict=True)
    pages = [min(max(own // page, low), high) for own, low, high in bounds]
    left = total - sum(pages)
    sign, limit = (1, most) if left > 0 else (-1, least)
    # The next to change is first: how far its pages are above (below) its entries, then its index.
    queue = [(sign * (pages[i] * page - own), sign * i) for i, own in enumerate(entries)]
    queue = [one for one in queue if pages[abs(one[1])] != limit[abs(one[1])]]
    heapq.heapify(queue)
    for _ in range(abs(left)):
        beyond, place = queue[0]
        pages[abs(place)] += sign
        if pages[abs(place)] == limit[abs(place)]:
            heapq.heappop(queue)
        else:
            heapq.heapreplace(queue, (beyond + page, place))
    return pages

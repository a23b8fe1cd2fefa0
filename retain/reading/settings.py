"""States how a cache that holds everything is read: which pages a query of a KV head reads, by which method.

A page is so many consecutive tokens of a sequence, counted without padding; tokens join the last page as they
come. Pages are chosen for each KV head of each layer, by the queries of its group. What the papers' codes
share: the first prompt is read whole, and so is every later forward of several tokens; each decoded token
chooses for itself. `questions` lets the tokens of a later read choose too, one after another.
"""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from retain.config import Count, PositiveShare, Share, Whole, check_fields

Method = Literal["quest", "fasa", "mpcache", "random", "recency"]
METHODS: tuple[Method, ...] = get_args(Method)
# Settings that some methods read; a method that does not refuses another value than the default.
READ_BY: dict[str, tuple[Method, ...]] = {
    "group": ("quest", "fasa", "mpcache"),
    "dominant_pairs": ("fasa",),
    "pairs": ("fasa",),
    "coarse_page": ("mpcache",),
    "coarse_share": ("mpcache",),
    "alpha": ("mpcache",),
}


@dataclass(frozen=True)
class Reading:
    """Settings.

    Args:
        by: the method. `quest`: an upper bound of the product with a page's keys (`retain.reading.quest`).
            `fasa`: the product over the pairs of channels that find a head's important tokens
            (`retain.reading.fasa`). `mpcache`: one product a cluster, coarse clusters first
            (`retain.reading.mpcache`). `random` and `recency` are controls (`retain.reading.baselines`).
        page: tokens that are read together; 1 chooses single tokens.
        whole_layers: first layers, of those with full attention, that are read whole. They are paid for.
        group: how the query heads that share a KV head agree on a page: the largest of their scores, or the
            mean.
        sinks: first tokens of a sequence whose pages are always read.
        recent: last tokens whose pages are always read, the query's own among them.
        questions: whether the tokens of a later read of several tokens choose too.
        dominant_pairs: table of `fasa` (`retain.head_tables`).
        pairs: share of a head's RoPE pairs that `fasa` looks at, at least one.
        coarse_page: tokens of a coarse cluster of `mpcache`, a multiple of `page`.
        coarse_share: share of the coarse clusters in which it looks at the fine ones.
        alpha: weight of the largest number of a channel beside the smallest, in its clusters.
    """

    by: Method = "quest"
    page: Count = 16
    whole_layers: Whole = 0
    group: Literal["max", "mean"] = "max"
    sinks: Whole = 0
    recent: Count = 1
    questions: bool = False
    dominant_pairs: str | None = None
    pairs: PositiveShare = 0.25
    coarse_page: Count = 32
    coarse_share: PositiveShare = 0.5
    alpha: Share = 0.6

    def __post_init__(self) -> None:
        check_fields(self, "reading")
        defaults = {own.name: own.default for own in fields(self)}
        problems = [
            f"{name} is read by {' and '.join(map(repr, readers))} alone, and this is {self.by!r}: leave "
            "it out"
            for name, readers in READ_BY.items()
            if self.by not in readers and getattr(self, name) != defaults[name]
        ]
        if self.by == "fasa" and self.dominant_pairs is None:
            problems.append(
                "'fasa' looks at the pairs of channels that its table names: state dominant_pairs (python -m "
                "retain.eval.diagnose.head_tables --table dominant_pairs measures one)"
            )
        if self.by == "mpcache" and self.coarse_page % self.page:
            problems.append(
                f"coarse_page {self.coarse_page} is no multiple of page {self.page}: clusters lie in one "
                "another"
            )
        if problems:
            raise ValueError(f"reading: {'; '.join(problems)}.")

    @property
    def cost(self) -> str:
        """What choosing costs a layer and decoded token, in the letters of `retain.shapes`."""
        return {
            "quest": f"bounds: 2 Q T D / {self.page}",
            "fasa": f"dominant pairs: {self.pairs:g} Q T D",
            "mpcache": f"clusters: Q T D / {self.coarse_page}, then at most Q T D / {self.page}",
        }.get(self.by, "nothing")

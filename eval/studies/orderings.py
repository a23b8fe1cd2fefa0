"""Published orderings: which method its paper says is better than which, and whether that holds here.

In: the scores of a run. Out: for each ordering, regime and keep_ratio a paired difference over all tasks,
with a finding in words. The one decision taken here: an ordering is a row of a table, written before the run
that checks it, and a finding is read off the verdict of its family: all orderings of one regime, over all
keep_ratios, are adjusted together. "better" holds where the policy is better, whatever the size; "alike"
where the difference is shown to lie within the margin, whatever its sign. Findings that were published before
this rule read the interval alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from retain.eval.stats.significance import Interval
from retain.eval.stats.summary import ALL, ALPHA, Cell, Comparison, Scores, compare_family

Finding = Literal["holds", "does not hold", "inconclusive"]
Size = Literal["above", "within", "below", "open"]

BARE = "_bare"


@dataclass(frozen=True)
class Ordering:
    """One published ordering.

    Attributes:
        topic: Heading that it stands under.
        policy: What is said to be better.
        baseline: Than what.
        claim: What was published, in short.
        paper: arXiv id; empty where the comparison is this project's own.
        says: "better", or "alike" where text and code differ and are published as one method.
        regimes: Where numbers were published; empty: nowhere.
        keep_ratios: At which shares; empty: at a number of entries, so that only the regime is compared.
        also: Other headings that it speaks of, which refer to it.
    """

    topic: str
    policy: str
    baseline: str
    claim: str
    paper: str
    says: Literal["better", "alike"] = "better"
    regimes: tuple[str, ...] = ()
    keep_ratios: tuple[float, ...] = ()
    also: tuple[str, ...] = ()

    def covers(self, regime: str, keep_ratio: float) -> bool:
        """Whether it was published there; one method under two names is meant everywhere."""
        if self.says == "alike":
            return True
        return regime in self.regimes and (not self.keep_ratios or keep_ratio in self.keep_ratios)


@dataclass(frozen=True)
class Checked:
    """An ordering at one regime and keep_ratio.

    Attributes:
        ordering: The row.
        made: Policy minus baseline.
        finding: What interval and adjusted test say of the row.
        size: Where the interval lies against the margin: "above" it, "within" it, "below" minus it, or
            "open", over one of its ends.
        published: Whether the ordering was published there; if not, it is extrapolated.
        recovery: Of a policy with protection on against off, (on - off) / (full - off); None where the full
            cache is not ahead.
    """

    ordering: Ordering
    made: Comparison
    finding: Finding
    size: Size
    published: bool
    recovery: float | None = None


PROTECTION = "Protection of both ends, on against off"
ENDS = "Protection of one end, and of another kind"
HEADS = "Budgets that heads share"
LAYERS = "Budgets that layers share"
WORST = "Worst case against mean over the window"
VALUES = "The value's norm"
STAGES = "Two stages against one"
TEXTS = "Text against released code"
DEFENSIVE = "The ladder of DefensiveKV's README (20 %, context_only)"
LAVA = "The ladder of LAVa's tables (query_aware)"

# What a reader of a topic's rows has to know.
NOTES: Mapping[str, tuple[str, ...]] = {
    PROTECTION: (
        "arXiv 2605.18053 evaluates with the question in the prompt and evicts while decoding; here entries "
        "go once, after the prefill, so every cell is beyond what was published.",
        "Its unprotected LRU breaks ties by the position's decimal string and so keeps neither end: what it "
        "reports for LRU is mostly that bug, and the row of lru is no reproduction of it.",
        "Off is what the method itself keeps, an observation window for instance. While 10 % of the budget "
        "are fewer entries than the `recent` that on and off share, a row compares the prefix alone.",
        "The finding is on the difference being above 0. Recovery, (on - off) / (full - off), is a number "
        "without an interval: nothing here proves `most`.",
        "Not among the rows: streaming_llm and duoattention, of which protection is the method, and "
        "defensive, whose score is that of defensivekv.",
    ),
    LAVA: (
        "All of its methods pool by max over 7, the heads of a group averaged first; Ada-KV's safeguard "
        "mixes budgets, as in its repository.",
        "Its budgets are entries (128 a head of documents of thousands), a smaller share than any here: only "
        "the regime is compared.",
        "Its released runs of LAVa held 4.5 % more entries than the budget at 128; here all hold the same.",
        "Its rows of CAKE are a weak anchor: the repository has no source for them, only bytecode in which "
        "layer budgets have no effect.",
    ),
    DEFENSIVE: ("Every step has the score of the released code, as the README measures it.",),
}

_README = "RULER-4K at 20 %: "
_LONGBENCH = "LongBench at 128 entries a head, Mistral-7B: "
_UNSEEN = ("context_only",)
_SEEN = ("query_aware",)
_DEFENSIVE = "2510.13334"
_CRITICAL = "2502.03805"
_LAVA = "2509.09754"


def _alike(policy: str, baseline: str, differs: str, paper: str) -> Ordering:
    return Ordering(TEXTS, policy, baseline, differs, paper, "alike")


# Each pair stands once; `also` names the other headings that it speaks of.
ORDERINGS: tuple[Ordering, ...] = (
    Ordering(ENDS, "snapkv_prefix_only", "snapkv_bare", "the prefix beside the window; ours", ""),
    Ordering(ENDS, "snapkv", "snapkv_prefix_only", "the suffix where it is longer than the window; ours", ""),
    Ordering(ENDS, "random_prefix_only", "random_bare", "the prefix alone; ours", ""),
    Ordering(ENDS, "random_suffix_only", "random_bare", "the suffix alone; ours", ""),
    Ordering(ENDS, "h2o_half", "h2o_bare", "half of the budget for recent entries, or none", "2306.14048"),
    Ordering(ENDS, "h2o", "h2o_half", "our protection, or H2O's own split; ours", ""),
    Ordering(
        HEADS,
        "ada_criticalkv",
        "criticalkv",
        "RULER-32K, Llama: 68.9 over 58.7 at 20 %, 86.3 over 76.9 at 40 %",
        _CRITICAL,
        regimes=_UNSEEN,
        keep_ratios=(0.2, 0.4),
    ),
    Ordering(HEADS, "adakv", "snapkv_layer", "a safeguard of 20 % of a head's budget", "2407.11550"),
    Ordering(HEADS, "defensivekv_nostage", "defensive", "heads share by risk; ours, not published", ""),
    Ordering(LAYERS, "pyramidkv", "snapkv", "lower layers need more", "2406.02069", regimes=_SEEN),
    Ordering(
        LAYERS, "cake", "cake_uniform_layers", "layers get what they prefer", "2503.12491", regimes=_SEEN
    ),
    *(
        Ordering(
            WORST,
            policy,
            baseline,
            "the worst case over the window is safer",
            _DEFENSIVE,
            regimes=_UNSEEN,
            keep_ratios=(0.2,),
        )
        for policy, baseline in (("snapkv_max", "snapkv"), ("defensive", "defensive_mean"))
    ),
    Ordering(
        VALUES,
        "criticalkv",
        "snapkv",
        "RULER-32K, Llama: 58.7 over 54.9 at 20 %, 76.9 over 67.9 at 40 %",
        _CRITICAL,
        regimes=_UNSEEN,
        keep_ratios=(0.2, 0.4),
    ),
    Ordering(
        VALUES,
        "vatp",
        "snapkv_nopool",
        "its table 5, " + _LONGBENCH + "35.34 over 34.42; neither is pooled here",
        _LAVA,
        regimes=_SEEN,
    ),
    Ordering(
        STAGES,
        "ada_criticalkv",
        "ada_criticalkv_one_stage",
        "alpha 0.5 over 0, LongBench at 20 %, Mistral: 42.85 over 31.94",
        _CRITICAL,
        regimes=_UNSEEN,
        keep_ratios=(0.2,),
    ),
    Ordering(
        STAGES,
        "defensivekv",
        "defensivekv_nostage",
        "90 % of the attention first; no ablation published",
        _DEFENSIVE,
    ),
    _alike("snapkv", "snapkv_paper", "pooled by mean over 5 (code), or max over 7", "2404.14469"),
    _alike("adakv", "adakv_paper", "a guaranteed top (code), or mixed budgets", "2407.11550"),
    _alike("criticalkv", "criticalkv_paper", "pooled by mean over 5 (code), or max over 7", _CRITICAL),
    _alike("ada_criticalkv", "ada_criticalkv_paper", "pooling and safeguard, as the two above", _CRITICAL),
    _alike(
        "defensivekv_code",
        "defensivekv",
        "norms over heads and the code's first stage, or the text's",
        _DEFENSIVE,
    ),
    _alike(
        "layer_defensivekv_code",
        "layer_defensivekv",
        "norms over heads and the code's first stage, or norms over tokens and the text's",
        _DEFENSIVE,
    ),
    _alike("lava_code", "lava_paper", "the scripts' floor of 0.2, or the largest value of all", _LAVA),
    _alike("cake_code", "cake", "what a layer cannot hold: evenly (code), or by weight", "2503.12491"),
    _alike("h2o_code", "h2o", "attention's mean (code), or its sum", "2306.14048"),
    _alike(
        "expected_attention",
        "expected_attention_paper",
        "norm of the value (code), or of the projected value",
        "2510.00636",
    ),
    _alike("vatp", "vatp_paper", "attention of a window (LAVa's code), or of all queries", "2406.12335"),
    *(
        Ordering(
            DEFENSIVE, *pair, _README + numbers, _DEFENSIVE, regimes=_UNSEEN, keep_ratios=(0.2,), also=also
        )
        for pair, numbers, also in (
            (("adakv", "snapkv"), "46.0 over 39.0", (HEADS,)),
            (("ada_criticalkv", "adakv"), "62.9 over 46.0", (VALUES,)),
            (("defensivekv_code", "ada_criticalkv"), "85.3 over 62.9", ()),
            (("layer_defensivekv_code", "defensivekv_code"), "91.4 over 85.3", (LAYERS,)),
        )
    ),
    *(
        Ordering(LAVA, *pair, _LONGBENCH + numbers, _LAVA, regimes=_SEEN, also=also)
        for pair, numbers, also in (
            (("adakv_pool7", "pyramidkv_pool7"), "35.82 over 34.51", ()),
            (("adakv_pool7", "snapkv_pool7"), "35.82 over 34.42", (HEADS,)),
            (("cake_pool7", "pyramidkv_pool7"), "35.06 over 34.51", ()),
            (("cake_pool7", "snapkv_pool7"), "35.06 over 34.42", ()),
            (("lava", "snapkv_pool7"), "36.74 over 34.42", ()),
            (("lava", "adakv_pool7"), "36.74 over 35.82", ()),
            (("lava", "cake_pool7"), "36.74 over 35.06", ()),
            (("lava", "lava_uniform_layers"), "36.74 over 36.20", (LAYERS,)),
            (("lava", "lava_equal_heads"), "36.74 over 34.95", (HEADS,)),
        )
    ),
)


def orderings_of(scores: Scores) -> list[Ordering]:
    """What a run can check: protection of every score that it also measured bare, and the table's rows of
    which it has both policies."""
    measured = scores.policies
    claim = "10 % of the budget at each end recovers most of what eviction costs, whatever the score"
    bare = [
        Ordering(PROTECTION, name, name + BARE, claim, "2605.18053", regimes=("decode",))
        for name in measured
        if name + BARE in measured
    ]
    return [*bare, *(one for one in ORDERINGS if {one.policy, one.baseline} <= set(measured))]


def check_orderings(scores: Scores, *, margin: float, resamples: int) -> list[Checked]:
    """Every ordering at every regime and keep_ratio of a run, over all tasks, each counting alike. Those of a
    regime are one Holm family.

    Args:
        scores: Of the run.
        margin: Of verdicts, sizes and "alike", in points.
        resamples: Of sign flips.
    """
    checked = []
    table = orderings_of(scores)
    made: dict[tuple[Cell, Cell], Comparison] = {}
    for regime in scores.regimes:
        pairs = [
            pair
            for one in table
            for ratio in scores.budgets
            if set(pair := (Cell(regime, one.policy, ratio), Cell(regime, one.baseline, ratio)))
            <= set(scores.exact)
        ]
        own = compare_family(scores, [(*pair, ALL) for pair in pairs], margin=margin, resamples=resamples)
        made |= {pair: found for pair, found in zip(pairs, own, strict=True) if found is not None}
    for one in table:
        for regime in scores.regimes:
            for ratio in scores.budgets:
                pair = Cell(regime, one.policy, ratio), Cell(regime, one.baseline, ratio)
                if pair in made:
                    checked.append(
                        Checked(
                            one,
                            made[pair],
                            finding_of(one, made[pair], margin),
                            size_of(made[pair].interval, margin),
                            one.covers(regime, ratio),
                            _recovery(scores, *pair) if one.topic == PROTECTION else None,
                        )
                    )
    return checked


def finding_of(ordering: Ordering, made: Comparison, margin: float) -> Finding:
    """What a comparison says of an ordering.

    "better" holds where the verdict is better, and does not where it is worse or the difference is shown to
    be no more than the margin. "alike" holds where the interval lies within the margin and the adjusted
    equivalence test passes, also where the difference is certain; it does not where the interval lies beyond
    the margin and the verdict says so. What its family does not bear is inconclusive.
    """
    if ordering.says == "alike":
        size, result = size_of(made.interval, margin), made.result
        p = result.within_p if result.holm_within_p is None else result.holm_within_p
        if made.verdict == "identical" or (size == "within" and p < ALPHA):
            return "holds"
        beyond = size in ("above", "below") and made.verdict in ("better", "worse")
        return "does not hold" if beyond else "inconclusive"
    if made.verdict == "inconclusive":
        return "inconclusive"
    return "holds" if made.verdict == "better" else "does not hold"


def size_of(interval: Interval, margin: float) -> Size:
    """Where an interval lies against the margin."""
    if -margin < interval.low and interval.high < margin:
        return "within"
    if interval.low >= margin:
        return "above"
    return "below" if interval.high <= -margin else "open"


def _recovery(scores: Scores, on: Cell, off: Cell) -> float | None:
    """Share of what eviction costs that protection wins back."""
    full, tasks = Cell(on.regime, "full", 1.0), scores.tasks(ALL)
    if full not in scores.exact:
        return None
    lost = scores.mean(full, tasks) - scores.mean(off, tasks)
    return (scores.mean(on, tasks) - scores.mean(off, tasks)) / lost if lost > 0 else None


def in_words(findings: Mapping[float, str]) -> str:
    """Findings, or sizes, by keep_ratio as one phrase: "holds", or which where."""
    kinds = list(dict.fromkeys(findings.values()))
    if len(kinds) == 1:
        return kinds[0]
    return "; ".join(
        f"{kind} at {', '.join(f'{ratio:g}' for ratio, own in findings.items() if own == kind)}"
        for kind in kinds
    )


def topics(checked: Sequence[Checked]) -> list[str]:
    """Headings, in the order of the table."""
    return list(dict.fromkeys(one.ordering.topic for one in checked))

"""Published orderings: which method its paper says is better than which, and whether that holds here.

In: the scores of a run. Out: for each ordering, regime and keep_ratio a paired difference over all tasks,
with a finding in words. The one decision taken here: an ordering is a row of a table, written before the run
that checks it, and a finding is read off the verdict alone: "holds" needs an interval that excludes 0 (or,
where two variants are said to be one method, one that lies within the margin).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from retain.eval.summary import ALL, Cell, Comparison, Scores, compare

Finding = Literal["holds", "does not hold", "inconclusive"]

BARE = "_bare"


@dataclass(frozen=True)
class Ordering:
    """One published ordering.

    Attributes:
        topic: Heading that it stands under.
        policy: What is said to be better.
        baseline: Than what.
        claim: What was published, in short.
        paper: arXiv id.
        says: "better", or "alike" where text and code differ and are published as one method.
        regimes: Where it was published; empty: no matter.
        keep_ratios: Where it was published; empty: no matter.
    """

    topic: str
    policy: str
    baseline: str
    claim: str
    paper: str
    says: Literal["better", "alike"] = "better"
    regimes: tuple[str, ...] = ()
    keep_ratios: tuple[float, ...] = ()


@dataclass(frozen=True)
class Checked:
    """An ordering at one regime and keep_ratio."""

    ordering: Ordering
    made: Comparison
    finding: Finding


PROTECTION = "Protection of both ends, on against off"
HEADS = "Budgets that heads share"
LAYERS = "Budgets that layers share"
WORST = "Worst case against mean over the window"
VALUES = "The value's norm"
STAGES = "Two stages against one"
TEXTS = "Text against released code"
DEFENSIVE = "The ladder of DefensiveKV's README (20 %, context_only)"
LAVA = "The ladder of LAVa's tables (query_aware)"

_README = "RULER-4K at 20 %: "
_LONGBENCH = "LongBench at 128 entries a head, Mistral-7B: "

ORDERINGS: tuple[Ordering, ...] = (
    Ordering(
        HEADS, "adakv", "snapkv", "RULER-4K at 20 %, as DefensiveKV reports: 46.0 over 39.0", "2407.11550"
    ),
    Ordering(HEADS, "ada_criticalkv", "criticalkv", "RULER-32K at 20 %, Llama: 68.9 over 58.7", "2502.03805"),
    Ordering(HEADS, "defensivekv", "defensive", "heads share one budget by risk; no ablation", "2510.13334"),
    Ordering(HEADS, "adakv", "snapkv_layer", "a safeguard of 20 % of a head's budget", "2407.11550"),
    Ordering(LAYERS, "pyramidkv", "snapkv", "lower layers need more", "2406.02069"),
    Ordering(LAYERS, "cake", "snapkv", "layers get what they prefer", "2503.12491"),
    Ordering(LAYERS, "lava", "snapkv_pool7", _LONGBENCH + "36.7 over 34.4", "2509.09754"),
    Ordering(LAYERS, "lava", "adakv_pool7", _LONGBENCH + "36.7 over 35.8", "2509.09754"),
    Ordering(LAYERS, "layer_defensivekv", "defensivekv", _README + "91.4 over 85.3", "2510.13334"),
    Ordering(WORST, "snapkv_max", "snapkv", "the worst case over the window is safer", "2510.13334"),
    Ordering(WORST, "defensive", "defensive_mean", "the worst case over the window is safer", "2510.13334"),
    Ordering(VALUES, "criticalkv", "snapkv", "RULER-32K at 20 %, Llama: 58.7 over 54.9", "2502.03805"),
    Ordering(VALUES, "vatp", "snapkv", "LAVa's table 5, " + _LONGBENCH + "35.3 over 34.4", "2406.12335"),
    Ordering(
        STAGES,
        "criticalkv",
        "criticalkv_one_stage",
        "on Ada-KV, LongBench at 20 %, Mistral: 42.9 over 31.9",
        "2502.03805",
    ),
    Ordering(STAGES, "defensivekv", "defensivekv_nostage", "90 % of the attention first", "2510.13334"),
    Ordering(
        TEXTS, "adakv_convex", "adakv", "mixed budgets (text), or a guaranteed top", "2407.11550", "alike"
    ),
    Ordering(TEXTS, "lava_floor", "lava", "the scripts' floor of 0.2, or none (text)", "2509.09754", "alike"),
    Ordering(
        TEXTS, "cake_even", "cake", "what a layer cannot hold: evenly, or by weight", "2503.12491", "alike"
    ),
    Ordering(
        TEXTS,
        "defensivekv_released",
        "defensivekv",
        "norms over heads and the code's first stage, or the text's",
        "2510.13334",
        "alike",
    ),
    Ordering(TEXTS, "snapkv_pool7", "snapkv", "pooled by max over 7, or mean over 5", "2404.14469", "alike"),
    Ordering(
        TEXTS,
        "layer_defensivekv_head_share",
        "layer_defensivekv",
        "norms over heads (code), or over tokens (text)",
        "2510.13334",
        "alike",
    ),
    *(
        Ordering(
            DEFENSIVE, policy, baseline, numbers, "2510.13334", regimes=("context_only",), keep_ratios=(0.2,)
        )
        for policy, baseline, numbers in (
            ("adakv", "snapkv", "46.0 over 39.0"),
            ("ada_criticalkv", "adakv", "62.9 over 46.0"),
            ("defensivekv", "ada_criticalkv", "85.3 over 62.9"),
            ("layer_defensivekv", "defensivekv", "91.4 over 85.3"),
        )
    ),
    *(
        Ordering(LAVA, policy, baseline, _LONGBENCH + numbers, "2509.09754", regimes=("query_aware",))
        for policy, baseline, numbers in (
            # All of its methods pool by max over 7.
            ("adakv_pool7", "pyramidkv_pool7", "35.8 over 34.5"),
            ("adakv_pool7", "snapkv_pool7", "35.8 over 34.4"),
            ("cake_pool7", "pyramidkv_pool7", "35.1 over 34.5"),
            ("cake_pool7", "snapkv_pool7", "35.1 over 34.4"),
            ("lava", "adakv_pool7", "36.7 over 35.8"),
            ("lava", "cake_pool7", "36.7 over 35.1"),
        )
    ),
)


def orderings_of(scores: Scores) -> list[Ordering]:
    """What a run can check: protection of every score that it also measured bare, and the table's rows of
    which it has both policies."""
    measured = scores.policies
    claim = "10 % of the budget at each end recovers most of what eviction costs, whatever the score"
    bare = [
        Ordering(PROTECTION, name, name + BARE, claim, "2605.18053")
        for name in measured
        if name + BARE in measured
    ]
    return [*bare, *(one for one in ORDERINGS if {one.policy, one.baseline} <= set(measured))]


def check_orderings(scores: Scores, *, margin: float, resamples: int) -> list[Checked]:
    """Every ordering at every regime and keep_ratio that it speaks of, over all tasks, each counting alike.

    Args:
        scores: Of the run.
        margin: Of the verdicts, in points.
        resamples: Of the intervals.
    """
    made: dict[tuple[Cell, Cell], Comparison | None] = {}
    checked = []
    for one in orderings_of(scores):
        for regime in scores.regimes:
            for ratio in scores.keep_ratios:
                if regime not in (one.regimes or scores.regimes):
                    continue
                if ratio not in (one.keep_ratios or scores.keep_ratios):
                    continue
                pair = Cell(regime, one.policy, ratio), Cell(regime, one.baseline, ratio)
                if pair not in made:
                    made[pair] = compare(scores, *pair, ALL, margin=margin, resamples=resamples)
                own = made[pair]
                if own is not None:
                    checked.append(Checked(one, own, finding_of(one, own)))
    return checked


def finding_of(ordering: Ordering, made: Comparison) -> Finding:
    """What a verdict says of an ordering."""
    if made.verdict == "inconclusive":
        return "inconclusive"
    holds = ("better",) if ordering.says == "better" else ("equivalent", "identical")
    return "holds" if made.verdict in holds else "does not hold"


def in_words(findings: Mapping[float, Finding]) -> str:
    """Findings by keep_ratio as one phrase: "holds here", or which where."""
    kinds = list(dict.fromkeys(findings.values()))
    if len(kinds) == 1:
        return {"holds": "holds here", "does not hold": "does not hold"}.get(kinds[0], kinds[0])
    return "; ".join(
        f"{kind} at {', '.join(f'{ratio:g}' for ratio, own in findings.items() if own == kind)}"
        for kind in kinds
    )


def topics(checked: Sequence[Checked]) -> list[str]:
    """Headings, in the order of the table."""
    return list(dict.fromkeys(one.ordering.topic for one in checked))

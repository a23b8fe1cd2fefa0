"""Observed scores of published methods, one file a family, in one registry (`SCORES`).

Settings that several scores have: `window`, the last queries observed (a sequence must not be shorter);
`pool` (`avg`, `max` or None) and `pool_size` (odd), smoothing over neighbouring entries; `order`, to pool
each query head (`pool_first`) or the mean of the group (`group_first`); `chunk`, queries at a time, which
changes memory and not the result (None: as many as are quick).
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from retain.attention.received import advance, advance_with_gaps
from retain.evidence import UNITS, Evidence, RunningStatistics, Score, masked_score
from retain.scores.cake import cake
from retain.scores.critical import critical
from retain.scores.defensive import defensive
from retain.scores.expected_attention import expected_attention
from retain.scores.h2o import h2o
from retain.scores.keydiff import keydiff
from retain.scores.keyformer import advance_with_noise, keyformer
from retain.scores.knorm import knorm
from retain.scores.lagkv import lagkv
from retain.scores.lava import lava
from retain.scores.lazy_eviction import lazy_eviction
from retain.scores.lru import lru
from retain.scores.observed_risk import observed_risk
from retain.scores.quest import quest
from retain.scores.random import random
from retain.scores.recency import recency
from retain.scores.snapkv import snapkv
from retain.scores.tova import tova
from retain.scores.triattention import triattention
from retain.scores.vatp import vatp


@dataclass(frozen=True)
class ScoreFamily:
    """Entry of the registry of observed scores.

    Args:
        function: `(evidence, **settings) -> Score`.
        unit: the unit under default settings (`retain.scores.trial` finds it under others).
        needs: the evidence that the function reads beyond keys, values, padding and places, under default
            settings: `window` (as many last queries as the `Score` says, one at least), `queries` (as many as
            there are, one at least), `running` (statistics of all queries, or every query to make them from),
            `value_norm` (`value_norm_BQT`, or an output projection to make it with), `rotary`, `hidden`,
            `token_ids`, `seeds` (one integer a sequence, passed as `seeds_B`). A cache that evicts again
            keeps exactly this for the next eviction.
        paper: title and arXiv id, or where the idea comes from.
        cost: cost of a layer, in the letters of `retain.shapes` (W: window queries).
        needs_where: other needs under certain settings: (name, value, or a type of values) -> needs.
        fold: folds queries into the running statistics that it reads, with those settings that it names.
    """

    function: Callable[..., Score]
    unit: str
    needs: frozenset[str]
    paper: str
    cost: str = ""
    needs_where: Mapping[tuple[str, Any], frozenset[str]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    fold: Callable[..., RunningStatistics] = advance

    def needs_with(self, settings: Mapping[str, Any]) -> frozenset[str]:
        """Needs under these settings."""
        for (name, value), needs in self.needs_where.items():
            own = settings.get(name)
            if own == value or (isinstance(value, type) and isinstance(own, value)):
                return needs
        return self.needs

    def counted(self, evidence: Evidence, settings: Mapping[str, Any]) -> Evidence:
        """The evidence with running statistics that its own queries are part of."""
        named = inspect.signature(self.fold).parameters
        own = {name: value for name, value in settings.items() if name in named}
        return replace(evidence, running=self.fold(evidence, evidence.running, **own))


_WINDOW = frozenset({"window"})
_WEIGHED = frozenset({"window", "value_norm"})
_RUNNING = frozenset({"running"})

SCORES: dict[str, ScoreFamily] = {
    "cake": ScoreFamily(
        cake,
        "mass",
        _WINDOW,
        "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences, arXiv 2503.12491",
        "W rows of attention (Q W T D), with their entropy and variance",
    ),
    "critical": ScoreFamily(
        critical,
        "risk",
        _WEIGHED,
        "Identify Critical KV Cache in LLM Inference (CriticalKV), arXiv 2502.03805",
        "W rows of attention (Q W T D) and one output projection (Q T D E; Q T D D with norm l2)",
        {("norm", "l2"): _WINDOW},
    ),
    "defensive": ScoreFamily(
        defensive,
        "risk",
        _WEIGHED,
        "Taming the Fragility of KV Cache Eviction (DefensiveKV), arXiv 2510.13334",
        "W rows of attention (Q W T D), each pooled (Q W T), and one output projection (Q T D E)",
    ),
    "expected_attention": ScoreFamily(
        expected_attention,
        "mass",
        frozenset({"queries", "rotary"}),
        "Expected Attention: Estimating Attention from Future Queries Distribution, arXiv 2510.00636",
        "a covariance of the S queries held (Q S D D) and a quadratic form an entry (Q T D D)",
        {("value_norm", "output_l1"): frozenset({"queries", "rotary", "value_norm"})},
    ),
    "h2o": ScoreFamily(
        h2o,
        "mass",
        _RUNNING,
        "H2O: Heavy-Hitter Oracle, arXiv 2306.14048",
        "nothing where running statistics are kept; else every row of attention (Q T T D), in chunks",
    ),
    "keydiff": ScoreFamily(
        keydiff,
        "rank",
        frozenset(),
        "KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364",
        "two passes over the keys (H T D)",
    ),
    "keyformer": ScoreFamily(
        keyformer,
        "mass",
        _RUNNING,
        "Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative Inference, "
        "arXiv 2403.09054",
        "every row of attention once, with noise (Q T T D), in chunks",
        fold=advance_with_noise,
    ),
    "knorm": ScoreFamily(
        knorm,
        "rank",
        frozenset(),
        "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430",
        "one pass over the keys (H T D)",
    ),
    "lagkv": ScoreFamily(
        lagkv,
        "rank",
        frozenset(),
        "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important, arXiv 2504.04704",
        "two passes over the keys and the values (H T D)",
    ),
    "lava": ScoreFamily(
        lava,
        "mass",
        _WINDOW,
        "LAVa: Layer-wise KV Cache Eviction with Dynamic Budget Allocation, arXiv 2509.09754",
        "W rows of attention (Q W T D) and one pass over the values (H T D)",
    ),
    "lazy_eviction": ScoreFamily(
        lazy_eviction,
        "rank",
        _RUNNING,
        "LazyEviction: Lagged KV Eviction with Attention Pattern Observation for Efficient Long Reasoning, "
        "arXiv 2506.15969",
        "every row of attention once (Q T T D), in chunks, and one pass over two numbers an entry (H T)",
        fold=advance_with_gaps,
    ),
    "lru": ScoreFamily(
        lru,
        "rank",
        _RUNNING,
        "least recently used, by attention; a control, no paper",
        "nothing where running statistics are kept; else every row of attention (Q T T D), in chunks",
    ),
    "observed_risk": ScoreFamily(
        observed_risk,
        "risk",
        _WEIGHED,
        "this project, after DefensiveKV (arXiv 2510.13334)",
        "W rows of attention (Q W T D) and one output projection (Q T D E)",
    ),
    "quest": ScoreFamily(
        quest,
        "rank",
        _WINDOW,
        "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv 2406.10774",
        "two passes over the keys (H T D), and one query against the bounds of T / page_size pages",
    ),
    "random": ScoreFamily(
        random, "rank", frozenset({"seeds"}), "a control, no paper", "one hash an entry (H T)"
    ),
    "recency": ScoreFamily(
        recency,
        "rank",
        frozenset(),
        "Efficient Streaming Language Models (StreamingLLM), arXiv 2309.17453",
        "one count an entry (T)",
    ),
    "snapkv": ScoreFamily(
        snapkv,
        "mass",
        _WINDOW,
        "SnapKV: LLM Knows What You are Looking for, arXiv 2404.14469",
        "W rows of attention (Q W T D)",
    ),
    "tova": ScoreFamily(
        tova,
        "mass",
        _WINDOW,
        "Transformers are Multi-State RNNs (TOVA), arXiv 2401.06104",
        "one row of attention (Q T D)",
    ),
    "triattention": ScoreFamily(
        triattention,
        "rank",
        frozenset({"queries", "rotary"}),
        "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression, arXiv 2604.04921",
        "one product of the keys with the centre of each query head (Q T D), and their lengths (H T D)",
        {("centres", str): frozenset({"rotary"})},
    ),
    "vatp": ScoreFamily(
        vatp,
        "mass",
        _WINDOW,
        "Attention Score is not All You Need (VATP), arXiv 2406.12335",
        "W rows of attention (Q W T D) and one pass over the values (H T D)",
        {("attention", "running"): _RUNNING},
    ),
}

__all__ = [
    "SCORES",
    "UNITS",
    "Score",
    "ScoreFamily",
    "cake",
    "critical",
    "defensive",
    "expected_attention",
    "h2o",
    "keydiff",
    "keyformer",
    "knorm",
    "lagkv",
    "lava",
    "lazy_eviction",
    "lru",
    "masked_score",
    "observed_risk",
    "quest",
    "random",
    "recency",
    "snapkv",
    "tova",
    "triattention",
    "vatp",
]

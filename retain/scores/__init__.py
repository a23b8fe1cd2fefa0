"""Observed scores: what each published scorer reads from the evidence, one file a family, one registry."""

from retain.scores.defensive import defensive
from retain.scores.h2o import h2o
from retain.scores.observed_risk import observed_risk
from retain.scores.random import random
from retain.scores.recency import recency
from retain.scores.score import UNITS, Score, ScoreFamily, masked_score
from retain.scores.snapkv import snapkv
from retain.scores.value_norm import value_norm_l1
from retain.scores.window import window_attention

_WINDOW = frozenset({"window"})

SCORES: dict[str, ScoreFamily] = {
    "defensive": ScoreFamily(
        defensive,
        "risk",
        _WINDOW,
        "Taming the Fragility of KV Cache Eviction (DefensiveKV), arXiv 2510.13334",
    ),
    "h2o": ScoreFamily(h2o, "mass", frozenset({"all_queries"}), "H2O: Heavy-Hitter Oracle, arXiv 2306.14048"),
    "observed_risk": ScoreFamily(
        observed_risk, "risk", _WINDOW, "this project, after DefensiveKV (arXiv 2510.13334)"
    ),
    "random": ScoreFamily(random, "rank", frozenset({"seeds"}), "a control, no paper"),
    "recency": ScoreFamily(
        recency, "rank", frozenset(), "Efficient Streaming Language Models (StreamingLLM), arXiv 2309.17453"
    ),
    "snapkv": ScoreFamily(
        snapkv, "mass", _WINDOW, "SnapKV: LLM Knows What You are Looking for, arXiv 2404.14469"
    ),
}

__all__ = [
    "SCORES",
    "UNITS",
    "Score",
    "ScoreFamily",
    "defensive",
    "h2o",
    "masked_score",
    "observed_risk",
    "random",
    "recency",
    "snapkv",
    "value_norm_l1",
    "window_attention",
]

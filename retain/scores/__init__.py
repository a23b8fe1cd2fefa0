"""Observed scores of published methods, one file a family; a line here brings it into the registry, `SCORES`.

Settings that several scores have: `window`, the last queries observed (a sequence must not be shorter);
`pool` (`avg`, `max` or None) and `pool_size` (odd), smoothing over neighbouring entries.
"""

from retain.evidence import UNITS, Score, masked_score
from retain.scores.cake import cake as cake
from retain.scores.critical import critical as critical
from retain.scores.defensive import defensive as defensive
from retain.scores.expected_attention import expected_attention as expected_attention
from retain.scores.family import FAMILIES, ScoreFamily
from retain.scores.h2o import h2o as h2o
from retain.scores.keydiff import keydiff as keydiff
from retain.scores.keyformer import keyformer as keyformer
from retain.scores.knorm import knorm as knorm
from retain.scores.lagkv import lagkv as lagkv
from retain.scores.lava import lava as lava
from retain.scores.lazy_eviction import lazy_eviction as lazy_eviction
from retain.scores.lru import lru as lru
from retain.scores.observed_risk import observed_risk as observed_risk
from retain.scores.quest import quest as quest
from retain.scores.random import random as random
from retain.scores.recency import recency as recency
from retain.scores.snapkv import snapkv as snapkv
from retain.scores.tova import tova as tova
from retain.scores.triattention import triattention as triattention
from retain.scores.vatp import vatp as vatp

SCORES = dict(sorted(FAMILIES.items()))

__all__ = ["SCORES", "UNITS", "Score", "ScoreFamily", "masked_score"]

"""A score in `risk` is value-weighted attention, `a * ||v W_O||_1`, and no other score is called so.

A maximum or a mean over queries and heads is still in that unit, and so is attention that every entry is
granted before the norm (`eps`). A score with another norm, or a divisor, is not.
"""

from dataclasses import replace

import pytest
import torch

from retain.attention.rotary import Rotary
from retain.scores import SCORES
from tests.naive import assert_heads_close, naive_norm, random_evidence
from tests.scores.test_scores import VARIANTS, WINDOWED, score_of

EXPECTED = {"sinks": 0, "value_norm": "output_l1"}
RISK = [
    ("critical", {}, 1e-4),
    ("critical", {"eps": 0.0}, 0.0),
    ("critical", {"eps": 0.25, "pool": None}, 0.25),
    *(
        ("defensive", {"aggregate": aggregate, "value_norm_place": place}, 0.0)
        for aggregate in ("max", "mean")
        for place in ("after_floor", "inside")
    ),
    ("expected_attention", EXPECTED, 0.0),
    ("expected_attention", {**EXPECTED, "epsilon": 0.25}, 0.25),
    ("expected_attention", {**EXPECTED, "covariance": False}, 0.0),
    ("observed_risk", {}, 0.0),
]
OTHERS = [
    *(
        (name, variant)
        for name, variant in VARIANTS
        if SCORES[name].unit != "risk" and variant.get("value_norm") != "output_l1"
    ),
    ("critical", {"norm": "l2"}),
    ("defensive", {"norm": "head_share"}),
    ("defensive", {"norm": "token_sum"}),
    *(("expected_attention", {"value_norm": norm}) for norm in ("plain", "output", None)),
]


@pytest.mark.parametrize(("name", "settings", "granted"), RISK)
def test_of_a_layer_in_which_nothing_differs_all_risk_says_the_same(name, settings, granted):
    """Every entry is paid 1/n by every query head, and all write alike: `(1/n + eps) * ||v W_O||_1`; without
    a pool, whose ends are damped."""
    evidence = random_evidence(
        pads=(0,), num_tokens=16, num_heads=1, group=4, rotary=Rotary(torch.tensor([0.3]))
    )
    evidence = replace(
        evidence,
        keys_BHTD=torch.zeros_like(evidence.keys_BHTD),
        output_weight_QDE=evidence.output_weight_QDE[:1].expand(4, -1, -1),
    )
    settings = settings if name not in WINDOWED else {"pool": None, **settings}
    score = score_of(evidence, name, settings, 1)
    assert score.unit == "risk"
    risk = [(1 / 16 + granted) * naive_norm(evidence, 0, 0, i) for i in range(16)]
    naive = torch.tensor(risk, dtype=torch.float64)[None, None]
    if settings.get("value_norm_place") == "inside":
        naive = naive.clamp_min(naive[..., :15].mean())  # its floor
    assert_heads_close(score.values_BHT, naive, ops=4)


@pytest.mark.parametrize(("name", "settings"), [*((name, settings) for name, settings, _ in RISK), *OTHERS])
def test_risk_alone_is_twice_as_large_where_everything_is_written_twice(name, settings):
    evidence = random_evidence(group=4, rotary=Rotary(torch.tensor([0.3])))
    weight = evidence.output_weight_QDE
    twice = replace(evidence, output_weight_QDE=torch.cat([weight, weight], dim=-1))
    score, double = (score_of(layer, name, settings) for layer in (evidence, twice))
    assert (score.unit == "risk") == ((name, settings) not in OTHERS)
    if score.unit == double.unit == "risk":
        assert_heads_close(double.values_BHT, 2 * score.values_BHT)
    else:
        valid = evidence.valid_BT[:, None].expand_as(score.values_BHT)
        assert not torch.allclose(double.values_BHT[valid], 2 * score.values_BHT[valid], rtol=0.1)

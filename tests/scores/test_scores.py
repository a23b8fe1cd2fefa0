"""Contract of every score: its unit, float32, -inf on padding and only there, no influence of the batch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.evidence import Evidence
from retain.scores import SCORES, UNITS, Score, masked_score
from tests.close import assert_close
from tests.naive import LAYERS, alone, assert_heads_close, random_evidence, special_layer

WINDOWED = {name for name, family in SCORES.items() if family.window({"window": 99}) == 99}

# Every named variant owes the same as its default.
VARIANTS = [
    *((name, {}) for name in sorted(SCORES)),
    ("cake", {"pool": "max"}),
    ("critical", {"pool": "max", "pool_size": 7}),
    ("defensive", {"norm": "head_share"}),
    ("defensive", {"norm": "token_sum", "pool": None}),
    ("expected_attention", {"value_norm": "output"}),
    ("h2o", {"reduce": "mean"}),
    ("keyformer", {"tau": 2.0, "seed": 5}),
    ("lagkv", {"lag": 3, "sinks": 1}),
    ("lava", {"value_max_over": "all", "pool": "avg"}),
    ("snapkv", {"pool": "max", "pool_size": 7}),
    ("triattention", {"furthest": 9}),
    ("vatp", {"attention": "running"}),
]


# Every score in every layer, but for the one that is refused.
IN_LAYERS = [
    (name, settings, layer)
    for name, settings in VARIANTS
    for layer in (None, *LAYERS)
    if (name, layer) != ("expected_attention", "soft_cap")
]
WINDOW = 6


def score_of(evidence: Evidence, name: str, settings: dict, window: int = WINDOW) -> Score:
    """The score, with an observation window that fits short sequences."""
    windowed = {"window": window} if name in WINDOWED else {}
    return SCORES[name].function(evidence, **{**windowed, **settings})


def both(score: Score) -> list[Tensor]:
    """Its values, and those of a first stage."""
    return [values for values in (score.values_BHT, score.first_BHT) if values is not None]


def _evidence(**settings):
    return random_evidence(rotary=Rotary(torch.tensor([0.3])), **settings)


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scores_are_float32_and_masked_on_padding(name, settings, dtype):
    evidence = _evidence(dtype=dtype)
    score = score_of(evidence, name, settings)
    window = SCORES[name].under(settings).window({"window": WINDOW, **settings})
    assert name == "quest" or score.window == window
    valid = evidence.valid_BT[:, None].expand(2, 2, 14)
    for values_BHT in both(score):
        assert values_BHT.dtype == torch.float32
        assert torch.equal(values_BHT > float("-inf"), valid)
        assert values_BHT[valid].isfinite().all()


@pytest.mark.parametrize(("name", "settings", "layer"), IN_LAYERS)
def test_a_sequence_scores_alike_alone_and_in_a_padded_batch(name, settings, layer):
    pads, ops = (0, 5, 2), 4 if name == "cake" else 1
    evidence = special_layer(_evidence(pads=pads), layer)
    seeds = [{"seeds_B": [seed]} if name == "random" else {} for seed in (7, 11, 13)]
    together = score_of(evidence, name, {**settings, **({"seeds_B": [7, 11, 13]} if seeds[0] else {})})
    for b, pad in enumerate(pads):
        single = score_of(alone(evidence, b), name, {**settings, **seeds[b]})
        assert single.window == together.window
        for batched, lone in zip(both(together), both(single), strict=True):
            assert_heads_close(batched[b : b + 1, :, pad:], lone.double(), ops=ops)
        if single.layer_weight_B is not None:
            weight = together.layer_weight_B[b : b + 1]
            assert_close(weight, single.layer_weight_B, dtype=torch.float32, ops=4)


@pytest.mark.parametrize("name", sorted(WINDOWED))
def test_a_window_that_queries_do_not_fill_is_refused(name):
    held = random_evidence(pads=(0,), num_tokens=24, num_queries=8)
    with pytest.raises(ValueError, match=r"holds the last 8 queries, the observation window needs 16"):
        SCORES[name].function(held, window=16)


REFUSED = [
    *[("defensive", "norm", "x"), ("expected_attention", "value_norm", "x"), ("h2o", "reduce", 1)],
    *[("lava", "value_max_over", "x"), ("snapkv", "pool", "median"), ("vatp", "attention", None)],
    *[("cake", "window", 1), ("cake", "tau1", 0), ("critical", "eps", -0.1), ("keyformer", "tau", 0.0)],
    *[
        ("lagkv", "lag", 0),
        ("lagkv", "sinks", -1),
        ("lazy_eviction", "alpha", 1.5),
        ("snapkv", "window", 9e9),
    ],
    *[("lru", "share", float("nan")), ("observed_risk", "window", 0), ("quest", "page_size", True)],
    *[("snapkv", "pool_size", 4), ("triattention", "furthest", 0), ("triattention", "centres", 3)],
]


def test_settings_out_of_range_are_refused():
    for name, setting, value in REFUSED:
        (problem,) = SCORES[name].problems({setting: value})
        assert problem.startswith(f"{name}.{setting}: ")
        (problem,) = SCORES[name].problems({f"{setting}_": value})
        assert f"unknown key '{name}.{setting}_' (did you mean '{setting}'?)" in problem


def test_a_score_declares_its_window_unit_and_parts():
    """Under its default settings, and every variant."""
    evidence = _evidence(num_tokens=40)
    for name, settings in VARIANTS:
        declared, score = SCORES[name].under(settings), SCORES[name].function(evidence, **settings)
        assert name == "quest" or score.window == declared.window(settings), name
        assert score.unit == declared.unit and score.unit in UNITS and not declared.problems(settings)
        assert declared.two_stages == (score.first_BHT is not None)
        assert declared.weighs_layers == (score.layer_weight_B is not None)


def test_evidence_that_lacks_something_is_refused():
    few = random_evidence(pads=(0,), num_tokens=24, num_queries=8)
    for name, settings in (
        *((name, {}) for name in ("h2o", "lru", "keyformer", "lazy_eviction")),
        ("vatp", {"attention": "running"}),
    ):
        with pytest.raises(ValueError, match="every query, but the evidence holds the last 8 of 24 and no"):
            score_of(few, name, settings)


def test_raw_numbers_are_masked_by_what_exists():
    nan, inf = float("nan"), float("inf")
    half = torch.tensor([[[nan, 1.0, nan]]], dtype=torch.bfloat16)
    score = masked_score(half, torch.tensor([[[False, True, False]]]), "rank", first_BHT=half)
    assert score.values_BHT.tolist() == score.first_BHT.tolist() == [[[-inf, 1.0, -inf]]]
    zeros = masked_score(torch.zeros(1, 2, 2), torch.tensor([[False, True]]), "risk")
    assert zeros.values_BHT.tolist() == [[[-inf, 0.0]] * 2]


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_risk_alone_is_twice_as_large_where_everything_is_written_twice(name, settings):
    """A score in `risk` is value-weighted attention, `a * ||v W_O||_1`, and no other score is called so."""
    evidence = _evidence(group=4)
    weight = evidence.output_weight_QDE
    twice = replace(evidence, output_weight_QDE=torch.cat([weight, weight], dim=-1))
    score, double = (score_of(layer, name, settings) for layer in (evidence, twice))
    valid = evidence.valid_BT[:, None].expand_as(score.values_BHT)
    if score.unit == "risk":
        assert_heads_close(double.values_BHT, 2 * score.values_BHT)
    else:
        assert not torch.allclose(double.values_BHT[valid], 2 * score.values_BHT[valid], rtol=0.1)

"""What every score owes: its unit, float32, -inf on padding and only there, and no influence of the batch."""

import inspect

import pytest
import torch

from retain.attention.rotary import Rotary
from retain.scores import SCORES, UNITS, Score, masked_score
from tests.close import assert_close
from tests.naive import LAYERS, alone, assert_heads_close, random_evidence, special_layer

WINDOWED = {
    name for name, family in SCORES.items() if "window" in inspect.signature(family.function).parameters
}
NEEDS = {"window", "queries", "running", "value_norm", "hidden", "token_ids", "seeds", "rotary"}

# Every named variant owes the same as its default.
VARIANTS = [
    *((name, {}) for name in sorted(SCORES)),
    ("cake", {"variance": "head"}),
    ("cake", {"order": "group_first", "pool": "max"}),
    ("critical", {"norm": "l2", "pool": "max", "pool_size": 7}),
    ("defensive", {"norm": "head_share"}),
    ("defensive", {"norm": "token_sum", "value_norm_place": "inside"}),
    ("defensive", {"aggregate": "mean", "pool": None}),
    ("expected_attention", {"value_norm": "output_l1", "epsilon": 0.02}),
    ("h2o", {"reduce": "mean"}),
    ("lava", {"value_max_over": "all", "pool": "avg"}),
    ("snapkv", {"aggregate": "max", "order": "group_first", "pool": "max", "pool_size": 7}),
    ("observed_risk", {"pool": "avg"}),
    ("vatp", {"attention": "running"}),
    ("vatp", {"order": "group_first", "pool": "max"}),
]


def _settings(name: str) -> dict:
    return {"window": 6} if name in WINDOWED else {}


def _evidence(**settings):
    return random_evidence(rotary=Rotary(torch.tensor([0.3])), **settings)


def test_the_registry_names_every_published_score():
    published = {"cake", "critical", "defensive", "expected_attention", "h2o", "keydiff", "knorm", "lava"}
    published |= {"quest", "recency", "snapkv", "tova", "vatp"}
    assert set(SCORES) == published | {"lru", "observed_risk", "random"}


@pytest.mark.parametrize("name", sorted(SCORES))
def test_every_family_says_unit_needs_paper_and_cost(name):
    family = SCORES[name]
    assert family.unit in UNITS
    for needs in (family.needs, *family.needs_where.values()):
        assert needs <= NEEDS
        assert not {"window", "queries"} <= needs
    known = inspect.signature(family.function).parameters
    assert {setting for setting, _ in family.needs_where} <= set(known)
    assert family.paper
    assert family.cost


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scores_are_float32_in_their_unit_and_masked_on_padding(name, variant, dtype):
    evidence = _evidence(dtype=dtype)
    score = SCORES[name].function(evidence, **_settings(name), **variant)
    assert score.unit in UNITS
    assert variant or score.unit == SCORES[name].unit
    valid = evidence.valid_BT[:, None].expand(2, 2, 14)
    for values_BHT in (score.values_BHT, score.first_BHT):
        if values_BHT is not None:
            assert values_BHT.dtype == torch.float32
            assert values_BHT.shape == (2, 2, 14)
            assert torch.equal(values_BHT > float("-inf"), valid)
            assert values_BHT[valid].isfinite().all()


@pytest.mark.parametrize(
    ("name", "variant", "layer"),
    [
        (name, variant, layer)
        for name, variant in VARIANTS
        for layer in (None, *LAYERS)
        if (name, layer) != ("expected_attention", "soft_cap")  # refused
    ],
)
def test_a_sequence_scores_alike_alone_and_in_a_padded_batch(name, variant, layer):
    pads = (0, 5, 2)
    evidence = _evidence(pads=pads)
    evidence = evidence if layer is None else special_layer(evidence, layer)
    seeds = [7, 11, 13] if name == "random" else None
    extra = {} if seeds is None else {"seeds_B": seeds}
    score = SCORES[name].function(evidence, **_settings(name), **variant, **extra)
    for b, pad in enumerate(pads):
        extra = {} if seeds is None else {"seeds_B": seeds[b : b + 1]}
        single = SCORES[name].function(alone(evidence, b), **_settings(name), **variant, **extra)
        assert single.window == score.window
        for batched, lone in ((score.values_BHT, single.values_BHT), (score.first_BHT, single.first_BHT)):
            assert (batched is None) == (lone is None)
            if batched is not None:
                assert_heads_close(batched[b : b + 1, :, pad:], lone.double(), ops=4 if name == "cake" else 1)


@pytest.mark.parametrize("name", sorted(WINDOWED))
def test_a_sequence_shorter_than_the_window_is_refused(name):
    evidence = random_evidence(pads=(0, 4), num_tokens=24)
    message = (
        r"sequence 1 of 2 has 20 tokens, which is shorter than the observation window of 22.*smaller window"
    )
    with pytest.raises(ValueError, match=message):
        SCORES[name].function(evidence, window=22)


def test_a_window_longer_than_the_queries_held_is_refused():
    evidence = random_evidence(pads=(0,), num_tokens=24, num_queries=8)
    with pytest.raises(ValueError, match=r"holds the last 8 queries, the observation window needs 16"):
        SCORES["snapkv"].function(evidence, window=16)


def test_the_window_alone_is_enough_evidence():
    full = random_evidence(num_tokens=24)
    last = random_evidence(num_tokens=24)
    object.__setattr__(last, "queries_BQSD", full.queries_BQSD[:, :, -8:])
    for name in sorted(WINDOWED):
        a, b = (SCORES[name].function(evidence, window=8).values_BHT for evidence in (full, last))
        assert torch.equal(a, b)


def test_unlike_and_half_precision_scores_are_refused():
    with pytest.raises(ValueError, match="one of risk, mass, rank; got 'log_risk'"):
        Score(torch.zeros(1, 1, 2), "log_risk")
    with pytest.raises(
        ValueError, match=r"float32 \[B, H, T\]; got torch.bfloat16 \[1, 1, 2\]: .*masked_score"
    ):
        Score(torch.zeros(1, 1, 2, dtype=torch.bfloat16), "risk")
    score = masked_score(torch.zeros(1, 1, 2, dtype=torch.bfloat16), torch.tensor([[False, True]]), "risk")
    assert score.values_BHT.tolist() == [[[float("-inf"), 0.0]]]


def test_scores_are_compared_head_by_head():
    """An error of a thousandth in a head that is a million times smaller than another."""
    reference = torch.tensor([[[1.0, 0.5], [1e-6, 5e-7]]], dtype=torch.float64)
    actual = reference.float()
    assert_heads_close(actual, reference)
    actual[0, 1, 1] *= 1.001
    assert_close(actual, reference)
    with pytest.raises(AssertionError, match="error"):
        assert_heads_close(actual, reference)

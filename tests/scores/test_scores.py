"""What every score owes: its unit, float32, -inf on padding and only there, and no influence of the batch."""

import pytest
import torch

from retain.scores import SCORES, Score, masked_score
from tests.close import assert_close
from tests.naive import alone, random_evidence

WINDOWED = {"snapkv", "defensive", "observed_risk"}


def _settings(name: str) -> dict:
    return {"window": 6} if name in WINDOWED else {}


def test_the_registry_names_every_published_score():
    assert set(SCORES) == {"defensive", "h2o", "observed_risk", "random", "recency", "snapkv"}


@pytest.mark.parametrize("name", sorted(SCORES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_float32_in_their_unit_and_masked_on_padding(name, dtype):
    evidence = random_evidence(dtype=dtype)
    score = SCORES[name].function(evidence, **_settings(name))
    assert score.unit == SCORES[name].unit
    assert score.values_BHT.dtype == torch.float32
    assert score.values_BHT.shape == (2, 2, 14)
    valid = evidence.valid_BT[:, None].expand_as(score.values_BHT)
    assert torch.equal(score.values_BHT > float("-inf"), valid)
    assert score.values_BHT[valid].isfinite().all()


@pytest.mark.parametrize("name", sorted(SCORES))
def test_a_sequence_scores_alike_alone_and_in_a_padded_batch(name):
    evidence = random_evidence(pads=(0, 5, 2))
    seeds = [7, 11, 13] if name == "random" else None
    extra = {} if seeds is None else {"seeds_B": seeds}
    score = SCORES[name].function(evidence, **_settings(name), **extra)
    for b, pad in enumerate((0, 5, 2)):
        extra = {} if seeds is None else {"seeds_B": seeds[b : b + 1]}
        single = SCORES[name].function(alone(evidence, b), **_settings(name), **extra)
        assert_close(score.values_BHT[b : b + 1, :, pad:], single.values_BHT.double())


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

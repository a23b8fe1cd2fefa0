"""The definitions against naive ones, and what must hold of them whatever the numbers."""

import itertools
import math

import pytest
import torch

from retain.eval.diagnose.measures import (
    agreement,
    coverage,
    coverage_numbers,
    divergence,
    jaccard,
    oracle_overlap,
    perplexity_ratio,
    token_loss,
)
from tests.close import assert_close
from tests.refused import refused

B, H, G, S, SEEN, T = 2, 2, 3, 4, 11, 8
Q = H * G


@pytest.fixture(params=["rows sum to one", "a sink takes some"])
def shown(request):
    """Attention of S queries, and a keep mask of the first T entries; float64."""
    logits = 3 * torch.randn(B, Q, S, SEEN + 1, dtype=torch.float64)
    sink = request.param == "a sink takes some"
    probs = logits.softmax(-1)[..., :SEEN] if sink else logits[..., :SEEN].softmax(-1)
    return probs, torch.rand(B, H, T) < 0.4


def test_coverage_is_its_formula(shown):
    probs, keep = shown
    naive = torch.zeros(B, H, S, dtype=torch.float64)
    for b, h, t in itertools.product(range(B), range(H), range(S)):
        paid = [max(float(probs[b, q, t, i]) for q in range(h * G, (h + 1) * G)) for i in range(T)]
        naive[b, h, t] = sum(p for i, p in enumerate(paid) if keep[b, h, i]) / sum(paid)
    assert_close(coverage(probs, keep), naive, ops=4)


def test_coverage_is_monotone_in_the_kept_set(shown):
    probs, _ = shown
    order = torch.rand(B, H, T).argsort(-1).argsort(-1)
    covered = torch.stack([coverage(probs, order < count) for count in range(T + 1)])
    assert (covered.diff(dim=0) >= -1e-12).all()
    assert (covered[0] == 0).all() and (covered[-1] == 1).all()
    assert (coverage(probs.float(), order < T) == 1).all(), "exactly, in float32 too"
    unasked = torch.tensor([[[[0.0, 1.0]]]])
    assert coverage(unasked, torch.zeros(1, 1, 1, dtype=torch.bool)).item() == 1.0, "asked for nothing"


def test_coverage_counts_no_entry_behind_the_prompt():
    probs = torch.tensor([[[[0.1, 0.3, 0.6]]]], dtype=torch.float64)
    keep = torch.tensor([[[True, False]]])
    assert_close(coverage(probs, keep), torch.full((1, 1, 1), 0.25, dtype=torch.float64))


def test_coverage_numbers_of_two_documents():
    first = [torch.tensor([[1.0, 0.2]]), torch.tensor([[0.8, 0.4], [0.9, 0.6]])]  # two layers, 1 + 2 heads
    second = [torch.tensor([[0.5]]), torch.tensor([[0.5], [0.8]])]
    found = coverage_numbers([first, second])
    cells = sorted([1.0, 0.2, 0.8, 0.4, 0.9, 0.6, 0.5, 0.5, 0.8])
    assert found["mean"] == pytest.approx(sum(cells) / 9)
    assert found["worst_step"] == pytest.approx(0.4) and found["worst"] == pytest.approx(0.2)
    assert found["outliers"] == pytest.approx(2 / 9)  # 0.5 is none
    edge = coverage_numbers([[torch.tensor([[0.5, 0.49, 0.51, 0.59]])]])
    assert edge["outliers"] == 0.25, "a half is covered"
    with pytest.raises(ValueError, match="no steps to summarise"):
        coverage_numbers([])


def test_likeness_by_hand():
    one = torch.tensor([[[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]]).bool()
    other = torch.tensor([[[0, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]]]).bool()
    assert jaccard(one, other).tolist() == [[0.25, 1.0, 1.0]]
    assert jaccard(other, one).tolist() == jaccard(one, other).tolist()


def test_oracle_overlap_by_hand():
    risk = torch.tensor([[[0.1, 0.9, 0.9, 0.3, float("-inf")]]])
    for places, wanted in (([1], 0.0), ([2], 1.0), ([1, 2], 1.0), ([0, 1], 0.5), ([0, 1, 2], 2 / 3), ([], 1)):
        keep = torch.zeros(1, 1, 5, dtype=torch.bool)
        keep[0, 0, places] = True
        assert oracle_overlap(keep, risk).item() == pytest.approx(wanted), places


def test_divergence_is_its_formula():
    logits, other = (3 * torch.randn(5, 13) for _ in range(2))
    p, q = (x.double().softmax(-1) for x in (logits, other))
    naive = torch.tensor(
        [sum(float(a) * math.log(a / b) for a, b in zip(*row, strict=True)) for row in zip(p, q, strict=True)]
    )
    assert_close(divergence(logits, other), naive.double(), dtype=torch.float32)
    assert (divergence(logits, logits) == 0).all() and (divergence(logits, other) > 0).all()
    assert (divergence(logits, logits + 5.0) < 1e-12).all()
    never = torch.tensor([[0.0, float("-inf")]])
    assert divergence(never, torch.zeros(1, 2)).item() == pytest.approx(math.log(2))
    assert divergence(torch.zeros(1, 2), never).item() == math.inf


def test_agreement_and_losses_of_tokens():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, -1.0]])
    other = torch.tensor([[1.0, 2.0, 3.0], [5.0, 0.0, 0.0]])
    assert agreement(logits, other).tolist() == [False, True]
    losses = token_loss(logits, torch.tensor([2, 0]))
    naive = [math.log(sum(math.exp(x - 2) for x in (1, 3, 2))), math.log(2 + math.exp(-1))]
    assert losses.tolist() == pytest.approx(naive)
    assert perplexity_ratio(losses, losses) == 1.0
    harmed = losses + torch.tensor([0.5, 1.5], dtype=torch.float64)
    assert perplexity_ratio(losses, harmed) == pytest.approx(math.e)
    with pytest.raises(ValueError, match="the same tokens twice; got 2 and 1"):
        perplexity_ratio(losses, losses[:1])


def test_what_does_not_belong_together():
    keep = torch.ones(1, 3, 6, dtype=torch.bool)
    for own, message in (
        (keep[:, :2, :4], "3 query heads over 5 entries and a keep mask of 2 KV heads"),
        (keep, "a keep mask of 3 KV heads and 6 entries do not belong"),
    ):
        refused(message, coverage, torch.rand(1, 3, 2, 5), own)

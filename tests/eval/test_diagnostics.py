"""The definitions against naive ones, and what must hold of them whatever the numbers."""

import itertools
import math
import statistics

import pytest
import torch

from retain.eval.diagnose.measures import (
    agreement,
    coverage,
    coverage_numbers,
    divergence,
    head_perturbation,
    head_perturbation_bound,
    jaccard,
    layer_output_bound,
    layer_output_loss,
    oracle_overlap,
    perplexity_ratio,
    repetition_rate,
    share_below,
    token_loss,
)
from retain.kernels.value_norm import value_norm as value_norm_l1
from tests.close import assert_close
from tests.refused import refused

B, H, G, S, SEEN, T, D, E = 2, 2, 3, 4, 11, 8, 5, 7
Q = H * G


@pytest.fixture(params=[False, True], ids=["rows sum to one", "a sink takes some"])
def shown(request):
    """Attention of S queries, values, W_O, a keep mask of the first T entries; float64."""
    logits = 3 * torch.randn(B, Q, S, SEEN + request.param, dtype=torch.float64)
    probs = logits.softmax(-1)[..., :SEEN]
    values = torch.randn(B, H, SEEN, D, dtype=torch.float64)
    weight = torch.randn(Q, D, E, dtype=torch.float64)
    return probs, values, weight, torch.rand(B, H, T) < 0.4


def kept(keep, b, h, i):
    """Entries behind the prompt are kept by everybody."""
    return i >= T or bool(keep[b, h, i])


def grid():
    """Every sequence, query head and query position."""
    return itertools.product(range(B), range(Q), range(S))


@pytest.mark.parametrize("aggregate", ["max", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_coverage_is_its_formula(shown, aggregate, weighted):
    probs, values, weight, keep = shown
    norms = value_norm_l1(values, weight)[..., :T]
    reduce = max if aggregate == "max" else statistics.mean
    naive = torch.zeros(B, H, S, dtype=torch.float64)
    for b, h, t in itertools.product(range(B), range(H), range(S)):
        group = range(h * G, (h + 1) * G)
        sizes = norms[b] if weighted else torch.ones_like(norms[b])
        paid = [reduce(float(probs[b, q, t, i] * sizes[q, i]) for q in group) for i in range(T)]
        naive[b, h, t] = sum(p for i, p in enumerate(paid) if keep[b, h, i]) / sum(paid)
    found = coverage(probs, keep, aggregate=aggregate, norm_BQT=norms if weighted else None)
    assert_close(found, naive, ops=4)


def naive_outputs(probs, values, weight, keep):
    """Per query head what it adds to the stream, with everything and with what is kept."""
    full, cut = (torch.zeros(B, Q, S, E, dtype=torch.float64) for _ in range(2))
    for b, q, t in grid():
        held = [i for i in range(SEEN) if kept(keep, b, q // G, i)]
        lost = sum(float(probs[b, q, t, i]) for i in range(SEEN) if i not in held)
        for i in range(SEEN):
            written = float(probs[b, q, t, i]) * (values[b, q // G, i] @ weight[q])
            full[b, q, t] += written
            # The softmax without what was evicted: its mass is gone, a sink's is not.
            cut[b, q, t] += written / (1 - lost) * (i in held)
    return full, cut


def test_what_heads_and_layers_lose_is_its_formula(shown):
    full, cut = naive_outputs(*shown)
    assert_close(head_perturbation(*shown), (full - cut).abs().sum(-1), ops=100)
    for p in (1, 2):
        naive = (full - cut).sum(1).abs().pow(p).sum(-1).pow(1 / p)
        assert_close(layer_output_loss(*shown, p=p), naive, ops=100)


def test_the_bounds_are_their_formulas(shown):
    probs, values, weight, keep = shown
    theta = torch.zeros(B, Q, S, dtype=torch.float64)
    lava = torch.zeros(B, S, dtype=torch.float64)
    largest_row = max(float(weight[q, d].abs().sum()) for q in range(Q) for d in range(D))
    for b, q, t in grid():
        h, paid = q // G, [float(p) for p in probs[b, q, t]]
        size = max(float(values[b, h, i].abs().sum()) for i in range(SEEN))
        norm = [float((values[b, h, i] @ weight[q]).abs().sum()) for i in range(SEEN)]
        inside = [i for i in range(SEEN) if kept(keep, b, h, i)]
        lost = sum(paid[i] for i in range(SEEN) if i not in inside)
        whole = sum(p * n for p, n in zip(paid, norm, strict=True))
        theta[b, q, t] = whole - (2 - 1 / (1 - lost)) * sum(paid[i] * norm[i] for i in inside)
        lava[b, t] += 2 * largest_row * size * lost
    assert_close(head_perturbation_bound(probs, value_norm_l1(values, weight), keep), theta, ops=100)
    assert_close(layer_output_bound(*shown), lava, ops=100)


@pytest.mark.parametrize("seed", range(20))
def test_losses_never_exceed_their_bounds(seed):
    draw = torch.Generator().manual_seed(seed)
    sharp = 10.0 ** (seed % 3 - 1)
    probs = (sharp * torch.randn(B, Q, S, SEEN, dtype=torch.float64, generator=draw)).softmax(-1)
    values = torch.randn(B, H, SEEN, D, dtype=torch.float64, generator=draw)
    weight = torch.randn(Q, D, E, dtype=torch.float64, generator=draw)
    keep = torch.rand(B, H, T, generator=draw) < 0.04 * seed
    slack = 1 + 1e-12
    theta = head_perturbation_bound(probs, value_norm_l1(values, weight), keep)
    moved = head_perturbation(probs, values, weight, keep)
    assert (moved <= theta * slack).all() and (moved > 0).any()
    loss = layer_output_loss(probs, values, weight, keep)
    assert (loss <= layer_output_bound(probs, values, weight, keep) * slack).all()
    assert (loss <= moved.sum(1) * slack).all()
    assert (layer_output_loss(probs, values, weight, keep, p=2) <= loss * slack).all()


def test_to_keep_everything_costs_nothing_at_all(shown):
    probs, values, weight, _ = shown
    everything = torch.ones(B, H, T, dtype=torch.bool)
    norms = value_norm_l1(values, weight)
    for dtype in (torch.float64, torch.float32):
        own, v, w, n = (x.to(dtype) for x in (probs, values, weight, norms))
        for more in ({"aggregate": "max"}, {"aggregate": "mean"}, {"norm_BQT": n[..., :T]}):
            assert (coverage(own, everything, **more) == 1).all()
        costs = [layer_output_loss(own, v, w, everything, p=p) for p in (1, 2)]
        costs += [head_perturbation(own, v, w, everything), head_perturbation_bound(own, n, everything)]
        assert all((cost == 0).all() for cost in (*costs, layer_output_bound(own, v, w, everything)))


def test_nothing_left_to_read_and_nothing_counted_behind_the_prompt():
    probs = torch.tensor([[[[0.25, 0.75]]]])
    values, weight = torch.tensor([[[[1.0], [-2.0]]]]), torch.ones(1, 1, 1)
    nothing = torch.zeros(1, 1, 2, dtype=torch.bool)
    assert head_perturbation(probs, values, weight, nothing).item() == 1.25
    assert head_perturbation_bound(probs, value_norm_l1(values, weight), nothing).item() == 1.75
    unasked = torch.tensor([[[[0.0, 1.0]]]])
    assert coverage(unasked, nothing[..., :1]).item() == 1.0, "the prompt was asked for nothing"
    behind = torch.tensor([[[[0.25, 0.75, 9.0]]]])
    assert coverage(behind, torch.tensor([[[True, False]]])).item() == 0.25


def test_coverage_numbers_of_two_documents():
    first = [torch.tensor([[1.0, 0.2]]), torch.tensor([[0.8, 0.4], [0.9, 0.6]])]  # two layers, 1 + 2 heads
    second = [torch.tensor([[0.5]]), torch.tensor([[0.5], [0.8]])]
    found = coverage_numbers([first, second])
    cells = torch.tensor([1.0, 0.2, 0.8, 0.4, 0.9, 0.6, 0.5, 0.5, 0.8])
    wanted = {"mean": float(cells.mean()), "worst_step": 0.4, "worst": 0.2}
    wanted |= {"outlier_steps": 1 / 3, "outliers": 2 / 9}  # means 0.9, 0.4, 0.6; and 0.5 is none
    shares = {"q01": 0.01, "q05": 0.05, "q10": 0.1}
    wanted |= {name: float(cells.double().quantile(share)) for name, share in shares.items()}
    assert found == pytest.approx(wanted)
    edge = coverage_numbers([[torch.tensor([[0.5, 0.49, 0.51, 0.59]])]])
    assert edge["outlier_steps"] == edge["outliers"] == 0.25, "a half is covered"
    refused("no steps to summarise", coverage_numbers, [])


def test_likeness_by_hand():
    assert share_below(torch.tensor([[1.0, 2.0], [0.5, 4.0]]), torch.tensor([[1.5, 2.0], [1.0, 3.0]])) == 0.5
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
    assert_close(divergence(logits, other), (p * (p / q).log()).sum(-1), dtype=torch.float32)
    assert (divergence(logits, logits) == 0).all() and (divergence(logits, logits + 5.0) < 1e-12).all()
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
    harmed = losses + torch.tensor([0.5, 1.5], dtype=torch.float64)
    assert perplexity_ratio(losses, harmed) == pytest.approx(math.e)
    refused("the same tokens twice; got 2 and 1", perplexity_ratio, losses, losses[:1])


@pytest.mark.parametrize(
    ("outputs", "rate"),
    [
        ([[1, 2, 3, 4, 5]], 0.0),
        ([[7] * 13], 0.9),  # ten 4-grams, one kind
        ([[7] * 13, [1, 2, 3, 4]], 9 / 11),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 0.0),  # other outputs do not count
        ([[1, 2], [3]], None),
    ],
)
def test_repetition_rate_by_hand(outputs, rate):
    assert repetition_rate(outputs) == rate
    refused("at least one token; got n=0", repetition_rate, outputs, n=0)


@pytest.mark.parametrize(
    ("call", "entries", "message"),
    [
        (lambda p, v, w, keep: coverage(p, keep[:, :2]), 4, "over 5 entries and a keep mask of 2 KV"),
        (head_perturbation, 6, "a keep mask of 3 KV heads and 6 entries do not belong"),
        (lambda p, v, w, keep: coverage(p, keep, aggregate="maxx"), 4, r"'maxx': did you mean 'max'\?"),
        (lambda *given: layer_output_loss(*given, p=3), 4, "norm p=1 or p=2; got p=3"),
    ],
)
def test_what_does_not_belong_together(call, entries, message):
    keep = torch.ones(1, 3, entries, dtype=torch.bool)
    refused(message, call, torch.rand(1, 3, 2, 5), torch.rand(1, 3, 5, 2), torch.rand(3, 2, 2), keep)

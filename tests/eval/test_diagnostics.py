"""The definitions against naive ones, and what must hold of them whatever the numbers."""

import itertools
import math
import statistics

import pytest
import torch

from retain.eval.diagnose import record
from retain.eval.diagnose.measures import (
    agreement,
    boundary_mass,
    coverage,
    coverage_numbers,
    divergence,
    head_perturbation,
    head_perturbation_bound,
    head_perturbation_relaxed_bound,
    jaccard,
    layer_output_bound,
    layer_output_loss,
    oracle_overlap,
    perplexity_ratio,
    repetition_rate,
    share_below,
    share_tight,
    token_loss,
)
from retain.evidence import attention_probs
from retain.hf.intercept.observe import observe
from retain.kernels.value_norm import value_norm as value_norm_l1
from retain.scores.value_norm import value_norms
from tests.close import assert_close
from tests.tiny import tiny_batch, tiny_model

B, H, G, S, SEEN, T, D, E = 2, 2, 3, 4, 11, 8, 5, 7
Q = H * G


@pytest.fixture(params=["rows sum to one", "a sink takes some"])
def shown(request):
    """Attention of S queries, values, W_O, a keep mask of the first T entries; float64."""
    logits = 3 * torch.randn(B, Q, S, SEEN + 1, dtype=torch.float64)
    probs = (
        logits.softmax(-1)[..., :SEEN]
        if request.param == "a sink takes some"
        else logits[..., :SEEN].softmax(-1)
    )
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
        paid = [
            reduce(
                float(probs[b, q, t, i] * (norms[b, q, i] if weighted else 1.0))
                for q in range(h * G, (h + 1) * G)
            )
            for i in range(T)
        ]
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


def test_head_perturbation_is_its_formula(shown):
    full, cut = naive_outputs(*shown)
    assert_close(head_perturbation(*shown), (full - cut).abs().sum(-1), ops=100)


@pytest.mark.parametrize("p", [1, 2])
def test_layer_output_loss_is_its_formula(shown, p):
    full, cut = naive_outputs(*shown)
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


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_the_relaxed_bound_is_its_formula(shown, share):
    probs, values, weight, keep = shown
    relaxed = torch.zeros(B, Q, S, dtype=torch.float64)
    for b, q, t in grid():
        h, paid = q // G, [float(p) for p in probs[b, q, t]]
        norm = [float((values[b, h, i] @ weight[q]).abs().sum()) for i in range(SEEN)]
        inside = [i for i in range(SEEN) if kept(keep, b, h, i)]
        prompt = sorted((i for i in inside if i < T), key=lambda i: -paid[i])
        first = [*prompt[: math.floor(share * len(prompt))], *range(T, SEEN)]
        sigma = sum(paid[i] for i in first) + 1 - sum(paid)
        whole = sum(p * n for p, n in zip(paid, norm, strict=True))
        relaxed[b, q, t] = whole - (2 - 1 / sigma) * sum(paid[i] * norm[i] for i in inside)
    norms = value_norm_l1(values, weight)
    found = head_perturbation_relaxed_bound(probs, norms, keep, share=share)
    assert_close(found, relaxed, ops=200)
    theta = head_perturbation_bound(probs, norms, keep)
    if share == 1.0:
        assert_close(found, theta, ops=100)
    else:
        assert (found >= theta).all() and (found > 1.01 * theta).any()


def test_the_relaxed_bound_is_theta_where_the_second_stage_is_paid_nothing():
    keep = torch.tensor([[[True, True, False, False]]])
    probs = torch.tensor([[[[0.5, 0.0, 0.2, 0.3]]]], dtype=torch.float64)
    norms = torch.tensor([[[1.0, 5.0, 2.0, 3.0]]], dtype=torch.float64)
    theta = head_perturbation_bound(probs, norms, keep)
    # C - (2 - 1/0.5) * 0.5 * 1
    assert theta.item() == pytest.approx(1.8) and head_perturbation_relaxed_bound(
        probs, norms, keep
    ).item() == pytest.approx(1.8)
    paid = torch.tensor([[[[0.4, 0.1, 0.2, 0.3]]]], dtype=torch.float64)
    # sigma is 0.4: 1.3 of what is lost and (1/0.4 - 1) (0.4 + 0.5) of what stays.
    assert head_perturbation_relaxed_bound(paid, norms, keep).item() == pytest.approx(1.3 + 1.5 * 0.9)
    # One kept entry is no first stage: nothing bounds what it holds.
    alone = torch.tensor([[[True, False, False, False]]])
    assert head_perturbation_relaxed_bound(paid, norms, alone).item() == math.inf
    nothing = torch.zeros(1, 1, 4, dtype=torch.bool)
    assert head_perturbation_relaxed_bound(paid, norms, nothing).item() == pytest.approx(2.2)


def test_heads_in_which_a_bound_is_tight_by_hand():
    loss, bound = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[2.0, 2.1], [0.0, 0.1]])
    assert share_tight(loss, bound) == pytest.approx(1 / 3)
    assert share_tight(loss, bound, 0.4) == pytest.approx(2 / 3)
    assert share_tight(torch.zeros(3), torch.zeros(3)) is None


def test_attention_to_an_end_of_the_prompt_is_its_formula(shown):
    probs, *_ = shown
    ends = torch.zeros(B, T, dtype=torch.bool)
    ends[0, :2], ends[1, -3:] = True, True
    naive = torch.zeros(B, Q, S, dtype=torch.float64)
    for b, q, t in grid():
        prompt = [float(probs[b, q, t, i]) for i in range(T)]
        naive[b, q, t] = sum(p for i, p in enumerate(prompt) if ends[b, i]) / sum(prompt)
    assert_close(boundary_mass(probs, ends), naive, ops=50)


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
    assert (
        theta <= head_perturbation_relaxed_bound(probs, value_norm_l1(values, weight), keep) * slack
    ).all()
    loss = layer_output_loss(probs, values, weight, keep)
    assert (loss <= layer_output_bound(probs, values, weight, keep) * slack).all()
    assert (loss <= moved.sum(1) * slack).all()
    assert (layer_output_loss(probs, values, weight, keep, p=2) <= loss * slack).all()


def test_the_bounds_are_tight_where_they_are():
    """Kept values on one side of zero, evicted ones on the other, all of one size, all on one line."""
    keep = torch.tensor([[[True, False, True, False]]])
    values = torch.where(keep, 1.0, -1.0)[..., None].double() * torch.tensor([2.0, 0.0], dtype=torch.float64)
    weight = torch.tensor([[[1.0, -3.0], [0.5, 0.5]]], dtype=torch.float64)
    probs = torch.tensor([[[[0.4, 0.3, 0.1, 0.2]]]], dtype=torch.float64)
    # 2 e |v| ||W[0]||_1 = 2 * 0.5 * 2 * 4
    wanted = torch.full((1, 1, 1), 8.0, dtype=torch.float64)
    assert_close(head_perturbation(probs, values, weight, keep), wanted, ops=4)
    assert_close(head_perturbation_bound(probs, value_norm_l1(values, weight), keep), wanted, ops=4)
    assert_close(layer_output_loss(probs, values, weight, keep), wanted[0], ops=4)
    assert_close(layer_output_bound(probs, values, weight, keep), wanted[0], ops=4)


def test_theta_is_tight_for_values_of_unlike_size_where_lava_is_not():
    keep = torch.tensor([[[True, False, True]]])
    values = torch.tensor([[[[3.0], [-1.0], [0.5]]]], dtype=torch.float64)
    weight = torch.ones(1, 1, 1, dtype=torch.float64)
    probs = torch.tensor([[[[0.2, 0.5, 0.3]]]], dtype=torch.float64)
    moved = head_perturbation(probs, values, weight, keep)
    assert_close(head_perturbation_bound(probs, value_norm_l1(values, weight), keep), moved, ops=4)
    assert float(layer_output_bound(probs, values, weight, keep)) > 1.5 * float(moved)


def test_to_keep_everything_costs_nothing_at_all(shown):
    probs, values, weight, _ = shown
    everything = torch.ones(B, H, T, dtype=torch.bool)
    norms = value_norm_l1(values, weight)
    for dtype in (torch.float64, torch.float32):
        own, v, w, n = (x.to(dtype) for x in (probs, values, weight, norms))
        for aggregate in ("max", "mean"):
            assert (coverage(own, everything, aggregate=aggregate) == 1).all()
        assert (coverage(own, everything, norm_BQT=n[..., :T]) == 1).all()
        assert (head_perturbation(own, v, w, everything) == 0).all()
        assert (head_perturbation_bound(own, n, everything) == 0).all()
        assert (layer_output_bound(own, v, w, everything) == 0).all()
        for p in (1, 2):
            assert (layer_output_loss(own, v, w, everything, p=p) == 0).all()


def test_coverage_and_the_lava_bound_are_monotone_in_the_kept_set(shown):
    probs, values, weight, _ = shown
    order = torch.rand(B, H, T).argsort(-1).argsort(-1)
    norms = value_norm_l1(values, weight)[..., :T]
    before, bound = torch.zeros(B, H, S, dtype=torch.float64), math.inf
    weighted_before = before
    for count in range(T + 1):
        keep = order < count
        now, weighted = coverage(probs, keep), coverage(probs, keep, norm_BQT=norms)
        assert (now >= before - 1e-12).all() and (weighted >= weighted_before - 1e-12).all()
        own = layer_output_bound(probs, values, weight, keep)
        assert (own <= bound + 1e-12).all()
        before, weighted_before, bound = now, weighted, own
    assert (before == 1).all()
    # The loss itself is not: a worse set can err in two directions that cancel.
    assert (coverage(probs, order < 0) == 0).all()


def test_nothing_left_to_read():
    probs = torch.tensor([[[[0.25, 0.75]]]])
    values, weight = torch.tensor([[[[1.0], [-2.0]]]]), torch.ones(1, 1, 1)
    nothing = torch.zeros(1, 1, 2, dtype=torch.bool)
    assert head_perturbation(probs, values, weight, nothing).item() == 1.25
    assert head_perturbation_bound(probs, value_norm_l1(values, weight), nothing).item() == 1.75
    unasked = torch.tensor([[[[0.0, 1.0]]]])
    assert coverage(unasked, nothing[..., :1]).item() == 1.0, "the prompt was asked for nothing"


def test_coverage_counts_no_entry_behind_the_prompt():
    probs = torch.tensor([[[[0.1, 0.3, 0.6]]]], dtype=torch.float64)
    keep = torch.tensor([[[True, False]]])
    assert_close(coverage(probs, keep), torch.full((1, 1, 1), 0.25, dtype=torch.float64))


def test_a_models_layer_loses_what_the_definition_says():
    """With what a real layer shows: o_proj of the evicted softmax, by masking logits."""
    model = tiny_model("qwen3").double()
    ids, _ = tiny_batch(num_tokens=24)
    evidence = observe(model, ids)[1]
    keep = torch.rand(1, evidence.num_heads, 16) < 0.5
    probs = attention_probs(evidence, 16, 24)
    held = torch.nn.functional.pad(keep, (0, 8), value=True)
    cut = probs.masked_fill(~held.repeat_interleave(evidence.group, 1)[:, :, None], 0.0)
    cut = cut / cut.sum(-1, keepdim=True)
    values = evidence.values_BHTD.repeat_interleave(evidence.group, 1)
    project = model.model.layers[1].self_attn.o_proj
    outs = [project((own @ values).transpose(1, 2).flatten(2)) for own in (probs, cut)]
    loss = layer_output_loss(probs, evidence.values_BHTD, evidence.output_weight_QDE, keep)
    assert_close(loss, (outs[0] - outs[1]).abs().sum(-1), ops=100)
    theta = head_perturbation_bound(probs, value_norms(evidence), keep)
    moved = head_perturbation(probs, evidence.values_BHTD, evidence.output_weight_QDE, keep)
    assert (moved <= theta * (1 + 1e-9)).all() and (loss <= moved.sum(1) * (1 + 1e-9)).all()


def test_coverage_numbers_of_two_documents():
    first = [torch.tensor([[1.0, 0.2]]), torch.tensor([[0.8, 0.4], [0.9, 0.6]])]  # two layers, 1 + 2 heads
    second = [torch.tensor([[0.5]]), torch.tensor([[0.5], [0.8]])]
    found = coverage_numbers([first, second])
    cells = sorted([1.0, 0.2, 0.8, 0.4, 0.9, 0.6, 0.5, 0.5, 0.8])
    assert found["mean"] == pytest.approx(sum(cells) / 9)
    assert found["worst_step"] == pytest.approx(0.4) and found["worst"] == pytest.approx(0.2)
    assert found["outlier_steps"] == pytest.approx(1 / 3)  # means 0.9, 0.4, 0.6
    assert found["outliers"] == pytest.approx(2 / 9)  # 0.5 is none
    assert found["q10"] == pytest.approx(0.2 + 0.8 * 0.2)  # at 0.1 * 8 = 0.8 between the two least
    assert found["q01"] == pytest.approx(0.2 + 0.08 * 0.2) and found["q05"] == pytest.approx(0.28)
    edge = coverage_numbers([[torch.tensor([[0.5, 0.49, 0.51, 0.59]])]])
    assert edge["outlier_steps"] == edge["outliers"] == 0.25, "a half is covered"
    numbers = torch.rand(3, 40)
    for name, share in (("q01", 0.01), ("q05", 0.05), ("q10", 0.1)):
        wanted = float(numbers.double().quantile(share))
        assert coverage_numbers([[numbers]])[name] == pytest.approx(wanted, abs=1e-12)
    with pytest.raises(ValueError, match="no steps to summarise"):
        coverage_numbers([])


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


def test_repetition_rate_by_hand():
    assert repetition_rate([[1, 2, 3, 4, 5]]) == 0.0
    assert repetition_rate([[7] * 13]) == 0.9  # ten 4-grams, one kind
    assert repetition_rate([[7] * 13, [1, 2, 3, 4]]) == 9 / 11
    assert repetition_rate([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0.0, "other outputs do not count"
    assert repetition_rate([[1, 2], [3]]) is None
    with pytest.raises(ValueError, match="at least one token; got n=0"):
        repetition_rate([[1]], n=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda probs, keep: coverage(probs, keep[:, :2, :4]),
            "3 query heads over 5 entries and a keep mask of 2 KV heads",
        ),
        (
            lambda probs, keep: head_perturbation(probs, torch.rand(1, 3, 5, 2), torch.rand(3, 2, 2), keep),
            "a keep mask of 3 KV heads and 6 entries do not belong",
        ),
        (
            lambda probs, keep: coverage(probs, keep[..., :4], aggregate="maxx"),
            r"unknown aggregate over query heads 'maxx': did you mean 'max'\?",
        ),
        (
            lambda probs, keep: layer_output_loss(
                probs, torch.rand(1, 3, 5, 2), torch.rand(3, 2, 2), keep[..., :4], p=3
            ),
            "norm p=1 or p=2; got p=3",
        ),
    ],
)
def test_what_does_not_belong_together(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.rand(1, 3, 2, 5), torch.ones(1, 3, 6, dtype=torch.bool))


def test_a_bound_that_bounds_nothing_is_written_as_none():
    assert record._finite(2.0) == 2.0 and record._finite(math.inf) is None
    assert math.isnan(record._finite(math.nan))

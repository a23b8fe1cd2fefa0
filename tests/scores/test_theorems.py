"""The bounds behind CriticalKV and LAVa, measured on random heads.

Both papers bound what eviction does to the attention output of one query, when the attention that is left is
scaled back to a sum of one. Here the output is made by plain loops in float64, with all entries and with the
kept ones, and its change is compared with the bound written from the formula and from the score that ships.
The scores are taken at a window of one query, which is the query that the bounds are about, without pool.

CriticalKV, per query head, with `A` the attention, `u_i = v_i W_O` and `s = sum_{i kept} A_i`:
`||o - o^||_1 <= theta = C - (2 - 1/s) * sum_{i kept} A_i ||u_i||_1`, `C = sum_i A_i ||u_i||_1`.

LAVa, per layer: `||y - y^||_1 <= 2 C^ * sum_q Vbar_h(q) * sum_{i evicted} A_q[i]`. `C^` is the induced L1
norm of the map from the concatenated heads to the output, of a column vector by `W_O^T`: the largest absolute
*column* sum of `W_O^T`, which is the largest L1 norm of a *row* of `W_O` (`[Q * D, E]`).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.scores import critical, lava
from tests.naive import naive_attention, naive_norm, naive_value, random_evidence

# Relative to the bound: the shipped scores are float32.
SLACK = 1e-5


@st.composite
def layers(draw, groups=(1, 2, 4, 8)):
    """One sequence, its last query, any number of entries evicted (never all of a head)."""
    H = draw(st.integers(1, 2))
    T = draw(st.integers(1, 9))
    evidence = random_evidence(
        pads=(0,),
        num_tokens=T,
        num_heads=H,
        group=draw(st.sampled_from(groups)),
        head_width=draw(st.integers(1, 4)),
        model_width=draw(st.integers(1, 6)),
        num_queries=1,
        seed=draw(st.integers(0, 2**31)),
        sharp=draw(st.sampled_from([0.1, 1.0, 3.0])),
        dtype=torch.float64,
    )
    kept = [draw(st.sets(st.integers(0, T - 1), min_size=1)) for _ in range(H)]
    return evidence, [sorted(head) for head in kept]


def _head(evidence, q):
    """Attention of the query, and what each entry writes: `A_i` and `u_i = v_i W_O^q`, by loops."""
    h = q // evidence.group
    T, (D, E) = evidence.num_seen, evidence.output_weight_QDE.shape[1:]
    paid = [float(naive_attention(evidence)[0, q, 0, i]) for i in range(T)]
    values, weight = evidence.values_BHTD[0, h].tolist(), evidence.output_weight_QDE[q].tolist()
    written = [[sum(values[i][d] * weight[d][e] for d in range(D)) for e in range(E)] for i in range(T)]
    return paid, written


def _rescaled(paid, kept):
    """Attention after eviction."""
    total = sum(paid[i] for i in kept)
    return [paid[i] / total if i in kept else 0.0 for i in range(len(paid))]


def _perturbation(paid, written, kept):
    """`||o - o^||_1` of one query head."""
    left = _rescaled(paid, kept)
    return sum(
        abs(sum((paid[i] - left[i]) * written[i][e] for i in range(len(paid))))
        for e in range(len(written[0]))
    )


def _theta(weighted, kept, mass):
    """CriticalKV's bound from `weighted_i = A_i ||u_i||_1` and the mass that its factor is made with."""
    return sum(weighted) - (2 - 1 / mass) * sum(weighted[i] for i in kept)


def _shipped(evidence):
    """`A_i` and `A_i ||u_i||_1` of every KV head, as the score has them."""
    score = critical(evidence, window=1, pool=None, eps=0.0)
    return score.first_BHT[0].double(), score.values_BHT[0].double()


@settings(deadline=None, max_examples=100, derandomize=True)
@given(layers(groups=(1,)))
def test_the_bound_made_of_the_shipped_score_holds(layer):
    evidence, kept_H = layer
    mass_HT, weighted_HT = _shipped(evidence)
    for h, kept in enumerate(kept_H):
        paid, written = _head(evidence, h)
        theta = _theta(weighted_HT[h].tolist(), kept, float(mass_HT[h, kept].sum()))
        naive = [paid[i] * naive_norm(evidence, 0, h, i) for i in range(len(paid))]
        assert theta == pytest.approx(_theta(naive, kept, sum(paid[i] for i in kept)), rel=1e-4, abs=1e-5)
        # 1/s is as large as what is kept is small, and so is what float32 makes of it.
        slack = SLACK * float(weighted_HT[h].sum()) / float(mass_HT[h, kept].sum())
        assert _perturbation(paid, written, kept) <= theta + slack


def _layer_change(evidence, kept_H):
    """`||y - y^||_1` of the layer's output, heads concatenated and projected."""
    Q, _, E = evidence.output_weight_QDE.shape
    change = [0.0] * E
    for q in range(Q):
        paid, written = _head(evidence, q)
        left = _rescaled(paid, kept_H[q // evidence.group])
        for e in range(E):
            change[e] += sum((paid[i] - left[i]) * written[i][e] for i in range(len(paid)))
    return sum(abs(x) for x in change)


def _induced_norm(evidence):
    """`C^`: the largest L1 norm of a row of W_O."""
    return max(sum(abs(float(x)) for x in row) for row in evidence.output_weight_QDE.flatten(0, 1))


def _shipped_lava_bound(evidence, kept_H, value_max_over, norm):
    """LAVa's bound with the shipped score, the largest of a group, counted once for each of its heads."""
    score = lava(evidence, window=1, pool=None, value_max_over=value_max_over).values_BHT[0].double()
    evicted = [
        sum(float(score[h, i]) for i in range(evidence.num_seen) if i not in kept)
        for h, kept in enumerate(kept_H)
    ]
    return 2 * norm * evidence.group * sum(evicted)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(layers())
def test_lavas_bound_holds_for_every_layer_and_kept_set(layer):
    evidence, kept_H = layer
    bound = 0.0
    for q in range(evidence.queries_BQSD.shape[1]):
        h = q // evidence.group
        paid, _ = _head(evidence, q)
        largest = max(naive_value(evidence, 0, h, k) for k in range(len(paid)))
        bound += largest * sum(paid[i] for i in range(len(paid)) if i not in kept_H[h])
    bound *= 2 * _induced_norm(evidence)
    change = _layer_change(evidence, kept_H)
    assert change <= bound * (1 + 1e-12) + 1e-12
    # The score takes the largest of the group: a looser bound, an equality where a group is one head.
    shipped = _shipped_lava_bound(evidence, kept_H, "all", _induced_norm(evidence))
    assert change <= shipped * (1 + SLACK) + SLACK
    assert bound <= shipped * (1 + SLACK) + SLACK
    if evidence.group == 1:
        assert shipped == pytest.approx(bound, rel=SLACK, abs=SLACK)

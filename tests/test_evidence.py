import math
from dataclasses import replace

import pytest
import torch

from retain.evidence import Evidence, attention_probs
from tests.close import assert_close


def make(S=6, T=9, dtype=torch.float32, pad=5, **settings):
    generator = torch.Generator().manual_seed(0)
    B, Q, H, D, E = 2, 4, 2, 8, 12

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return Evidence(
        layer_idx=0,
        queries_BQSD=draw(B, Q, S, D),
        keys_BHTD=draw(B, H, T, D),
        values_BHTD=draw(B, H, T, D),
        output_weight_QDE=draw(Q, D, E),
        scaling=D**-0.5,
        positions_BT=torch.arange(T).expand(B, T),
        valid_BT=torch.arange(T) >= torch.tensor([[0], [pad]]),
        hidden_BTE=draw(B, T, E),
        **settings,
    )


def naive(evidence, start, stop):
    """Three loops in float64."""
    B, Q, S, _ = evidence.queries_BQSD.shape
    T = evidence.num_seen
    out = torch.zeros(B, Q, stop - start, T, dtype=torch.float64)
    for b in range(B):
        for q in range(Q):
            for s in range(start, stop):
                own, exps = T - S + s, {}
                for t in range(T):
                    near = evidence.window is None or t > own - evidence.window
                    if t <= own and near and evidence.valid_BT[b, t]:
                        key = evidence.keys_BHTD[b, q // evidence.group, t].double()
                        logit = float(evidence.queries_BQSD[b, q, s].double() @ key) * evidence.scaling
                        if evidence.soft_cap:
                            logit = evidence.soft_cap * math.tanh(logit / evidence.soft_cap)
                        exps[t] = math.exp(logit)
                total = sum(exps.values())
                if evidence.sinks_Q is not None:
                    total += math.exp(float(evidence.sinks_Q[q]))
                for t, value in exps.items():
                    out[b, q, s - start, t] = value / total
    return out


@pytest.mark.parametrize(
    "settings",
    [{}, {"soft_cap": 0.7}, {"window": 3}, {"sinks_Q": torch.tensor([0.1, -1.0, 2.0, 0.0])}],
    ids=str,
)
@pytest.mark.parametrize(("start", "stop"), [(0, 6), (2, 4), (5, 6)])
@pytest.mark.parametrize(("S", "pad"), [(6, 5), (6, 0), (9, 0), (9, 5)])
def test_attention_probs_are_the_formula(settings, start, stop, S, pad):
    evidence = make(S=S, pad=pad, **settings)
    assert_close(attention_probs(evidence, start, stop), naive(evidence, start, stop))


def test_rows_of_real_queries_sum_to_one_and_pads_to_zero():
    probs = attention_probs(make(S=9), 0, 9).sum(-1)
    valid = make(S=9).valid_BT[:, None].expand(2, 4, 9)
    assert_close(probs[valid], torch.ones_like(probs[valid]))
    assert torch.equal(probs[~valid], torch.zeros_like(probs[~valid]))
    assert probs.dtype == torch.float32
    assert attention_probs(make(dtype=torch.bfloat16), 0, 1).dtype == torch.float32


def test_queries_that_learn_get_a_gradient_and_are_left_alone():
    evidence = make(dtype=torch.float64, soft_cap=0.7)
    queries = evidence.queries_BQSD.clone().requires_grad_()
    keys = evidence.keys_BHTD.clone()

    def probs(queries):
        return attention_probs(replace(evidence, queries_BQSD=queries), 1, 4)

    assert torch.autograd.gradcheck(probs, queries)
    assert torch.equal(queries, evidence.queries_BQSD) and torch.equal(keys, evidence.keys_BHTD)


def test_range_is_checked():
    with pytest.raises(ValueError, match="queries 0..7 are not inside the 6 queries held"):
        attention_probs(make(), 0, 7)


def test_select_batch():
    evidence = make()
    picked = evidence.select_batch(torch.tensor([1]))
    assert torch.equal(attention_probs(picked, 0, 6), attention_probs(evidence, 0, 6)[1:])
    view = evidence.select_batch(slice(0, 1))
    assert view.keys_BHTD.data_ptr() == evidence.keys_BHTD.data_ptr() and view.hidden_BTE is not None
    assert (evidence.num_seen, evidence.num_queries, evidence.num_heads, evidence.group) == (9, 6, 2, 2)

from dataclasses import replace

import pytest
import torch

from retain.attention.chunked import truncate
from retain.evidence import RunningStatistics, attention_probs
from tests.close import assert_close
from tests.held import ASKED, filled, held_evidence, naive_held_attention
from tests.naive import LAYERS, naive_attention, random_evidence, special_layer


def make(S=6, pad=5, **settings):
    """Two sequences of 9 entries, of which the last S have queries."""
    shape = {"num_tokens": 9, "num_queries": S, "head_width": 8, "model_width": 12}
    return random_evidence((0, pad), hidden_BTE=torch.randn(2, 9, 12), **shape, **settings)


def naive(evidence, start, stop):
    return naive_attention(evidence)[:, :, start:stop]


@pytest.mark.parametrize(
    "settings",
    [{}, {"soft_cap": 0.7}, {"sinks_Q": torch.tensor([0.1, -1.0, 2.0, 0.0])}],
    ids=str,
)
@pytest.mark.parametrize(("start", "stop"), [(0, 6), (2, 4), (5, 6)])
@pytest.mark.parametrize(("S", "pad"), [(6, 5), (6, 0), (9, 5)])
def test_attention_probs_are_the_formula(settings, start, stop, S, pad):
    evidence = make(S=S, pad=pad, **settings)
    probs = attention_probs(evidence, start, stop)
    assert_close(probs, naive(evidence, start, stop))
    half = make(S=S, pad=pad, dtype=torch.bfloat16)
    assert probs.dtype == attention_probs(half, start, stop).dtype == torch.float32


def test_queries_that_learn_get_a_gradient_and_are_left_alone():
    evidence = make(S=9, dtype=torch.float64, soft_cap=0.7)  # padded queries among them
    queries, keys = evidence.queries_BQSD.clone().requires_grad_(), evidence.keys_BHTD.clone()

    def probs(queries):
        return attention_probs(replace(evidence, queries_BQSD=queries), 1, 7)

    assert torch.autograd.gradcheck(probs, queries)
    assert torch.equal(queries, evidence.queries_BQSD) and torch.equal(keys, evidence.keys_BHTD)
    (probs(queries)[0] ** 2).sum().backward()
    assert queries.grad[0].abs().sum() > 0 and queries.grad[0].isfinite().all()


# Evidence of a later moment, when heads hold different entries.


@pytest.mark.parametrize("layer", [None, *LAYERS])
@pytest.mark.parametrize("latest", [True, False])
@pytest.mark.parametrize(("start", "stop"), [(0, ASKED), (2, 5), (ASKED - 1, ASKED)])
def test_a_query_pays_only_what_its_head_holds(layer, latest, start, stop):
    """A query whose own entry is gone still pays."""
    evidence = special_layer(held_evidence(latest=latest), layer)
    want = naive_held_attention(evidence)[:, :, start:stop]
    for poison in (0.0, float("nan"), float("inf")):
        assert_close(attention_probs(filled(evidence, poison), start, stop), want)
    if not latest:
        lost = ~evidence.held_BHT[:, :, -ASKED:].repeat_interleave(2, dim=1)[:, :, start:stop]
        sees = want.sum(-1) > 0
        assert (lost & sees).any() and (want[0, :2] == 0).all()


def test_a_query_that_a_sequence_does_not_have_pays_nothing():
    queried = torch.arange(ASKED) >= torch.tensor([[0], [3], [8]])
    for evidence in (held_evidence(), replace(held_evidence(), held_BHT=None)):
        few = replace(evidence, queried_BS=queried)
        want = naive_held_attention(few)
        assert_close(attention_probs(few, 0, ASKED), want)
        assert_close(attention_probs(few, 2, 6), want[:, :, 2:6])
        assert (want.sum((1, 3)) > 0).equal(queried) and few.asks_BS.equal(queried)
        assert evidence.asks_BS.all()


def _with_all_fields():
    evidence = held_evidence()
    B, T = evidence.valid_BT.shape
    return replace(
        evidence,
        hidden_BTE=torch.randn(B, T, 5),
        queried_BS=torch.rand(B, ASKED) < 0.5,
        log_weight_BHT=torch.rand(B, evidence.num_heads, T),
        stream_BTE=torch.randn(B, T, 5),
        lookahead_BQSD=torch.randn(B, evidence.queries_BQSD.shape[1], 2, evidence.keys_BHTD.shape[3]),
        lookahead_keys_BHSD=torch.randn(B, evidence.num_heads, 2, evidence.keys_BHTD.shape[3]),
    )


@pytest.mark.parametrize("idx", [slice(1, 3), torch.tensor([2, 0])], ids=str)
def test_some_of_the_sequences_keep_every_field(idx):
    evidence = _with_all_fields()
    assert evidence.select_batch(slice(0, 1)).keys_BHTD.data_ptr() == evidence.keys_BHTD.data_ptr()
    chosen = vars(evidence.select_batch(idx))
    for name, value in vars(evidence).items():
        if isinstance(value, RunningStatistics):
            assert torch.equal(chosen[name].mass_BHT, value.mass_BHT[idx])
            assert torch.equal(chosen[name].last_access_BHT, value.last_access_BHT[idx])
        elif isinstance(value, torch.Tensor) and "B" in name.rpartition("_")[2]:
            assert torch.equal(chosen[name], value[idx]), name
        else:
            assert chosen[name] is value


def test_the_first_entries_keep_every_field():
    evidence = _with_all_fields()
    stop = evidence.num_seen - 3
    cut = truncate(evidence, stop)
    for name, value in vars(cut).items():
        whole = getattr(evidence, name)
        letters = name.rpartition("_")[2]
        if name in ("running", "lookahead_BQSD", "lookahead_keys_BHSD"):
            assert value is None
        elif "T" in letters:
            assert torch.equal(value, whole.narrow(letters.index("T"), 0, stop)), name
        elif "S" in letters:
            assert torch.equal(value, whole.narrow(letters.index("S"), 0, ASKED - 3)), name
    want = naive_held_attention(evidence)[:, :, : ASKED - 3, :stop]
    assert_close(attention_probs(cut, 0, ASKED - 3), want)

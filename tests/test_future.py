"""Future risk against its definition, at the edges, in chunks, and behind its fence."""

import pytest
import torch

from retain.future import future_risk
from tests.close import assert_close
from tests.memory import Watch
from tests.naive import naive_attention, naive_norm, random_evidence

T, DOCUMENT = 16, 11


def _evidence(*, mid_pad: bool = False, **settings):
    """Two sequences of 11 document slots and 5 appended; the second has 3 pads before it (and one before "
    "its appendix)."""
    evidence = random_evidence(pads=(0, 3), num_tokens=T, **settings)
    if mid_pad:
        evidence.valid_BT[1, DOCUMENT] = False
    return evidence


def _naive(evidence, document, horizon, sources):
    attention = naive_attention(evidence)
    B, Q = attention.shape[:2]
    G = Q // evidence.num_heads
    reach = T if evidence.window is None else evidence.window
    risk = torch.zeros(B, evidence.num_heads, document, dtype=torch.float64)
    reached = torch.zeros(B, evidence.num_heads, document, dtype=torch.bool)
    for b in range(B):
        for i in range(document):
            for j in range(i, evidence.num_seen):
                own, far = j < document, j - i >= horizon
                counts = ("own" in sources and own and far) or ("appendix" in sources and not own)
                if not (counts and evidence.valid_BT[b, i] and evidence.valid_BT[b, j] and j - i < reach):
                    continue
                reached[b, :, i] = True
                for q in range(Q):
                    paid = float(attention[b, q, j, i]) * naive_norm(evidence, b, q, i)
                    risk[b, q // G, i] = max(float(risk[b, q // G, i]), paid)
    return risk, reached


@pytest.mark.parametrize("sources", [("own",), ("appendix",), ("own", "appendix")])
@pytest.mark.parametrize("horizon", [0, 1, 4, 10, 11])
@pytest.mark.parametrize("chunk", [1, 3, 128])
def test_future_risk_is_its_definition(sources, horizon, chunk):
    evidence = _evidence()
    risk, reached = future_risk(
        evidence, document_tokens=DOCUMENT, horizon=horizon, sources=sources, chunk=chunk
    )
    wanted, wanted_reached = _naive(evidence, DOCUMENT, horizon, sources)
    assert risk.dtype == torch.float32
    assert torch.equal(reached, wanted_reached)
    assert_close(risk, wanted)


@pytest.mark.parametrize("sources", [("own",), ("appendix",), ("own", "appendix")])
@pytest.mark.parametrize(
    "settings", [{"group": 1}, {"group": 3}, {"window": 6}, {"soft_cap": 2.0}, {"mid_pad": True}], ids=str
)
def test_groups_windows_caps_and_padding_before_the_appendix(sources, settings):
    evidence = _evidence(**settings)
    risk, reached = future_risk(evidence, document_tokens=DOCUMENT, horizon=4, sources=sources, chunk=5)
    wanted, wanted_reached = _naive(evidence, DOCUMENT, 4, sources)
    assert torch.equal(reached, wanted_reached)
    assert_close(risk, wanted)


def test_reached_at_the_edges():
    evidence = random_evidence(pads=(0, 3), num_tokens=T)
    for horizon in (1, 4, 12):
        _, reached = future_risk(evidence, document_tokens=T, horizon=horizon, sources=("own",))
        for b, pad in enumerate((0, 3)):
            assert reached[b, 0].tolist() == [pad <= i < T - horizon for i in range(T)]
    _, reached = future_risk(evidence, document_tokens=T, horizon=T, sources=("own",))
    assert not reached.any()
    _, reached = future_risk(evidence, document_tokens=DOCUMENT, horizon=T, sources=("own", "appendix"))
    assert torch.equal(reached[:, 0], evidence.valid_BT[:, :DOCUMENT])


def test_mixed_sources_are_the_larger_of_the_two():
    evidence = _evidence()
    own, appendix, both = (
        future_risk(evidence, document_tokens=DOCUMENT, horizon=4, sources=sources)[0]
        for sources in (("own",), ("appendix",), ("own", "appendix"))
    )
    assert torch.equal(both, torch.maximum(own, appendix))


def test_the_appendix_needs_only_its_own_queries():
    full = _evidence()
    last = _evidence()
    object.__setattr__(last, "queries_BQSD", full.queries_BQSD[:, :, DOCUMENT:])
    a, b = (future_risk(e, document_tokens=DOCUMENT, sources=("appendix",))[0] for e in (full, last))
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match="need the last 16 queries, the evidence holds 5"):
        future_risk(last, document_tokens=DOCUMENT)


def test_half_precision_evidence_gives_float32_risk():
    evidence = _evidence(dtype=torch.bfloat16)
    risk, _ = future_risk(evidence, document_tokens=DOCUMENT, horizon=4)
    assert risk.dtype == torch.float32
    assert_close(risk, _naive(evidence, DOCUMENT, 4, ("own", "appendix"))[0])


@pytest.mark.parametrize("sources", [("own",), ("appendix",), ("own", "appendix")])
def test_no_more_than_a_chunk_of_attention_exists(sources):
    """Memory is linear in T: rows of a chunk of queries, twice, and what is as long as the sequence."""
    peaks = []
    for tokens in (256, 512, 1024):
        evidence = random_evidence((0, 3), num_tokens=tokens)
        with Watch() as watch:
            future_risk(evidence, document_tokens=tokens // 2, horizon=4, sources=sources, chunk=8)
        peaks.append(watch.peak)
        rows = 4 * 8 * tokens * 4  # query heads x chunk x keys x bytes, of one sequence
        assert watch.peak <= 2 * rows + 600 * tokens
    assert peaks[2] - peaks[1] <= 2.1 * (peaks[1] - peaks[0])
    assert peaks[2] < 4 * 1024**2 * 4 / 8  # one sequence's matrix


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"sources": ("own", "apendix")},
            "unknown source of future queries 'apendix': did you mean 'appendix'",
        ),
        ({"sources": ()}, "needs a source of queries: pass one or both of own, appendix"),
        ({"document_tokens": T}, "the document fills all 16 entries: append a question"),
        ({"document_tokens": T + 1}, r"document_tokens is 1..16.*got 17"),
        ({"horizon": -1}, "horizon is 0 or more.*got horizon -1"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        future_risk(_evidence(), **{"document_tokens": DOCUMENT, **settings})

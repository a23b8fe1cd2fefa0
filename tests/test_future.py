"""Future risk against its definition, at the edges, in chunks, and behind its fence."""

import itertools
from dataclasses import replace

import pytest
import torch

from retain.future import AGGREGATES, WEIGHTS, future_use
from tests.close import assert_close
from tests.naive import naive_attention, naive_norm, random_evidence
from tests.refused import refused

DOCUMENT = 11


def _parts(**settings):
    """A document of 11 entries (the second behind 3 pads), and branches of 4, 3 and 1 tokens after it."""
    whole = random_evidence(pads=(0, 3), num_tokens=DOCUMENT, hidden_BTE=_hidden(DOCUMENT, 0), **settings)
    branches = []
    for number, (source, length) in enumerate([("appendix", 4), ("repeat", 3), ("repeat", 1)], start=1):
        longer = random_evidence(
            pads=(0, 3), num_tokens=DOCUMENT + length, num_queries=length, seed=number,
            hidden_BTE=_hidden(DOCUMENT + length, number), **settings,
        )  # fmt: skip
        longer.keys_BHTD[:, :, :DOCUMENT] = whole.keys_BHTD
        longer.values_BHTD[:, :, :DOCUMENT] = whole.values_BHTD
        branches.append((source, replace(longer, output_weight_QDE=whole.output_weight_QDE)))
    return whole, branches


def _hidden(length, seed):
    return torch.randn(2, length, 5, generator=torch.Generator().manual_seed(seed + 100)) * 0.2


def _naive_use(document, branches, sources, aggregate, weight, horizon):
    """By loops in float64, as the docstring of `future_use` says."""
    parts = [("own", document, horizon), *((source, evidence, 0) for source, evidence in branches)]
    attentions = [naive_attention(evidence) for _, evidence, _ in parts]
    B, H, G = len(document.valid_BT), document.num_heads, document.group
    use = torch.zeros(B, H, DOCUMENT, dtype=torch.float64)
    reached = torch.zeros(B, H, DOCUMENT, dtype=torch.bool)
    for b, h, i in itertools.product(range(B), range(H), range(DOCUMENT)):
        by_source = {}
        for source, factor in sources.items():
            paid, count = [], 0
            for number, (name, evidence, distance) in enumerate(parts):
                S, T = evidence.num_queries, evidence.num_seen
                for s in range(S if name == source else 0):
                    j = T - S + s
                    if not evidence.valid_BT[b, j] or j - i < max(0, distance):
                        continue
                    count += 1
                    for q in range(h * G, h * G + G):
                        each = float(attentions[number][b, q, s, i])
                        each *= 1.0 if weight == "none" else naive_norm(document, b, q, i)
                        if weight == "value_norm_over_hidden":
                            each /= float(evidence.hidden_BTE[b, j].double().abs().sum())
                        paid.append(each)
            if count and document.valid_BT[b, i]:
                by_source[source] = factor * (max(paid) if aggregate == "max" else sum(paid) / G / count)
        reached[b, h, i] = bool(by_source)
        if by_source and aggregate == "max":
            use[b, h, i] = max(by_source.values())
        elif by_source:
            use[b, h, i] = sum(by_source.values()) / sum(sources[name] for name in by_source)
    return use, reached


SOURCE_SETS = {
    "own": {"own": 1.0},
    "repeat": {"repeat": 2.0},
    "all": {"own": 1.0, "appendix": 0.25, "repeat": 0.5},
}


SINKS = {"sinks_Q": torch.tensor([0.5, -1.0, 2.0, 0.0])}
SPECIAL = ({"group": 1}, {"group": 3}, {"soft_cap": 2.0}, {"dtype": torch.bfloat16}, SINKS)


@pytest.mark.parametrize("weight", sorted(WEIGHTS))
@pytest.mark.parametrize("aggregate", sorted(AGGREGATES))
@pytest.mark.parametrize(
    ("sources", "horizon", "settings"),
    [
        *((sources, 4, {}) for sources in sorted(SOURCE_SETS)),
        *((sources, horizon, {}) for sources in ("own", "all") for horizon in (0, 10, 11, 16)),
        *(("all", 4, settings) for settings in SPECIAL),
    ],
    ids=str,
)
def test_future_use_is_its_definition(aggregate, weight, sources, horizon, settings):
    document, branches = _parts(**settings)
    given = {"aggregate": aggregate, "weight": weight, "horizon": horizon}
    use, reached = future_use(document, branches, sources=SOURCE_SETS[sources], **given)
    wanted, wanted_reached = _naive_use(document, branches, SOURCE_SETS[sources], **given)
    assert use.dtype == torch.float32 and (horizon > 9 or wanted.abs().sum() > 0)
    assert torch.equal(reached, wanted_reached)
    assert_close(use, wanted)


def test_branches_and_sources_without_the_other_change_nothing():
    document, branches = _parts()
    each, _ = future_use(document, branches, sources={"own": 1.0}, horizon=4)
    alone, _ = future_use(document, (), sources={"own": 1.0, "continuation": 3.0}, horizon=4)
    assert torch.equal(each, alone)
    use, reached = future_use(document, branches, sources={"continuation": 1.0})
    assert not reached.any() and not use.any()


def test_evidence_that_holds_too_little_is_refused():
    document, _ = _parts()
    few = replace(document, queries_BQSD=document.queries_BQSD[:, :, -3:])
    said = "needs a query for each of the document's 11 entries, .* holds 3"
    refused(said, future_use, few, sources={"own": 1.0})
    said = "'appendix' holds 11 queries over 11 entries, of which 11"
    refused(said, future_use, document, [("appendix", document)], sources={"appendix": 1.0})
    bare, how = replace(document, hidden_BTE=None), {"weight": "value_norm_over_hidden"}
    said = "looks at the attention input, and the evidence has none"
    refused(said, future_use, bare, sources={"own": 1.0}, **how)

"""Attention that entries receive, against plain loops, by kernels and without them; and accumulated."""

import itertools
from dataclasses import fields, is_dataclass, replace

import pytest
import torch

from retain.attention import received
from retain.attention.received import advance, advance_with_gaps, received_attention
from retain.evidence import Evidence
from retain.kernels import backend
from tests.close import assert_close
from tests.held import ASKED, filled, held_evidence, naive_held_attention, single
from tests.kernels.device import DEVICE
from tests.naive import LAYERS, random_evidence, special_layer

# The interpreter takes its time, and the op has tests of its own.
PATHS = [*(("reference", layer) for layer in (None, *LAYERS)), ("triton", None)]
# numpy, in which kernels are interpreted, speaks of the poison in what is not held.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


# Queries that each sequence has.
FEWER = torch.arange(ASKED) >= torch.tensor([[0], [5], [8]])


def evidences(layer: str | None) -> list[Evidence]:
    """All entries, padded; those that heads hold; the same with fewer queries in some sequences."""
    shown = [
        random_evidence((0, 3, 5), num_queries=ASKED),
        filled(held_evidence(latest=False), float("nan")),
        replace(filled(held_evidence(seed=4), float("inf")), queried_BS=FEWER),
    ]
    return [single(special_layer(one, layer)) for one in shown]


def on_device(part):
    """Evidence, and whatever else holds tensors, where kernels run; loops stay on the CPU."""
    if torch.is_tensor(part):
        return part.to(DEVICE)
    if is_dataclass(part):
        return replace(part, **{each.name: on_device(getattr(part, each.name)) for each in fields(part)})
    return part


def naive(evidence: Evidence, start: int, entries: int, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention `[B, Q, s, entries]` in float64 of the pairs that count, and which those are."""
    T, S = evidence.num_seen, evidence.num_queries
    attention = naive_held_attention(evidence)
    far = torch.arange(T - S, T)[:, None] - torch.arange(T) >= distance
    counts = (attention > 0) & far
    return (attention * counts)[:, :, start:, :entries], counts[:, :, start:, :entries]


@pytest.mark.parametrize(("path", "layer"), PATHS)
@pytest.mark.parametrize(
    ("start", "entries", "distance"), [(0, None, 0), (3, None, 2), (0, 9, 0), (ASKED - 1, 13, 4)]
)
def test_statistics_are_their_formulas(path, layer, start, entries, distance):
    for evidence in evidences(layer):
        T = evidence.num_seen
        attention, counts = naive(evidence, start, entries or T, distance)
        least = torch.full((*evidence.queries_BQSD.shape[:2], ASKED - start), 0.11)
        entry_s = torch.arange(T - ASKED + start, T)[:, None]
        want = {
            "max": attention.amax(2),
            "sum": attention.sum(2),
            "scatter": (attention - attention.mean(2, keepdim=True)).square().sum(2),
            "entropy": -(attention * (attention + 1e-10).log()).sum(2),
            "last": torch.where((attention >= 0.11) & counts, entry_s, -1).amax(2),
        }
        assert not ((attention - 0.11).abs() < 1e-6).any()  # or else rounding would say what an access is
        where = {"start": start, "entries": entries, "distance": distance, "least_BQs": least.to(DEVICE)}
        there = on_device(evidence)
        for group in (False, True):
            with backend.using(path):
                stats = [one.cpu() for one in received_attention(there, *want, group=group, **where)]
            with backend.using("reference"):
                plain = [one.cpu() for one in received_attention(there, *want, group=group, **where)]
            for (name, naive_BQT), got, other in zip(want.items(), stats, plain, strict=True):
                if group:
                    naive_BHGT = naive_BQT.unflatten(1, (evidence.num_heads, -1))
                    naive_BQT = naive_BHGT.amax(2) if name in ("max", "last") else naive_BHGT.sum(2)
                if name == "last":
                    assert torch.equal(got, naive_BQT)
                else:
                    assert got.dtype == torch.float32
                    # Entropy is a product with a logarithm: an operation more.
                    ops = 2 if name == "entropy" else 1
                    assert_close(got, naive_BQT, None if path == "reference" else other, ops=ops)


# Accumulated: folded query by query, chunk by chunk or at once, over entries held or not.


def naive_running(evidence, share):
    """Mass and last access by loops, of the held queries and what was known before."""
    attention, places = naive_held_attention(evidence), evidence.places_BT
    (B, H, T), S, G = evidence.keys_BHTD.shape[:3], evidence.num_queries, evidence.group
    before = evidence.running
    mass = torch.zeros(B, H, T, dtype=torch.float64) if before is None else before.mass_BHT.clone()
    last = places[:, None].expand(B, H, T).clone()
    for b in range(B):
        for h in range(H):
            for i in range(T):
                if before is not None:
                    last[b, h, i] = max(int(places[b, i]), int(before.last_access_BHT[b, h, i]))
                for s in range(S):
                    paid = [float(attention[b, q, s, i]) for q in range(h * G, h * G + G)]
                    mass[b, h, i] += sum(paid) / G
                    seen = int((attention[b, h * G, s] > 0).sum())
                    if attention[b, h * G, s, i] > 0 and max(paid) >= share / seen:
                        last[b, h, i] = max(int(last[b, h, i]), int(places[b, T - S + s]))
    return mass, last


@pytest.mark.parametrize("layer", [None, *LAYERS])
@pytest.mark.parametrize("latest", [True, False])
@pytest.mark.parametrize("share", [0.0, 1.0, 2.5])
def test_statistics_are_their_formula(layer, latest, share):
    """Own entries not held, and heads that hold nothing, among them."""
    evidence = special_layer(held_evidence(latest=latest), layer)
    mass, last = naive_running(evidence, share)
    exists, before = evidence.exists_BHT, [x.clone() for x in vars(evidence.running).values()]
    got = advance(filled(evidence, float("nan")), evidence.running, share=share)
    assert_close(got.mass_BHT[exists], mass[exists])
    assert torch.equal(got.last_access_BHT[exists], last[exists])
    assert all(map(torch.equal, before, vars(evidence.running).values()))


def naive_gaps(evidence, alpha, before):
    """Last access and longest gap by loops over accesses, one entry of one head at a time."""
    attention, places, G = naive_held_attention(evidence), evidence.places_BT, evidence.group
    (B, H, T), S = evidence.keys_BHTD.shape[:3], evidence.num_queries
    last, gap = torch.zeros(B, H, T, dtype=torch.int64), torch.zeros(B, H, T, dtype=torch.int64)
    for b, h, i in itertools.product(range(B), range(H), range(T)):
        at, longest = int(places[b, i]), 0
        if before is not None:
            at, longest = max(at, int(before.last_access_BHT[b, h, i])), int(before.longest_gap_BHT[b, h, i])
        for s in range(S):
            if float(attention[b, h * G : h * G + G, s, i].max()) >= alpha:
                place = int(places[b, T - S + s])
                longest, at = max(longest, place - at, 1), max(at, place)
        last[b, h, i], gap[b, h, i] = at, longest
    return last, gap


@pytest.mark.parametrize("layer", [None, *LAYERS])
@pytest.mark.parametrize("latest", [True, False])
@pytest.mark.parametrize("alpha", [1e-4, 0.1, 0.4])
def test_gaps_are_their_formula(layer, latest, alpha, monkeypatch):
    evidence = special_layer(held_evidence(latest=latest), layer)
    # A cache has never seen an access that is later than the queries before these.
    first_B11 = evidence.places_BT[:, None, -evidence.num_queries, None]
    past = replace(evidence.running, last_access_BHT=evidence.running.last_access_BHT.minimum(first_B11 - 1))
    exists = evidence.exists_BHT
    for before in (None, past):
        last, gap = naive_gaps(evidence, alpha, before)
        assert len(gap[exists].unique()) > 2
        for numbers in (1, 700, 2**27):
            monkeypatch.setattr(received, "ROW_NUMBERS", numbers)
            got = advance_with_gaps(filled(evidence, float("nan")), before, alpha=alpha)
            assert torch.equal(got.last_access_BHT[exists], last[exists])
            assert torch.equal(got.longest_gap_BHT[exists], gap[exists])
            assert_close(got.mass_BHT[exists], advance(evidence, before).mass_BHT[exists])

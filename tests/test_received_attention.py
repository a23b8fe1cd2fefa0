"""What queries pay to entries, against attention by plain loops; and by kernels what it is without them."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch

from retain.attention.received import received_attention
from retain.evidence import Evidence
from retain.kernels import backend
from retain.kernels.attention_stats import Pool
from tests.close import assert_close
from tests.held import ASKED, filled, held_evidence, naive_held_attention, naive_place_pool, single
from tests.kernels.device import DEVICE
from tests.naive import LAYERS, random_evidence, special_layer

# The interpreter takes its time, and the op has tests of its own.
PATHS = [*(("reference", layer) for layer in (None, *LAYERS)), ("triton", None), ("triton", "window")]
# numpy, in which kernels are interpreted, speaks of the poison in what is not held.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def evidences(layer: str | None) -> list[Evidence]:
    """Of everything, padded; of what heads hold; of that with fewer queries in some sequences."""
    queried = torch.arange(ASKED) >= torch.tensor([[0], [5], [8]])
    shown = [
        random_evidence((0, 3, 5), num_queries=ASKED),
        filled(held_evidence(own=False), float("nan")),
        replace(filled(held_evidence(seed=4), float("inf")), queried_BS=queried),
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
            "squares": attention.square().sum(2),
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


@pytest.mark.parametrize(("path", "layer"), PATHS)
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_rows_are_pooled_by_place_and_keep_their_mass(path, layer, kind):
    for evidence in evidences(layer):
        B, Q, _, _ = evidence.queries_BQSD.shape
        T = evidence.num_seen
        split, exists = T - ASKED, evidence.exists_BHT
        rows = naive_held_attention(evidence)
        pooled_rows, kept = torch.zeros_like(rows), torch.zeros_like(rows)
        places = evidence.places_BT.masked_fill(~evidence.valid_BT, -(10**6))
        for b in range(B):
            for q in range(Q):
                held = exists[b, q // evidence.group]
                for s in range(ASKED):
                    row = rows[b, q, s]
                    pooled = naive_place_pool(row, kind, 5, split, places[b].tolist()).masked_fill(~held, 0.0)
                    pooled_rows[b, q, s] = pooled
                    for side in (slice(0, split), slice(split, None)):
                        if pooled[side].sum() > 0:
                            kept[b, q, s, side] = pooled[side] * row[side].sum() / pooled[side].sum()
        for want, keep_mass in ((pooled_rows, False), (kept, True)):
            pool, there = Pool(kind, 5, split, keep_mass), on_device(evidence)
            with backend.using("reference"):
                other = [one.cpu() for one in received_attention(there, "max", "sum", pool=pool)]
            with backend.using(path):
                (lse,) = received_attention(there, "lse")
                stats = received_attention(there, "max", "sum", pool=pool, lse_BQs=lse if keep_mass else None)
            stats = [one.cpu() for one in stats]
            plain_max, plain_sum = (None, None) if path == "reference" else other
            assert_close(stats[0], want.amax(2), plain_max)
            assert_close(stats[1], want.sum(2), plain_sum)

"""Evidence made of random numbers, and attention by three plain loops in float64, against which formulas are
checked."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from retain.evidence import Evidence
from tests.close import assert_close


def random_evidence(
    pads: tuple[int, ...] = (0, 4),
    *,
    num_tokens: int = 14,
    num_heads: int = 2,
    group: int = 2,
    head_width: int = 3,
    model_width: int = 5,
    num_queries: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    sharp: float = 1.5,
    **settings,
) -> Evidence:
    """Evidence of a layer, left-padded by `pads`; padded slots hold large garbage, which must not matter."""
    draw = torch.Generator().manual_seed(seed)
    B, H, T, D, E = len(pads), num_heads, num_tokens, head_width, model_width
    Q, S = H * group, num_queries or num_tokens
    queries, keys, values = (
        torch.randn(B, heads, length, D, generator=draw) * sharp for heads, length in ((Q, S), (H, T), (H, T))
    )
    valid = torch.arange(T) >= torch.tensor(pads)[:, None]
    keys = keys.masked_fill(~valid[:, None, :, None], 30.0)
    values = values.masked_fill(~valid[:, None, :, None], -30.0)
    return Evidence(
        layer_idx=3,
        queries_BQSD=queries.to(dtype),
        keys_BHTD=keys.to(dtype),
        values_BHTD=values.to(dtype),
        output_weight_QDE=torch.randn(Q, D, E, generator=draw).to(dtype),
        scaling=D**-0.5,
        positions_BT=(valid.cumsum(-1) - 1).clamp_min(0),
        valid_BT=valid,
        **settings,
    )


def left_of(evidence: Evidence, left: list[int]) -> Evidence:
    """The evidence after an eviction that left these entries, with its last query."""
    return replace(
        evidence,
        queries_BQSD=evidence.queries_BQSD[:, :, -1:],
        keys_BHTD=evidence.keys_BHTD[:, :, left],
        values_BHTD=evidence.values_BHTD[:, :, left],
        positions_BT=evidence.positions_BT[:, left],
        valid_BT=evidence.valid_BT[:, left],
        place_BT=evidence.places_BT[:, left],
    )


def naive_attention(evidence: Evidence) -> Tensor:
    """Attention `[B, Q, S, T]` in float64: one softmax at a time, entry by entry. Rows that see nothing are "
    "zero."""
    queries, keys = evidence.queries_BQSD.double(), evidence.keys_BHTD.double()
    B, Q, S, _ = queries.shape
    T, G = keys.shape[2], Q // keys.shape[1]
    attention = torch.zeros(B, Q, S, T, dtype=torch.float64)
    for b in range(B):
        for q in range(Q):
            for s in range(S):
                each = T - S + s
                seen = [i for i in range(each + 1) if evidence.valid_BT[b, i]]
                logits = [float(queries[b, q, s] @ keys[b, q // G, i]) * evidence.scaling for i in seen]
                if evidence.soft_cap is not None:
                    logits = [evidence.soft_cap * math.tanh(x / evidence.soft_cap) for x in logits]
                total = sum(math.exp(x) for x in logits)
                if evidence.sinks_Q is not None:
                    total += math.exp(float(evidence.sinks_Q[q]))
                for i, x in zip(seen, logits, strict=True):
                    attention[b, q, s, i] = math.exp(x) / total
    return attention


def existing(evidence: Evidence, b: int) -> list[int]:
    """Entries of a sequence that are no padding."""
    return [i for i in range(evidence.num_seen) if evidence.valid_BT[b, i]]


def naive_norm(evidence: Evidence, b: int, q: int, i: int, p: int = 1) -> float:
    """`||v_i W_O^q||_p` by loops in float64."""
    value = evidence.values_BHTD[b, q // evidence.group, i].double().tolist()
    columns = evidence.output_weight_QDE[q].double().T.tolist()
    written = [abs(sum(v * w for v, w in zip(value, column, strict=True))) for column in columns]
    return sum(x**p for x in written) ** (1 / p)


def alone(evidence: Evidence, b: int) -> Evidence:
    """Sequence `b` on its own, without its padding."""
    pad = int((~evidence.valid_BT[b]).sum())
    one = evidence.select_batch(slice(b, b + 1))
    S, T = one.num_queries, one.num_seen
    return Evidence(
        layer_idx=one.layer_idx,
        queries_BQSD=one.queries_BQSD[:, :, max(0, pad - (T - S)) :],
        keys_BHTD=one.keys_BHTD[:, :, pad:],
        values_BHTD=one.values_BHTD[:, :, pad:],
        output_weight_QDE=one.output_weight_QDE,
        scaling=one.scaling,
        positions_BT=one.positions_BT[:, pad:],
        valid_BT=one.valid_BT[:, pad:],
        soft_cap=one.soft_cap,
        sinks_Q=one.sinks_Q,
        rotary=one.rotary,
    )


# Groups of 1, 4, 8; odd lengths; batches of 3; a window larger than what comes before it, and one sequence of
# which the window is all.
SHAPES = {
    "group1": {"pads": (0, 4), "num_tokens": 15, "group": 1, "window": 6},
    "group4": {"pads": (0, 3, 7), "num_tokens": 17, "group": 4, "window": 5},
    "group8": {"pads": (2, 0, 5), "num_tokens": 13, "num_heads": 1, "group": 8, "window": 4},
    "wide": {"pads": (0, 9, 15), "num_tokens": 40, "group": 2, "window": 25},
}


# Layers whose softmax is not the plain one.
LAYERS = ("soft_cap", "sinks")

# Every shape in a plain layer, and one in each other layer.
SHAPED = (*((shape, None) for shape in sorted(SHAPES)), *(("group4", layer) for layer in LAYERS))


def shaped_evidence(name: str, layer: str | None = None, **settings) -> tuple[Evidence, int]:
    """Evidence of one of `SHAPES` (in a layer of `LAYERS`) that holds the window's queries only, and the
    window."""
    shape = dict(SHAPES[name])
    window = shape.pop("window")
    return special_layer(random_evidence(**{"num_queries": window, **shape, **settings}), layer), window


def special_layer(evidence: Evidence, layer: str | None) -> Evidence:
    """The same evidence in a layer of `LAYERS`: a cap that bites, or sink logits."""
    Q = evidence.queries_BQSD.shape[1]
    settings: dict[str | None, dict] = {
        None: {},
        "soft_cap": {"soft_cap": 1.5},
        "sinks": {"sinks_Q": torch.linspace(-1.0, 2.0, Q)},
    }
    return replace(evidence, **settings[layer])


def assert_heads_close(
    actual: Tensor, reference: Tensor, *, dtype: torch.dtype | None = None, ops: int = 1
) -> None:
    """`assert_close` where each head row (all but the last axis) counts relative to its own largest entry: in
    a row of small numbers, small errors are seen."""
    largest = reference.double().masked_fill(~reference.isfinite(), 0.0).abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1.0)
    assert_close(actual.double() / scale, reference.double() / scale, dtype=dtype or actual.dtype, ops=ops)


def naive_pool(row: Tensor, kind: str | None, size: int, split: int) -> Tensor:
    """Pooling of one row by loops; the entries before `split` and those from it on do not see each other."""
    if kind is None:
        return row
    T, pooled = len(row), torch.zeros(len(row), dtype=torch.float64)
    for i in range(T):
        near = [
            float(row[k])
            for k in range(i - size // 2, i + size // 2 + 1)
            if 0 <= k < T and (k < split) == (i < split)
        ]
        pooled[i] = sum(near) / size if kind == "avg" else max(near)
    return pooled


def masked(values_BHT: Tensor, evidence: Evidence) -> Tensor:
    """-inf on what does not exist."""
    return values_BHT.double().masked_fill(~evidence.exists_BHT, float("-inf"))


def naive_scores(evidence: Evidence, number: Callable[[int, int, int], float]) -> Tensor:
    """`[B, H, T]` in float64: `number(b, h, i)` of every entry, -inf on padding."""
    naive = torch.full(evidence.keys_BHTD.shape[:3], float("-inf"), dtype=torch.float64)
    for b, h, i in itertools.product(*map(range, naive.shape)):
        if evidence.valid_BT[b, i]:
            naive[b, h, i] = number(b, h, i)
    return naive


def naive_overlap(score_HT: Tensor, target_HT: Tensor, reached_HT: Tensor) -> list[float]:
    """The share, of each head, of the target's top fifth of the reached entries that is among the score's."""
    shares = []
    for h in range(len(target_HT)):
        entries = [i for i in range(target_HT.shape[1]) if reached_HT[h, i]]
        size = max(1, round(0.2 * len(entries)))
        # Equal ones: the later entry first, as everywhere in retain.
        best, found = (
            set(sorted(entries, key=lambda i, row=of_HT[h]: (-float(row[i]), -i))[:size])
            for of_HT in (target_HT, score_HT)
        )
        shares.append(len(best & found) / size)
    return shares


MASK = 2**64 - 1


def mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def naive_state(seed: int, layer: int, head: int) -> int:
    """Hash of a seed, a layer and a head, from which numbers of entries are drawn."""
    return mixed((mixed((mixed(seed & MASK) + layer) & MASK) + head) & MASK)


def naive_gumbel(state: int) -> float:
    """Gumbel noise of a hash's number."""
    return -math.log(-math.log((mixed(state & MASK) >> 40) / 2**24 + 2**-25))

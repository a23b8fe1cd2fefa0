"""Evidence of a later moment: heads hold different entries, and what they do not hold is poison."""

from dataclasses import replace

import torch
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.cache.store import RaggedStore
from retain.evidence import Evidence, RunningStatistics
from retain.scores.value_norm import value_norms
from tests.naive import random_evidence

# How many queries are held.
ASKED = 8


def held_evidence(
    pads: tuple[int, ...] = (0, 4, 1), *, seed: int = 0, num_tokens: int = 20, latest: bool = True, **settings
) -> Evidence:
    """Columns of which each head holds about half, and the last `ASKED` all heads; `latest=False`: not those
    either, and the first head of the first sequence holds nothing. Places and positions have gaps."""
    draw = torch.Generator().manual_seed(seed + 1)
    evidence = random_evidence(
        pads,
        num_tokens=num_tokens,
        num_queries=ASKED,
        seed=seed,
        dtype=torch.float64,
        rotary=Rotary(torch.tensor([0.3])),
        **settings,
    )
    B, H, T = evidence.keys_BHTD.shape[:3]
    valid_BT = evidence.valid_BT
    held_BHT = torch.rand(B, H, T, generator=draw) < 0.5
    if latest:
        held_BHT[..., T - ASKED :] = True
    else:
        held_BHT[0, 0] = False
        held_BHT[0, 1, 3] = True
    held_BHT &= valid_BT[:, None]
    # The queries come from tokens that follow one another; before them some are gone.
    gaps_BT = torch.randint(1, 4, (B, T), generator=draw)
    gaps_BT[:, T - ASKED + 1 :] = 1
    place_BT = ((gaps_BT * valid_BT).cumsum(-1) - 1).clamp_min(0)
    mass_BHT = torch.rand(B, H, T, generator=draw, dtype=torch.float64)
    last_BHT = place_BT[:, None] + torch.randint(0, 5, (B, H, T), generator=draw)
    gap_BHT = torch.arange(B * H * T).view(B, H, T) % 4
    return replace(
        evidence,
        positions_BT=place_BT + 2,
        place_BT=place_BT,
        held_BHT=held_BHT,
        running=RunningStatistics(mass_BHT, last_BHT, gap_BHT),
        value_norm_BQT=value_norms(evidence),
        learned_BHT=torch.rand(B, H, T, generator=draw),
    )


def filled(evidence: Evidence, fill: float) -> Evidence:
    """The same with `fill` wherever a head does not hold the entry."""
    missing_BHT = ~evidence.exists_BHT
    missing_BQT = missing_BHT.repeat_interleave(evidence.group, dim=1)
    running, norms_BQT, learned_BHT = evidence.running, evidence.value_norm_BQT, evidence.learned_BHT
    assert running is not None and norms_BQT is not None and learned_BHT is not None
    return replace(
        evidence,
        keys_BHTD=evidence.keys_BHTD.masked_fill(missing_BHT[..., None], fill),
        values_BHTD=evidence.values_BHTD.masked_fill(missing_BHT[..., None], fill),
        running=replace(running, mass_BHT=running.mass_BHT.masked_fill(missing_BHT, fill)),
        value_norm_BQT=norms_BQT.masked_fill(missing_BQT, fill),
        learned_BHT=learned_BHT.masked_fill(missing_BHT, fill),
    )


def row_of(store: RaggedStore, sequence: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and positions of one row of a store, in order of time."""
    keys_ND, values_NV, positions_N, rows_N = store.flat()
    chosen_N = rows_N == sequence * store.num_heads + head
    return keys_ND[chosen_N], values_NV[chosen_N], positions_N[chosen_N]


def single(evidence: Evidence) -> Evidence:
    """The same in float32, which kernels take."""
    each = {
        name: field.float()
        for name, field in vars(evidence).items()
        if isinstance(field, Tensor) and field.dtype == torch.float64
    }
    running = evidence.running
    if running is not None:
        each["running"] = replace(running, mass_BHT=running.mass_BHT.float())
    return replace(evidence, **each)


def compacted(evidence: Evidence, b: int, h: int) -> tuple[Evidence, Tensor]:
    """Entries that one head holds, alone and in a row, as evidence in which nothing is missing; and which
    entries these are."""
    left = evidence.exists_BHT[b, h].nonzero().flatten()
    heads = slice(h * evidence.group, (h + 1) * evidence.group)
    running = evidence.running
    assert running is not None and evidence.value_norm_BQT is not None and evidence.place_BT is not None
    one = replace(
        evidence,
        queries_BQSD=evidence.queries_BQSD[b : b + 1, heads, max(0, ASKED - len(left)) :],
        keys_BHTD=evidence.keys_BHTD[b : b + 1, h : h + 1, left],
        values_BHTD=evidence.values_BHTD[b : b + 1, h : h + 1, left],
        output_weight_QDE=evidence.output_weight_QDE[heads],
        positions_BT=evidence.positions_BT[b : b + 1, left],
        valid_BT=evidence.valid_BT[b : b + 1, left],
        sinks_Q=None if evidence.sinks_Q is None else evidence.sinks_Q[heads],
        running=RunningStatistics(
            *(side_BHT[b : b + 1, h : h + 1, left] for side_BHT in vars(running).values())
        ),
        held_BHT=None,
        place_BT=evidence.place_BT[b : b + 1, left],
        learned_BHT=None,
        value_norm_BQT=evidence.value_norm_BQT[b : b + 1, heads, left],
    )
    return one, left


def naive_held_attention(evidence: Evidence) -> Tensor:
    """Attention `[B, Q, S, T]` in float64: each head over what it holds, one softmax at a time by loops over
    the heads that hold something."""
    B, Q, S, _ = evidence.queries_BQSD.shape
    T, G = evidence.num_seen, evidence.group
    out = torch.zeros(B, Q, S, T, dtype=torch.float64)
    for b in range(B):
        for q in range(Q):
            for s in range(S):
                if evidence.queried_BS is not None and not evidence.queried_BS[b, s]:
                    continue
                each = T - S + s
                seen = [i for i in range(each + 1) if evidence.exists_BHT[b, q // G, i]]
                if not seen:
                    continue
                keys = evidence.keys_BHTD[b, q // G, seen].double()
                logits = keys @ evidence.queries_BQSD[b, q, s].double() * evidence.scaling
                if evidence.soft_cap is not None:
                    logits = evidence.soft_cap * torch.tanh(logits / evidence.soft_cap)
                if evidence.log_weight_BHT is not None:
                    logits = logits + evidence.log_weight_BHT[b, q // G, seen].double()
                total = logits.exp().sum()
                if evidence.sinks_Q is not None:
                    total = total + evidence.sinks_Q[q].double().exp()
                out[b, q, s, seen] = logits.exp() / total
    return out

"""Builds a layer's evidence at a later eviction, when its heads hold different entries already.

Its columns are the tokens that are still held. Attention inputs and queries are not kept, so what a later
eviction wants to know of an entry (a gate's score, the norm of its projected value, the attention that it
got) is computed once and stored beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.budget.statement import Stock
from retain.cache.dense_view import DenseView, align_last, dense_view, last_tokens
from retain.cache.layer_store import Store
from retain.cache.store import LOG_WEIGHT, tail_index_RS
from retain.eviction import BoundPolicy
from retain.evidence import Evidence, RunningStatistics, in_reach
from retain.hf.cache.layer import Layer, joined
from retain.hf.cache.state import History
from retain.hf.model.layout import LayerSpec

# Names of side columns: what stands beside an entry.
LEARNED, NORM, MASS, ACCESS, GAP = "learned", "value_norm", "mass", "last_access", "longest_gap"


def beside_of(evidence: Evidence) -> dict[str, Tensor]:
    """What of a dense evidence stands beside its entries once they are in a store: `[B, H, T]` or `[B, H, T,
    G]`."""
    beside = {}
    if evidence.learned_BHT is not None:
        beside[LEARNED] = evidence.learned_BHT
    if evidence.value_norm_BQT is not None:
        norms_BHGT = evidence.value_norm_BQT.unflatten(1, (evidence.num_heads, -1))
        beside[NORM] = norms_BHGT.transpose(-1, -2).contiguous()
    if evidence.running is not None:
        beside |= _beside_of(evidence.running)
    return beside


def _beside_of(running: RunningStatistics) -> dict[str, Tensor]:
    """Running statistics, each `[B, H, T]`."""
    beside = {MASS: running.mass_BHT, ACCESS: running.last_access_BHT.to(torch.int32)}
    if running.longest_gap_BHT is not None:
        beside[GAP] = running.longest_gap_BHT.to(torch.int32)
    return beside


def evidence_of(
    layer: Layer,
    spec: LayerSpec,
    history: History,
    rotary: Rotary | None,
    *,
    num_queries: int,
    each: int | None = None,
    keys: bool = True,
    values: bool = True,
    output_weight: bool = True,
) -> tuple[Evidence, DenseView]:
    """What a layer shows now.

    Args:
        layer: with a store, and the queries of the last tokens.
        spec: where it is in the model.
        history: of the batch, the layer's last tokens included.
        rotary: the model's rotary embedding, where it is understood.
        num_queries: of the last tokens, those whose queries are shown.
        each: of those, at most so many of each sequence, so that what a sequence shows does not depend on how
            many of its last tokens are real in others; None: all.
        keys, values, output_weight: whether they are shown; what is not is NaN.

    Returns:
        the evidence, and where its columns lie in the store.
    """
    store = layer.store
    assert store is not None
    device = store.device
    valid_BT, positions_BT = history.valid_BT.to(device), history.positions_BT.to(device)
    first = history.num_seen - num_queries
    from_B = last_tokens(valid_BT, num_queries if each is None else each).clamp_min(first)
    asked_BS = valid_BT[:, first:] & (torch.arange(first, history.num_seen, device=device) >= from_B[:, None])
    columns = dense_view(
        store.positions_C,
        store.index_N(),
        store.rows_N(),
        store.num_heads,
        positions_BT=positions_BT,
        valid_BT=valid_BT,
        queries_from=from_B,
    )
    if num_queries:
        queries_BQSD = align_last(layer.recent.last_queries(num_queries).to(device), asked_BS)
    else:
        shape = history.batch_size, spec.num_heads, 0, spec.head_dim
        queries_BQSD = torch.zeros(shape, dtype=store.dtype, device=device)
    ids = history.token_ids_BT
    beside = {name: columns.gather(side_C) for name, side_C in store.side.items()}
    norms = beside.get(NORM)
    evidence = spec.evidence(
        scaling=layer.scaling,
        soft_cap=layer.soft_cap,
        output=output_weight,
        queries_BQSD=queries_BQSD,
        keys_BHTD=_shown(columns, store, "keys", keys),
        values_BHTD=_shown(columns, store, "values", values),
        positions_BT=columns.positions_BT,
        valid_BT=columns.valid_BT,
        token_ids_BT=None if ids is None else columns.of_tokens(ids.to(device)),
        rotary=rotary,
        running=_running_of(beside),
        held_BHT=columns.held_BHT,
        place_BT=columns.place_BT,
        queried_BS=columns.queried_BT[:, columns.queried_BT.shape[1] - queries_BQSD.shape[2] :],
        learned_BHT=beside.get(LEARNED),
        log_weight_BHT=beside.get(LOG_WEIGHT),
        value_norm_BQT=None if norms is None else norms.transpose(-1, -2).flatten(1, 2),
    )
    return evidence, columns


def _running_of(beside: Mapping[str, Tensor]) -> RunningStatistics | None:
    """Running statistics, where they are kept."""
    if MASS not in beside:
        return None
    gap_BHT = beside[GAP].long() if GAP in beside else None
    return RunningStatistics(beside[MASS], beside[ACCESS].long(), gap_BHT)


def _shown(columns: DenseView, store: Store, name: str, wanted: bool) -> Tensor:
    """The keys or values that a store holds, at the columns; NaN without any memory behind it, where nobody
    looks."""
    if wanted:
        return columns.gather(store.keys_CD if name == "keys" else store.values_CD)
    like = store.plain.keys_CD if name == "keys" else store.plain.values_CD
    return like.new_full((), float("nan")).expand(*columns.held_BHT.shape, like.shape[-1])


def note_(
    layer: Layer,
    spec: LayerSpec,
    bound: BoundPolicy,
    history: History,
    rotary: Rotary | None,
    *,
    num_tokens: int,
) -> None:
    """Write beside a layer's last entries what a later eviction wants to know of them.

    Args:
        layer: whose store holds the last tokens in every head.
        spec: where it is in the model.
        bound: says what is wanted.
        history: of the batch, the last tokens included.
        rotary: the model's rotary embedding.
        num_tokens: the last tokens, of which nothing was noted yet.
    """
    wants, store = bound.wants, layer.store
    assert store is not None
    device = store.device
    if wants.learned or wants.value_norm:
        valid_BS = history.valid_BT[:, -num_tokens:].to(device)
        tail = bound.with_metadata(_tail(layer, spec, bound, history, rotary, valid_BS))
        for name, side in beside_of(replace(tail, running=None)).items():
            store.set_side_(name, side, valid_BS)
    if wants.running:
        evidence, columns = evidence_of(
            layer, spec, history, rotary, num_queries=num_tokens, values=False, output_weight=False
        )
        running = bound.counted(evidence).running
        assert running is not None
        for name, side_BHT in _beside_of(running).items():
            store.write_side_(name, side_BHT.flatten(0, 1)[columns.entries])
    layer.recent.hidden, layer.recent.stream = [], []


def _tail(
    layer: Layer,
    spec: LayerSpec,
    bound: BoundPolicy,
    history: History,
    rotary: Rotary | None,
    valid_BS: Bool[Tensor, "B S"],
) -> Evidence:
    """The last tokens alone, as if nothing had come before: enough for what looks at one entry at a time."""
    assert layer.store is not None
    store, num_tokens = layer.store.plain, valid_BS.shape[1]
    (B, H), device = store.lengths_BH.shape, store.device
    index_RS, real_RS = tail_index_RS(store, valid_BS)
    keys_BHTD, values_BHTD = (
        side[index_RS].masked_fill(~real_RS[..., None], 0).view(B, H, num_tokens, -1)
        for side in (store.keys_CD, store.values_CD)
    )
    ids, recent = history.token_ids_BT, layer.recent
    if bound.wants.entry_queries:
        queries_BQSD = recent.last_queries(num_tokens).to(device)
    else:
        queries_BQSD = keys_BHTD.new_zeros(B, spec.num_heads, 0, spec.head_dim)
    return spec.evidence(
        scaling=layer.scaling,
        soft_cap=layer.soft_cap,
        output=bound.reads_output,
        queries_BQSD=queries_BQSD,
        keys_BHTD=keys_BHTD,
        values_BHTD=values_BHTD,
        positions_BT=history.positions_BT[:, -num_tokens:].to(device),
        valid_BT=valid_BS,
        hidden_BTE=joined(recent.hidden).to(device) if recent.hidden else None,
        token_ids_BT=None if ids is None else ids[:, -num_tokens:].to(device),
        rotary=rotary,
        stream_BTE=joined(recent.stream).to(device) if recent.stream else None,
    )


def remembered(evidence: Evidence, bound: BoundPolicy) -> Evidence:
    """What of a layer is held until the lookahead tokens have asked: besides its keys and values, what the
    policy's own score looks at."""
    wants = bound.wants
    if bound.scorer is not None:  # nobody knows what a foreign scorer looks at
        return evidence
    evidence = bound.counted(evidence)
    queries_BQSD = evidence.queries_BQSD
    if wants.queries is not None:  # a copy, so that the others are let go
        queries_BQSD = queries_BQSD[:, :, max(0, evidence.num_seen - wants.queries) :].clone()
    return replace(evidence, queries_BQSD=queries_BQSD, hidden_BTE=None, stream_BTE=None)


def intact_tokens(layers: list[Layer], history: History) -> Bool[Tensor, "B T"]:
    """Tokens that every head of every layer still holds."""
    device = history.valid_BT.device
    positions_BT = history.positions_BT.to(device)
    width = int(positions_BT.max()) + 1
    counts, heads = torch.zeros(history.batch_size * width, dtype=torch.int64, device=device), 0
    for layer in layers:
        store = layer.store
        assert store is not None
        heads += store.num_heads
        sequence_N = store.rows_N() // store.num_heads
        place_N = sequence_N * width + store.positions_C[store.index_N()].long()
        counts += torch.bincount(place_N, minlength=counts.numel()).to(device)
    held_BT = counts.view(history.batch_size, width).gather(1, positions_BT.clamp_min(0)) == heads
    return held_BT & history.valid_BT


def without_expired(evidence: Evidence, bound: BoundPolicy) -> Evidence:
    """The evidence of a first prompt, in which no head holds what the next query no longer sees; running
    statistics, if the policy wants any, are of all that its queries saw."""
    if evidence.window is None or evidence.num_seen < evidence.window:
        return evidence
    alive_BT = in_reach(evidence.window, evidence.valid_BT, evidence.positions_BT)
    if torch.equal(alive_BT, evidence.valid_BT):
        return evidence
    evidence = bound.counted(evidence) if evidence.running is None else evidence
    return replace(evidence, held_BHT=alive_BT[:, None].expand(-1, evidence.num_heads, -1))


def stock_in_reach(
    specs: Sequence[LayerSpec], valid_BT: Bool[Tensor, "B T"], positions_BT: Int[Tensor, "B T"]
) -> Stock | None:
    """What there is to choose from of a first prompt, before any layer has come; None: all of it, since none
    of it has left a sliding window."""
    if all(spec.window is None or spec.window > valid_BT.shape[1] for spec in specs):
        return None
    alive = [
        valid_BT if spec.window is None else in_reach(spec.window, valid_BT, positions_BT) for spec in specs
    ]
    if all(torch.equal(own_BT, valid_BT) for own_BT in alive):
        return None
    counts = [own_BT.sum(-1) * spec.num_kv_heads for own_BT, spec in zip(alive, specs, strict=True)]
    held_BL = torch.stack(counts, dim=1).tolist()
    lengths_B = tuple(valid_BT.sum(-1).tolist())
    return Stock(tuple(map(tuple, held_BL)), lengths_B, torch.stack(alive).all(0))


def expire_(store: Store, window: int, last_B: Int[Tensor, " B"]) -> bool:
    """Let go, in place, of entries that no later query of a sliding-window layer can see; whether there were
    any."""
    sequence_N = store.rows_N() // store.num_heads
    alive_N = store.positions_C[store.index_N()] > (last_B.to(store.device) + 1 - window)[sequence_N]
    if bool(alive_N.all()):
        return False
    store.evict_(alive_N, in_place=True)
    return True


def without_queries(history: History, first: int, wanted: int | None) -> list[int]:
    """Sequences that have fewer queries from a token on than the policy wants to look at.

    So it is behind the pads of a finished row, once a mask says that they were pads, and behind a crop:
    they are decided on again when enough tokens have come.
    """
    shown_B = history.valid_BT[:, first:].sum(-1).tolist()
    return [row for row, shown in enumerate(shown_B) if shown < min(wanted or 1, history.lengths_B[row])]

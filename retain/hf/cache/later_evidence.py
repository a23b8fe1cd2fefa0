"""Builds a layer's evidence at a later eviction, when its heads hold different entries already.

Its columns are the tokens that are still held. Attention inputs and queries are not kept, so that what a
later eviction reads of an entry (a gate's score, the norm of its projected value, the attention that it
received) is computed once and stored with the entry, as metadata.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from retain.attention.dense_view import DenseView, dense_view
from retain.attention.rotary import Rotary
from retain.cache.store import LOG_WEIGHT, RaggedStore, tail_index_RS
from retain.eviction import BoundPolicy
from retain.evidence import Evidence, RunningStatistics
from retain.hf.cache.layer import Layer
from retain.hf.cache.state import History
from retain.hf.model.layout import LayerSpec

# Names of the columns of metadata.
LEARNED, NORM, MASS, ACCESS, GAP = "learned", "value_norm", "mass", "last_access", "longest_gap"


def metadata_of(evidence: Evidence) -> dict[str, Tensor]:
    """The metadata of an evidence's entries, by name: `[B, H, T]` or `[B, H, T, G]`."""
    metadata, running = {}, evidence.running
    if evidence.learned_BHT is not None:
        metadata[LEARNED] = evidence.learned_BHT
    if evidence.value_norm_BQT is not None:
        norms_BHGT = evidence.value_norm_BQT.unflatten(1, (evidence.num_heads, -1))
        metadata[NORM] = norms_BHGT.transpose(-1, -2).contiguous()
    if running is not None:
        metadata |= {MASS: running.mass_BHT, ACCESS: running.last_access_BHT.to(torch.int32)}
        if running.longest_gap_BHT is not None:
            metadata[GAP] = running.longest_gap_BHT.to(torch.int32)
    return metadata


def evidence_of(
    layer: Layer,
    spec: LayerSpec,
    history: History,
    rotary: Rotary | None,
    *,
    num_queries: int,
    keys: bool = True,
    values: bool = True,
    output_weight: bool = True,
) -> tuple[Evidence, DenseView]:
    """The evidence of a layer that holds a store.

    Args:
        layer: with a store, and the queries of the last tokens.
        spec: where it is in the model.
        history: of the batch, the layer's last tokens included.
        rotary: the model's rotary embedding, where it is understood.
        num_queries: last tokens whose queries are shown, as many as the longest sequence has at most.
        keys, values, output_weight: whether they are shown; what is not is NaN.

    Returns:
        the evidence, and where its columns lie in the store.
    """
    store = layer.store
    assert store is not None
    device = store.device
    valid_BT, positions_BT = history.valid_BT.to(device), history.positions_BT.to(device)
    columns = dense_view(
        store.positions_C,
        store.index_N(),
        store.rows_N(),
        store.num_heads,
        positions_BT=positions_BT,
        valid_BT=valid_BT,
        num_queries=num_queries,
    )
    if num_queries:
        asked_BS = valid_BT[:, -num_queries:]
        queries_BQSD = layer.recent.last("queries", num_queries).to(device)
        queries_BQSD = queries_BQSD.masked_fill(~asked_BS[:, None, :, None], 0)
    else:
        queries_BQSD = _no_queries(store, spec)
    metadata = {name: columns.gather(column_C) for name, column_C in store.side.items()}
    norms, running = metadata.get(NORM), None
    if MASS in metadata:
        gap_BHT = metadata[GAP].long() if GAP in metadata else None
        running = RunningStatistics(metadata[MASS], metadata[ACCESS].long(), gap_BHT)
    evidence = spec.evidence(
        output=output_weight,
        queries_BQSD=queries_BQSD,
        keys_BHTD=_shown(columns, store, "keys", keys),
        values_BHTD=_shown(columns, store, "values", values),
        positions_BT=columns.positions_BT,
        valid_BT=columns.valid_BT,
        rotary=rotary,
        running=running,
        held_BHT=columns.held_BHT,
        place_BT=columns.place_BT,
        queried_BS=columns.queried_BT[:, columns.queried_BT.shape[1] - queries_BQSD.shape[2] :],
        learned_BHT=metadata.get(LEARNED),
        log_weight_BHT=metadata.get(LOG_WEIGHT),
        value_norm_BQT=None if norms is None else norms.transpose(-1, -2).flatten(1, 2),
    )
    return evidence, columns


def _no_queries(store: RaggedStore, spec: LayerSpec) -> Tensor:
    shape = len(store.lengths_BH), spec.num_heads, 0, spec.head_dim
    return torch.zeros(shape, dtype=store.dtype, device=store.device)


def _shown(columns: DenseView, store: RaggedStore, name: str, read: bool) -> Tensor:
    """Keys or values at the columns; NaN without memory where nothing reads them."""
    like = store.columns[name]
    if read:
        return columns.gather(like)
    return like.new_full((), float("nan")).expand(*columns.held_BHT.shape, like.shape[-1])


def store_metadata_(
    layer: Layer,
    spec: LayerSpec,
    bound: BoundPolicy,
    history: History,
    rotary: Rotary | None,
    *,
    num_tokens: int,
) -> None:
    """Store the metadata that later evictions read of a layer's last tokens.

    Args:
        layer: whose store holds the last tokens in every head.
        spec: where it is in the model.
        bound: the policy.
        history: of the batch, the last tokens included.
        rotary: the model's rotary embedding.
        num_tokens: the last tokens, of which nothing was stored yet.
    """
    wants, store = bound.wants, layer.store
    assert store is not None
    if wants.learned or wants.value_norm:
        valid_BS = history.valid_BT[:, -num_tokens:].to(store.device)
        tail = bound.with_metadata(_tail(layer, spec, bound, history, rotary, valid_BS))
        for name, column in metadata_of(replace(tail, running=None)).items():
            store.set_side_(name, column, valid_BS)
    if wants.running:
        asked = min(num_tokens, max(history.lengths_B))
        evidence, columns = evidence_of(
            layer, spec, history, rotary, num_queries=asked, values=False, output_weight=False
        )
        counted = replace(bound.counted(evidence), learned_BHT=None, value_norm_BQT=None)
        for name, column_BHT in metadata_of(counted).items():
            store.write_side_(name, column_BHT.flatten(0, 1)[columns.entries])
    layer.recent.keep("hidden", 0)
    layer.recent.keep("stream", 0)


def _tail(
    layer: Layer,
    spec: LayerSpec,
    bound: BoundPolicy,
    history: History,
    rotary: Rotary | None,
    valid_BS: Bool[Tensor, "B S"],
) -> Evidence:
    """The last tokens alone, as if nothing had come before: enough for scores of one entry at a time."""
    assert layer.store is not None
    store, num_tokens = layer.store, valid_BS.shape[1]
    (B, H), device = store.lengths_BH.shape, store.device
    index_RS, real_RS = tail_index_RS(store, valid_BS)
    keys_BHTD, values_BHTD = (
        column_CD[index_RS].masked_fill(~real_RS[..., None], 0).view(B, H, num_tokens, -1)
        for column_CD in (store.keys_CD, store.values_CD)
    )
    recent = layer.recent.tensors()
    queries_BQSD = _no_queries(layer.store, spec)
    if bound.wants.entry_queries:
        queries_BQSD = layer.recent.last("queries", num_tokens).to(device)
    hidden_BTE, stream_BTE = (
        recent[kind].to(device) if kind in recent else None for kind in ("hidden", "stream")
    )
    return spec.evidence(
        output=bound.reads_output,
        queries_BQSD=queries_BQSD,
        keys_BHTD=keys_BHTD,
        values_BHTD=values_BHTD,
        positions_BT=history.positions_BT[:, -num_tokens:].to(device),
        valid_BT=valid_BS,
        hidden_BTE=hidden_BTE,
        rotary=rotary,
        stream_BTE=stream_BTE,
    )


def without_inputs(evidence: Evidence, bound: BoundPolicy) -> Evidence:
    """The evidence of a layer that waits for lookahead tokens, without the tensors that the policy's observed
    score does not read."""
    if bound.scorer is not None:  # a function may read everything
        return evidence
    evidence, queries = bound.counted(evidence), bound.wants.queries
    queries_BQSD = evidence.queries_BQSD
    if queries is not None:  # a copy, so that the others are freed
        queries_BQSD = queries_BQSD[:, :, max(0, evidence.num_seen - queries) :].clone()
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

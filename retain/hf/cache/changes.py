"""Changes what a conversation holds: entries go, tokens are forgotten, sequences are chosen or stacked."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retain.cache.layer_store import Store, stacked
from retain.cache.layout import normal_tensors
from retain.cache.precision import Precision
from retain.cache.store import LOG_WEIGHT
from retain.correction.cuts import cut_
from retain.correction.merge import Merge
from retain.eviction import BoundPolicy
from retain.hf.cache.layer import Recent
from retain.hf.cache.regime import Regime
from retain.hf.cache.state import History, State
from retain.hf.model import pass_through_layers
from retain.protection import spans_by_sequence


def cut_all(
    state: State,
    keep: Sequence[Tensor | None],
    correction: Merge | None = None,
    precision: Precision | None = None,
) -> None:
    """Cut all dense layers; every mask is checked before the first is.

    Args:
        keep: masks of the layers; None keeps all.
        correction: how what stays makes up for what goes.
        precision: how what stays is packed; None: not.
    """
    for layer, keep_BHT in zip(state.ragged, keep, strict=True):
        layer.check(keep_BHT)
    state.evidence = None  # it shares the dense tensors, which each layer lets go in turn
    with state.changing():
        for layer, keep_BHT in zip(state.ragged, keep, strict=True):
            where = state.valid_BT, state.positions_BT
            layer.store = state.cut_dense(layer, keep_BHT, *where, correction=correction, precision=precision)
    if state.history is not None:
        state.packed_at = state.num_seen
        count_eviction(state, sum(state.history.lengths_B) * state.layout.num_kv_heads)


def count_eviction(state: State, held_before: int) -> None:
    """Count an eviction, if anything went."""
    if sum(map(sum, state.held_BL())) < held_before:
        state.evictions, state.evicted_at = state.evictions + 1, state.num_seen


def end_prompt(state: State) -> None:
    """The first prompt was read."""
    assert state.history is not None
    state.prompt_B, state.width, state.announced_BT = list(state.history.lengths_B), None, None
    if not state.regime.again:
        for layer in state.ragged:  # nobody will ask again
            layer.recent = Recent()
            if layer.store is not None:
                layer.store.drop_side_(*({*layer.store.side} - {LOG_WEIGHT}))
    for left in state.pass_through:
        pass_through_layers.trim_(left)


def shrink(state: State, lower: Sequence[Tensor | None], rows: list[int] | None) -> None:
    """Lower layers let go of what a cascade no longer keeps, one layer at a time.

    Args:
        lower: what each keeps, of the entries of these sequences.
        rows: the sequences; None for all.
    """
    for store, keep_N in zip(state.stores, lower, strict=False):
        if keep_N is None:
            continue
        keep_N = keep_N.to(store.device)
        if rows is not None and len(rows) < len(store.lengths_BH):
            inside_B = torch.zeros(len(store.lengths_BH), dtype=torch.bool, device=keep_N.device)
            inside_B[rows] = True
            inside_N = inside_B[store.rows_N() // store.num_heads]
            keep_N = torch.ones_like(inside_N).masked_scatter_(inside_N, keep_N)
        cut_(store, keep_N, state.bound_policy.correction)


def drop(state: State, forgotten_BT: Bool[Tensor, "B P"]) -> None:
    """Let go of entries that the mask has since declared padding (pads that `generate` put behind a
    finished row)."""
    assert state.history is not None
    positions_BT = state.positions_BT
    gone_BP = forgotten_BT.new_zeros(forgotten_BT.shape[0], int(positions_BT.max()) + 1)
    b, t = forgotten_BT.nonzero(as_tuple=True)
    gone_BP[b, positions_BT[b, t]] = True
    with state.changing():
        for store in state.stores:
            store.drop_(gone_BP)
        state.history = state.history.without(forgotten_BT)


def cannot_crop(state: State, length: int, cut: History) -> str | None:
    """Why the conversation cannot go back to a length; None if it can."""
    removed, wants = state.num_seen - length, state.bound_policy.wants
    if length < state.evicted_at:
        return f"entries were evicted when it had seen {state.evicted_at}, and those are gone"
    if any(not pass_through_layers.can_crop(layer, removed) for layer in state.pass_through):
        return "a layer with a sliding window or a recurrent state has let go of what it had then"
    if not state.regime.again or state.bound_policy.keeps_all:
        return None
    if wants.running and state.noted > length:
        return "the running statistics that its policy keeps count the queries since"
    recent, moments = state.ragged[0].recent, [seen for seen in state.moments if seen <= length]
    wanted = (moments or [0])[-1] if wants.queries is None else cut.first_of_last(wants.queries)
    if wants.queries != 0 and state.num_seen - recent.num_queries > wanted:
        return "queries that its policy looks at are not held that far back"
    return None


def crop(state: State, length: int, cut: History) -> None:
    """Forget all tokens but the first `length`, whose history is `cut`; `cannot_crop` was asked."""
    removed = state.num_seen - length
    with state.changing():
        state.evidence, state.history = None, cut
        for left in state.pass_through:
            pass_through_layers.crop(left, removed)
        for layer in state.ragged:
            layer.seen, layer.recent = length, layer.recent.cut(removed)
            if layer.store is not None:
                layer.store.crop_(cut.last_B + 1)
            else:
                layer.hold(*(tensor[:, :, :length].clone() for tensor in layer.dense()))
    state.noted, state.packed_at = min(state.noted, length), min(state.packed_at, length)
    state.moments = [seen for seen in state.moments if seen <= length] or [length]
    if state.prompt_B is not None:
        state.prompt_B = [min(own, left) for own, left in zip(state.prompt_B, cut.lengths_B, strict=True)]


def select_batch(state: State, indices: Int[Tensor, " N"]) -> list[int]:
    """Keep these sequences, in this order, an index may repeat; the same as a list."""
    assert state.history is not None
    if (known_BT := state.announced_BT) is not None and state.batch_size % len(known_BT) == 0:
        known_BT = known_BT.repeat_interleave(state.batch_size // len(known_BT), dim=0)
        state.announced_BT = known_BT[indices.to(known_BT.device)]
    with state.changing():
        for left in state.pass_through:
            pass_through_layers.select_batch(left, indices)
        for layer in state.ragged:
            layer.select_batch(indices)
    if state.evidence is not None:
        state.evidence = [evidence.select_batch(indices) for evidence in state.evidence]
    rows = indices.tolist()
    if state.seeds is not None:
        state.seeds = [state.seeds[row] for row in rows]
    if state.pinned is not None and spans_by_sequence(state.pinned) is not None:
        state.pinned = [state.pinned[row] for row in rows]
    if state.prompt_B is not None:
        state.prompt_B = [state.prompt_B[row] for row in rows]
    state.held_whole = [new for new, row in enumerate(rows) if row in state.held_whole]
    state.history = state.history.select_batch(indices)
    return rows


@normal_tensors()
def _alike_(stores: list[Store]) -> list[Store]:
    """The same, all with log weights if some have them: an entry without counts itself."""
    counted = next((own.log_weight_C for own in stores if own.log_weight_C is not None), None)
    for store in stores if counted is not None else ():
        if store.log_weight_C is None:
            store.write_side_(LOG_WEIGHT, counted.new_zeros(store.entries_held))
    return stores


def concat(parts: Sequence[State], slack: int | None) -> State:
    """Stack conversations along the batch, which have all seen equally many tokens; the parts are used up.

    Args:
        parts: of one model.
        slack: free entries per row for new tokens; None: theirs.
    """
    for part in parts:
        for layer in part.ragged:
            if layer.store is None:
                layer.store = part.cut_dense(layer, None, part.valid_BT, part.positions_BT)
            layer.store.drop_side_(*({*layer.store.side} - {LOG_WEIGHT}))
    bound = BoundPolicy(" + ".join(sorted({part.bound_policy.name for part in parts})))
    whole = State(parts[0].layout, bound, Regime(), slack=parts[0].slack, seeds=None, pinned=None)
    whole.layers[:] = parts[0].layers
    for idx, layer in enumerate(whole.layers):
        if idx in whole.layout.alone:
            whole.layers[idx] = pass_through_layers.concat([part.layers[idx] for part in parts])
            continue
        layer.store = stacked(_alike_([part.layers[idx].store for part in parts]), slack)
        layer.recent = Recent()
    whole.history = History.concat([part.history for part in parts if part.history is not None])
    whole.prompt_B = list(whole.history.lengths_B)
    whole.moments, whole.noted, whole.marks = [whole.num_seen], whole.num_seen, parts[0].marks
    whole.evictions = max(part.evictions for part in parts)
    whole.evicted_at = max(part.evicted_at for part in parts)
    sizes = [0, *accumulate(part.batch_size for part in parts)]
    whole.held_whole = [
        size + row for size, part in zip(sizes, parts, strict=False) for row in part.held_whole
    ]
    return whole

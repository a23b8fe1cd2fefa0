"""Hands what a cache holds to others: the tokens that each layer keeps, and a plain `DynamicCache` of them.

Other engines and libraries hold equally many entries in every head. A policy with a `selection`
(`retain.budget.one_set`) keeps the same tokens in all heads of a layer, or of all layers.
"""

from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache

from retain.cache.store import LOG_WEIGHT, RaggedStore
from retain.hf.cache.state import State


def token_sets(state: State) -> list[Int[Tensor, "B n"]]:
    """Compute the position of every token that is held, for each layer that evicts.

    Raises:
        ValueError: nothing was evicted yet, or the heads of a layer hold different tokens, or sequences hold
            different numbers of them.
    """
    sets = []
    for idx, store in _stores(state):
        B, H = store.lengths_BH.shape
        position_N, counts = store.positions_C[store.index_N()], store.lengths_BH.unique().tolist()
        position_BHn = position_N.view(B, H, -1) if len(counts) == 1 else None
        if position_BHn is None or not bool((position_BHn == position_BHn[:, :1]).all()):
            held = f"between {counts[0]} and {counts[-1]} entries" if len(counts) > 1 else "different tokens"
            raise ValueError(
                f"heads of layer {idx} hold {held}, and a token set is the same for all: evict with "
                "selection={'shared': 'layer'} or {'shared': 'model'}, sequences of one length in a batch."
            )
        sets.append(position_BHn[:, 0].long())
    return sets


def to_dynamic_cache(state: State) -> DynamicCache:
    """Copy the entries that are held into a `DynamicCache` of transformers.

    Raises:
        ValueError: as `token_sets`; layers hold different numbers of tokens; a layer evicts nothing (a
            sliding window, a recurrent state); or entries stand for several (a correction that counts).
    """
    sets, dynamic = token_sets(state), DynamicCache()
    lengths = sorted({tokens_Bn.shape[1] for tokens_Bn in sets})
    if len(lengths) > 1:
        raise ValueError(
            f"layers hold between {lengths[0]} and {lengths[-1]} tokens, and a DynamicCache is as long in "
            "each: evict with allocation={'layers': 'uniform'}, or selection={'shared': 'model'}."
        )
    alone = [idx for idx in range(len(state.layers)) if idx not in {own for own, _ in _stores(state)}]
    if alone:
        raise ValueError(
            f"layers {alone} evict nothing, and what they hold is not exported: only models whose layers all "
            "evict have a DynamicCache."
        )
    for idx, store in _stores(state):
        if LOG_WEIGHT in store.beside:
            raise ValueError(
                f"entries of layer {idx} count for several, which a DynamicCache cannot say: evict without a "
                "correction that counts (count=false)."
            )
        (B, H), index_N = store.lengths_BH.shape, store.index_N()
        shape = (B, H, lengths[0], -1)
        dynamic.update(store.keys_CD[index_N].view(shape), store.values_CD[index_N].view(shape), idx)
    return dynamic


def _stores(state: State) -> list[tuple[int, RaggedStore]]:
    """Stores of the layers that evict, with their indices."""
    state.check_whole()
    found = [(idx, getattr(layer, "store", None)) for idx, layer in enumerate(state.layers)]
    stores = [(idx, store) for idx, store in found if store is not None]
    if not stores:
        raise ValueError(
            "nothing was evicted, so each layer holds all tokens: prefill() with a policy, or evict() first."
        )
    return stores

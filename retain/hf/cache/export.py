"""Hands what a cache holds to others: the tokens that each layer keeps, and a plain `DynamicCache` of them.

Other engines and libraries hold equally many entries in every head, as numbers. A policy with a `selection`
(`retain.budget.one_set`) keeps the same tokens in all heads of a layer, or of all layers. Entries in few bits
(`retain.precision`) are decoded.
"""

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache

from retain.cache.store import LOG_WEIGHT
from retain.cache.tiered_store import Store
from retain.hf.cache.state import State


def token_sets(state: State) -> list[Int[Tensor, "B n"]]:
    """`Cache.token_sets`."""
    return [_common(idx, store)[0] for idx, store in _stores(state)]


def _common(idx: int, store: Store) -> tuple[Int[Tensor, "B n"], Int[Tensor, "B H n"]]:
    """Positions of the tokens that all heads of a layer hold, ascending, and where their entries lie."""
    (B, H), index_N = store.lengths_BH.shape, store.index_N()
    position_N, row_N = store.positions_C[index_N].long(), store.rows_N()
    width = int(position_N.max()) + 1
    # Row after row, and by position: tiers of a store come one after another.
    order_N = (row_N * width + position_N).argsort()
    index_N, position_N, sequence_N = index_N[order_N], position_N[order_N], row_N[order_N] // H
    token_N = sequence_N * width + position_N
    common_N = torch.bincount(token_N, minlength=B * width)[token_N] == H
    counts_B = torch.bincount(sequence_N[common_N], minlength=B) // H
    longest_B = store.lengths_BH.to(counts_B.device).amax(1)
    if (apart := int((longest_B - counts_B).max())) > 1:
        raise ValueError(
            f"heads of layer {idx} hold different tokens, {apart} of {int(longest_B.max())} not in all: "
            "evict with selection={'shared': 'layer'} or {'shared': 'model'}."
        )
    if len(counts_B.unique()) > 1:
        raise ValueError(
            f"sequences hold between {int(counts_B.min())} and {int(counts_B.max())} tokens in layer {idx}, "
            "and a token set has one width: export sequences of one length, or one at a time."
        )
    at_BHn = index_N[common_N].view(B, H, -1)
    return store.positions_C[at_BHn[:, 0]].long(), at_BHn


def to_dynamic_cache(state: State) -> DynamicCache:
    """`Cache.to_dynamic_cache`."""
    stores, dynamic = _stores(state), DynamicCache()
    alone = [idx for idx in range(len(state.layers)) if idx not in {own for own, _ in stores}]
    if alone:
        raise ValueError(
            f"layers {alone} evict nothing, and what they hold is not exported: only models whose layers all "
            "evict have a DynamicCache."
        )
    found = {idx: _common(idx, store) for idx, store in stores}
    lengths = [tokens_Bn.shape[1] for tokens_Bn, _ in found.values()]
    least = min(lengths)
    for idx, store in stores:
        if LOG_WEIGHT in store.beside:
            raise ValueError(
                f"entries of layer {idx} count for several, which a DynamicCache cannot say: evict without a "
                "correction that counts (count=false)."
            )
        tokens_Bn, at_BHn = found[idx]
        if tokens_Bn.shape[1] == least + 1:  # the token that a budget leaves to the lowest layers
            rest = next(own for own, _ in found.values() if own.shape[1] == least)
            in_all_Bn = (tokens_Bn[..., None] == rest.to(tokens_Bn.device)[:, None]).any(-1)
            if bool((in_all_Bn.sum(1) == least).all()):
                at_BHn = at_BHn[in_all_Bn[:, None].expand_as(at_BHn)].view(*at_BHn.shape[:2], least)
        if at_BHn.shape[2] != least:
            raise ValueError(
                f"layers hold between {least} and {max(lengths)} tokens, and a DynamicCache is as long in "
                "each: state keep_ratio or tokens_per_head with allocation={'layers': 'uniform'}, or evict "
                "with selection={'shared': 'model'}."
            )
        held, latent = (store.keys_CD[at_BHn], store.values_CD[at_BHn]), state.layout.spec_of[idx].latent
        dynamic.update(*(held if latent is None else latent.parts(held[0])), idx)
    return dynamic


def _stores(state: State) -> list[tuple[int, Store]]:
    """Stores of the layers that evict, with their indices."""
    state.check_whole()
    found = [(idx, getattr(layer, "store", None)) for idx, layer in enumerate(state.layers)]
    stores = [(idx, store) for idx, store in found if store is not None]
    if not stores:
        raise ValueError(
            "nothing was evicted, so each layer holds all tokens: prefill() with a policy, or evict() first."
        )
    return stores

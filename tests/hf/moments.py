"""A full DynamicCache that evicts at a regime's moments, by masks alone: the oracle of everything that
decodes on.

A rule of position and content says what goes, so that beams that part ways evict apart. The moments are
counted here anew, from lengths; nothing of `retain` runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from tests.hf.masked import evicting, masked, positions_of

RECENT = 4


def keeps(keys_BHTD: Tensor, positions_BT: Tensor, valid_BT: Tensor, layer_idx: int) -> Tensor:
    """The rule keeps the newest tokens, and keys that pass a bar which rises with the length."""
    last_B1 = positions_BT.masked_fill(~valid_BT, -1).amax(1, keepdim=True)
    recent_BT = positions_BT > last_B1 - RECENT
    bar_B11 = 0.02 * last_B1[:, None] - 0.5 + 0.1 * layer_idx
    chosen_BHT = keys_BHTD[..., 0].double() - keys_BHTD[..., 1].double() > bar_B11
    return (chosen_BHT | recent_BT[:, None]) & valid_BT[:, None]


def policy(evidence) -> Tensor:
    """The rule, for `retain.Cache`."""
    return keeps(evidence.keys_BHTD, evidence.positions_BT, evidence.valid_BT, evidence.layer_idx)


class FullCache(DynamicCache):
    """Holds every entry of the layers that evict; what is masked follows the sequences."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(config=model.config)
        for idx in evicting(model):
            self.layers[idx] = DynamicLayer()
        self.kept: list[Tensor] = []
        self.evictions = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.kept[:] = [layer.index_select(0, beam_idx) for layer in self.kept]


@contextmanager
def oracle(
    model: PreTrainedModel,
    attention_mask: Tensor,
    *,
    when: str = "prefill",
    every: int = 32,
    rule: Callable[..., Tensor] = keeps,
) -> Iterator[FullCache]:
    """Inside, forwards on the cache that is yielded evict as `retain.Cache` does in that regime.

    Args:
        model: an unattached model.
        attention_mask: 2D, over all tokens that will ever be seen.
        regime: when.
        every: tokens between evictions while decoding.
        rule: what is kept.
    """
    full, parts = FullCache(model), when.split("+")
    ended, due_at = False, 0

    def after(module, args, kwargs, output):
        nonlocal ended, due_at
        seen, S = full.get_seq_length(), output.last_hidden_state.shape[1]
        read = S > 1 or not ended
        ends = not ended
        due = ("prefill" in parts and ends) or ("chunk" in parts and read)
        due |= "decode" in parts and ended and seen - due_at >= every
        if due:
            mask = attention_mask[:, :seen].bool()
            before = sum(int((layer & mask[:, None, : layer.shape[-1]]).sum()) for layer in full.kept)
            before += sum(int(mask[:, layer.shape[-1] :].sum()) * layer.shape[1] for layer in full.kept)
            for number, idx in enumerate(evicting(model)):
                keys = full.layers[idx].keys
                chosen = rule(keys, positions_of(mask.long()), mask, idx)
                held = torch.ones(chosen.shape, dtype=torch.bool)
                held[..., : full.kept[number].shape[-1]] = full.kept[number]
                full.kept[number] = held & chosen
            full.evictions += sum(int(layer.sum()) for layer in full.kept) < before
        if due or ends:
            due_at = seen
        ended |= ends

    with masked(model, None, attention_mask) as kept:
        full.kept = kept
        hook = model.model.register_forward_hook(after, with_kwargs=True)
        try:
            yield full
        finally:
            hook.remove()

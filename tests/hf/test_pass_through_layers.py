"""Layers left alone: what a cache asks of them is what transformers' whole cache would do."""

import copy

import pytest
import torch
from transformers import DynamicCache

from retain.hf.model.decoder import layout_of
from retain.hf.model.pass_through_layers import (
    concat,
    tensors_of,
    trim_,
)
from retain.hf.version_names import CACHE
from tests.tiny import tiny_batch, tiny_model

every_family = pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_next", "qwen3_5"])


@torch.no_grad()
def filled(family):
    """transformers' cache after a context, and the layout."""
    model = tiny_model(family)
    cache = DynamicCache(config=model.config)
    ids, mask = tiny_batch((0, 3, 11))
    model(input_ids=ids, attention_mask=mask, **{CACHE: cache})
    return cache, layout_of(model)


def tensors(layer):
    return {name: tensor.clone() for name, tensor in tensors_of(layer).items()}


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@every_family
def test_sequences_are_selected_and_concatenated(family):
    cache, layout = filled(family)
    idx = torch.tensor([2, 0, 0])
    for layer in layout.alone:
        whole = cache.layers[layer]
        one, *parts = (copy.deepcopy(whole) for _ in range(4))
        one.reorder_cache(idx)
        assert equal(tensors(one), {name: tensor[idx] for name, tensor in tensors(whole).items()})
        for row, part in enumerate(parts):
            part.reorder_cache(torch.tensor([row]))
        assert equal(tensors(concat(parts)), tensors(whole))
        empty = layout.blank_layers()[layer]
        empty.reorder_cache(idx)
        assert not tensors_of(empty)


def test_a_long_read_leaves_no_more_than_the_window():
    layer = filled("gemma3")[0].layers[0]
    before = tensors(layer)
    assert before["keys"].shape[-2] == 15
    assert layer.keys.untyped_storage().nbytes() > 2 * layer.keys.nbytes  # a view of all 40
    trim_(layer)
    assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes and equal(tensors(layer), before)

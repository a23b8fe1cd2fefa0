"""Padding that a cache could not tell from tokens is refused; lookahead tokens ask each sequence as alone."""

import pytest
import torch

import retain
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import layout_of
from tests.evictions import small
from tests.hf.moments import policy
from tests.hf.regime_runs import (
    assert_same_held,
    exact_model,
    held_by,
)
from tests.hf.test_lookahead import trained
from tests.hf.test_saving import assert_same_state, forward, grown
from tests.refused import refused
from tests.tiny import FAMILIES, tiny_batch, tiny_model

PADS = (0, 3, 11)
ALONE = ("gemma3", "gpt_oss", "qwen3_next", "qwen3_5", "gemma2", "cohere2")


def test_which_families_have_layers_that_are_left_alone():
    assert tuple(family for family in FAMILIES if layout_of(exact_model(family)).alone) == ALONE


@pytest.mark.parametrize(
    ("family", "when"), [*((one, "prefill") for one in ALONE), ("llama", "chunk+decode")]
)
def test_padding_that_would_be_taken_for_tokens_is_refused(family, when):
    model, (ids, mask) = tiny_model(family), tiny_batch(PADS)
    turn, turn_mask = tiny_batch((0, 2, 0), 6, seed=5)
    with retain.attach(model):
        cache = Cache(model, policy=policy, when=when, every=3)
        forward(model, cache, ids, mask)
        before, calls = cache.fork(), []
        hook = model.model.layers[0].register_forward_pre_hook(lambda *args: calls.append(1))
        said = r"padding behind tokens, which .*(_attention\)|when='chunk.decode'\)).*batch_select_indices"
        refused(said, forward, model, cache, turn, grown(mask, turn_mask))
        hook.remove()
        assert not calls
        assert_same_state(cache, before)
        # It goes on as if nothing had been asked.
        got, want = (forward(model, one, turn, grown(mask, 6)) for one in (cache, before))
        assert torch.equal(got, want)


def test_lookahead_tokens_ask_each_sequence_as_alone(heads_file):
    model = exact_model("qwen3")
    ids, mask = tiny_batch(PADS, 40)
    asked = {"tokens_per_head": 12, "pinned": [(6, 9)], "gates": trained(model)}
    with retain.attach(model):
        policy = small("gate", heads_file)
        cache = Cache(model, policy, **asked).prefill(ids, mask)
        for b in range(3):
            alone = Cache(model, policy, **asked).prefill(ids[b : b + 1, mask[b].bool()])
            mine = [layer[b : b + 1, :, mask[b].bool()] for layer in held_by(cache, mask)]
            assert_same_held([mine], [held_by(alone, mask[b : b + 1, mask[b].bool()])])

"""A padded batch does what its sequences do alone, in every family; padding that some layers
could not tell from tokens is refused.

Padding may stand behind tokens of the same call, as transformers runs it: an unread token before a turn
that is padded on its left, virtual tokens before a padded prompt.
"""

import pytest
import torch

import retain
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import layout_of
from tests.close import MODEL, assert_close
from tests.evictions import small
from tests.hf.masked import masked_logits
from tests.hf.moments import policy
from tests.hf.regime_runs import (
    assert_same_held,
    differs,
    eviction_free,
    exact_model,
    held_by,
    life,
    lived,
    of_sequence,
)
from tests.hf.test_lookahead import trained
from tests.hf.test_saving import assert_same_state, forward, grown
from tests.tiny import FAMILIES, tiny_batch, tiny_model

PADS = (0, 3, 11)
ALONE = ("gemma3", "gpt_oss", "qwen3_next", "qwen3_5", "gemma2", "cohere2")


@pytest.mark.parametrize("chunk", [None, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_left_padded_prompt_steps_a_turn_and_steps_equal_solo_runs(family, chunk, heads_file):
    """In chunks of 9, the first chunk of the third sequence is all padding."""
    model, policy = exact_model(family), small("snapkv", heads_file)
    scenario = life(3, chunk=chunk, steps=(7, 7))
    settings = {"tokens_per_head": 11, "when": "chunk+decode", "every": 3}
    with retain.attach(model):
        cache = Cache(model, policy, **settings)
        got, held = lived(model, cache, scenario)
        solo = [lived(model, Cache(model, policy, **settings), scenario.alone(b)) for b in range(3)]
    # How far batch and solo runs of the full cache are apart under the same evictions: recurrent states are
    # made in blocks of tokens, so where padding stands moves their last digits.
    plain = masked_logits(
        model,
        None,
        scenario.chunks,
        scenario.mask,
        after=lambda number, kept: kept.__setitem__(slice(None), held[number]),
    )
    for b, (want, want_held) in enumerate(solo):
        (ones, mine), (others, _) = (of_sequence(scenario, b, out, held) for out in (got, plain))
        assert (len(want) < len(got)) == (b == 2 and chunk == 9)
        assert_same_held(mine, want_held)
        for one, logits, other in zip(ones, want, others, strict=True):
            assert_close(one, logits, other, dtype=torch.float32, ops=MODEL)
    assert cache.evictions >= 6 and differs(got, eviction_free(model, scenario), scenario.mask)


def test_which_families_have_layers_that_are_left_alone():
    assert tuple(family for family in FAMILIES if layout_of(exact_model(family)).alone) == ALONE


@pytest.mark.parametrize("when", ["prefill", "chunk+decode"])
@pytest.mark.parametrize("family", ALONE)
def test_padding_that_layers_left_alone_would_take_for_tokens_is_refused(family, when):
    model, (ids, mask) = tiny_model(family), tiny_batch(PADS)
    turn, turn_mask = tiny_batch((0, 2, 0), 6, seed=5)
    with retain.attach(model):
        cache = Cache(model, policy=policy, when=when, every=3)
        forward(model, cache, ids, mask)
        steps = list(tiny_batch((0, 0, 0), 4, seed=3)[0].split(1, dim=1))
        for number, step in enumerate(steps):
            forward(model, cache, step, grown(mask, number + 1))
        mask, calls = grown(mask, 4), []
        before = cache.fork()
        hook = model.model.layers[0].register_forward_pre_hook(lambda *args: calls.append(1))
        with pytest.raises(
            ValueError,
            match=r"padding behind tokens, which .*\((linear|sliding)_attention\).*batch_select_indices",
        ):
            forward(model, cache, turn, grown(mask, turn_mask))
        with pytest.raises(ValueError, match="padding behind tokens"):
            forward(model, cache, turn, grown(mask, torch.zeros_like(turn_mask)))
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

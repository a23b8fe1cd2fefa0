"""A padded batch does what its sequences do alone, in every family; padding that some could not tell from
tokens is refused."""

import pytest
import torch
from transformers import DynamicCache

import retain
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import layout_of
from tests.close import MODEL, assert_close
from tests.evictions import small
from tests.hf.masked import masked_logits, positions_of
from tests.hf.moments import policy
from tests.hf.regime_runs import (
    assert_same_held,
    differs,
    eviction_free,
    exact_model,
    life,
    lived,
    of_sequence,
)
from tests.hf.test_saving import assert_same_state, forward, grown
from tests.tiny import FAMILIES, tiny_batch, tiny_model

PADS = (0, 3, 11)
ALONE = ("gemma3", "gpt_oss", "qwen3_next", "qwen3_5")


@pytest.mark.parametrize("chunk", [None, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_left_padded_prompt_steps_a_turn_and_steps_equal_solo_runs(family, chunk, heads_file):
    """In chunks of 9, the first chunk of the third sequence is all padding."""
    model, policy = exact_model(family), small("snapkv", heads_file)
    own = life(3, chunk=chunk, turn_pads=(0, 0, 0), steps=(7, 7))
    settings = {"tokens_per_head": 11, "regime": "chunked+decode", "every": 3}
    with retain.attach(model):
        cache = Cache(model, policy, **settings)
        got, held = lived(model, cache, own)
        solo = [lived(model, Cache(model, policy, **settings), own.alone(b)) for b in range(3)]
    # How far batch and solo runs of the full cache are apart under the same evictions: recurrent states are
    # made in blocks of tokens, so where padding stands moves their last digits.
    plain = masked_logits(
        model,
        None,
        own.chunks,
        own.mask,
        after=lambda number, kept: kept.__setitem__(slice(None), held[number]),
    )
    for b, (want, want_held) in enumerate(solo):
        (ones, mine), (others, _) = (of_sequence(own, b, out, held) for out in (got, plain))
        assert (len(want) < len(got)) == (b == 2 and chunk == 9)
        assert_same_held(mine, want_held)
        for one, logits, other in zip(ones, want, others, strict=True):
            assert_close(one, logits, other, dtype=torch.float32, ops=MODEL)
    assert cache.evictions >= 6 and differs(got, eviction_free(model, own), own.mask)


def test_which_families_have_layers_that_are_left_alone():
    assert tuple(family for family in FAMILIES if layout_of(exact_model(family)).alone) == ALONE


@pytest.mark.parametrize("regime", ["prefill", "chunked+decode"])
@pytest.mark.parametrize("family", ALONE)
def test_padding_that_layers_left_alone_would_take_for_tokens_is_refused(family, regime):
    model, (ids, mask) = tiny_model(family), tiny_batch(PADS)
    turn, turn_mask = tiny_batch((0, 2, 0), 6, seed=5)
    with retain.attach(model):
        cache = Cache(model, policy=policy, regime=regime, every=3)
        forward(model, cache, ids, mask)
        steps = list(tiny_batch((0, 0, 0), 4, seed=3)[0].split(1, dim=1))
        for number, step in enumerate(steps):
            forward(model, cache, step, grown(mask, number + 1))
        mask, calls = grown(mask, 4), []
        before = cache.fork()
        hook = model.model.layers[0].register_forward_pre_hook(lambda *args: calls.append(1))
        with pytest.raises(
            ValueError,
            match=r"padding behind tokens.*layers \((linear|sliding)_attention\).*batch_select_indices",
        ):
            forward(model, cache, turn, grown(mask, turn_mask))
        # A row that is paused, and one of which nothing comes at all.
        for row in (turn_mask[:, :1] * 0, torch.zeros_like(turn_mask)):
            with pytest.raises(ValueError, match="padding behind tokens"):
                forward(model, cache, turn[:, : row.shape[1]], grown(mask, row))
        hook.remove()
        assert not calls
        assert_same_state(cache, before)
        # What the message says to do.
        parts = [cache.fork() for _ in range(2)]
        parts[0].batch_select_indices(torch.tensor([0, 2]))
        parts[1].batch_select_indices(torch.tensor([1]))
        forward(model, parts[0], turn[[0, 2]], grown(mask, 6)[[0, 2]])
        forward(model, parts[1], turn[1:2, 2:], grown(mask, 4)[1:2])
        # And it goes on as if nothing had been asked.
        got, want = (forward(model, one, turn, grown(mask, 6)) for one in (cache, before))
        assert torch.equal(got, want)
        assert torch.equal(parts[0].state.positions_BT[0], cache.state.positions_BT[0])
        assert_close(
            forward(model, parts[0], turn[[0, 2], :1], grown(mask, 7)[[0, 2]]),
            forward(model, cache, turn[:, :1], grown(mask, 7))[[0, 2]],
            dtype=torch.float32,
            ops=MODEL,
        )


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_why_such_padding_is_refused(family):
    """Transformers' own cache gives a padded second turn other logits than the sequence has alone."""
    model, (ids, mask) = exact_model(family), tiny_batch((0, 3))
    turn, turn_mask = tiny_batch((0, 4), 9, seed=5)
    whole = grown(mask, turn_mask)

    def run(rows, real):
        cache = DynamicCache(config=model.config)
        for new, upto in ((ids, mask), (turn, whole)):
            given = upto[rows] if real is None else upto[rows][:, real[: upto.shape[1]]]
            new = (
                new[rows]
                if real is None
                else new[rows][:, real[upto.shape[1] - new.shape[1] : upto.shape[1]]]
            )
            where = positions_of(given)[:, -new.shape[1] :]
            out = model(input_ids=new, attention_mask=given, position_ids=where, past_key_values=cache).logits
        return out[-1, -1]

    assert float((run([0, 1], None) - run([1], whole[1].bool())).abs().max()) > 1e-2

"""A padded batch does what its sequences do alone, in every family; padding that some layers
could not tell from tokens is refused.

Padding may stand behind tokens of the same call, as transformers runs it: an unread token before a turn
that is padded on its left, virtual tokens before a padded prompt.
"""

import warnings
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

import retain
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import layout_of
from retain.hf.version_names import CACHE
from tests.close import MODEL, assert_close
from tests.evictions import small
from tests.hf.masked import masked_logits, positions_of
from tests.hf.moments import policy
from tests.hf.regime_runs import (
    assert_same_held,
    assert_same_logits,
    differs,
    eviction_free,
    exact_model,
    gates_of,
    held_by,
    life,
    lived,
    of_sequence,
)
from tests.hf.test_lookahead import trained
from tests.hf.test_saving import assert_same_state, forward, grown
from tests.tiny import FAMILIES, PAD, tiny_batch, tiny_model

PADS = (0, 3, 11)
ALONE = ("gemma3", "gpt_oss", "qwen3_next", "qwen3_5", "gemma2", "cohere2")


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
            out = model(input_ids=new, attention_mask=given, position_ids=where, **{CACHE: cache}).logits
        return out[-1, -1]

    assert float((run([0, 1], None) - run([1], whole[1].bool())).abs().max()) > 1e-2


NEW = 6
HOW = {"do_sample": False, "pad_token_id": PAD, "max_new_tokens": NEW}


def behind(mask, tokens=5):
    """The mask with some more tokens before the padding of each sequence."""
    return torch.cat([mask.new_ones(len(mask), tokens), mask], dim=1)


def with_gaps(own, prompt=40):
    """A life whose prompt and turn have a token or more before their padding."""
    mask = own.mask.clone()
    mask[:, :5] = 1
    mask[:, prompt + 2] = 1  # before the turn's padding
    return replace(own, mask=mask)


@pytest.mark.parametrize(
    ("name", "regime", "chunk"),
    [
        ("snapkv", "prefill", None),
        ("h2o", "chunked+decode", None),
        ("fused", "chunked+decode", 13),  # a chunk ends inside the gap
    ],
)
def test_a_batch_with_gaps_equals_solo_runs(name, regime, chunk, heads_file):
    model, policy = exact_model("qwen3"), small(name, heads_file)
    own = with_gaps(life(3, chunk=chunk, steps=(2, 1), turn=9, turn_pads=(0, 4, 7)))
    settings = {"tokens_per_head": 12, "regime": regime, "every": 2}
    settings |= {"gates": gates_of(model)} if policy.learned else {}
    with retain.attach(model):
        cache = Cache(model, policy, **settings)
        got, held = lived(model, cache, own)
        for b in range(3):
            want, want_held = lived(model, Cache(model, policy, **settings), own.alone(b))
            logits, mine = of_sequence(own, b, got, held)
            assert_same_held(mine, want_held)
            assert_same_logits(logits, want, own.alone(b).mask)
    assert cache.evictions and not bool(own.mask[:, 40:].all())


def test_what_is_held_whole_is_evicted_later_as_alone(heads_file):
    """By evidence, by masks of one's own, and by lookahead tokens; and it is cropped as it was read."""
    model = exact_model("qwen3")
    ids, mask = tiny_batch(PADS, 35)
    ids, mask = torch.cat([ids[:, -5:], ids], dim=1), behind(mask)
    whole = {"evict": False, "hold_evidence": True}
    asked = {"tokens_per_head": 12, "pinned": [(6, 9)]}
    with retain.attach(model):
        held = Cache(model, None).prefill(ids, mask, **whole)
        solo = [Cache(model, None).prefill(ids[b : b + 1, mask[b].bool()], **whole) for b in range(3)]
        for policy, gates in (("snapkv", None), ("gate", trained(model))):
            policy = replace(small(policy, heads_file), scope="head")
            got = held.fork().evict(policy, gates=gates, **asked)
            first = Cache(model, policy, gates=gates, **asked).prefill(ids, mask)
            for b, alone in enumerate(solo):
                want = alone.fork().evict(policy, gates=gates, **asked)
                want = held_by(want, mask[b : b + 1, mask[b].bool()])
                for cache in (got, first):
                    mine = [own[b : b + 1, :, mask[b].bool()] for own in held_by(cache, mask)]
                    assert_same_held([mine], [want])
        short = held.fork()
        short.crop(30)
        again = Cache(model, None).prefill(ids[:, :30], mask[:, :30])
        assert_same_held([held_by(short, mask[:, :30])], [held_by(again, mask[:, :30])])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_turns_of_different_lengths_through_generate(family):
    """The answer's last token, which nobody has read, stands before the turn's padding."""
    model = exact_model(family)
    ids, mask = tiny_batch(PADS)
    turn, turn_mask = tiny_batch((0, 4, 2), 9, seed=5)
    after = torch.cat([mask, mask.new_ones(3, NEW), turn_mask], dim=1)

    def turns(cache):
        one = model.generate(ids, attention_mask=mask, **{CACHE: cache}, **HOW)
        two = torch.cat([one, turn], dim=1)
        how = {**HOW, "return_dict_in_generate": True, "output_logits": True}
        return model.generate(two, attention_mask=after, **{CACHE: cache}, **how)

    want = turns(DynamicCache(config=model.config))
    with retain.attach(model):
        for regime in ("prefill", "chunked+decode"):
            cache = Cache(model, "snapkv", keep_ratio=1.0, regime=regime, every=3)
            got = turns(cache)
            assert torch.equal(got.sequences, want.sequences)
            assert_close(got.logits[-1], want.logits[-1], dtype=torch.float32, ops=MODEL)
        assert cache.entries_seen == int(cache.state.valid_BT.sum()) * 2 * len(cache.state.specs)
        # The mask says who is real; a mask that ends in padding behind tokens is still refused.
        with pytest.raises(ValueError, match="right padding: a row of the attention mask ends in 0"):
            right = torch.cat(
                [whole := cache.state.valid_BT.long(), whole.new_tensor([[1, 1], [1, 0], [1, 1]])], 1
            )
            model(
                input_ids=turn[:, :2],
                attention_mask=right,
                position_ids=positions_of(right)[:, -2:],
                **{CACHE: cache},
            )


def prompt_again(raises):
    """Marks what fails under transformers 5.24, with this error and no other."""
    return pytest.mark.xfail(
        CACHE == "cache",
        reason="peft 0.21 does not find what transformers 5.24 calls `cache`, and writes its prompt again "
        "before every token, with any cache (docs/versions.md)",
        raises=raises,
        strict=True,
    )


def prompt_tuned(pads):
    """A model with five virtual tokens, a batch for its `generate`, and what it writes without a cache."""
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
        tuned = peft.get_peft_model(tiny_model("qwen3", dtype=torch.float64), config).eval().double()
        ids, mask = tiny_batch(pads)
        given = {"input_ids": ids, "attention_mask": mask, **HOW}
        return tuned, given, tuned.generate(use_cache=False, **given)


@prompt_again(AssertionError)
@pytest.mark.parametrize("pads", [(0, 0, 0), PADS])
def test_prompt_tuning_with_the_cache_of_transformers(pads):
    tuned, given, want = prompt_tuned(pads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own
        got = tuned.generate(**{CACHE: DynamicCache(config=tuned.config)}, **given)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "pads",
    [
        pytest.param((0, 0, 0), marks=prompt_again(AssertionError)),
        pytest.param(PADS, marks=prompt_again(ValueError)),  # the mask is not as long as the tokens
    ],
)
def test_prompt_tuning(pads):
    tuned, given, want = prompt_tuned(pads)
    with warnings.catch_warnings(), retain.attach(tuned):
        warnings.simplefilter("ignore")  # peft's own
        cache = Cache(tuned, "snapkv", keep_ratio=1.0, regime="chunked+decode", every=3)
        got = tuned.generate(**{CACHE: cache}, **given)
        seen = behind(given["attention_mask"]).bool()
        assert torch.equal(got, want) and torch.equal(cache.state.valid_BT[:, :45], seen)
        cache = Cache(tuned, policy)
        got = tuned.generate(**{CACHE: cache}, **given)
        assert cache.evictions == 1 and not torch.equal(got, want)


def test_a_gap_that_layers_left_alone_would_take_for_tokens_is_refused():
    model, (ids, mask) = tiny_model("gemma3"), tiny_batch(PADS, 30)
    with retain.attach(model):
        cache = Cache(model, "snapkv", keep_ratio=1.0)
        with pytest.raises(ValueError, match="padding behind tokens.*before its first token"):
            cache.prefill(torch.cat([ids[:, :5], ids], dim=1), behind(mask))
        cache.prefill(ids, mask)

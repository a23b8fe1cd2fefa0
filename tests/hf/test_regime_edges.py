"""What is refused of a regime, before any work; and lives that are cropped, forked or partly forgotten."""

import copy
import re
from dataclasses import replace

import pytest
import torch

import retain
from retain.hf.cache import Cache
from retain.hf.press import press_score
from retain.protection import Protection
from tests.evictions import small
from tests.hf.masked import positions_of
from tests.hf.naive_regimes import Naive
from tests.hf.regime_runs import (
    Life,
    assert_same_held,
    assert_same_logits,
    exact_model,
    gates_of,
    held_by,
    life,
    lived,
)
from tests.tiny import PAD, tiny_batch

FEW = Protection(sinks=1, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=2)


@pytest.fixture(scope="module")
def exact():
    model = exact_model()
    with retain.attach(model):
        yield model


@pytest.fixture
def forwards(exact):
    """Attention calls so far."""
    calls: list[int] = []
    hook = exact.model.layers[0].register_forward_pre_hook(lambda *args: calls.append(1))
    yield calls
    hook.remove()


def test_what_a_regime_is_not(exact, forwards):
    model = exact
    with pytest.raises(ValueError, match="regime is 'chunkd' .did you mean 'chunked'.*one of prefill"):
        Cache(model, "snapkv", keep_ratio=0.5, regime="chunkd")
    for wrong in (0, -1, True):
        with pytest.raises(ValueError, match=f"every is {wrong!r}, and must be a whole number of tokens"):
            Cache(model, "snapkv", keep_ratio=0.5, regime="decode", every=wrong)
    with pytest.raises(ValueError, match="'regim' .did you mean 'regime'"):
        Cache(model, "snapkv", keep_ratio=0.5, regim="chunked")
    ids, mask = tiny_batch((0,))
    for regime in ("chunked", "decode", "prefill+decode"):
        cache = Cache(model, "knorm", keep_ratio=0.5, regime=regime, protection=FEW)
        with pytest.raises(ValueError, match=rf"evict=False leaves .* regime '{re.escape(regime)}'"):
            cache.prefill(ids, mask, evict=False)
    with pytest.raises(ValueError, match="at least 1 token a chunk"):
        Cache(model, "knorm", keep_ratio=0.5, protection=FEW).prefill(ids, mask, chunk_size=0)
    assert not forwards


def test_a_scorer_of_ones_own_reads_what_a_later_moment_has_not(exact):
    class Norms:
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            return -keys.norm(dim=-1)

    foreign = press_score(exact, Norms())
    for regime in ("chunked", "decode", "chunked+decode"):
        with pytest.raises(ValueError, match=rf"regime '{re.escape(regime)}' evicts again later"):
            Cache(exact, "adakv", keep_ratio=0.4, observed=foreign, regime=regime)


@pytest.mark.parametrize("regime", ["prefill", "chunked", "chunked+decode"])
def test_too_small_a_budget_is_found_before_the_first_chunk(regime, exact, forwards):
    ids, mask = tiny_batch((0, 11))
    wide = replace(FEW, recent=9)
    for budget in ({"tokens_per_head": 8}, {"keep_ratio": 0.22}):
        for chunk_size in (None, 7):
            cache = Cache(exact, "knorm", **budget, regime=regime, protection=wide)
            with pytest.raises(ValueError, match=r"budget of [\d.]* entries per head.*10 protected"):
                cache.prefill(ids, mask, chunk_size=chunk_size)
            assert not forwards and cache.num_seen == 0
    cache = Cache(exact, "knorm", tokens_per_head=12, regime=regime, protection=wide, pinned=[(0, 9)])
    with pytest.raises(ValueError, match="in turns and pinned spans"):
        cache.prefill(ids, mask, chunk_size=7)
    with pytest.raises(ValueError, match="leaves its 29 tokens"):
        Cache(exact, "knorm", tokens_per_head=12, regime=regime, protection=FEW, pinned=[(28, 30)]).prefill(
            ids, mask, chunk_size=7
        )


def test_decoding_alone_asks_nothing_of_the_prompts_budget(exact):
    """A ratio of the prompt may be less than what is protected, as long as nothing is evicted yet."""
    ids, mask = tiny_batch((0,))
    settings = {"keep_ratio": 0.3, "regime": "decode", "every": 100, "protection": replace(FEW, recent=16)}
    at_once = Cache(exact, "knorm", **settings).prefill(ids, mask)
    in_chunks = Cache(exact, "knorm", **settings).prefill(ids, mask, chunk_size=16)
    assert at_once.entries_held == in_chunks.entries_held == 40 * 6


@pytest.mark.parametrize("name", ["adakv", "h2o", "gate"])
def test_pads_that_generate_put_behind_a_finished_row(name, exact, heads_file):
    """A row ends early, and the next turn's mask says that what came after it is padding."""
    policy, (ids, mask) = small(name, heads_file), tiny_batch((0, 4))
    gates = gates_of(exact) if policy.learned else None
    answer = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [5, PAD, PAD, PAD, PAD, PAD, PAD]])
    turn, turn_mask = tiny_batch((0, 5), 7, seed=5)
    during = torch.cat([mask, torch.ones_like(answer)], dim=1)
    after = torch.cat([mask, (answer != PAD).long(), turn_mask], dim=1)
    cache = Cache(exact, policy, keep_ratio=0.6, gates=gates, seeds=(3, 4), regime="chunked")
    with torch.no_grad():
        seen = 0
        for chunk in (ids, *answer.split(1, dim=1)):
            upto = during[:, : seen + chunk.shape[1]]
            where = positions_of(upto)[:, seen:]
            exact(input_ids=chunk, attention_mask=upto, position_ids=where, past_key_values=cache)
            seen += chunk.shape[1]
        where = positions_of(after)[:, seen:]
        got = exact(input_ids=turn, attention_mask=after, position_ids=where, past_key_values=cache).logits
    # The row that had ended, alone and without them.
    real = after[1].bool()
    parts = [ids[1:, mask[1].bool()], answer[1:, :1], turn[1:, turn_mask[1].bool()]]
    naive = Naive(exact, policy, {"keep_ratio": 0.6}, regime="chunked", seeds=(4,), gates=gates)
    naive.run(parts, torch.ones(1, int(real.sum()), dtype=torch.long), 1)
    for layer, held in zip(held_by(cache, after), naive.held, strict=True):
        assert torch.equal(layer[1:, :, real], held)
    assert torch.isfinite(got[turn_mask.bool()]).all() and cache.evictions == 2


def test_crop_goes_back_over_steps_and_what_follows_is_as_if_they_had_never_come(exact, heads_file):
    ids, mask = tiny_batch((0, 3))
    draw = torch.Generator().manual_seed(2)
    steps = list(torch.randint(2, 90, (7, 2, 1), generator=draw))

    @torch.no_grad()
    def go_on(cache, chunks):
        for chunk in chunks:
            upto = torch.cat([mask, mask.new_ones(2, cache.num_seen + 1 - 40)], 1)
            where = positions_of(upto)[:, -1:]
            exact(input_ids=chunk, attention_mask=upto, position_ids=where, past_key_values=cache)
        return held_by(cache, upto)

    for name in ("adakv", "gate"):
        policy = small(name, heads_file)
        gates = gates_of(exact) if policy.learned else None
        settings = {"keep_ratio": 0.4, "gates": gates, "regime": "prefill+decode", "every": 5}
        cache = Cache(exact, policy, **settings).prefill(ids, mask)
        other = copy.deepcopy(cache)
        go_on(cache, steps[:3])
        cache.crop(40)
        got, want = go_on(cache, steps[2:]), go_on(other, steps[2:])
        assert cache.evictions == other.evictions == 2
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
        with pytest.raises(ValueError, match="go back to 40: entries were evicted when it had seen 45"):
            cache.crop(40)
    counted = Cache(exact, small("h2o", heads_file), keep_ratio=0.4, regime="decode", every=9)
    counted.prefill(ids, mask)
    go_on(counted, steps[:3])
    counted.crop(41)
    assert counted.num_seen == 41


def test_a_fork_goes_its_own_way_and_selected_sequences_are_what_they_were(exact, heads_file):
    policy, own = small("layer_defensivekv", heads_file), life(3, chunk=9, steps=(4, 4))
    settings = {"keep_ratio": 0.4, "regime": "chunked+decode", "every": 3}
    cache = Cache(exact, policy, **settings)
    whole, held = lived(exact, Cache(exact, policy, **settings), own)
    half = own.prompt + 2
    seen = sum(ids.shape[1] for ids in own.chunks[:half])
    lived(exact, cache, Life(own.chunks[:half], own.mask[:, :seen], own.prompt))
    fork, some = cache.fork(), cache.fork()
    some.batch_select_indices(torch.tensor([2, 0]))
    for one, rows in ((cache, [0, 1, 2]), (fork, [0, 1, 2]), (some, [2, 0])):
        at, logits, left = seen, [], []
        for ids in own.chunks[half:]:
            upto = own.mask[rows, : at + ids.shape[1]]
            where = positions_of(upto)[:, at:]
            with torch.no_grad():
                given = {"attention_mask": upto, "position_ids": where, "past_key_values": one}
                logits.append(exact(input_ids=ids[rows], **given).logits)
            at += ids.shape[1]
            left.append(held_by(one, upto))
        assert_same_held(left, [[layer[rows] for layer in layers] for layers in held[half:]])
        assert_same_logits(logits, [step[rows] for step in whole[half:]], own.mask[rows, seen:])


@pytest.mark.parametrize("name", ["adakv", "h2o", "fused"])
def test_queries_that_are_held_for_a_later_moment_are_few(name, exact, heads_file):
    policy, queries = small(name, heads_file), []
    gates = gates_of(exact) if policy.learned else None
    cache = Cache(exact, policy, tokens_per_head=12, gates=gates, regime="chunked+decode", every=3)
    own = life(1, tokens=64, chunk=8, steps=(6, 0), turn=0)
    lived(exact, cache, own, lambda number: queries.append(cache.ragged[0].recent.num_queries))
    assert max(queries) <= 8 + 4
    assert all(layer.recent.hidden == [] for layer in cache.ragged)

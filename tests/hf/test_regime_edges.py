"""What is refused of a regime, before any work; and lives that are cropped, forked or partly forgotten."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

import retain
from retain.hf.cache.cache import Cache
from retain.hf.cache.layer import MARKS
from retain.hf.version_names import CACHE
from retain.protection import Protection
from tests.evictions import small
from tests.hf.masked import positions_of
from tests.hf.naive_regimes import Naive
from tests.hf.regime_runs import (
    FEW,
    Life,
    assert_same_held,
    assert_same_logits,
    exact_model,
    gates_of,
    held_by,
    life,
    lived,
    of_sequence,
)
from tests.hf.test_saving import assert_same_state
from tests.hf.test_turns_again import turns_of
from tests.tiny import PAD, tiny_batch, tiny_model


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
    with pytest.raises(
        ValueError, match="chunk_size is 0: pass tokens a forward, a whole number of at least 1"
    ):
        Cache(model, "knorm", keep_ratio=0.5, protection=FEW).prefill(ids, mask, chunk_size=0)
    assert not forwards


@pytest.mark.parametrize("regime", ["prefill", "chunked", "chunked+decode", "decode"])
def test_too_small_a_budget_is_found_before_the_first_chunk(regime, exact, forwards):
    ids, mask = tiny_batch((0, 11))
    wide = replace(FEW, recent=9)
    budgets = [{"tokens_per_head": 8}, {"keep_ratio": 0.22}]
    if regime == "decode":
        budgets = [{"tokens_per_head": 9}, {"keep_ratio": 0.12}, {"bytes": 9 * 6 * 256}]
    for budget, chunk_size in itertools.product(budgets, (None, 7)):
        cache = Cache(exact, "knorm", **budget, regime=regime, every=8, protection=wide, short="raise")
        with pytest.raises(ValueError, match=r"budget of [\d.]* entries per head.*10 protected"):
            cache.prefill(ids, mask, chunk_size=chunk_size)
        assert not forwards and cache.num_seen == 0
    if regime == "decode":  # a prompt and its first tokens that the budget holds need no protection
        held = Cache(exact, "knorm", tokens_per_head=9, regime=regime, every=4, protection=wide)
        held.prefill(ids[:, :4])
        assert forwards
        return
    given = {"protection": wide, "pinned": [(0, 9)], "short": "raise"}
    cache = Cache(exact, "knorm", tokens_per_head=12, regime=regime, **given)
    with pytest.raises(ValueError, match="in pinned spans"):
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
            exact(input_ids=chunk, attention_mask=upto, position_ids=where, **{CACHE: cache})
            seen += chunk.shape[1]
        where = positions_of(after)[:, seen:]
        before = cache.fork()
        with pytest.raises(ValueError, match="position_ids of a sequence do not increase"):
            exact(input_ids=turn, attention_mask=after, position_ids=where - 1, **{CACHE: before})
        got = exact(input_ids=turn, attention_mask=after, position_ids=where, **{CACHE: cache}).logits
    # The row that had ended, alone and without them.
    real = after[1].bool()
    parts = [ids[1:, mask[1].bool()], answer[1:, :1], turn[1:, turn_mask[1].bool()]]
    naive = Naive(exact, policy, {"keep_ratio": 0.6}, regime="chunked", seeds=(4,), gates=gates)
    naive.run(parts, torch.ones(1, int(real.sum()), dtype=torch.long), 1)
    for layer, held in zip(held_by(cache, after), naive.held, strict=True):
        assert torch.equal(layer[1:, :, real], held)
    assert torch.isfinite(got[turn_mask.bool()]).all() and cache.evictions == 2


@pytest.mark.parametrize("name", ["adakv", "h2o", "fused"])
def test_queries_that_are_held_for_a_later_moment_are_few(name, exact, heads_file):
    policy, queries = small(name, heads_file), []
    gates = gates_of(exact) if policy.learned else None
    cache = Cache(exact, policy, tokens_per_head=12, gates=gates, regime="chunked+decode", every=3)
    own = life(1, tokens=64, chunk=8, steps=(6, 0), turn=0)
    lived(exact, cache, own, lambda number: queries.append(cache.state.ragged[0].recent.num_queries))
    assert max(queries) <= 8 + 4
    assert all(layer.recent.hidden == [] for layer in cache.state.ragged)


def test_a_turn_whose_protection_no_budget_can_hold_is_refused_before_it_is_read():
    turns = turns_of(4)
    model, calls = tiny_model("qwen3"), []
    # All tokens of a turn are recent, up to 30 in all.
    settings = {"observed_settings": {"window": 4, "pool_size": 3}, "regime": "chunked+decode", "every": 2}
    settings |= {"protection": Protection(0, 0.0, 0.0, 0, 30), "short": "raise"}

    @torch.no_grad()
    def read(cache, ids):
        return model(input_ids=ids, **{CACHE: cache}).logits

    def refused(budget):
        """The turn that a budget does not hold, and the cache that was asked."""
        cache = Cache(model, "snapkv", tokens_per_head=budget, **settings)
        for number, ids in enumerate(turns):
            before, calls[:] = cache.fork(), []
            try:
                read(cache, ids)
            except ValueError as error:
                assert re.search(rf"budget of {budget} .*protected", str(error))
                assert not calls and cache.num_seen == sum(turn.shape[1] for turn in turns[:number])
                if number:
                    assert_same_state(cache, before)
                return number, cache
        return len(turns), cache

    with retain.attach(model):
        model.model.layers[0].register_forward_pre_hook(lambda *args: calls.append(1))
        # Twelve tokens a turn: exactly what does not fit is refused.
        found = [refused(budget) for budget in (11, 12, 23, 24, 29, 30)]
        numbers = [number for number, _ in found]
        assert numbers == [0, 1, 1, 2, 2, 4]
        assert found[-1][1].evictions == 2  # the first two turns are held whole
        number, cache = refused(25)
        assert number == 2
        # It goes on as one that was not asked, on whatever else fits.
        other = Cache(model, "snapkv", tokens_per_head=25, **settings)
        for ids in turns[:2]:
            read(other, ids)
        assert torch.equal(read(cache, turns[2][:, :1]), read(other, turns[2][:, :1]))
        assert cache.num_seen == 25 and cache.evictions == 0


@pytest.mark.parametrize("name", ["keydiff", "recency"])
def test_policies_that_look_at_no_queries_hold_none(name, exact):
    own, counts = life(3, chunk=9, steps=(50, 3)), []
    cache = Cache(exact, name, tokens_per_head=12, protection=FEW, regime="chunked+decode", every=7)

    def look(number):
        counts.extend(layer.recent.num_queries + layer.recent.num_bytes for layer in cache.state.ragged)

    lived(exact, cache, own, look)
    look(-1)
    assert len(counts) == 3 * (len(own.chunks) + 1) and set(counts) == {0} and cache.evictions > 10


def dormant(wakes: int) -> Life:
    """The second sequence has nothing in six turns and the steps behind each, and then some tokens."""
    ids, mask = tiny_batch((0, 3))
    draw = torch.Generator().manual_seed(4)
    chunks, rows = [ids], [mask]
    for turn in range(7):
        for size in (9, *[1] * 5):
            chunks.append(torch.randint(2, 90, (2, size), generator=draw))
            awake = torch.arange(size) >= (size - wakes if turn == 6 and size > 1 else size)
            rows.append(torch.stack([torch.ones(size, dtype=torch.long), awake.long()]))
    return Life(chunks, torch.cat(rows, dim=1), 1)


@pytest.mark.parametrize("wakes", [2, 6])
@pytest.mark.parametrize("name", ["snapkv", "h2o", "layer_defensivekv"])
def test_queries_stay_few_while_a_sequence_has_nothing_to_say(name, wakes, exact, heads_file, monkeypatch):
    monkeypatch.setattr("retain.hf.cache.engine.MOST_UNNOTED", 8)
    policy, own, queries, held_bytes = small(name, heads_file), dormant(wakes), [], []
    settings = {"tokens_per_head": 12, "regime": "chunked", "seeds": None}
    cache = Cache(exact, policy, **settings)

    def look(number):
        queries.append(max(layer.recent.num_queries for layer in cache.state.ragged))
        held_bytes.append(max(layer.recent.num_bytes for layer in cache.state.ragged))

    got, held = lived(exact, cache, own, look)
    look(-1)
    window, column = cache.state.bound_policy.wants.queries, 2 * 6 * 16 * 8  # float64, 6 heads of 16
    after_reads = [queries[number + 1] for number, ids in enumerate(own.chunks) if ids.shape[1] > 1]
    assert max(after_reads) <= window + 8 and max(queries) <= window + 8 + 8
    assert max(held_bytes) <= (1 + MARKS) * column * (window + 8 + 8)
    # The other sequence is decided on as it would be alone.
    for b in range(2):
        want, want_held = lived(exact, Cache(exact, policy, **settings), own.alone(b))
        logits, mine = of_sequence(own, b, got, held)
        if b == 1 and wakes < window:  # too few queries to be asked: spared until there are enough
            assert all(int(layer[0].sum(-1).max()) == 12 + wakes for layer in mine.pop())
            want_held.pop()
        assert_same_held(mine, want_held)
        assert_same_logits(logits, want, own.alone(b).mask)
    asleep = [[layer[1, :, :40] for layer in layers] for layers in held[:-6]]
    assert all(torch.equal(a, b) for one in asleep for a, b in zip(one, asleep[0], strict=True))
    assert cache.evictions == 8


@pytest.mark.parametrize("tokens_per_head", [12, 400])
def test_marks_are_few_and_none_is_made_inside_a_first_prompt(tokens_per_head, exact, heads_file):
    own = life(3, chunk=7, steps=(2, 2))
    turns = [life(3, seed=seed, steps=(1, 1)) for seed in range(2, 8)]
    mask = torch.cat([own.mask, *[one.mask[:, 41:49] for one in turns]], dim=1)
    chunks = [*own.chunks, *[part for one in turns for part in (one.chunks[4], one.chunks[5][:, :1])]]
    assert mask.shape[1] == sum(ids.shape[1] for ids in chunks)
    cache, marks = (
        Cache(exact, small("snapkv", heads_file), tokens_per_head=tokens_per_head, regime="chunked"),
        [],
    )
    lived(exact, cache, Life(chunks, mask, own.prompt), lambda number: marks.append(_marks(cache)))
    marks.append(_marks(cache))
    seen = [sum(ids.shape[1] for ids in chunks[:number]) for number in range(len(chunks) + 1)]
    ends = [
        seen[number + 1] for number, ids in enumerate(chunks) if ids.shape[1] > 1 and seen[number + 1] >= 40
    ]
    for at, own_marks in zip(seen, marks, strict=True):
        want = [end for end in ends if end <= at]
        assert own_marks == want[-1 if tokens_per_head == 12 else -MARKS :]
    assert len(ends) == 8 > MARKS and marks[own.prompt - 1] == [] != marks[own.prompt]


def _marks(cache: Cache) -> list[int]:
    marks = [sorted(layer.recent.marks) for layer in cache.state.ragged]
    assert all(own == marks[0] for own in marks)
    return marks[0]


@pytest.mark.parametrize("how", ["batch_select_indices", "reorder_cache", "repeat"])
def test_what_is_known_of_a_prompt_that_is_still_to_come_follows_its_sequences(how, exact, heads_file):
    """One sequence has padding in its midst, so that a ratio of its announced length is another."""
    ids, mask = tiny_batch((0, 3, 11))
    mask[0, 24:32] = 0
    rows = torch.tensor(
        [0, 0, 1, 1, 2, 2] if how == "repeat" else [2, 0, 1] if how == "reorder_cache" else [2, 0]
    )
    settings = {"keep_ratio": 0.4, "regime": "chunked", "pinned": [(25, 27)]}

    @torch.no_grad()
    def read(cache, rows, start, stop):
        given = {"attention_mask": mask[rows, :stop], "position_ids": positions_of(mask[rows])[:, start:stop]}
        exact(input_ids=ids[rows, start:stop], **{CACHE: cache}, **given)

    cache, fresh = (Cache(exact, small("adakv", heads_file), **settings) for _ in range(2))
    every = torch.arange(3)
    cache.state.announce(40, mask)
    read(cache, every, 0, 8)
    read(cache, every, 8, 16)
    if how == "repeat":
        cache.batch_repeat_interleave(2)
    else:
        getattr(cache, how)(rows)
    fresh.state.announce(40, mask[rows])
    for start in range(0, 40, 8):
        read(fresh, rows, start, start + 8)
        if start >= 16:
            read(cache, rows, start, start + 8)
            held = held_by(cache, mask[rows, : start + 8]), held_by(fresh, mask[rows, : start + 8])
            assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))
    counts = cache.budgets().held_BLH.sum(-1)
    lengths = mask.sum(-1)[rows]
    assert torch.equal(counts, (0.4 * 2 * lengths + 0.5).long()[:, None].expand(-1, 3))
    assert cache.state.announced_BT is None and cache.evictions == fresh.evictions > 2

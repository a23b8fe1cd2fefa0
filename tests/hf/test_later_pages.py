"""`Cache(page=)` in the regimes that evict again: every head holds whole pages and the last tokens, whatever
happens to a conversation in between."""

import itertools
import math

import pytest
import torch

import retain
from retain.budget.statement import Budget, LayerShape, Stock, spread
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from retain.policy import plan_of
from tests.evictions import small
from tests.hf.masked import positions_of
from tests.hf.naive_regimes import due_after
from tests.hf.regime_runs import (
    SEEDS,
    Life,
    agree,
    assert_same_held,
    assert_same_logits,
    assert_same_stores,
    exact_model,
    gates_of,
    held_by,
    life,
    lived,
    of_sequence,
)
from tests.hf.test_ended import END, ends_at
from tests.hf.test_regime_edges import dormant
from tests.hf.test_regimes import REGIMES
from tests.hf.test_saving import assert_same_state
from tests.refused import refused
from tests.tiny import PAD, tiny_batch

PAGE, EVERY = 4, 5
AGAIN = tuple(regime for regime in REGIMES if regime != "prefill")
NAMES = ("fused", "snapkv", "lava", "recency", "adakv", "pyramidkv", "h2o", "layer_defensivekv")
SHAPES = [LayerShape(2, 2 * 16 * 8)] * 3  # of the tiny models in float64
BUDGETS = ({"keep_ratio": 0.4}, {"tokens_per_head": 14}, {"bytes": 6 * 2 * 16 * 8 * 15})
# Of each policy two regimes, of each regime half of the policies; the others are for the slow tier.
CASES = [
    pytest.param(
        name,
        regime,
        BUDGETS[(row + column) % 3],
        marks=[] if (row + column) % 2 == 0 and row < 6 else pytest.mark.slow,
    )
    for (row, name), (column, regime) in itertools.product(enumerate(NAMES), enumerate(AGAIN))
]


@pytest.fixture(scope="module")
def exact():
    model = exact_model()
    with retain.attach(model):
        yield model


def cache_of(model, name: str, **settings) -> Cache:
    policy = small(name, "")
    gates = {"gates": gates_of(model)} if policy.learned else {}
    return Cache(model, policy, **{"page": PAGE, "every": EVERY, **gates, **settings})


def assert_pages(held, own: Life, regime: str, budget, policy=None, page: int = PAGE) -> int:
    """At every moment what went leaves whole pages beside the last tokens and, where the policy is given, as
    many as the budget says; the number of moments at which something went."""
    sizes, seen, went = [ids.shape[1] for ids in own.chunks], 0, 0
    prompt = sum(sizes[: own.prompt])
    before: list[torch.Tensor] = []
    for number, due in enumerate(due_after(regime, EVERY, sizes, own.prompt)):
        seen += sizes[number]
        mask = own.mask[:, :seen].bool()
        there = [layer.clone() for layer in held[number]]
        for layer, old in zip(there, before or there, strict=True):  # what could stay
            layer[:, :, : old.shape[-1]] |= old if before else False
        for b in range(len(mask)) if due else ():
            kept, could = (
                torch.stack([layer[b, :, mask[b]] for layer in held_L]) for held_L in (held[number], there)
            )
            s = kept.shape[-1]
            tail = s % page
            assert ((kept.sum(-1) - tail) % page == 0).all() and not (kept & ~could).any()
            assert kept[..., s - tail :].all()
            went += int((could & ~kept).any())
            if policy is None or not s:
                continue
            length = int(own.mask[b, :prompt].sum()) if number < own.prompt else s
            stock = Stock(
                (tuple(could.sum((1, 2)).tolist()),),
                (length,),
                could.all(0).all(0)[None],
                None if number < own.prompt - 1 else (int(own.mask[b, :prompt].sum()),),
            )
            ones = torch.ones(1, s, dtype=torch.bool)
            plain = plan_of(policy, Budget(**budget), ones, SHAPES, stock=stock)
            p, mean = (
                int(plain.protected_BT[0, : s - tail].sum()),
                spread(Budget(**budget), [length], SHAPES).per_head_B[0],
            )
            K = max(math.ceil((mean - tail) / page), math.ceil(p / page), 0)
            assert int(kept.sum()) == min(K * 6 * page, int(could.sum()) - 6 * tail) + 6 * tail
        before = held[number]
    return went


@pytest.mark.parametrize(("name", "regime", "budget"), CASES)
def test_every_regime_holds_whole_pages_of_the_budget_at_every_moment(name, regime, budget):
    """A plain implementation, which decides about each sequence alone, holds the same."""
    policy, own = small(name, ""), life(3, steps=(12, 7))
    plain = agree(exact_model(), policy, own, regime=regime, every=EVERY, page=PAGE, **budget)
    assert assert_pages(plain.history, own, regime, budget, policy) >= 3


@pytest.mark.parametrize("regime", AGAIN)
def test_a_page_of_one_entry_is_no_page(regime, exact):
    own, how = life(3, steps=(7, 3)), {"regime": regime, "keep_ratio": 0.4, "seeds": SEEDS}
    name = "fused" if "prefill" in regime else "adakv"
    (got, held), (want, plain) = (
        lived(exact, cache_of(exact, name, page=page, **how), own) for page in (1, None)
    )
    assert_same_held(held, plain)
    assert all(map(torch.equal, got, want))


def test_sequences_in_a_batch_are_cut_as_alone(exact):
    own, how = life(3, steps=(7, 6)), {"regime": "chunked+decode", "tokens_per_head": 14}
    got, held = lived(exact, cache_of(exact, "fused", seeds=SEEDS, **how), own)
    for b in range(3):
        alone = cache_of(exact, "fused", seeds=SEEDS[b : b + 1], **how)
        want, want_held = lived(exact, alone, own.alone(b))
        logits, mine = of_sequence(own, b, got, held)
        assert_same_held(mine, want_held)
        assert_same_logits(logits, want, own.alone(b).mask)


@pytest.mark.parametrize("regime", AGAIN)
def test_generate_goes_on_in_pages_behind_sequences_that_have_ended(regime, exact):
    """The second ends early, and is cut as at its end; and a turn follows."""
    ids, mask = tiny_batch((0, 3, 7))
    how = {"do_sample": False, "pad_token_id": PAD, "max_new_tokens": 22, "eos_token_id": END}
    how["suppress_tokens"] = [PAD, END]
    cache = cache_of(exact, "snapkv", keep_ratio=0.4, regime=regime)
    given = {"attention_mask": mask, "stopping_criteria": ends_at(70, 44, 70), "prefill_chunk_size": 16}
    got = exact.generate(ids, **{CACHE: cache}, **how, **given)
    assert cache.evictions >= 2 and got.shape[1] == 62
    real = torch.cat([mask.bool(), torch.ones(3, 21, dtype=torch.bool)], dim=1)
    real[1, 44:] = False
    assert torch.equal(cache.state.valid_BT, real)

    def beside_pages(cache):
        since_B = cache.state.valid_BT[:, cache.state.evicted_at :].sum(-1)
        before_B = cache.state.valid_BT.sum(-1) - since_B
        return (cache.budgets().held_BLH - (since_B + before_B % PAGE)[:, None, None]) % PAGE

    assert not beside_pages(cache).any()
    turn, own = torch.cat([got, ids[:, :6]], dim=1), torch.cat([real, real.new_ones(3, 7)], dim=1)
    own[1, 61] = False  # the fill that nobody has read
    exact.generate(turn, **{CACHE: cache}, attention_mask=own.long(), **{**how, "max_new_tokens": 7})
    assert not beside_pages(cache).any() and cache.num_seen == 74


@torch.no_grad()
def forward(model, cache: Cache, ids, mask) -> None:
    where = positions_of(mask)[:, cache.num_seen :]
    model(input_ids=ids, attention_mask=mask, position_ids=where, **{CACHE: cache})


@pytest.mark.parametrize("name", ["recency", "fused"])
def test_a_conversation_may_be_cropped_forked_saved_and_chosen_from(name, exact, tmp_path):
    ids, mask = tiny_batch((0, 3, 11))
    new = torch.randint(2, 90, (3, 24), generator=torch.Generator().manual_seed(3))
    whole = torch.cat([mask, torch.ones_like(new)], dim=1)

    def decode(cache, start, stop, rows=(0, 1, 2)):
        for at in range(start, stop):
            forward(exact, cache, new[list(rows), at : at + 1], whole[list(rows), : 41 + at])
        return cache

    cache = cache_of(exact, name, keep_ratio=0.4, regime="prefill+decode", seeds=SEEDS)
    cache = decode(cache.prefill(ids, mask), 0, 7)
    assert cache.state.evicted_at == 45 and cache.num_seen == 47
    fork = cache.fork()
    cache.save(tmp_path / "paged.safetensors")
    gates = gates_of(exact) if name == "fused" else None
    back = Cache.load(tmp_path / "paged.safetensors", exact, gates=gates)
    assert back.report().page == PAGE
    chosen = cache.fork()
    chosen.batch_select_indices(torch.tensor([2, 0]))
    decode(cache, 7, 9)
    cache.crop(46)
    decode(cache, 6, 22)
    want = held_by(cache, whole[:, :62])
    assert cache.evictions == 5
    assert_same_stores(cache, decode(back, 7, 22))
    assert_same_stores(cache, decode(fork, 7, 22))
    mine = held_by(decode(chosen, 7, 22, (2, 0)), whole[[2, 0], :62])
    assert all(torch.equal(a, b[[2, 0]]) for a, b in zip(mine, want, strict=True))
    both = Cache.concat([fork, back])
    assert both.entries_held == 2 * cache.entries_held
    decode(both, 22, 24, (0, 1, 2, 0, 1, 2))
    refused("cannot go back to 50: entries were evicted", fork.crop, 50)


@pytest.mark.parametrize("every", [3, 30])
def test_tokens_are_taken_back_only_where_pages_stay_whole(every, exact):
    """Padding behind a sequence's end was shown as tokens, and counted in full pages since; or not yet."""
    ids, mask = tiny_batch((0, 4))
    answer = torch.randint(2, 90, (2, 7), generator=torch.Generator().manual_seed(1))
    turn, turn_mask = tiny_batch((0, 2), 7, seed=5)
    real = torch.ones_like(answer)
    real[1, 1:] = 0
    shown, after = (torch.cat([mask, own, turn_mask], dim=1) for own in (torch.ones_like(real), real))
    settings = {"keep_ratio": 0.4, "regime": "chunked+decode", "every": every, "seeds": SEEDS[:2]}
    cache = cache_of(exact, "adakv", **settings)
    forward(exact, cache, ids, mask)
    for at in range(7):
        forward(exact, cache, answer[:, at : at + 1], shown[:, : 41 + at])
    before = cache.fork()
    if every == 3:
        said = r"attention_mask takes back tokens of sequences \[1\] that filled pages of 4 of which .* fork"
        refused(said, forward, exact, cache, turn, after)
        assert_same_state(cache, before)
        forward(exact, cache, turn, shown)  # it goes on as if they were tokens
        assert cache.num_seen == 54
        return
    forward(exact, cache, turn, after)
    alone = cache_of(exact, "adakv", **{**settings, "seeds": SEEDS[1:2]})
    own = Life([ids[1:, 4:], answer[1:, :1], turn[1:, 2:]], torch.ones(1, 42, dtype=torch.long), 1)
    _, want = lived(exact, alone, own)
    mine = [layer[1:, :, after[1].bool()] for layer in held_by(cache, after)]
    assert_same_held([mine], want[-1:])


def test_a_sequence_that_is_spared_or_held_whole_goes_on_in_pages(exact):
    own = dormant(2)
    _, held = lived(exact, cache_of(exact, "snapkv", tokens_per_head=12, regime="chunked", every=99), own)
    assert assert_pages(held, own, "chunked", {}) > 6
    # Of 60 tokens snapkv protects more than the budget; those of the others fit.
    ids, mask = tiny_batch((0, 240, 100), 300)
    cache = Cache(exact, "snapkv", keep_ratio=0.2, page=16, regime="prefill+decode", every=4)
    cache.prefill(ids, mask)
    for _ in range(21):
        mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
        forward(exact, cache, ids[:, :1], mask)
    held_BLH = cache.budgets().held_BLH
    assert cache.state.held_whole == [1] and (held_BLH[1] == 81).all() and cache.evictions >= 2
    # Of 320 tokens 64 are four pages; 44 of 220, 12 of which fill no page, are two.
    assert held_BLH[0].sum() == 6 * (4 * 16 + 1) and held_BLH[2].sum() == 6 * (2 * 16 + 13)

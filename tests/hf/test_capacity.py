"""A cache that says what its budget costs: warnings, refusals and larger budgets, in every way to evict."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import retain
from retain.budget.allocation import Allocation
from retain.budget.capacity import (
    Capacity,
    CapacityError,
    CapacityWarning,
    Guard,
    capacity_of,
    rounded_up,
)
from retain.budget.cascade import keep_sets
from retain.budget.priority_sampling import Draw
from retain.gates.artifact import load_gates, save_gates
from retain.hf.cache.cache import Cache
from retain.hf.cache.state import State
from retain.hf.model.identity import fingerprint
from retain.hf.version_names import CACHE
from retain.presets import Policy
from tests.evictions import small
from tests.hf.regime_runs import assert_same_stores, exact_model, gates_of
from tests.hf.test_calibrated import curve
from tests.refused import refused
from tests.tiny import tiny_batch

TINY, HUGE = 1e-6, 1e6
SHARED = {
    **{scope: {"scope": scope} for scope in ("head", "layer", "model")},
    "as shipped": {"scope": "model", "fusion": "learned", "draw": Draw(0.2)},
}
NOTHING = Capacity(TINY, (0.0,), (0.0,), (0,), (0,), (0,))


def guard_of(cache):
    return cache.engine.capacity_guard.guard


def fused(**settings) -> Policy:
    policy = small("fused", "")
    protection = replace(policy.protection, prefix_fraction=0.0, suffix_fraction=0.0)
    # One budget that all goes by score, on the scale of the learned one: what a stored limit is read off for.
    plain = {"protection": protection, "scope": "model", "fusion": "max", "draw": None}
    return replace(policy, **{**plain, **settings})


def gates(model):
    return curve(gates_of(model))


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(scope="module")
def model():
    made = exact_model()
    with retain.attach(made):
        yield made


@pytest.fixture(scope="module")
def batch():
    return tiny_batch((0, 5), 60)


def made(model, policy=None, **settings) -> Cache:
    """A cache of calibrated gates, whose budget keeps three of ten entries."""
    own = {"gates": gates(model), **({} if {"bytes", "threshold"} & set(settings) else {"keep_ratio": 0.3})}
    return Cache(model, fused() if policy is None else policy, **{**own, **settings})


def price_of(model, batch, policy) -> float:
    """The lower of the prices that two sequences pay."""
    return min(made(model, policy, capacity=Guard("warn", HUGE)).prefill(*batch).capacity.price_B)


@pytest.mark.parametrize("shared", SHARED)
def test_a_warning_tells_the_price_and_changes_nothing(model, batch, shared):
    policy = fused(**SHARED[shared])
    plain = made(model, policy, capacity=None).prefill(*batch)
    cache = made(model, policy, capacity=Guard("warn", TINY))
    said = r"keep_ratio=0.3: more goes than can be afforded.*\(of 2 such\)"
    with pytest.warns(CapacityWarning, match=said):
        cache.prefill(*batch)
    assert_same_stores(plain, cache)
    assert plain.capacity is None and "capacity" not in str(plain.report())
    assert "capacity more goes than" in str(cache.report())
    # Read along a cascade, it is what the scores say of all layers at once.
    held = made(model, policy, capacity=None).prefill(*batch, evict=False, hold_evidence=True)
    context = held.state.batch_context(batch[1].bool())
    moment = held.state.bound_policy.request.joint_eviction(held.evidence, context)
    shares, found = moment.part.shares, moment.candidates
    at_once = capacity_of(shares, found, keep_sets(shares, found), TINY)
    assert cache.capacity.price_B == pytest.approx(at_once.price_B)
    assert cache.capacity.lost_B == pytest.approx(at_once.lost_B)
    assert cache.capacity.need_B == at_once.need_B and cache.capacity.kept_B == at_once.kept_B


def test_it_is_quiet_where_all_can_be_afforded_and_speaks_once(model, batch):
    given = {"attention_mask": batch[1], "max_new_tokens": 9}
    quiet, cache = (
        made(model, capacity=Guard("warn", limit), regime="decode", every=2) for limit in (HUGE, TINY)
    )
    with silent():
        model.generate(batch[0], **{CACHE: quiet}, **given)
    assert quiet.evictions > 1 and quiet.capacity.short_B == [False, False]
    with pytest.warns(CapacityWarning) as said:
        model.generate(batch[0], **{CACHE: cache}, **given)
    assert cache.evictions > 1 and len(said) == 1


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("how", ["prefill", "evict", "chunks"])
def test_it_keeps_what_is_needed(model, batch, shared, how):
    policy = fused(**SHARED[shared])
    limit = price_of(model, batch, policy) * 0.6
    cache = made(model, policy, capacity=Guard("keep", limit))
    with silent():
        if how == "evict":
            cache.prefill(*batch, evict=False, hold_evidence=True).evict()
        else:
            cache.prefill(*batch, chunk_size=25 if how == "chunks" else None)
    capacity, heads = cache.capacity, cache.state.layout.num_kv_heads
    assert capacity.raised and max(capacity.price_B) <= limit
    assert cache.entries_held == sum(capacity.kept_B) and cache.bytes_held() < cache.bytes_full()
    pairs = zip(capacity.kept_B, capacity.entries_B, strict=True)
    assert all(kept > 0.3 * entries for kept, entries in pairs)
    assert cache.evictions == 1 and "budget enlarged" in str(cache.report())
    assert capacity.entries_B == (60 * heads, 55 * heads)


@pytest.mark.parametrize("regime", ["prefill", "chunked", "decode"])
def test_the_ratio_that_it_advises_is_one_of_what_was_seen_and_is_enough(model, regime):
    """Also where earlier evictions have left less than that to choose from."""
    ids, mask = tiny_batch((0,), 200)
    settings = {"gates": gates(model), "regime": regime, "every": 8}
    chunk = None if regime == "prefill" else 100

    def run(ratio, limit):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            cache = Cache(model, fused(), keep_ratio=ratio, capacity=Guard("warn", limit), **settings)
            if regime == "decode":
                more = {"max_new_tokens": 9, "do_sample": False}
                model.generate(ids, attention_mask=mask, **{CACHE: cache}, **more)
            else:
                cache.prefill(ids, mask, chunk_size=chunk)
        return cache, [str(one.message) for one in said]

    # What only the last eviction cannot afford.
    limit = run(0.3, HUGE)[0].capacity.price_B[0] * 0.9
    cache, said = run(0.3, limit)
    capacity, seen, (told,) = cache.capacity, cache.num_seen * 6, said
    assert capacity.short_B == [True] and (capacity.seen_B or capacity.entries_B) == (seen,)
    assert (capacity.entries_B[0] < seen) == (regime == "chunked")
    assert capacity.ratio_B == [capacity.need_B[0] / seen] and 0.3 < capacity.ratio_B[0] < 0.5
    assert f"(keep_ratio about {rounded_up(capacity.ratio_B[0]):.3g})" in told
    # Each of three layers rounds its part of the budget.
    enough, silent_then = run(rounded_up(capacity.ratio_B[0] + 1.5 / seen), limit)
    assert enough.capacity.short_B == [False] and not silent_then


def test_where_all_can_be_afforded_it_keeps_what_was_stated(model, batch):
    plain = made(model, capacity=None).prefill(*batch)
    for action in ("keep", "raise"):
        assert_same_stores(made(model, capacity=Guard(action, HUGE)).prefill(*batch), plain)


def test_a_refusal_evicts_nothing_and_leaves_a_cache_to_go_on_with(model, batch):
    ids, mask = batch
    cache, how = made(model, capacity=Guard("raise", TINY)), {"attention_mask": mask, "max_new_tokens": 3}
    with pytest.raises(CapacityError, match="Nothing was evicted: state a larger budget") as said:
        cache.prefill(ids, mask)
    assert all(said.value.capacity.short_B) and cache.num_seen == 0
    for _ in range(2):
        with pytest.raises(CapacityError):
            model.generate(ids, **{CACHE: cache}, **how)
        # Nothing counts as seen, and nothing stays that nobody could ask for.
        assert all(layer.keys is None and layer.store is None for layer in cache.state.ragged)
        assert cache.num_seen == cache.bytes_held() == cache.bytes_allocated() == 0
    fresh, cache.engine.capacity_guard.guard = made(model, capacity=None), None
    answers = [model.generate(ids, **{CACHE: own}, do_sample=False, **how) for own in (cache, fresh)]
    assert torch.equal(*answers)
    # What is held for `evict` stays held.
    cache = made(model, capacity=Guard("raise", TINY)).prefill(ids, mask, evict=False, hold_evidence=True)
    with pytest.raises(CapacityError):
        cache.evict()
    assert cache.entries_held == cache.entries_seen and guard_of(cache).action == "raise"
    cache.evict(fused(), keep_ratio=0.3, gates=gates(model), capacity=None)
    assert cache.entries_held < cache.entries_seen and cache.capacity is None


def test_what_a_cache_was_made_with_comes_back_with_a_reset(model, batch):
    own = gates(model)
    own.metadata["calibration"]["capacity"] = {"limit": TINY}
    given = {"gates": own, "keep_ratio": 0.3}
    cache = Cache(model, fused(), capacity="raise", **given)
    cache.prefill(*batch, evict=False, hold_evidence=True).evict(fused(), capacity=None, **given)
    assert guard_of(cache) is None
    cache.reset()
    assert guard_of(cache) == Guard("raise", TINY)
    with pytest.raises(CapacityError):
        cache.prefill(*batch)
    # Also what was changed by hand.
    cache.engine.capacity_guard.guard = None
    cache.prefill(*batch)
    assert cache.entries_held < cache.entries_seen
    cache.reset()
    with pytest.raises(CapacityError):
        cache.prefill(*batch)


def test_a_policy_named_later_is_under_the_guard_that_the_cache_was_made_with(model, batch):
    own = gates(model)
    own.metadata["calibration"]["capacity"] = {"limit": TINY}
    given = {"gates": own, "keep_ratio": 0.3}

    def held(capacity):
        cache = Cache(model, fused(), capacity=capacity, **given)
        return cache.prefill(*batch, evict=False, hold_evidence=True)

    with pytest.raises(CapacityError):
        held("raise").evict(fused(scope="head"), **given)
    with silent():
        assert guard_of(held(None).evict(fused(scope="layer"), **given)) is None
        # It means nothing there, and the caller is told how to go on.
        with pytest.raises(
            ValueError, match="capacity='raise'.*what it observes is past.*pass capacity=None"
        ):
            held("raise").evict("snapkv", keep_ratio=0.9)
        assert guard_of(held("auto").evict("snapkv", keep_ratio=0.9)) is None
    for capacity, also in (("auto", {}), (None, {"capacity": "auto"}), ("raise", {"capacity": "warn"})):
        with pytest.warns(CapacityWarning):
            assert guard_of(held(capacity).evict(fused(), **given, **also)) == Guard("warn", TINY)


@pytest.mark.parametrize("action", ["warn", "raise", "keep"])
@pytest.mark.parametrize("guessed", [2, 16], ids=["all seemed to fit", "too little seemed to fit"])
def test_keys_in_another_precision_than_the_weights_are_guarded_all_the_same(
    model, batch, monkeypatch, action, guessed
):
    """A budget in bytes, and float64 keys where another precision was expected (as under autocast): what goes
    is known when the first keys come."""
    # Entries of 2 x 16 numbers; 360 of sequence 0, 330 of sequence 1.
    fits = 32 * 8 * (360 if guessed == 16 else 150)
    monkeypatch.setattr(State, "element_size", guessed)
    cache = Cache(model, fused(), gates=gates(model), bytes=fits, capacity=Guard(action, TINY))
    if guessed == 16:
        with silent():
            cache.prefill(*batch)
        assert cache.entries_held == cache.entries_seen and not any((cache.capacity or NOTHING).short_B)
    elif action == "raise":
        with pytest.raises(CapacityError):
            cache.prefill(*batch)
    elif action == "warn":
        with pytest.warns(CapacityWarning, match=f"bytes={fits:g}"):
            cache.prefill(*batch)
        assert cache.entries_held == 300 and cache.capacity.short_B == [True, True]
    else:
        cache.prefill(*batch)
        assert cache.capacity.raised and cache.entries_held > 300


def test_a_warning_points_at_the_users_line(model, batch):
    caches = [made(model, capacity=Guard("warn", TINY)) for _ in range(3)]
    with pytest.warns(CapacityWarning) as said:
        caches[0].prefill(*batch)
        model.generate(batch[0], attention_mask=batch[1], **{CACHE: caches[1]}, max_new_tokens=2)
        caches[2].prefill(*batch, evict=False, hold_evidence=True).evict()
    assert {one.filename for one in said} == {__file__} and len({one.lineno for one in said}) == 3


def test_a_later_eviction_that_is_refused_leaves_the_cache_whole(model, batch):
    ids, mask = batch
    policy = fused()
    settings = {"gates": gates(model), "keep_ratio": 0.3, "regime": "chunked"}
    cache = Cache(model, policy, capacity=Guard("raise", HUGE), **settings).prefill(ids, mask)
    held = cache.entries_held
    cache.engine.capacity_guard.guard = Guard("raise", TINY)
    turn, both = ids[:, -9:], torch.cat([mask, torch.ones_like(ids[:, -9:])], 1)
    positions = (both.cumsum(-1) - 1)[:, -9:]
    given = {"attention_mask": both, "position_ids": positions, CACHE: cache}
    with torch.no_grad(), pytest.raises(CapacityError):
        model(input_ids=turn, **given)
    heads = sum(spec.num_kv_heads for spec in cache.state.specs)
    assert cache.entries_held == held + 2 * 9 * heads
    assert cache.num_seen == 69 and cache.evictions == 1
    cache.state.check_whole()


def test_the_limit_comes_with_the_gates_and_stays_with_the_file(model, batch, tmp_path):
    own = gates(model)
    own.metadata["calibration"]["capacity"] = {"limit": 0.25}
    own = load_gates(save_gates(own, tmp_path / "gates", fingerprint=fingerprint(model)))

    def guard(policy=None, **settings):
        return guard_of(made(model, policy, **{"gates": own, **settings}))

    assert guard() == Guard("warn", 0.25) and guard(capacity=None) is None
    assert guard(capacity="keep") == Guard("keep", 0.25)
    # On its own scale, where all heads share one budget: what that limit was read off for.
    for own_scale in ({"fusion": "learned"}, {"fusion": "sum"}, {"draw": Draw(0.3)}):
        assert guard(fused(**own_scale)) == Guard("warn", 0.25)
    others = [{"scope": "head"}, {"scope": "layer"}, {"fusion": "prior"}, {"fusion": "log_linear"}]
    for settings in (*others, {"fusion": "veto"}, {"allocation": Allocation(normalise="head")}):
        assert guard(fused(**settings)) is None
        assert guard(fused(**settings), capacity="raise") == Guard("raise", 0.25)
    assert guard(fused(fusion="rank_blend")) is guard(threshold=2.0) is guard(gates=gates(model)) is None
    other = {"policy": "snapkv", "keep_ratio": 0.9, "observed_settings": {"window": 4}}
    assert guard_of(Cache(model, **other)) is None
    for capacity in (None, "keep", "auto", Guard("warn", HUGE)):
        cache = made(model, gates=own, capacity=capacity)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CapacityWarning)
            cache.prefill(*batch, evict=False, hold_evidence=True).evict()
        again = Cache.load(cache.save(tmp_path / "cache.safetensors"), model, gates=own)
        assert guard_of(again) == guard_of(cache)
        # What was stated comes back too, for policies that are named later.
        for one in (cache, again):
            one.reset()
            one.prefill(*batch, evict=False, hold_evidence=True)
            if capacity in (None, "auto"):
                assert guard_of(one.evict(**other)) is None
            else:
                refused("what it observes is past", one.evict, **other)


def test_what_no_limit_means_anything_for_is_refused(model):
    guard = Guard("warn", 1.0)
    for said, asked in (
        ("stored without a limit: calibrate them with calibration.capacity", {"capacity": "warn"}),
        (r"did you mean 'keep'", {"capacity": "kepe"}),
        ("a retain.budget.capacity.Guard or None; got 3", {"capacity": 3}),
        ("fusion 'rank_blend'.*is not in risk", {"policy": fused(fusion="rank_blend"), "capacity": guard}),
        ("the threshold is the limit", {"threshold": 2.0, "capacity": guard}),
    ):
        refused(said, made, model, **asked)
    refused("what it observes is past", Cache, model, "snapkv", keep_ratio=0.6, capacity=guard)
    refused("no score that could be held against a limit", Cache, model, None, capacity=guard)

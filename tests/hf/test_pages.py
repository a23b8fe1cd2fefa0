"""`Cache(page=)`: what it holds is what all layers decide together, in every way to read a prompt."""

import itertools

import pytest
import torch

import retain
from retain.budget.statement import Budget
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from retain.policy import decide_layers, pages_of, shape_of
from tests.evictions import small
from tests.hf.regime_runs import assert_same_stores, exact_model, gates_of, held_by
from tests.hf.test_cache import assert_same, question, ragged_logits
from tests.hf.test_lookahead import gated
from tests.refused import refused
from tests.tiny import attached, tiny_batch, tiny_model

PADS, TOKENS, PAGE, SEEDS = (0, 7, 3), 61, 8, [3, 4, 5]
NAMES = (
    "snapkv",
    "adakv",
    "pyramidkv",
    "lava",
    "cake",
    "layer_defensivekv",
    "criticalkv",
    "duoattention",
    "fused",
)


def paged(model, policy, heads_file="", **settings) -> Cache:
    policy = small(policy, heads_file) if isinstance(policy, str) else policy
    gates = {"gates": gates_of(model)} if policy.learned else {}
    return Cache(model, policy, **{"keep_ratio": 0.4, "page": PAGE, "seeds": SEEDS, **gates, **settings})


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_what_all_layers_decide_together_and_answers_from_that(heads_file, name):
    model, (ids, mask) = attached("qwen3"), tiny_batch(PADS, TOKENS)
    policy, budget = small(name, heads_file), Budget(keep_ratio=0.4, page=PAGE)
    cache = paged(model, name, heads_file).prefill(ids, mask)
    evidence = Cache(model, None).prefill(ids, mask, evict=False, hold_evidence=True).evidence
    learned = [gates_of(model).score(layer) for layer in evidence] if policy.learned else None
    made = decide_layers(policy, evidence, budget, learned=learned, seeds_B=SEEDS)
    keep, shapes = [one.keep_BHT for one in made], [shape_of(layer) for layer in evidence]
    for got, want in zip(held_by(cache, mask), keep, strict=True):
        assert torch.equal(got, want)
    lengths = [TOKENS - pad for pad in PADS]
    pages = [pages_of(policy, budget, length, shapes) for length in lengths]
    planned = [6 * (K * PAGE + length % PAGE) for K, length in zip(pages, lengths, strict=True)]
    assert cache.budgets().held_BLH.sum((1, 2)).tolist() == planned
    report = cache.report()
    assert report.total.entries_held == sum(planned) < report.total.entries_seen
    assert report.page == PAGE and "whole pages of 8" in str(report) and report.evictions == 1
    assert all(layer.keys is None for layer in cache.layers)
    new, new_mask = question(3)
    whole = torch.cat([mask, new_mask], dim=1)
    got = ragged_logits(model, paged(model, name, heads_file), [ids, new], whole)
    assert_same("qwen3", got, keep, [ids, new], whole)


def test_generate_goes_on_with_whole_pages():
    model, (ids, mask) = attached("qwen3"), tiny_batch(PADS, TOKENS)
    cache = paged(model, "snapkv")
    got = model.generate(ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=5, do_sample=False)
    assert cache.evictions == 1 and cache.num_seen == TOKENS + 4 and got.shape[1] == TOKENS + 5
    held = paged(model, "snapkv").prefill(ids, mask).entries_held
    assert cache.entries_held == held + 3 * 6 * 4


@pytest.mark.parametrize("name", ["snapkv", "layer_defensivekv", "fused"])
def test_every_way_to_read_a_prompt_holds_whole_pages(name, tmp_path):
    """At once, in chunks (whose evidence is of the last), by `evict`; a fork and a file go on alike."""
    model = exact_model()
    ids, mask = tiny_batch(PADS, TOKENS)
    with retain.attach(model):
        once = paged(model, name).prefill(ids, mask)
        chunks = paged(model, name).prefill(ids, mask, chunk_size=20)
        held = paged(model, name).prefill(ids, mask, evict=False, hold_evidence=True)
        own = once.state.bound_policy.request
        fork = held.fork().evict(own.policy, keep_ratio=0.4, page=PAGE, gates=own.gates)
        assert_same_stores(once, held.evict())
        assert_same_stores(once, fork)
        tails = torch.tensor([(TOKENS - pad) % PAGE for pad in PADS])[:, None, None]
        held_BLH = chunks.budgets().held_BLH
        assert ((held_BLH - tails) % PAGE == 0).all()
        assert torch.equal(held_BLH.sum((1, 2)), once.budgets().held_BLH.sum((1, 2)))
        once.save(tmp_path / "paged.safetensors")
        back = Cache.load(tmp_path / "paged.safetensors", model, gates=own.gates)
        assert back.report().page == PAGE
        turn, turn_mask = question(3)
        whole = torch.cat([mask, turn_mask], dim=1)
        want = ragged_logits(model, once.fork(), [turn], whole)[0]
        for cache in (back, once.fork()):
            assert torch.equal(ragged_logits(model, cache, [turn], whole)[0], want)
            assert cache.evictions == 1


def test_a_page_of_one_entry_and_one_longer_than_the_prompt():
    model, (ids, mask) = attached("qwen3"), tiny_batch(PADS, TOKENS)
    plain = paged(model, "adakv", page=None).prefill(ids, mask)
    assert_same_stores(plain, paged(model, "adakv", page=1).prefill(ids, mask))
    large = paged(model, "adakv", page=64).prefill(ids, mask)
    assert large.entries_evicted == 0 and plain.entries_evicted > 0


def test_sequences_in_a_batch_are_cut_as_alone():
    model = exact_model()
    ids, mask = tiny_batch(PADS, TOKENS)
    with retain.attach(model):
        together = held_by(paged(model, "layer_defensivekv").prefill(ids, mask), mask)
        for b, pad in enumerate(PADS):
            one = ids[b : b + 1, pad:]
            alone = paged(model, "layer_defensivekv", seeds=SEEDS[b : b + 1]).prefill(one)
            for got, want in zip(held_by(alone, torch.ones_like(one)), together, strict=True):
                assert torch.equal(got[0], want[b, :, pad:])


def test_lookahead_gates_cut_whole_pages_too():
    model, (ids, mask) = tiny_model("qwen3"), tiny_batch((3, 0), 40)
    with retain.attach(model):
        cache = gated(model, page=PAGE).prefill(ids, mask)
        held = gated(model, page=PAGE).prefill(ids, mask, evict=False, hold_evidence=True).evict()
    held_BLH = cache.budgets().held_BLH
    assert ((held_BLH - torch.tensor([37 % PAGE, 0])[:, None, None]) % PAGE == 0).all()
    # 14.8 of 37, 5 of them in the tail, and 16 of 40: two pages a head.
    assert held_BLH.sum((1, 2)).tolist() == [6 * (2 * PAGE + 5), 6 * 2 * PAGE]
    assert_same_stores(cache, held)


def test_where_pages_are_not_rounded_is_said():
    model, (ids, mask) = attached("qwen3"), tiny_batch(PADS, TOKENS)
    refused("page=8 .* threshold=0.5 states none", paged, model, "snapkv", keep_ratio=None, threshold=0.5)
    refused("page=8 .* byte_ratio=0.5 states none", paged, model, "snapkv", keep_ratio=None, byte_ratio=0.5)
    refused("page is the entries of a page, .* got 0", paged, model, "snapkv", page=0)
    refused("stated once, .* got none", paged, model, "snapkv", keep_ratio=None)
    refused("page can only be given with a named policy", Cache, model, None, page=8)
    refused("of Cache itself: 'pages' .did you mean 'page'", paged, model, "snapkv", pages=8)
    by_bytes = paged(model, "snapkv", keep_ratio=None, bytes=6 * 128 * 25).prefill(ids, mask)
    assert by_bytes.budgets().held_BLH[:, 0, 0].tolist() == [5 + 24, 6 + 24, 2 + 24]
    window = attached("mistral_window")
    said = "page=8 counts pages of all tokens .* 61 by now, and layers with a sliding window of 24 let go"
    for regime, chunk in itertools.product(("prefill", "decode", "chunked"), (None, 10)):
        cache = paged(window, "snapkv", regime=regime)
        refused(said, cache.prefill, ids, mask, chunk_size=chunk)
        assert cache.num_seen == 0

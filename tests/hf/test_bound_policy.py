import pytest
import torch

import retain
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from retain.policy import load_policy
from retain.protection import Protection
from tests.held import row_of
from tests.hf.regime_runs import assert_same_stores
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model

SMALL = Protection(sinks=1, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=2)
SEEDS = (3, 4, 5)


def test_sections_are_merged_into_the_policy():
    model = tiny_model("qwen3")
    ids, mask = tiny_batch((0,), 120)
    preset = load_policy("snapkv")
    overrides = {"protection": {"recent": 8}, "observed_settings": {"window": 16}}
    same = ["protection.recent=8", "observed_settings.window=16"]
    assert preset.protection.sinks == load_policy("snapkv", same).protection.sinks == 4
    with retain.attach(model):
        got = Cache(model, "snapkv", keep_ratio=0.5, **overrides).prefill(ids, mask)
        want = Cache(model, load_policy("snapkv", same), keep_ratio=0.5).prefill(ids, mask)
        plain = Cache(model, "snapkv", keep_ratio=0.5).prefill(ids, mask)
        # Settings belong to a score: another score comes without them.
        Cache(model, "snapkv", keep_ratio=0.5, observed="recency").prefill(ids, mask)
    assert_same_stores(got, want)
    assert not all(
        torch.equal(one.store.flat()[2], two.store.flat()[2])
        for one, two in zip(got.layers, plain.layers, strict=True)
    )


def test_wrong_overrides_are_refused_at_construction_all_at_once():
    model = tiny_model("qwen3")
    wrong = {"protection": {"recnt": 8}, "fusion_weight": "much", "keep_rato": 0.5, "fusio": "max"}
    with pytest.raises(ValueError, match="unfit settings of Cache or of policy 'snapkv'") as caught:
        Cache(model, "snapkv", keep_ratio=0.5, **wrong)
    for part in (
        "'protection.recnt' (did you mean 'recent'?)",
        "fusion_weight: input should be a valid number, got 'much' (str)",
        "'keep_rato' (did you mean 'keep_ratio'?)",
        "'fusio' (did you mean 'fusion'?)",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("how", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
def test_seeds_are_of_prompts_where_generate_repeats_them(how):
    model = tiny_model("qwen3")
    ids, mask = tiny_batch((0, 3), 60)
    kept = {}

    def remember(store):
        return [row_of(store, b, 0)[2].tolist() for b in range(4)]

    settings = {"max_new_tokens": 4, "num_beams": 1, **how}
    with retain.attach(model):
        asked = {"keep_ratio": 0.5, "protection": SMALL}
        cache = Cache(model, "random", **asked, seeds=(3, 4), pinned=[[(9, 11)], []])
        model.generate(input_ids=ids, attention_mask=mask, **{CACHE: cache}, **settings)
        assert list(cache.state.seeds) == [3, 3, 4, 4]
        pinned = [[(9, 11)]] * 2 + [[]] * 2
        by_hand = Cache(model, "random", **asked, seeds=(3, 3, 4, 4), pinned=pinned)
        by_hand.prefill(ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0))
        kept = remember(by_hand.layers[1].store)
        assert kept[0] == kept[1] != kept[2] == kept[3]
        assert [row[: len(kept[0])] for row in remember(cache.layers[1].store)[:2]] == kept[:2]
        cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
        assert cache.state.seeds == [4, 3, 3, 4]
        cache.reset()
        assert cache.state.seeds == [3, 4] and cache.prefill(ids, mask).state.seeds == [3, 4]
        with pytest.raises(ValueError, match="got 3 seeds for 2 sequences: pass one per sequence"):
            Cache(model, "random", keep_ratio=0.5, seeds=SEEDS).prefill(ids, mask)


def test_what_no_policy_is_and_what_would_not_be_read_is_refused():
    model = tiny_model("qwen3")
    refused("a name, a path, a Policy or a function", Cache, model, policy=3)
    for given in ({"pinned": [(0, 5)]}, {"gates": "folder"}, {"keep_ratio": 0.5}):
        said = f"{next(iter(given))} can only be given with a named policy.*the function <lambda>"
        refused(said, Cache, model, lambda evidence: evidence.valid_BT, **given)
    refused(
        "gates would not be read: policy 'snapkv'", Cache, model, "snapkv", keep_ratio=0.5, gates="folder"
    )

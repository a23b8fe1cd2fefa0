"""`generate` on an evicting cache: every way to generate equals a masked full cache that evicts at the same
moments, and what cannot work is refused before any work."""

import warnings

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
)

import retain
from retain.eviction import WHEN
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from tests.close import MODEL, assert_close
from tests.hf.moments import oracle, policy
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model

PADS = (0, 3, 11)
NEW = 14
FAMILIES = ("llama", "gemma3", "qwen3_next")
# name -> (settings, sequences a prompt)
WAYS = {
    "greedy": ({"do_sample": False}, 1),
    "sampled": ({"do_sample": True, "top_k": 20, "temperature": 1.5}, 1),
    "several": ({"do_sample": True, "top_k": 20, "temperature": 1.5, "num_return_sequences": 3}, 3),
    "beams": ({"do_sample": False, "num_beams": 3}, 3),
    "several_beams": ({"do_sample": False, "num_beams": 4, "num_return_sequences": 2}, 4),
    "sampled_beams": ({"do_sample": True, "num_beams": 3, "temperature": 1.5}, 3),
}


def generated(model, cache, ids, mask, **settings):
    """Sequences and logits, under one seed."""
    torch.manual_seed(3)
    how = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True, **settings}
    return model.generate(input_ids=ids, attention_mask=mask, **{CACHE: cache}, **how)


def whole_mask(mask, more, repeats=1):
    return torch.cat([mask, mask.new_ones(mask.shape[0], more)], dim=1).repeat_interleave(repeats, dim=0)


def assert_same(got, want):
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        assert_close(a, b, dtype=torch.float32, ops=MODEL)


def compare(model, way, when):
    settings, repeats = WAYS[way]
    ids, mask = tiny_batch(PADS)
    with oracle(model, whole_mask(mask, NEW, repeats), when=when, every=5) as full:
        want = generated(model, full, ids, mask, **settings)
    plain = generated(model, DynamicCache(config=model.config), ids, mask, **settings)
    with retain.attach(model):
        cache = Cache(model, policy=policy, when=when, every=5)
        got = generated(model, cache, ids, mask, **settings)
    assert_same(got, want)
    assert not torch.equal(got.sequences, plain.sequences)  # the control
    held = sum(
        int((kept & whole_mask(mask, NEW, repeats)[:, None, : kept.shape[-1]].bool()).sum())
        for kept in full.kept
    )
    later = sum(
        (full.get_seq_length() - kept.shape[-1]) * kept.shape[0] * kept.shape[1] for kept in full.kept
    )
    assert cache.entries_held == held + later
    assert cache.evictions == full.evictions


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_way_equals_the_masked_full_cache(family, way):
    compare(tiny_model(family, dtype=torch.float64), way, "chunk+decode")


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("family", FAMILIES)
def test_whenever_it_evicts_it_equals_the_masked_full_cache(family, when):
    model = tiny_model(family, dtype=torch.float64)
    compare(model, "greedy" if when in ("prefill", "chunk+decode") else "beams", when)


def turn_after(got, mask, seed=8):
    """A second turn without padding, and the mask of everything."""
    turn = tiny_batch((0,) * mask.shape[0], 6, seed=seed)[0]
    ids = torch.cat([got.sequences, turn], dim=1)
    return ids, torch.cat([mask, mask.new_ones(mask.shape[0], NEW + 6)], dim=1)


@pytest.mark.parametrize("when", ["prefill", "chunk+decode"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_generate_continues_the_first(family, when):
    model = tiny_model(family, dtype=torch.float64)
    ids, mask = tiny_batch(PADS)

    def turns(cache):
        one = generated(model, cache, ids, mask, do_sample=False)
        two = generated(model, cache, *turn_after(one, mask), do_sample=False)
        # Only what is new, with a mask of everything, is another way to say the same.
        ids_3, mask_3 = turn_after(two, turn_after(one, mask)[1], seed=9)
        return (
            one,
            two,
            generated(model, cache, ids_3[:, two.sequences.shape[1] - 1 :], mask_3, do_sample=False),
        )

    with oracle(model, whole_mask(mask, 3 * (NEW + 6)), when=when, every=5) as full:
        want = turns(full)
    with retain.attach(model):
        cache = Cache(model, policy=policy, when=when, every=5)
        got = turns(cache)
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
    assert cache.evictions == full.evictions >= (1 if when == "prefill" else 3)


CANNOT = {
    "assistant_model": ("model", "assisted decoding"),
    "prompt_lookup_num_tokens": (2, "assisted decoding"),
    "cache_implementation": ("static", "a cache of its own"),
    "use_cache": (False, "reads all tokens again"),
    "output_attentions": (True, "asks for attention weights"),
    "prefill_chunk_size": (5, r"cache.prefill\(input_ids, attention_mask, chunk_size="),
}


def untouched(cache, forwards):
    return cache.num_seen == 0 and not forwards


@pytest.fixture
def counted():
    """An attached model, and a list that grows with each of its forwards."""
    model, forwards = tiny_model("llama"), []
    model.register_forward_pre_hook(lambda *args: forwards.append(1))
    with retain.attach(model):
        yield model, forwards


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_work_is_refused_before_any_work(name, counted):
    model, forwards = counted
    value, why = CANNOT[name]
    value = tiny_model("llama") if value == "model" else value
    ids = tiny_batch((0,), 12)[0]
    cache = Cache(model, policy=policy)
    refused(f"^{name}.*{why}", model.generate, ids, **{CACHE: cache}, max_new_tokens=4, **{name: value})
    if name != "assistant_model":
        config = GenerationConfig(max_new_tokens=4)
        setattr(config, name, value)
        refused(rf"^generation_config\.{name}.*{why}", model.generate, ids, config, **{CACHE: cache})
    assert untouched(cache, forwards)
    model.generate(ids, **{CACHE: cache}, max_new_tokens=4, do_sample=False)
    assert cache.num_seen == 15


def test_a_cache_of_another_model_is_refused():
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    ids = tiny_batch((0,), 12)[0]
    with retain.attach(model), retain.attach(other):
        cache = Cache(model, policy=policy)
        with pytest.raises(ValueError, match="made for another model than the one that is called"):
            other.generate(ids, **{CACHE: cache}, max_new_tokens=4)
        assert cache.num_seen == 0
        model.generate(ids, **{CACHE: cache}, max_new_tokens=4)


@pytest.mark.parametrize("kind", ["PrefixTuning", "PromptTuning"])
def test_a_learned_prompt_is_no_silent_success(kind):
    peft = pytest.importorskip("peft")
    model, ids = tiny_model("llama"), tiny_batch((0,), 12)[0]
    prefix = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own
        wrapped = peft.get_peft_model(model, prefix).eval()
        with retain.attach(wrapped):
            cache = Cache(model, policy=policy)  # of the model inside
            for call in (
                lambda: Cache(wrapped, policy=policy),
                lambda: wrapped.generate(input_ids=ids, **{CACHE: cache}, max_new_tokens=3),
            ):
                refused("P.*_TUNING., of which a retain.Cache knows nothing", call)
            with wrapped.disable_adapter():
                assert Cache(wrapped, policy=policy).prefill(ids).num_seen == 12


FEW = {"protection": {"recent": 4}, "observed_settings": {"window": 4}}
HOW = {"max_new_tokens": 3, "do_sample": False}


def test_ids_that_begin_otherwise_than_what_was_read_are_refused():
    model, (ids, mask) = tiny_model("llama"), tiny_batch((0, 3))
    both, whole = torch.cat([ids, ids[:, :7]], dim=1), torch.cat([mask, torch.ones_like(mask[:, :7])], dim=1)
    with retain.attach(model):
        cache = Cache(model, "snapkv", keep_ratio=0.5, **FEW).prefill(ids, mask)
        padding, other, turned = both.clone(), both.clone(), cache.fork()
        padding[1, :3] += 1
        other[1, 39] += 1
        model.generate(padding, **{CACHE: cache.fork()}, attention_mask=whole, **HOW)
        turned.batch_select_indices(torch.tensor([1, 0]))
        shorter = cache.fork()
        shorter.batch_select_indices(torch.tensor([1]))
        for one, given in ((cache, other), (turned, both), (shorter, other[1:])):
            said = "input_ids does not begin with the tokens that this cache has read: pass generate"
            refused(said, model.generate, given, **{CACHE: one}, **HOW)
        model.generate(both.flip(0), **{CACHE: turned}, attention_mask=whole.flip(0), **HOW)


@pytest.mark.parametrize("num_ids", [1, 7, 40])
def test_ids_of_the_question_alone_are_refused_by_name(num_ids):
    model, (ids, mask) = tiny_model("llama"), tiny_batch((0, 3))
    question = tiny_batch((0, 0), num_ids, seed=9)[0]
    with retain.attach(model):
        cache = Cache(model, "snapkv", keep_ratio=0.5, **FEW).prefill(ids, mask)
        said = f"has {num_ids} tokens a row, and this cache has read 40"
        for given in ({}, {"attention_mask": torch.ones_like(question)}):
            with pytest.raises(
                ValueError, match=rf"input_ids {said}.*torch.cat\(\[context_ids, question_ids"
            ):
                model.generate(question, **{CACHE: cache}, **given, **HOW)
        assert cache.num_seen == 40


def test_embeddings_of_both_say_what_ids_of_both_say():
    model, (ids, mask) = tiny_model("gemma3"), tiny_batch((0, 3))
    question = tiny_batch((0, 0), 7, seed=9)[0]
    whole = {"attention_mask": torch.cat([mask, torch.ones_like(question)], dim=1)}
    embed, both = model.get_input_embeddings(), torch.cat([ids, question], dim=1)
    with retain.attach(model):
        cache = Cache(model, "snapkv", keep_ratio=0.5, **FEW).prefill(ids, mask)
        want = model.generate(both, **{CACHE: cache.fork()}, **whole, **HOW)[:, -3:]
        got = model.generate(inputs_embeds=embed(both), **{CACHE: cache.fork()}, **whole, **HOW)
        assert torch.equal(got, want)

"""`generate` on an evicting cache: every way to generate equals a masked full cache that evicts at the same
moments, and what cannot work is refused before any work."""

import warnings

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
)

import retain
from retain.hf.cache.cache import Cache
from retain.hf.cache.regime import NAMES
from retain.hf.intercept.attach import attach
from retain.hf.version_names import CACHE
from tests.close import MODEL, assert_close
from tests.hf.moments import oracle, policy
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model

PADS = (0, 3, 11)
NEW = 14
FAMILIES = ("llama", "mistral_window", "gemma3", "qwen3_next")
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


def compare(model, way, regime):
    settings, repeats = WAYS[way]
    ids, mask = tiny_batch(PADS)
    with oracle(model, whole_mask(mask, NEW, repeats), regime=regime, every=5) as full:
        want = generated(model, full, ids, mask, **settings)
    plain = generated(model, DynamicCache(config=model.config), ids, mask, **settings)
    with retain.attach(model):
        cache = Cache(model, policy=policy, regime=regime, every=5)
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
    if model.config.model_type != "mistral":  # a window lets go of more
        assert cache.entries_held == held + later
    assert cache.evictions == full.evictions


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_way_equals_the_masked_full_cache(family, way):
    compare(tiny_model(family, dtype=torch.float64), way, "chunked+decode")


@pytest.mark.parametrize("regime", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_regime_equals_the_masked_full_cache(family, regime):
    model = tiny_model(family, dtype=torch.float64)
    compare(model, "greedy" if regime in ("prefill", "chunked+decode") else "beams", regime)


def turn_after(got, mask, seed=8):
    """A second turn without padding, and the mask of everything."""
    turn = tiny_batch((0,) * mask.shape[0], 6, seed=seed)[0]
    ids = torch.cat([got.sequences, turn], dim=1)
    return ids, torch.cat([mask, mask.new_ones(mask.shape[0], NEW + 6)], dim=1)


@pytest.mark.parametrize("regime", ["prefill", "chunked+decode"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_generate_continues_the_first(family, regime):
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

    with oracle(model, whole_mask(mask, 3 * (NEW + 6)), regime=regime, every=5) as full:
        want = turns(full)
    with retain.attach(model):
        cache = Cache(model, policy=policy, regime=regime, every=5)
        got = turns(cache)
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
    assert cache.evictions == full.evictions >= (1 if regime == "prefill" else 3)


def test_guidance_reads_its_own_context_beside_ours():
    model = tiny_model("llama")
    ids, mask = tiny_batch((0,))
    how = {"guidance_scale": 1.5, "do_sample": False}
    want = generated(model, DynamicCache(config=model.config), ids, mask, **how)
    with retain.attach(model):
        assert torch.equal(
            generated(model, Cache(model, policy=None), ids, mask, **how).sequences, want.sequences
        )
        cache = Cache(model, policy=policy)
        got = generated(model, cache, ids, mask, **how)
    assert not torch.equal(got.sequences, want.sequences) and cache.num_seen == 40 + NEW - 1


CANNOT = {
    "assistant_model": ("model", "assisted decoding"),
    "prompt_lookup_num_tokens": (2, "assisted decoding"),
    "assistant_early_exit": (1, "assisted decoding"),
    "use_mtp": (True, "assisted decoding"),
    "cache_implementation": ("static", "a cache of its own"),
    "use_cache": (False, "reads all tokens again"),
    "output_attentions": (True, "asks for attention weights"),
    "prefill_chunk_size": (5, r"cache.prefill\(input_ids, attention_mask, chunk_size="),
}


def untouched(cache, forwards):
    return cache.num_seen == 0 and cache.state.history is None and not forwards


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
        setattr(model.generation_config, name, value)
        with pytest.raises(ValueError, match=rf"^model\.generation_config\.{name}.*{why}"):
            model.generate(ids, **{CACHE: cache}, max_new_tokens=4)
        setattr(model.generation_config, name, None)
    assert untouched(cache, forwards)
    model.generate(ids, **{CACHE: cache}, max_new_tokens=4, do_sample=False)
    assert cache.num_seen == 15


def test_a_forward_refuses_to_give_attention_weights(counted):
    model, _ = counted
    ids = tiny_batch((0,), 12)[0]
    cache = Cache(model, policy=policy)
    for read in (ids, ids[:, :1]):
        seen = cache.num_seen
        for own in (model, model.model):
            refused(
                "^output_attentions.*asks for attention weights",
                own,
                read,
                **{CACHE: cache},
                output_attentions=True,
            )
        assert cache.num_seen == seen
        model(read, **{CACHE: cache}, output_attentions=None)
    assert cache.num_seen == 13  # which it was told by no call that was refused


def test_a_config_that_asks_for_attention_weights_is_refused_and_one_without_caches_is_not():
    """A decoder goes by the one, and uses a cache that it is given whatever the other says."""
    model, ids = tiny_model("llama", attn="eager"), tiny_batch((0,), 12)[0]
    model.config.output_attentions, model.config.use_cache = True, False
    how = {"max_new_tokens": 4, "do_sample": False}
    with attach(model):
        cache = Cache(model, policy=policy).prefill(ids)  # whose outputs nobody sees
        said = r"^model\.config\.output_attentions=True asks for attention weights"
        refused(said, model, ids[:, :1], **{CACHE: cache})
        refused(said, model.generate, ids, **{CACHE: Cache(model, policy=policy)}, **how)
        assert cache.num_seen == 12
        want = model(ids[:, :1], output_attentions=False, **{CACHE: cache.fork()}).logits
        model.config.output_attentions = False
        assert torch.equal(model(ids[:, :1], **{CACHE: cache}).logits, want) and cache.num_seen == 13
        model.generate(ids, **{CACHE: (fresh := Cache(model, policy=policy))}, **how)
        assert fresh.num_seen == 15


def test_settings_that_are_off_are_no_reason(counted):
    model, _ = counted
    ids = tiny_batch((0,), 12)[0]
    off = {"use_mtp": False, "use_cache": True, "output_attentions": False}
    # What checkpoints with sliding windows were published with; transformers takes it for nothing.
    model.generation_config.cache_implementation = "hybrid"
    cache = Cache(model, policy=policy)
    model.generate(ids, **{CACHE: cache}, max_new_tokens=4, do_sample=False, **off)
    model(ids[:, :1], **{CACHE: cache}, **off)
    assert cache.num_seen == 16


def test_generate_that_gets_round_the_attached_model_is_refused():
    model, forwards = tiny_model("llama"), []
    ids = tiny_batch((0,), 12)[0]
    model.register_forward_pre_hook(lambda *args: forwards.append(1))
    how = {"max_new_tokens": 4, "do_sample": False}
    want = model.generate(ids, **how)
    forwards.clear()
    with attach(model.model):
        cache = Cache(model, policy=None)
        with pytest.raises(ValueError, match="not called through the model that was attached"):
            model.generate(ids, **{CACHE: cache}, **how)
        assert untouched(cache, forwards)
        with attach(model):  # which puts that right
            assert torch.equal(model.generate(ids, **{CACHE: cache}, **how), want)
        with pytest.raises(ValueError, match="not called through the model that was attached"):
            GenerationMixin.generate(model, ids, **{CACHE: Cache(model, policy=None)}, **how)
    assert "generate" not in vars(model) and torch.equal(model.generate(ids, **how), want)


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

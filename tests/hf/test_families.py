"""Every family against the oracle: what is evicted is gone, what is left alone is as transformers has it."""

import pytest
import torch

import retain
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from tests.close import MODEL, assert_close
from tests.hf.masked import evicting, full_cache, masked, masked_logits, random_keep
from tests.hf.test_cache import ragged_logits
from tests.refused import refused
from tests.tiny import EAGER, FAMILIES, attached, tiny_batch, tiny_model

PADS = {1: (0,), 3: (0, 3, 11)}
every_family = pytest.mark.parametrize("family", FAMILIES)
both = pytest.mark.parametrize("batch", [1, 3])


def choose(model, keep):
    """A policy that keeps what a test chose: one mask for each layer that evicts."""
    masks = dict(zip(evicting(model), keep, strict=True))
    return lambda evidence: masks[evidence.layer_idx]


def chunks_of(batch: int, num_tokens: int = 40, steps: int = 4):
    """A padded context, a question of several tokens without padding, and single tokens; and their mask."""
    ids, mask = tiny_batch(PADS[batch], num_tokens)
    question = tiny_batch((0,) * batch, 6, seed=5)[0]
    chunks = [ids, question, *(torch.full((batch, 1), 9 + step) for step in range(steps))]
    return chunks, mask, torch.cat([mask, mask.new_ones(batch, 6 + steps)], dim=1)


def apart(got, want) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))


# Norms, RoPE and recurrent states of these models are float32 inside, so two runs in float64 agree to that.
INSIDE = {"dtype": torch.float32, "ops": MODEL}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@both
@every_family
def test_generate_equals_the_masked_full_cache(family, batch, attn):
    if attn == "sdpa" and family in EAGER:
        wanted = "does not support an attention implementation|caps its attention logits at 2 .*'eager'"
        return refused(wanted, attached, family, attn=attn)
    # Eager masks are the lowest number of a precision: in float64 what a pad's query sees becomes NaN, in
    # transformers' own caches too.
    dtype = torch.float32 if attn == "eager" else torch.float64
    model = tiny_model(family, dtype=dtype, attn=attn)
    ids, mask = tiny_batch(PADS[batch])
    keep = random_keep(model, mask)
    settings = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    everything = torch.cat([mask, mask.new_ones(batch, 20)], dim=1)
    with masked(model, keep, everything):
        want = model.generate(input_ids=ids, **{CACHE: full_cache(model)}, **settings)
    plain = model.generate(input_ids=ids, **settings)
    with retain.attach(model):
        cache = Cache(model, policy=choose(model, keep))
        got = model.generate(input_ids=ids, **{CACHE: cache}, **settings)
    assert torch.equal(got.sequences, want.sequences)
    if attn == "sdpa":
        for a, b in zip(got.logits, want.logits, strict=True):
            assert_close(a, b, **INSIDE)
    assert apart(got.logits, plain.logits) > 0.1
    later = 19 * batch * keep[0].shape[1] * len(keep)
    assert cache.entries_held == sum(int(kept.sum()) for kept in keep) + later


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_family
def test_half_precision_is_as_good_as_the_full_cache_in_half_precision(family, dtype):
    chunks, mask, whole = chunks_of(3)
    model = tiny_model(family, dtype=dtype)
    keep = random_keep(model, mask)
    reference = masked_logits(tiny_model(family, dtype=dtype).float(), keep, chunks, whole)
    plain = masked_logits(model, keep, chunks, whole)
    with retain.attach(model):
        got = ragged_logits(model, Cache(model, policy=choose(model, keep)), chunks, whole)
    masks = whole.bool().split([ids.shape[1] for ids in chunks], dim=1)
    for a, b, c, real in zip(got, reference, plain, masks, strict=True):
        assert_close(a[real], b[real], c[real], dtype=dtype, ops=MODEL)


@every_family
def test_a_model_that_accelerate_dispatched_gives_the_same(family):
    """Its hooks move inputs between devices; ours see what the layers see, and are undone without a trace."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model(family)
    chunks, mask, whole = chunks_of(3)
    keep = random_keep(model, mask)
    with retain.attach(model):
        want = ragged_logits(model, Cache(model, policy=choose(model, keep)), chunks, whole)
    devices = {f"model.layers.{idx}": "cpu" for idx in range(len(model.model.layers))} | {
        f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"
    }
    placed = accelerate.dispatch_model(model, {**devices, "lm_head": "cpu"}, force_hooks=True)
    assert any(hasattr(module, "_hf_hook") for module in placed.modules())
    with retain.attach(placed):
        got = ragged_logits(placed, Cache(placed, policy=choose(placed, keep)), chunks, whole)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    after = masked_logits(placed, None, chunks[:1], whole)
    assert torch.equal(after[0], masked_logits(tiny_model(family), None, chunks[:1], whole)[0])

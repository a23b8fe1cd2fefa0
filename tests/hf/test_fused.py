"""The fused policy with one budget for the heads of all layers, in every regime of `retain.Cache`: at every
moment the ragged cache holds what a plain dense one keeps, and its logits are those of that one."""

from dataclasses import replace

import pytest
import torch

import retain
from retain.budget.allocation import Allocation
from retain.budget.priority_sampling import Draw
from retain.fusion import FUSIONS, IN_RISK
from retain.hf.cache.cache import Cache
from retain.hf.cache.regime import NAMES
from retain.hf.model.decoder import describe, layout_of
from retain.presets import Policy
from tests.evictions import small
from tests.hf.masked import positions_of
from tests.hf.regime_runs import exact_model, gates_of, held_by, life, life_of
from tests.hf.test_named_regimes import agree
from tests.tiny import tiny_batch, tiny_model

BOTH_SIDES = tuple(sorted(set(FUSIONS) - {"observed", "learned"}))


def fused(how: str = "max", **settings) -> Policy:
    """The preset with a short window and little protection, its heads sharing over layers."""
    policy = small("fused", "")
    protection = replace(policy.protection, prefix_fraction=0.0, suffix_fraction=0.0)
    lift = None if how == "prior" or settings.get("draw") else "mean"
    changes = {"fusion": how, "floor": lift, "draw": None, "scope": "model", "protection": protection}
    changes.update(settings)
    return replace(policy, **changes)


@pytest.mark.parametrize("how", BOTH_SIDES)
@pytest.mark.parametrize("regime", NAMES)
def test_every_fusion_in_every_regime(how, regime):
    """Three left-padded sequences; each is decided with its own padding cut off."""
    naive = agree(exact_model(), fused(how), life(3), regime=regime, keep_ratio=0.4)
    counts = {int(held[0, h].sum()) for held in naive.history[-1] for h in range(held.shape[1])}
    assert len(counts) > 1  # heads got what they bid for


# What there is to a draw: a budget that all heads share, and one that layers ask for parts of.
DRAWS = {
    "model": {"how": "sum"},
    "model, guarded, over the head's mean": {
        "allocation": Allocation(normalise="head", safeguard="guaranteed")
    },
    "layer, shares by entropy": {"scope": "layer", "allocation": Allocation("entropy")},
    "by the gate alone": {"how": "learned", "observed": None, "observed_settings": {}},
}


def drawn(name: str = "model", share: float = 0.4) -> Policy:
    """The policy with a share drawn."""
    return fused(**DRAWS[name], draw=Draw(share))


@pytest.mark.parametrize(
    ("name", "regime"),
    [("model", regime) for regime in NAMES] + [(name, "chunked+decode") for name in DRAWS if name != "model"],
)
def test_a_share_is_drawn_in_every_regime(name, regime):
    naive = agree(exact_model(), drawn(name), life(3), regime=regime, keep_ratio=0.4)
    plain = agree(exact_model(), replace(drawn(name), draw=None), life(3), regime=regime, keep_ratio=0.4)
    for own, other in zip(naive.history[-1], plain.history[-1], strict=True):
        assert not torch.equal(own, other)
    counts = [sum(held.sum() for held in run.history[-1]) for run in (naive, plain)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("family", ["gemma3", "mistral_window", "qwen3_next"])
def test_a_share_is_drawn_beside_windows_and_layers_left_alone(family):
    model = exact_model(family)
    agree(model, drawn(), life_of(model, 3), regime="chunked+decode", tokens_per_head=11)


FAMILY = ("llama", "qwen2", "gemma3", "mistral_window", "gpt_oss", "qwen3_next")


@pytest.mark.parametrize("how", ["max", "prior", "veto"])
@pytest.mark.parametrize("family", FAMILY)
def test_groups_windows_sinks_and_layers_left_alone(family, how):
    model = exact_model(family)
    agree(model, fused(how), life_of(model, 3), regime="chunked+decode", tokens_per_head=11)


@pytest.mark.parametrize("how", ["max", "prior", "veto"])
@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_a_threshold_admits_by_the_fused_risk(how, scope):
    """Under a threshold nothing is shared: every scope admits the same."""
    naive = agree(exact_model(), fused(how, scope=scope), life(3), regime="chunked+decode", threshold=2.0)
    assert len({int(held.sum()) for held in naive.history[-1]}) > 1


@pytest.mark.parametrize("how", [*IN_RISK, "sum"])
def test_gates_in_another_unit_are_refused_when_the_cache_is_made(how):
    model = tiny_model("llama")
    mass = retain.new_gates(model, "lowrank")
    with pytest.raises(ValueError, match=f"fusion '{how}' wants a gate in 'risk', and these .*in 'mass'"):
        Cache(model, fused(how), gates=mass, keep_ratio=0.5)


@pytest.mark.parametrize("how", ["sum", "prior", "veto", "log_linear", "rank_blend"])
def test_a_fusion_is_no_other_one(how):
    """On the same context each keeps something that `max` does not."""
    model, (ids, mask) = exact_model(), tiny_batch((0, 5), 60)
    held = []
    with retain.attach(model):
        for one in ("max", how):
            cache = Cache(model, fused(one), gates=gates_of(model), keep_ratio=0.3).prefill(ids, mask)
            held.append(held_by(cache, mask))
    assert any(not torch.equal(a, b) for a, b in zip(*held, strict=True))


def made(how: str) -> Policy:
    """A fusion, or the policy with a share drawn."""
    return drawn() if how == "drawn" else fused(how)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("how", ["max", "prior", "veto", "drawn"])
def test_a_batch_keeps_what_each_sequence_keeps_alone_and_holds_the_exact_bytes(family, how):
    model, pads, tokens = exact_model(family), (0, 9), 60
    ids, mask = tiny_batch(pads, tokens)
    settings = {"policy": made(how), "gates": gates_of(model), "keep_ratio": 0.3}
    with retain.attach(model):
        both = Cache(model, **settings).prefill(ids, mask)
        held = held_by(both, mask)
        for b, pad in enumerate(pads):
            own, real = ids[b : b + 1, pad:], mask[b : b + 1, pad:]
            alone = held_by(Cache(model, **settings).prefill(own, real), real)
            for one, two in zip(held, alone, strict=True):
                assert torch.equal(one[b : b + 1, :, pad:], two) and not one[b, :, :pad].any()
    specs = describe(model)
    entries = [sum(int(0.3 * (tokens - pad) * s.num_kv_heads + 0.5) for s in specs) for pad in pads]
    entry_bytes = 2 * specs[0].head_dim * 8
    assert both.budgets().held_BLH.sum((1, 2)).tolist() == entries
    assert both.bytes_held() == sum(entries) * entry_bytes
    assert [int(layer.sum()) for layer in held] == both.budgets().held_BLH.sum((0, 2)).tolist()


@torch.no_grad()
def answer(model, cache: Cache, mask: torch.Tensor, question: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Logits of a question and of what is chosen after it, `[B, S + steps, vocabulary]`."""
    logits, new = [], question
    for _ in range(steps):
        mask = torch.cat([mask, torch.ones_like(new)], 1)
        where = positions_of(mask)[:, -new.shape[1] :]
        given = {"attention_mask": mask, "position_ids": where}
        logits.append(model(input_ids=new, past_key_values=cache, **given).logits)
        new = logits[-1][:, -1:].argmax(-1)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("how", ["max", "prior", "veto", "drawn"])
@pytest.mark.parametrize("regime", ["prefill", "chunked", "prefill+decode"])
def test_forks_crops_and_generate_go_on_from_the_same_context(how, regime):
    model, (ids, mask) = tiny_model("qwen3"), tiny_batch((0, 7), 50)
    one, two = (tiny_batch((0, 0), 6, seed=seed)[0] for seed in (4, 5))
    settings = {"gates": gates_of(model), "keep_ratio": 0.3, "every": 32, "regime": regime}
    with retain.attach(model):
        cache = Cache(model, made(how), **settings).prefill(ids, mask)
        held, bytes_held = held_by(cache, mask), cache.bytes_held()
        forks = [cache.fork(), cache.fork()]
        # What a fork answers is what the original answers, and does not reach it.
        first = answer(model, forks[0], mask, one)
        assert cache.bytes_held() == bytes_held
        if regime != "chunked":  # there a question is a chunk, which evicts
            answer(model, cache, mask, two)
            cache.crop(50)
        assert all(torch.equal(a, b) for a, b in zip(held_by(cache, mask), held, strict=True))
        assert cache.bytes_held() == bytes_held
        assert torch.equal(answer(model, cache, mask, one), first)
        # The same through `generate`.
        whole = torch.cat([mask, torch.ones_like(one)], 1)
        tokens = model.generate(
            input_ids=torch.cat([ids, one], 1),
            attention_mask=whole,
            past_key_values=forks[1],
            max_new_tokens=5,
            do_sample=False,
        )
        assert torch.equal(tokens[:, 56:], first[:, 5:].argmax(-1))
    assert cache.entries_evicted > 0


@pytest.mark.parametrize("seeds", [None, [8, 9]])
def test_what_was_drawn_is_drawn_by_a_loaded_cache_too(seeds, tmp_path):
    """Saved between two evictions: the lots, and the share, are those of the cache that goes on."""
    model, (ids, mask) = tiny_model("qwen3"), tiny_batch((0, 7), 50)
    (question, _) = tiny_batch((0, 0), 6, seed=4)
    gates, held = gates_of(model), []
    gates.metadata = {}
    settings = {"gates": gates, "keep_ratio": 0.3, "every": 4, "regime": "prefill+decode", "seeds": seeds}
    with retain.attach(model):
        cache = Cache(model, drawn(), **settings).prefill(ids, mask)
        again = Cache.load(cache.save(tmp_path / "context.safetensors"), model, gates=gates)
        assert again.state.bound_policy.request.policy == drawn()
        logits = [answer(model, own, mask, question, 9) for own in (cache, again)]
        whole = torch.cat([mask, mask.new_ones(2, 14)], 1)
        held = [held_by(own, whole) for own in (cache, again)]
    assert torch.equal(*logits) and cache.evictions == again.evictions > 2
    assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))


def test_seeds_say_who_is_drawn():
    model, (ids, mask) = tiny_model("qwen3"), tiny_batch((0, 7), 50)
    settings, held = {"gates": gates_of(model), "keep_ratio": 0.3}, []
    with retain.attach(model):
        for seeds in (None, [0, 0], [0, 1]):
            cache = Cache(model, drawn(), seeds=seeds, **settings).prefill(ids, mask)
            held.append(torch.stack(held_by(cache, mask)))
    assert torch.equal(held[0], held[1]) and torch.equal(held[1][:, 0], held[2][:, 0])
    assert not torch.equal(held[1][:, 1], held[2][:, 1])


def test_a_share_to_be_drawn_is_stated_for_a_cache():
    model = tiny_model("llama")
    given = {"gates": gates_of(model), "keep_ratio": 0.5}
    made_by_name = Cache(model, "fused", draw={"share": 0.3}, **given)
    assert made_by_name.state.bound_policy.request.policy.draw == Draw(0.3)
    with pytest.raises(ValueError, match="draw shares out a budget that heads share, and scope 'head'"):
        Cache(model, "fused", draw={"share": 0.3}, scope="head", **given)
    with pytest.raises(ValueError, match="share: .* at most 1, got 3.0"):
        Cache(model, "fused", draw={"share": 3.0}, **given)
    with pytest.raises(ValueError, match="draw would not be read"):
        Cache(model, "fused", draw={"share": 0.3}, gates=given["gates"], threshold=1.0)


def test_layers_left_alone_are_not_scored_and_hold_all():
    model, (ids, mask) = tiny_model("gemma3"), tiny_batch((0, 5), 50)
    sliding = set(range(4)) - {spec.layer_idx for spec in describe(model)}
    assert sliding and layout_of(model).alone
    gates = gates_of(model)
    assert not sliding & set(gates.layers)
    with retain.attach(model):
        cache = Cache(model, fused("prior"), gates=gates, keep_ratio=0.3).prefill(ids, mask)
        full = Cache(model, None).prefill(ids, mask)
    assert len(cache.state.ragged) == 4 - len(sliding)
    for idx in sliding:
        assert torch.equal(cache.layers[idx].keys, full.layers[idx].keys)

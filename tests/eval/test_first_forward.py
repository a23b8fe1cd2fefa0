"""A cache that is shown what another forward came to is one that read for itself, to the bit; and a context
is read once for all cells."""

from dataclasses import replace

import pytest
import torch

import retain
from retain.eval.run.checks import load_checked
from retain.eval.run.first_forward import read_first_forward
from retain.gates import GATES, GateSet
from retain.hf.cache.cache import Cache
from retain.hf.cache.regime import NAMES
from retain.hf.intercept.attach import attach
from retain.hf.intercept.lookahead_pass import lookahead_gates
from retain.hf.model.decoder import base_model
from retain.hf.version_names import CACHE
from tests.eval.small import lines_of, save_table, small
from tests.tiny import tiny_batch, tiny_model

CHUNK = 16
FEW = {"sinks": 1, "recent": 4, "prefix_fraction": 0.0, "suffix_fraction": 0.0}
POLICIES = ("random", "snapkv", "h2o", "cake", "layer_defensivekv", "gate", "learned")


@pytest.fixture(scope="module")
def model():
    own = tiny_model("qwen3", seed=0)
    attach(own)
    return own


def gates_of(family: str) -> GateSet:
    """Untrained gates of the model that tell entries apart."""
    model = tiny_model("qwen3", seed=0)
    torch.manual_seed(1)
    if GATES[family].extension is not None:
        return lookahead_gates(model, num_tokens=4, rank=2)
    gates = retain.new_gates(model, family, seed=1)
    for parameter in gates.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return gates


def state(cache):
    """Everything that a cache goes on from."""
    state = cache.state
    found = {
        "seen": [
            cache.num_seen,
            cache.evictions,
            state.evicted_at,
            state.moments,
            state.noted,
        ],
        "prompt": [state.prompt_B, state.width, state.seeds],
        "bytes": [cache.bytes_held(), cache.bytes_allocated()],
        "history": [state.valid_BT, state.positions_BT, state.history.token_ids_BT],
    }
    for number, layer in enumerate(state.ragged):
        store, recent = layer.store, layer.recent
        index_N = store.index_N()
        sides = {"keys": store.keys_CD, "values": store.values_CD, "positions": store.positions_C}
        own = {name: side[index_N] for name, side in {**sides, **store.beside}.items()}
        found[f"layer {number}"] = [layer.seen, layer.scaling, layer.soft_cap, store.lengths_R]
        found[f"entries {number}"] = [*own, *own.values()]
        found[f"recent {number}"] = [*recent.queries, "hidden", *recent.hidden, *recent.stream]
    return found


def same(one, other):
    first, second = state(one), state(other)
    assert [*first] == [*second]
    for name, own in first.items():
        assert len(own) == len(second[name]), name
        for a, b in zip(own, second[name], strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name


def go_on(model, cache, ids, mask):
    """A question, and some tokens of an answer."""
    later = torch.cat([ids, ids[:, 5:9]], dim=1)
    known = torch.cat([mask, torch.ones_like(mask[:, :4])], dim=1)
    made = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    return model.generate(input_ids=later, attention_mask=known, **{CACHE: cache}, **made)


@pytest.mark.parametrize("regime", NAMES)
def test_a_cache_that_is_shown_a_read_is_one_that_read(model, regime):
    chunk = CHUNK if "chunked" in regime else None
    ids, mask = tiny_batch((0, 0) if chunk else (0, 9), 60)
    with torch.inference_mode():
        read = read_first_forward(model, ids, mask, chunk=chunk)
        kept = set()
        for policy in (None, *POLICIES):
            gates = gates_of("linear") if policy in ("gate", "learned") else None
            own = {"regime": regime, "every": 3, "seeds": [5, 6], "keep_ratio": 0.4, "protection": FEW}
            own = {} if policy is None else own
            shown, plain = (Cache(model, policy, gates=gates, **own) for _ in range(2))
            assert read.into(shown) is shown
            plain.prefill(ids, mask, chunk_size=chunk)
            same(shown, plain)
            assert bool(shown.evictions) == (policy is not None and regime != "decode")
            store = shown.state.stores[0]
            kept.add(tuple(store.positions_C[store.index_N()].tolist()))
            assert torch.equal(go_on(model, shown, ids, mask), go_on(model, plain, ids, mask))
            same(shown, plain)
            assert bool(shown.evictions) == (policy is not None)
    assert len(kept) == 1 if regime == "decode" else len(kept) > len(POLICIES) / 2


@pytest.mark.parametrize("family", sorted(GATES))
def test_gates_are_shown_what_they_look_at(model, family):
    gates = gates_of(family)
    # Some ask behind a whole prompt, some look at all of it: they take the regime that evicts once, at once.
    chunk = None if gates.extension is not None or family == "context" else CHUNK
    regime = "prefill" if chunk is None else "chunked+decode"
    ids, mask = tiny_batch((0, 0), 60)
    with torch.inference_mode():
        read = read_first_forward(model, ids, mask, chunk=chunk, wanted=gates.inputs)
        own = {"regime": regime, "every": 3, "keep_ratio": 0.4, "protection": FEW}
        shown, plain = (Cache(model, "gate", gates=gates, **own) for _ in range(2))
        read.into(shown)
        plain.prefill(ids, mask, chunk_size=chunk)
        same(shown, plain)
        assert torch.equal(go_on(model, shown, ids, mask), go_on(model, plain, ids, mask))
        same(shown, plain)


def test_a_model_with_layers_of_its_own_reads_for_every_cache():
    hybrid = tiny_model("gemma3")
    attach(hybrid)
    ids, mask = tiny_batch((0, 3), 40)
    read = read_first_forward(hybrid, ids, mask)
    assert read.evidence is None
    shown, plain = (Cache(hybrid, "snapkv", keep_ratio=0.4, protection=FEW) for _ in range(2))
    same(read.into(shown), plain.prefill(ids, mask))


@pytest.mark.parametrize(("when", "reads"), [("prefill", 1), ("decode", 3), ("chunk", 3)])
def test_a_context_is_read_once_for_all_policies_and_budgets(gated, tmp_path, when, reads):
    table = save_table(tmp_path / "ragged.jsonl", shorter=60)
    config = small(gated, policies=("random", "snapkv", "learned"), when=(when,), keep_ratios=(0.6, 0.7))
    config = replace(config, tasks=(table,), items_per_task=3, batch_items=3, chunk_tokens=40, every=2)
    first = []

    def count(module, args, kwargs):
        if kwargs[CACHE].get_seq_length() == 0:
            first.append(kwargs["input_ids"].shape)

    def counted(*given):
        loaded, contexts = load_checked(*given)
        first.clear()
        base_model(loaded.model).register_forward_pre_hook(count, with_kwargs=True)
        return loaded, contexts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.eval.small.load_checked", counted)
        assert len(lines_of(config)) == 3 * (1 + 3 * 2)
    assert len(first) == reads  # one by one where entries go meanwhile

"""save, load, continue equals continue; and what cannot be saved or loaded says so before anything is
changed."""

import copy
import itertools
import json
import os
import resource

import pytest
import torch
from safetensors.torch import save_file

import retain
from retain.cache import file_format
from retain.cache.precision import Precision
from retain.eviction import WHEN
from retain.gates.artifact import save_gates
from retain.hf.cache.cache import Cache, saving
from retain.hf.model.decoder import describe
from retain.hf.model.identity import fingerprint
from retain.hf.version_names import CACHE
from retain.scores import masked_score
from tests.hf.masked import positions_of, random_keep
from tests.hf.moments import policy
from tests.refused import refused
from tests.tiny import FAMILIES, attached, tiny_batch, tiny_model

PADS = (0, 3, 11)
SOME = ("qwen3", "gemma3", "qwen3_next")


def random_gates(model, seed=0):
    """Gates of nobody's training, that tell entries apart."""
    gates = retain.new_gates(model, "linear")
    generator = torch.Generator().manual_seed(seed)
    for weight in gates.parameters():
        weight.data.normal_(generator=generator)
    gates.metadata = {}
    return gates


@torch.no_grad()
def forward(model, cache, ids, mask):
    """A forward, with positions that count a sequence's real tokens."""
    where = positions_of(mask)[:, -ids.shape[1] :]
    return model(input_ids=ids, attention_mask=mask, position_ids=where, **{CACHE: cache}).logits


def grown(mask, more):
    return torch.cat([mask, mask.new_ones(mask.shape[0], more) if isinstance(more, int) else more], dim=1)


def continued(model, cache, mask, steps=9):
    """Logits of a turn (padded, where no layer takes padding for tokens) and of steps after it, through
    further moments."""
    whole = cache.state.layout.alone or cache.state.when.again
    turn, padded = tiny_batch((0, 0, 0) if whole else (2, 0, 1), 6, seed=7)
    turn, padded = turn[: mask.shape[0]], padded[: mask.shape[0]]
    mask = grown(mask, padded)
    logits = [forward(model, cache, turn, mask)[:, -1:]]
    for _ in range(steps):
        mask = grown(mask, 1)
        logits.append(forward(model, cache, logits[-1].argmax(-1), mask))
    return torch.cat(logits, dim=1)


def started(model, cache, steps=7):
    """A padded prompt and some steps, so that the next moment is due in the middle of nothing."""
    ids, mask = tiny_batch(PADS)
    token = forward(model, cache, ids, mask)[:, -1:].argmax(-1)
    for _ in range(steps):
        mask = grown(mask, 1)
        token = forward(model, cache, token, mask).argmax(-1)
    return mask


def assert_same_state(one, other):
    """All of a conversation: what is held, what was seen, and when the next moment is."""
    assert json.dumps(saving._header(one)) == json.dumps(saving._header(other))
    a, b = dict(saving._tensors(one)), dict(saving._tensors(other))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]) and tensor.dtype == b[name].dtype, name


@pytest.mark.parametrize("family", FAMILIES)
def test_save_load_continue_equals_continue(family, tmp_path):
    model = attached(family)
    for when in WHEN if family in SOME else ("chunk+decode",):
        cache = Cache(model, policy=policy, when=when, every=5)
        mask = started(model, cache)
        assert cache.evictions == (1 if when in ("prefill", "chunk", "decode") else 2)
        path = cache.save(tmp_path / "some" / "context.safetensors")
        again = Cache.load(path, model, policy=policy)
        assert_same_state(again, cache)
        assert again.report() == again.fork().report() and again.entries_held == cache.entries_held
        twice = Cache.load(again.save(tmp_path / "again.safetensors"), model, policy=policy)
        want = continued(model, cache, mask)
        assert torch.equal(continued(model, again, mask), want)
        assert torch.equal(continued(model, twice, mask), want)
        assert again.evictions == cache.evictions >= (1 if when == "prefill" else 2)


POLICIES = {
    "snapkv": {"observed_settings": {"window": 4}, "keep_ratio": 0.4},
    "h2o": {"tokens_per_head": 12},
    "lru": {"tokens_per_head": 12},
    "expected_attention": {"keep_ratio": 0.4},
    "random": {"keep_ratio": 0.4, "seeds": [5, 6, 7]},
    "adakv": {"observed_settings": {"window": 4}, "keep_ratio": 0.4, "pinned": [[(1, 3)], [], [(0, 2)]]},
    "gate": {"keep_ratio": 0.4, "gates": "own"},
    # A share of which is drawn: by seeds, which the file knows.
    "learned": {
        "keep_ratio": 0.4,
        "gates": "own",
        "draw": {"share": 0.4},
        "observed_settings": {"window": 4},
    },
    "h2o:admission": {"threshold": 0.7, "pinned": [(2, 4)]},
}
SMALL = {"sinks": 2, "recent": 4, "minimum": 2, "prefix_fraction": 0.0, "suffix_fraction": 0.0}


# Those that hold entries in fewer bits.
PACKED = {
    "snapkv:2 bits": {**POLICIES["snapkv"], "protection": SMALL, "precision": {"bits": 2, "recent": 4}},
    "full:4 bits": {"precision": {"bits": 4, "recent": 4}},
}


@pytest.mark.parametrize(
    ("name", "when"),
    [*itertools.product(POLICIES, ("prefill", "prefill+decode")), *((name, "prefill") for name in PACKED)],
)
def test_policies_by_name_are_in_the_file(name, when, tmp_path):
    model = attached("qwen3")
    settings = dict(PACKED[name]) if name in PACKED else {"protection": SMALL, **POLICIES[name]}
    gates = random_gates(model) if settings.pop("gates", None) else None
    cache = Cache(model, name.partition(":")[0], when=when, every=5, gates=gates, **settings)
    mask = started(model, cache, steps=8)
    path = cache.save(tmp_path / "context.safetensors")
    again = Cache.load(path, model, gates=gates)
    assert_same_state(again, cache)
    assert again.state.bound_policy.policy == cache.state.bound_policy.policy
    assert again.state.bound_policy.budget == cache.state.bound_policy.budget
    before = [part.packed and part.packed.entries_held for part in cache.state.stores]
    steps = 33 if name in PACKED else 9
    assert torch.equal(continued(model, again, mask, steps), continued(model, cache, mask, steps))
    assert_same_state(again, cache)
    assert cache.report().total.entries_evicted > 0 or name == "full:4 bits"
    for store, count in zip(again.state.stores, before, strict=True):  # packing went on
        assert (store.packed is not None) == (name in PACKED) and (
            not count or store.packed.entries_held > count
        )
    # A new conversation on the same cache asks the same policy.
    for one in (again, cache):
        one.reset()
        started(model, one)
    assert_same_state(again, cache)


def test_without_a_policy_after_a_hand_made_eviction_and_after_concat(tmp_path):
    model, (ids, mask) = attached("llama"), tiny_batch(PADS)
    held = Cache(model, policy=None).prefill(ids, mask, evict=False, hold_evidence=True)
    # The precision of a layer is not the policy's, or is nobody's any more.
    precisions = (None, Precision(bits=4, recent=1))
    forks = [held.fork().evict_with(random_keep(model, mask), precision=one) for one in precisions]
    stacked = Cache.concat(forks)
    assert stacked.state.stores[0].packed is not None
    for cache in (Cache(model, policy=None).prefill(ids, mask), *forks, stacked):
        again = Cache.load(cache.save(tmp_path / "context.safetensors"), model)
        assert again.state.bound_policy.name == cache.state.bound_policy.name
        assert_same_state(again, cache)
        turn, padded = tiny_batch((0, 2, 1, 0, 3, 0)[: cache.batch_size], 5, seed=9)
        whole = grown(mask.repeat(cache.batch_size // 3, 1), padded)
        assert torch.equal(forward(model, again, turn, whole), forward(model, cache, turn, whole))


@pytest.mark.parametrize("when", ["prefill", "prefill+decode"])
@pytest.mark.parametrize("family", SOME)
def test_the_file_is_the_bytes_held_and_little_more(family, when, tmp_path):
    model, (ids, mask) = attached(family), tiny_batch((0, 100, 350), 900)
    cache = Cache(model, policy=policy, when=when, every=5).prefill(ids, mask)
    forward(model, cache, ids[:, :1], grown(mask, 1))
    size, report = os.path.getsize(cache.save(tmp_path / "context.safetensors")), cache.report()
    extra = 4 * cache.entries_held  # positions; this policy keeps nothing else
    rows = sum(4 * 3 * spec.num_kv_heads for spec in cache.state.specs)
    alone = sum(layer.bytes_held + 8 for layer in report.alone)
    recent = sum(layer.recent.num_bytes for layer in cache.state.ragged)
    exact = cache.bytes_held() + extra + rows + alone + recent + 3 * (9 * 901 + 8)
    assert exact <= size <= exact + 1024 * len(cache.layers) + 8192
    assert size < cache.report().total.bytes_allocated + alone + 3 * 10 * 901  # no slack


def newest(evidence):
    """A score of the caller's."""
    return masked_score(evidence.positions_BT[:, None].float().expand(-1, 2, -1), evidence.exists_BHT, "rank")


def saved(tmp_path, name="qwen3", **settings):
    model = attached(name)
    settings = {"policy": policy, **settings}
    cache = Cache(model, **settings)
    started(model, cache)
    return model, cache, cache.save(tmp_path / "context.safetensors")


def test_a_failed_save_leaves_the_old_file(tmp_path):
    model, cache, path = saved(tmp_path)
    before = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limit[1]))
    try:
        with pytest.raises(OSError, match="too large: .*context.safetensors could not be written, and is"):
            cache.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]
    cache.save(path)  # and nothing else changed
    assert path.read_bytes() == before


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path):
    model, _, path = saved(tmp_path)
    content = bytearray(path.read_bytes())
    places = [
        *range(20, len(content), len(content) // 23),
        len(content) - 1,
        content.index(b"evicted_at") + 14,
    ]
    for place in places:
        content[place] ^= 1
        path.write_bytes(content)
        refused("truncated or corrupt|not written by", Cache.load, path, model, policy=policy)
        content[place] ^= 1
    path.write_bytes(content)
    Cache.load(path, model, policy=policy)


def test_other_files_are_refused(tmp_path):
    model, _, path = saved(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist: pass the path"):
        Cache.load(tmp_path / "nowhere", model)
    save_file({"weight": torch.ones(3)}, path)
    refused("was not written by cache.save", Cache.load, path, model)
    for version, step in (
        (7, "upgrade retain to load it"),
        (5, "read the context again and save it, or load"),
    ):
        told = json.dumps({"schema_version": version, "header": {"unknown": 1}})
        save_file({"weight": torch.ones(3)}, path, {file_format.FORMAT: told})
        refused(f"schema version {version}, this retain reads 6: {step}", Cache.load, path, model)


def test_another_model_is_refused(tmp_path):
    model, _, path = saved(tmp_path)
    assert describe(model)[0].dtype == torch.float32
    other = tiny_model("qwen3", seed=1)
    refused(r"of another model \(sha256 .* -> .*; saved -> at hand\)", Cache.load, path, other, policy=policy)
    deeper = tiny_model("qwen3", num_hidden_layers=4)
    refused("num_layers 3 -> 4", Cache.load, path, deeper, policy=policy)
    half = tiny_model("qwen3", dtype=torch.bfloat16)
    assert fingerprint(half) == fingerprint(model)
    refused("dtype 'torch.float32' -> 'torch.bfloat16'", Cache.load, path, half, policy=policy)


def test_what_a_file_cannot_hold_must_be_passed(tmp_path):
    model, _, path = saved(tmp_path)
    refused(r"policy is a function \('policy'\), and policy=None was passed", Cache.load, path, model)
    refused("policy='snapkv' was passed: pass the same function", Cache.load, path, model, policy="snapkv")
    gates, some = random_gates(model), {"protection": SMALL, "keep_ratio": 0.4}
    refused("gates .* would not be read", Cache.load, path, model, policy=policy, gates=gates)
    _, _, path = saved(tmp_path, policy="gate", gates=gates, **some)
    refused("policy 'gate' needs gates", Cache.load, path, model)
    said = r"policy is in the file \('gate'\), and policy='h2o' was passed"
    refused(said, Cache.load, path, model, policy="h2o", gates=gates)


def test_a_score_of_the_callers_is_not_asked_again(tmp_path):
    """It evicts once, so what is loaded keeps everything from then on."""
    model = attached("qwen3")
    cache = Cache(model, "knorm", observed=newest, keep_ratio=0.4, protection=SMALL)
    mask = started(model, cache)
    again = Cache.load(cache.save(tmp_path / "context.safetensors"), model)
    assert again.report() == cache.report() and again.report().total.entries_evicted > 0
    assert torch.equal(continued(model, again, mask), continued(model, cache, mask))


def test_other_gates_are_refused(tmp_path):
    model = tiny_model("qwen3")
    folders = []
    for seed in (0, 1):
        gates = random_gates(model, seed=seed)
        folders.append(save_gates(gates, tmp_path / str(seed), fingerprint=fingerprint(model)))
    settings = {"protection": SMALL, "keep_ratio": 0.4, "when": "prefill+decode", "every": 5}
    _, cache, path = saved(tmp_path, policy="gate", gates=folders[0], **settings)
    assert_same_state(Cache.load(path, model, gates=folders[0]), cache)
    with pytest.raises(ValueError, match=r"evicted with gates \w{12}, and these are \w{12} \(sha256\)"):
        Cache.load(path, model, gates=folders[1])


def test_what_cannot_be_saved(tmp_path):
    model = tiny_model("qwen3")
    ids, mask = tiny_batch(PADS)
    path = tmp_path / "context.safetensors"
    with retain.attach(model), torch.no_grad():
        cache = Cache(model, policy=policy)
        refused("has seen no tokens", cache.save, path)
        dense = Cache(model, policy=None).prefill(ids, mask, evict=False)
        refused("holds its prefill densely.*evict first", dense.save, path)
        hook = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=ids, attention_mask=mask, **{CACHE: cache})
        hook.remove()
        refused("broke off", cache.save, path)
        assert os.listdir(tmp_path) == []
        dense.evict_with([mask.bool()[:, None].expand(-1, 2, -1)] * 3).save(path)


def test_copies_of_a_cache_share_its_model():
    model = attached("llama")
    cache = Cache(model, "snapkv", keep_ratio=0.5, protection={"recent": 4}).prefill(tiny_batch((0,), 40)[0])
    for same in (copy.copy(cache), copy.deepcopy(cache)):
        assert same.model is model and same.state is not cache.state
        assert_same_state(same, cache)

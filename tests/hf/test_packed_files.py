"""Files of caches in few bits: a cache goes on with what it held, and headers that cannot be are refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from retain.cache import file_format
from retain.cache.precision import Precision
from retain.hf.cache.cache import Cache
from tests.hf.test_saving import SMALL, assert_same_state, continued, forward, grown, started
from tests.refused import refused
from tests.tiny import attached, tiny_batch

SNAPKV = {"policy": "snapkv", "protection": SMALL, "observed_settings": {"window": 4}}
POLICIES = {
    "snapkv": {**SNAPKV, "keep_ratio": 0.5},
    "again": {**SNAPKV, "keep_ratio": 0.5, "regime": "prefill+decode", "every": 5},
    "full": {"policy": "full"},
}
PACKED = {"bits": 4, "recent": 4}


@pytest.mark.always
@pytest.mark.parametrize(("policy", "bits"), [("snapkv", 4), ("again", 2), ("full", 4)])
def test_packed_entries_go_on_exactly(policy, bits, tmp_path):
    model = attached("llama")
    cache = Cache(model, **POLICIES[policy], precision={"bits": bits, "recent": 4})
    mask = started(model, cache)
    path = cache.save(tmp_path / "context.safetensors")
    again = Cache.load(path, model)
    assert_same_state(again, cache)
    assert again.state.packed_at == cache.state.packed_at
    assert again.state.bound_policy.precision == cache.state.bound_policy.precision is not None
    for one, other in zip(again.state.stores, cache.state.stores, strict=True):
        assert one.precision == other.precision and one.packed.codec == other.packed.codec
        assert one.bytes_held == other.bytes_held
    before = [store.packed.entries_held for store in cache.state.stores]
    assert torch.equal(continued(model, again, mask, steps=33), continued(model, cache, mask, steps=33))
    assert_same_state(again, cache)
    if policy == "full":  # packing went on
        after = [store.packed.entries_held for store in again.state.stores]
        assert all(one > other for one, other in zip(after, before, strict=True))
        for one in (again, cache):  # and goes on in a new conversation
            one.reset()
            started(model, one, steps=0)
        assert_same_state(again, cache)


def test_a_hand_made_precision_and_a_stack_of_caches(tmp_path):
    """The precision of a layer is not the policy's, or is nobody's any more."""
    model, (ids, mask) = attached("qwen3"), tiny_batch((0, 3))
    keep = [torch.rand(2, 2, 40, generator=torch.Generator().manual_seed(layer)) < 0.6 for layer in range(3)]
    held = [Cache(model, policy=None).prefill(ids, mask, evict=False) for _ in range(2)]
    held[0].evict_with(keep, precision=Precision(bits=4, recent=4))
    held[1].evict_with(keep)
    for cache in (held[0], Cache.concat(held)):
        again = Cache.load(cache.save(tmp_path / "context.safetensors"), model)
        assert_same_state(again, cache)
        assert again.state.bound_policy.precision is None
        turn, own = tiny_batch((0, 2, 1, 0)[: cache.batch_size], 5, seed=9)
        whole = grown(mask.repeat(cache.batch_size // 2, 1), own)
        assert torch.equal(forward(model, again, turn, whole), forward(model, cache, turn, whole))


def naive_codes(x_ND, bits, groups):
    """Decoded numbers of these groups of (entry, channel), one after another, by float64 loops; scales are
    rounded to float16."""
    back = x_ND.double().clone()
    for group in groups:
        own = [float(x_ND[place]) for place in group]
        least = float(torch.tensor(min(own), dtype=torch.float32).half())
        step = float(torch.tensor((max(own) - least) / (2**bits - 1), dtype=torch.float32).half())
        for place, x in zip(group, own, strict=True):
            code = min(max(round((x - least) / step), 0), 2**bits - 1) if step > 0 else 0
            back[place] = least + step * code
    return back


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_file_in_few_bits_is_kivis_layout_with_its_error(bits, tmp_path):
    model = attached("llama", head_dim=40)
    cache = Cache(model, **POLICIES["snapkv"]).prefill(*tiny_batch((0, 3), 70))
    path = cache.save(tmp_path / "context.safetensors", bits=bits)
    again, (header, tensors) = Cache.load(path, model), file_format.read_file(path)
    assert header["coded"] == bits
    for idx, (one, other) in enumerate(zip(again.state.stores, cache.state.stores, strict=True)):
        assert one.packed is None and torch.equal(one.lengths_BH, other.lengths_BH)
        size = 0
        for name, decoded, held in zip(("keys", "values"), one.flat()[:2], other.flat()[:2], strict=True):
            assert decoded.dtype == held.dtype
            start, groups = 0, []
            for length in other.plain.lengths_R.tolist():
                for first in range(start, start + length, 32):
                    entries = range(first, min(first + 32, start + length))
                    if name == "keys":
                        groups += [[(entry, channel) for entry in entries] for channel in range(40)]
                    else:
                        groups += [
                            [(entry, channel) for channel in channels]
                            for entry in entries
                            for channels in (range(32), range(32, 40))
                        ]
                start += length
            want = naive_codes(held, bits, groups)
            # Where a number lies between two codes, either is as near.
            assert float(((decoded.double() - want).abs() > 1e-4).double().mean()) < 1e-3
            naive_error = (want - held.double()).square().sum()
            assert float((decoded.double() - held.double()).square().sum()) == pytest.approx(
                float(naive_error), rel=1e-4
            )
            size += 4 * len(groups) + held.shape[0] * 40 * bits // 8
        own = file_format.within(tensors, f"layer.{idx}.store.")
        assert size == sum(own[key].nbytes for key in ("keys", "values", "value_scales", "key_scales"))
        assert set(own) == {"keys", "values", "value_scales", "key_scales", "groups", "positions", "lengths"}
        for name, column in other.beside.items():
            assert torch.equal(one.beside[name], column)
    # What was loaded is a plain cache, whose own file is exact.
    exact = again.save(tmp_path / "exact.safetensors")
    assert_same_state(Cache.load(exact, model), again)


def test_what_cannot_be_in_few_bits(tmp_path):
    model = attached("llama")
    cache = Cache(model, policy=None).prefill(*tiny_batch())
    path = tmp_path / "context.safetensors"
    for bits in (3, 16, 0):
        refused(r"bits is 8, 4 or 2; got", cache.save, path, bits=bits)
    cache.state.stores[0].plain.values_CD[3, 2] = 1e5
    refused(r"reach 1e\+05, and scales are float16.*no bits=", cache.save, path, bits=4)
    assert not path.exists()


WRONG = {
    "bits": (lambda header: header["precision"].update(bits=3), "precision.bits: input should be"),
    "none": (lambda header: header.update(precision=None), "packed entries, and no precision"),
    "rule": (lambda header: header["rule"]["precision"].update(recent=-1), "precision.recent: input"),
    "counters": (lambda header: header.pop("packed_at"), "does not hold what cache.save writes"),
}


@pytest.fixture(scope="module")
def packed_file(tmp_path_factory):
    """A file with packed entries."""
    model = attached("qwen3")
    cache = Cache(model, "full", precision=PACKED)
    started(model, cache)
    return model, file_format.read_file(cache.save(tmp_path_factory.mktemp("saved") / "a.safetensors"))


def written(path, header, tensors):
    """A file that is whole by its digest."""
    text = json.dumps(header)
    told = {
        "schema_version": file_format.SCHEMA_VERSION,
        "sha256": file_format.digest(text, tensors.items()),
        "header": text,
    }
    save_file(tensors, path, {file_format.FORMAT: json.dumps(told)})
    return path


@pytest.mark.parametrize("name", WRONG)
def test_a_header_that_nobody_writes_is_refused(name, packed_file, tmp_path):
    model, (header, tensors) = packed_file
    change, reason = WRONG[name]
    header = json.loads(json.dumps(header))
    change(header)
    refused(reason, Cache.load, written(tmp_path / "context.safetensors", header, tensors), model)

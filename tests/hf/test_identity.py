"""The identity of a model: every weight counts, and adapters where keys and values are stored; gates and
cache files are refused on another."""

import copy

import pytest

import retain
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import base_model
from retain.hf.model.identity import fingerprint, identity_of
from tests.hf.test_adapted_weights import merged, wrapped
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model

peft = pytest.importorskip("peft")
IDS, MASK = tiny_batch((0,), 40)
QV = {"target_modules": ["q_proj", "v_proj"]}


def read(model):
    cache = Cache(model, "snapkv", keep_ratio=0.5, protection={"recent": 4})
    with retain.attach(model):
        return cache.prefill(IDS, MASK)


def with_other(model, name):
    """The same model, of which one weight is another."""
    other = copy.deepcopy(model)
    weight = other.get_parameter(name)
    weight.data = weight.data * 1.25 + 0.125
    return other


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss", "qwen3_next", "mixtral"])
def test_every_weight_counts(family):
    model = tiny_model(family)
    base = base_model(model)
    names = [name for name, _ in base.named_parameters()]
    assert len(names) > 15
    known = fingerprint(model)
    found = {fingerprint(with_other(base, name))["sha256"] for name in names} | {known["sha256"]}
    assert len(found) == len(names) + 1
    assert known == fingerprint(base) == fingerprint(copy.deepcopy(model).bfloat16())
    assert fingerprint(with_other(model, "lm_head.weight")) == known
    assert identity_of(model, head=True) != identity_of(with_other(model, "lm_head.weight"), head=True)


def test_a_model_without_all_weights_has_no_fingerprint():
    lost = tiny_model("llama")
    lost.model.norm.to("meta")
    refused("norm.weight is on the meta device", fingerprint, lost)


def test_how_positions_turn_is_part_of_what_a_file_holds(tmp_path):
    model = tiny_model("llama")
    path = read(model).save(tmp_path / "c")
    longer = tiny_model(
        "llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    )
    assert fingerprint(longer) == fingerprint(model)
    refused("another model .rotary", Cache.load, path, longer)


@pytest.mark.parametrize("change", ["merged", "on"])
def test_a_file_of_the_base_is_refused_on_what_an_adapter_makes_of_it(change, tmp_path):
    base = tiny_model("llama")
    path = read(base).save(tmp_path / "c")
    known = wrapped(tiny_model("llama"), **QV)
    assert Cache.load(path, copy.deepcopy(base)).num_seen == 40
    with known.disable_adapter():
        assert Cache.load(path, known).num_seen == 40
    if change == "merged":
        refused("of another model .sha256", Cache.load, path, merged(known))
    else:
        refused("of another model .adapters None -> ", Cache.load, path, known)


def test_names_of_adapters_are_free_and_merged_ones_are_weights():
    one, other = (wrapped(tiny_model("llama"), names=(name,), **QV) for name in ("default", "x"))
    assert identity_of(one) == identity_of(other) and "adapters" in identity_of(one)
    assert fingerprint(one) == fingerprint(tiny_model("llama"))
    want = identity_of(merged(one))
    one.merge_adapter()
    assert identity_of(one) == want and "adapters" not in want
    headed = wrapped(tiny_model("llama"), target_modules=["lm_head"])
    answers = identity_of(headed, head=True)
    with headed.disable_adapter():
        assert identity_of(headed, head=True) != answers
    assert identity_of(headed) == identity_of(tiny_model("llama"))

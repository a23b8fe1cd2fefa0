"""Gates as a peft adapter: a round trip through peft's own files, other adapters beside it, its limits."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, LoraModel, PeftConfig, PeftModel, get_peft_model

import retain
from retain.gates import GateSet
from retain.hf.cache.cache import Cache
from retain.hf.model import adapter
from retain.hf.model.identity import fingerprint
from retain.hf.version_names import CACHE
from tests.close import assert_close
from tests.launch import launch_environment
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model

PROTECTION = {
    "protection": {"sinks": 1, "recent": 2, "prefix_fraction": 0.0, "suffix_fraction": 0.0, "minimum": 0}
}


def gates_of_family(family: str, model, seed: int = 0, **metadata) -> GateSet:
    torch.manual_seed(seed)
    gates = retain.new_gates(model, family, seed=seed)
    for tensor in gates.state_dict().values():  # buffers too: what training estimates must travel as well
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape) + 0.5)
    gates.metadata = metadata
    return gates


def same(one: GateSet, other: GateSet) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return list(left) == list(right) and all(
        torch.equal(tensor, right[name]) for name, tensor in left.items()
    )


# Families that look at the attention input alone.
HIDDEN = ("context", "decay", "linear", "lowrank", "mlp")


@pytest.mark.parametrize("family", HIDDEN)
@pytest.mark.parametrize("base", ["llama", "phi3", "gemma3", "qwen3_next"])
def test_a_folder_of_peft_gives_the_gates_back(base: str, family: str, tmp_path: Path) -> None:
    model = tiny_model(base)
    gates = gates_of_family(family, model, fingerprint=fingerprint(model), protected_window=2)
    wrapped = adapter.wrap(model, gates)
    assert same(adapter.gates_of(wrapped), gates)
    wrapped.save_pretrained(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    read = PeftModel.from_pretrained(tiny_model(base), tmp_path)
    again = adapter.gates_of(read)
    assert same(again, gates) and again.metadata == gates.metadata and again.family == family
    assert PeftConfig.from_pretrained(tmp_path).family == family


def test_another_name_loads_the_same_tensors(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    first, second = gates_of_family("mlp", model), gates_of_family("mlp", model, seed=1)
    adapter.wrap(tiny_model("qwen3"), second).save_pretrained(tmp_path)
    wrapped = adapter.wrap(model, first, adapter_name="first")
    result = wrapped.load_adapter(tmp_path, "second")
    assert [key for key in result.missing_keys if "retain_" in key] == [] and result.unexpected_keys == []
    assert same(adapter.gates_of(wrapped, "second"), second) and same(
        adapter.gates_of(wrapped, "first"), first
    )
    assert same(adapter.gates_of(wrapped), first)
    wrapped.set_adapter("second")
    assert same(adapter.gates_of(wrapped), second)
    wrapped.delete_adapter("first")
    refused("unknown adapter of gates 'first'", adapter.gates_of, wrapped, "first")


@pytest.mark.parametrize("pair", list(itertools.permutations(HIDDEN, 2)), ids="-".join)
def test_two_gate_sets_of_other_families_live_beside_each_other(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    model = tiny_model("qwen3")
    both = [gates_of_family(family, model, seed) for seed, family in enumerate(pair)]
    for family, gates in zip(pair, both, strict=True):
        model = adapter.wrap(model, gates, family)
    for family, gates in zip(pair, both, strict=True):
        assert same(adapter.gates_of(model, family), gates)
        model.set_adapter(family)
        assert same(adapter.gates_of(model), gates)
    model.save_pretrained(tmp_path)
    read = PeftModel.from_pretrained(tiny_model("qwen3"), tmp_path / pair[0], adapter_name=pair[0])
    read.load_adapter(tmp_path / pair[1], pair[1])
    assert all(same(adapter.gates_of(read, family), own) for family, own in zip(pair, both, strict=True))
    model.delete_adapter(pair[0])
    assert same(adapter.gates_of(model, pair[1]), both[1])


def test_the_model_computes_what_it_did_and_unload_leaves_it_as_it_was() -> None:
    model = tiny_model("qwen3")
    input_ids, mask = tiny_batch((0, 4))
    modules, names = list(model.modules()), list(model.state_dict())
    before = model(input_ids, attention_mask=mask).logits
    wrapped = adapter.wrap(model, gates_of_family("linear", model))
    assert torch.equal(wrapped(input_ids=input_ids, attention_mask=mask).logits, before)
    assert fingerprint(wrapped) == fingerprint(tiny_model("qwen3"))
    assert wrapped.unload() is model
    assert list(model.modules()) == modules and list(model.state_dict()) == names
    assert not hasattr(model, "peft_config")
    assert torch.equal(model(input_ids, attention_mask=mask).logits, before)
    refused("layer 0 of this model carries no gates", adapter.gates_of, model)


def test_gates_are_not_handed_out_disabled_nor_merged() -> None:
    model = tiny_model("llama")
    wrapped = adapter.wrap(model, gates_of_family("linear", model))
    with wrapped.disable_adapter():
        refused("are disabled: name one .adapter_name=. of .'default'", adapter.gates_of, wrapped)
    assert adapter.gates_of(wrapped).family == "linear"
    said = "nothing to merge: take adapter.gates_of.model. and call unload"
    refused(said, wrapped.merge_and_unload)


def test_lora_may_be_merged_beside_the_gates() -> None:
    model = tiny_model("qwen3")
    input_ids, mask = tiny_batch((0, 4))
    gates = gates_of_family("mlp", model)
    adapter.wrap(model, gates)
    with pytest.warns(UserWarning, match="multiple adapters"):  # peft's word on any second method
        lora = LoraModel(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), "lora")
    with_lora = lora(input_ids=input_ids, attention_mask=mask).logits
    merged = lora.merge_and_unload()
    assert merged is model and same(adapter.gates_of(merged, "default"), gates)
    assert all(
        type(module) is torch.nn.Linear for name, module in model.named_modules() if name.endswith("q_proj")
    )
    assert_close(merged(input_ids, attention_mask=mask).logits, with_lora)
    again = adapter.wrap(tiny_model("qwen3"), gates)
    assert same(adapter.gates_of(again), gates)


def test_training_the_gates_trains_the_adapter_and_nothing_else(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    wrapped = adapter.wrap(model, gates_of_family("mlp", model))
    trained = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    assert trained and all("retain_up" in name or "retain_out" in name for name in trained)
    gates = adapter.gates_of(wrapped)
    with torch.no_grad():
        gates[0].out.weight.add_(1.0)
    wrapped.save_pretrained(tmp_path)
    assert same(adapter.gates_of(PeftModel.from_pretrained(tiny_model("qwen3"), tmp_path)), gates)


def test_a_cache_takes_the_adapters_gates() -> None:
    input_ids, mask = tiny_batch((0, 4))
    held = []
    for carried in (False, True):
        model = tiny_model("phi3")
        gates = gates_of_family("linear", model, fingerprint=fingerprint(model))
        if carried:
            model = adapter.wrap(model, gates)
            gates = adapter.gates_of(model)
        with retain.attach(model):
            cache = Cache(model, "gate", keep_ratio=0.4, gates=gates, **PROTECTION)
            how = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
            model.generate(input_ids=input_ids, **{CACHE: cache}, **how)
        held.append([layer.store.positions_C[layer.store.index_N()] for layer in cache.state.ragged])
        assert cache.evictions == 1
    assert all(torch.equal(one, other) for one, other in zip(*held, strict=True))


def test_gates_that_have_no_place_there_are_refused() -> None:
    model, deeper = tiny_model("qwen3"), tiny_model("qwen3", num_hidden_layers=4)
    for family, reason in {
        "lookahead": "they look at keys, lookahead, not at the attention input alone",
        "decay_shared": "their layers share parameters",
    }.items():
        said = f"cannot be a peft adapter: .*{reason}.* Save them as an artifact"
        refused(said, adapter.wrap, model, gates_of_family(family, model))
    said = r"differ in layers \[3\]: gates are for \[0, 1, 2\]"
    refused(said, adapter.wrap, deeper, gates_of_family("linear", model))
    refused("names no gates: make one with adapter.wrap", get_peft_model, model, adapter.GateConfig())


def test_retain_alone_registers_nothing_and_peft_then_knows_no_gates(tmp_path: Path) -> None:
    model = tiny_model("llama")
    adapter.wrap(model, gates_of_family("linear", model)).save_pretrained(tmp_path)
    script = f"""
import sys
import retain, retain.hf.cache.cache
assert "peft" not in sys.modules and "retain.hf.model.adapter" not in sys.modules
from peft import PeftConfig
from peft.utils import PeftType
import retain.hf.model.adapter as adapter
assert "RETAIN" not in PeftType.__members__
try:
    PeftConfig.from_pretrained({str(tmp_path)!r})
except KeyError as error:
    assert error.args == ("RETAIN",), error
else:
    raise AssertionError("peft knew the method")
adapter.register()
adapter.register()
assert PeftConfig.from_pretrained({str(tmp_path)!r}).family == "linear"
assert PeftType("RETAIN") is PeftType.RETAIN and "RETAIN" in list(PeftType)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=launch_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

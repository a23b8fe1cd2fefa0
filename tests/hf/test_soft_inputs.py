"""Soft gates of every family, against dense T x T masks that a plain formula makes: what each gate looks at
inside of the attention, and that gradients reach its parameters alone."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from retain.gates import GateInputs
from retain.hf.training.soft_attention import SoftGated
from tests.hf.test_gate_inputs import gates_of
from tests.hf.test_soft import assert_same
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model

PADS = (0, 9)
FAMILIES_OF_GATES = {
    **{"decay": ("decay", {"F": 16}), "decay, shared": ("decay_shared", {"F": 16})},
    **{"admission": ("admission", {}), "delayed": ("dms", {})},
    "context": ("context", {"heads": 2, "width": 4}),
    **{"low rank": ("lowrank", {"rank": 4, "sinks": 3}), "linear": ("linear", {})},
}
MODELS = ("llama", "qwen2", "qwen3")


def inputs_of_module(module, hidden, kwargs, stream, valid):
    """Everything that a gate may look at, from the module's own projections."""
    B, T, _ = hidden.shape
    split = (B, T, -1, module.head_dim)
    queries, keys, values = (
        projection(hidden).view(split) for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        queries, keys = module.q_norm(queries), module.k_norm(keys)
    queries, keys, values = (part.transpose(1, 2) for part in (queries, keys, values))
    turned = apply_rotary_pos_emb(queries, keys, *kwargs["position_embeddings"])
    return GateInputs(
        hidden_BTE=hidden,
        stream_BTE=stream,
        queries_BQTD=turned[0],
        queries_before_BQTD=queries,
        keys_BHTD=turned[1],
        keys_before_BHTD=keys,
        values_BHTD=values,
        valid_BT=valid,
    )


SHOWN = {"protected": 4, "shown_to": inputs_of_module}


@pytest.mark.parametrize(
    ("model", "gate"), [(MODELS[number % 3], gate) for number, gate in enumerate(FAMILIES_OF_GATES)]
)
def test_every_family_attends_as_its_paper_says(model, gate):
    model = tiny_model(model, dtype=torch.float64)
    assert_same(model, gates_of(model, *FAMILIES_OF_GATES[gate]), **SHOWN)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rope", ["before", "after"])
def test_queries_keys_and_values_before_and_after_rope(rope, model):
    def of_mass(output, gate):
        return torch.nn.functional.logsigmoid(output)

    model = tiny_model(model, dtype=torch.float64)
    assert_same(model, gates_of(model, "qkv", {"F": 8, "rope": rope}), to_log_gate=of_mass, **SHOWN)


def test_families_without_an_openness_are_refused():
    model = tiny_model("llama")
    gates = gates_of(model, "qkv", {"F": 8}, dtype=torch.float32)
    trained = SoftGated(model, gates, protected=2)
    refused("family 'qkv' say no openness.*pass to_log_gate=", trained, *tiny_batch(PADS, 20))

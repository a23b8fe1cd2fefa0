"""Soft gates of every family, against dense T x T masks that a plain formula makes: what each gate looks at
inside of the attention, and that gradients reach its parameters alone."""

from contextlib import contextmanager

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import retain
from retain.gates import GateInputs
from retain.hf.model.decoder import base_model, describe
from retain.hf.training.soft_attention import SoftGated, logistic, soft_gated
from tests.close import MODEL, assert_close
from tests.tiny import tiny_batch, tiny_model

PADS = (0, 9)
FAMILIES_OF_GATES = {
    "decay": ("decay", {"F": 16}),
    "decay, shared": ("decay_shared", {"F": 16}),
    "admission": ("admission", {}),
    "delayed": ("dms", {}),
    "context": ("context", {"heads": 2, "width": 4}),
    "low rank": ("lowrank", {"rank": 4, "sinks": 3}),
    "linear": ("linear", {}),
}
MODELS = ("llama", "qwen2", "qwen3")


def gates_of(model, family, settings=None, *, dtype=torch.float64):
    """Random gates that are neither open nor shut."""
    gates = retain.new_gates(model, family, **(settings or {})).to(dtype)
    draw = torch.Generator().manual_seed(0)
    for parameter in gates.parameters():
        spread = 0.5 if parameter.dim() < 2 else 1.5 * parameter.shape[-1] ** -0.5
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * spread)
    return gates


def inputs_of_module(module, hidden, position_embeddings, stream, valid):
    """Everything that a gate may look at, from the module's own projections."""
    B, T, _ = hidden.shape
    split = (B, T, -1, module.head_dim)
    queries, keys, values = (
        projection(hidden).view(split) for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        queries, keys = module.q_norm(queries), module.k_norm(keys)
    queries, keys, values = (part.transpose(1, 2) for part in (queries, keys, values))
    turned = apply_rotary_pos_emb(queries, keys, *position_embeddings)
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


@contextmanager
def dense(model, gates, attention_mask, *, protected, to_log_gate=None, decays=None):
    """Every evicting module gets the bias of its gate as a 4D mask."""
    handles, made, streams = [], {}, {}
    T, valid = attention_mask.shape[1], attention_mask.bool()
    place = torch.arange(T)
    distance = place[:, None] - place
    decays = gates.ages if decays is None else decays

    def give_mask(spec):
        def hook(module, args, kwargs):
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            gate = gates[spec.layer_idx]
            shown = inputs_of_module(
                module, hidden, kwargs["position_embeddings"], streams[spec.layer_idx], valid
            )
            output = gate(shown)
            log_gate = gate.log_gate(output) if to_log_gate is None else to_log_gate(output, gate)
            made[spec.layer_idx] = log_gate
            bias = log_gate[:, :, None] * (distance if decays else 1.0)
            bias = torch.where(distance >= protected, bias, 0.0)
            seen = (distance >= 0) & valid[:, None, None]
            bias = bias.masked_fill(~(seen | (distance == 0)), float("-inf"))
            mask = bias.to(hidden.dtype).repeat_interleave(module.num_key_value_groups, dim=1)
            return args, {**kwargs, "attention_mask": mask}

        return hook

    def note(layer_idx):
        def hook(module, args):
            streams[layer_idx] = args[0]

        return hook

    for spec in describe(model):
        layer = base_model(model).layers[spec.layer_idx]
        handles.append(layer.register_forward_pre_hook(note(spec.layer_idx)))
        handles.append(spec.module.register_forward_pre_hook(give_mask(spec), with_kwargs=True))
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()


def gradients(gates):
    return {name: parameter.grad.clone() for name, parameter in gates.named_parameters()}


def assert_same(model, gates, **settings):
    ids, mask = tiny_batch(PADS, 34)
    settings = {"protected": 4, **settings}
    found = []
    for context in (
        lambda: soft_gated(model, gates, **settings),
        lambda: dense(model, gates, mask, **settings),
    ):
        gates.zero_grad()
        with context() as made:
            logits = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        log_gates = made if isinstance(made, dict) else made.log_gates
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        term = sum(log_gates[layer].exp()[:, :, 9:].mean() for layer in gates.layers)
        ((logits * weights).sum() / len(weights) + term).backward()
        found.append((logits.detach(), log_gates, gradients(gates)))
    (logits, log_gates, got), (wanted, wanted_gates, wanted_got) = found
    assert_close(logits, wanted, dtype=torch.float32)
    for layer in gates.layers:
        assert bool((log_gates[layer][:, :, 9:] <= 0).all())
        assert_close(log_gates[layer][:, :, 9:], wanted_gates[layer][:, :, 9:], dtype=torch.float32)
    for name, gradient in got.items():
        assert gradient.any(), name
        assert_close(gradient, wanted_got[name], dtype=torch.float32, ops=MODEL)
    free = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    assert float((free - logits).abs().max().detach()) > 0.05, "the gates must bite"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "gate"), [(MODELS[number % 3], gate) for number, gate in enumerate(FAMILIES_OF_GATES)]
)
def test_every_family_attends_as_its_own_form_says(model, gate):
    model = tiny_model(model, dtype=torch.float64)
    assert_same(model, gates_of(model, *FAMILIES_OF_GATES[gate]))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rope", ["before", "after"])
def test_queries_keys_and_values_before_and_after_rope(rope, model):
    def of_mass(output, gate):
        return torch.nn.functional.logsigmoid(output)

    model = tiny_model(model, dtype=torch.float64)
    assert_same(model, gates_of(model, "qkv", {"F": 8, "rope": rope}), to_log_gate=of_mass)


def test_a_form_and_a_kind_that_are_stated_win():
    model = tiny_model("llama", dtype=torch.float64)
    gates = gates_of(model, "decay", {"F": 16})
    assert gates.ages
    assert_same(model, gates, decays=False)
    assert_same(model, gates_of(model, "linear"), to_log_gate=logistic, decays=True, protected=0)


@pytest.mark.parametrize("family", ["dms", "admission", "decay"])
@pytest.mark.parametrize("model", ["gemma3", "qwen3_next", "mistral_window", "phi3"])
def test_other_models_run_and_reach_every_gate(model, family):
    model = tiny_model(model, dtype=torch.float64)
    gates = gates_of(model, family)
    ids, mask = tiny_batch(PADS, 34)
    with soft_gated(model, gates, protected=3) as soft:
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
    free = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    assert float((free - logits).abs().max().detach()) > 0.01
    (logits.square().mean() + sum(phi.exp().mean() for phi in soft.log_gates.values())).backward()
    assert all(gradient.any() for gradient in gradients(gates).values())


@pytest.mark.parametrize("family", ["dms", "admission", "context", "decay"])
def test_gradient_checkpointing_changes_nothing(family):
    model = tiny_model("qwen3")
    gates = gates_of(model, family, dtype=torch.float32)
    found = []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        gates.zero_grad()
        with SoftGated(model, gates, protected=2) as trained:
            losses = []
            for pads in ((0, 9), (4, 0)):
                ids, mask = tiny_batch(pads, 20)
                output, log_gates = trained(ids, mask)
                losses.append(output.logits[mask.bool()].logsumexp(-1).sum())
                losses.append(sum(phi.exp().mean() for phi in log_gates.values()))
            sum(losses).backward()
        found.append(list(gradients(gates).values()))
    for plain, checkpointed in zip(*found, strict=True):
        assert plain.any()
        assert_close(checkpointed, plain.double(), ops=MODEL)


def test_families_without_an_openness_are_refused():
    model = tiny_model("llama")
    ids, mask = tiny_batch(PADS, 20)
    with (
        soft_gated(model, gates_of(model, "qkv", {"F": 8}, dtype=torch.float32), protected=2),
        pytest.raises(ValueError, match="family 'qkv' say no openness.*pass to_log_gate="),
    ):
        model(ids, attention_mask=mask)


def test_hooks_for_the_stream_are_undone():
    model = tiny_model("llama")
    ids, mask = tiny_batch(PADS, 20)
    with soft_gated(model, gates_of(model, "dms", dtype=torch.float32), protected=2):
        model(ids, attention_mask=mask)
        assert base_model(model).layers[0]._forward_pre_hooks
    assert not any(layer._forward_pre_hooks for layer in base_model(model).layers)

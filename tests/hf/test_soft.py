from contextlib import contextmanager
from functools import partial

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import retain.hf.training.soft_attention as soft_module
from retain.gates import GateInputs, build_gates
from retain.hf.model.decoder import base_model, describe
from retain.hf.training.soft_attention import SoftGated
from retain.hf.version_names import CACHE, CHECKPOINTING
from retain.kernels.gated_attention import gated_attention
from tests.close import MODEL, assert_close
from tests.hf.test_gate_inputs import gates_of as random_gates
from tests.refused import refused
from tests.tiny import FAMILIES, SINGLE, tiny_batch, tiny_model

PADS = (0, 9)
PROTECTED = 6
INPUT_IDS, MASK = tiny_batch(PADS, 20)


def gates_of(model, family="linear", *, dtype=torch.float64, **dims):
    """Fresh gates whose outputs differ from entry to entry."""
    specs = describe(model)
    made = {spec.layer_idx: {"E": spec.hidden_size, "H": spec.num_kv_heads, **dims} for spec in specs}
    gates = build_gates(family, made).to(dtype)
    for layer in gates.layers:
        gates[layer].start_at_(torch.zeros(gates[layer].H))
        torch.nn.init.normal_(gates[layer].out.weight, std=gates[layer].out.weight.shape[1] ** -0.5)
    return gates


def small(family="qwen3", **settings):
    model = tiny_model(family, **settings)
    return model, gates_of(model, dtype=torch.float32)


@contextmanager
def dense(model, gates, attention_mask, *, protected, to_log_gate=None, ungated_BT=None, shown_to=None):
    """The oracle: every evicting module gets the bias of its gate as a 4D mask, T x T a query head; nothing
    of `retain.hf.training.soft_attention` or of the kernels runs.

    Args:
        shown_to: `(module, hidden, its keyword arguments, residual stream, validity) -> GateInputs`; None:
            the attention input alone.
    """
    handles, made, streams = [], {}, {}
    T, valid = attention_mask.shape[1], attention_mask.bool()
    distance = torch.arange(T)[:, None] - torch.arange(T)

    def give_mask(spec, module, args, kwargs):
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        gate = gates[spec.layer_idx]
        shown = GateInputs(hidden_BTE=hidden)
        if shown_to is not None:
            shown = shown_to(module, hidden, kwargs, streams[spec.layer_idx], valid)
        output = gate(shown)
        log_gate = gate.log_gate(output) if to_log_gate is None else to_log_gate(output, gate)
        if ungated_BT is not None:
            log_gate = torch.where(ungated_BT[:, None], 0.0, log_gate)
        made[spec.layer_idx] = log_gate
        bias = log_gate[:, :, None] * (distance if gates.ages else 1.0)
        bias = torch.where(distance >= protected, bias, 0.0)
        seen = (distance >= 0) & valid[:, None, None]
        # A pad's own query may see nothing; let it see itself, nobody looks at what comes out.
        bias = bias.masked_fill(~(seen | (distance == 0)), float("-inf"))
        mask = bias.to(hidden.dtype).repeat_interleave(module.num_key_value_groups, dim=1)
        return args, {**kwargs, "attention_mask": mask}

    def keep_stream(idx, module, args):
        streams[idx] = args[0]

    for spec in describe(model):
        layer = base_model(model).layers[spec.layer_idx]
        handles.append(layer.register_forward_pre_hook(partial(keep_stream, spec.layer_idx)))
        handles.append(spec.module.register_forward_pre_hook(partial(give_mask, spec), with_kwargs=True))
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()


def both(model, gates, pads=PADS, shown_to=None, ungated_BT=None, **settings):
    """Logits at tokens, log-gates and gate gradients: ours, and the oracle's."""
    input_ids, mask = tiny_batch(pads, 34)
    settings = {"protected": PROTECTED, **settings}
    results = []
    for ours in (True, False):
        gates.zero_grad()
        if ours:
            with SoftGated(model, gates, **settings) as trained:
                output, log_gates = trained(input_ids, mask, ungated_BT=ungated_BT)
        else:
            how = {**settings, "shown_to": shown_to, "ungated_BT": ungated_BT}
            with dense(model, gates, mask, **how) as log_gates:
                output = model(input_ids, attention_mask=mask, use_cache=False)
        logits = output.logits[mask.bool()]
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        term = sum(log_gates[layer].exp()[:, :, 9:].mean() for layer in gates.layers)
        ((logits * weights).sum() / len(weights) + term).backward()
        results.append((logits.detach(), log_gates, gradients(gates)))
    assert all(parameter.grad is None for parameter in model.parameters())
    return results


def gradients(gates):
    return {name: parameter.grad.clone() for name, parameter in gates.named_parameters()}


def assert_same(model, gates, **settings):
    """Ours is the oracle's, and differs from no gates at all."""
    (logits, log_gates, found), (wanted, wanted_gates, wanted_found) = both(model, gates, **settings)
    assert_close(logits, wanted, dtype=torch.float32)  # norms inside of the model are float32's
    assert set(log_gates) == set(wanted_gates) == set(gates.layers)
    for layer, log_gate in log_gates.items():
        assert bool((log_gate[:, :, 9:] <= 0).all())
        assert_close(log_gate[:, :, 9:], wanted_gates[layer][:, :, 9:], dtype=torch.float32)
    for name, gradient in found.items():
        assert gradient.any(), name
        assert_close(gradient, wanted_found[name], dtype=torch.float32, ops=MODEL)
    input_ids, mask = tiny_batch(settings.get("pads", PADS), 34)
    free = model(input_ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    assert float((free - logits).abs().max()) > 0.05, "the gates must bite"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SINGLE])
def test_logits_and_gradients_are_those_of_dense_masks(family):
    model = tiny_model(family, dtype=torch.float64)
    assert_same(model, gates_of(model, "mlp" if family == "qwen3" else "linear"))


@pytest.mark.parametrize(
    "settings",
    [
        {"protected": 0},
        {"protected": 1},
        {"to_log_gate": lambda output, gate: -output.square()},
        {"ungated_BT": (torch.arange(34) % 5 == 0).expand(2, 34)},
        {"pads": (0, 0)},
    ],
    ids=["all", "all but itself", "another form", "ungated", "no padding"],
)
def test_every_form_of_gate(settings):
    model = tiny_model("llama", dtype=torch.float64)
    assert_same(model, gates_of(model), **settings)


def test_soft_caps():
    """Gemma-2 has one, in eager attention; in float32, unlike the others (`SINGLE`)."""
    model = tiny_model("gemma2", query_pre_attn_scalar=8, attn_logit_softcapping=1.0)
    gates = gates_of(model, dtype=torch.float32)
    (logits, _, found), (wanted, _, wanted_found) = both(model, gates)
    assert_close(logits, wanted.double(), ops=MODEL)
    for name, gradient in found.items():
        assert_close(gradient, wanted_found[name].double(), ops=4 * MODEL)
    for spec in describe(model):
        spec.module.attn_logit_softcapping = None
    (uncapped, _, _), _ = both(model, gates)
    assert float((uncapped - logits).abs().max()) > 0.05


def hooks_of(model):
    return [
        hook
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for hook in hooks
    ]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_next"])
def test_gradient_checkpointing_changes_nothing(family):
    """Two forwards before the first backward: each is computed again with its own padding, and a forward
    without gates between them has none."""
    model, gates = small(family)
    batches = [tiny_batch(pads, 20) for pads in ((0, 9), (4, 0))]
    free = model(*batches[0], use_cache=False).logits
    found = []
    for again in (False, True):
        if again:
            getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": False})
            model.train()
        gates.zero_grad()
        losses, trained = [], SoftGated(model, gates, protected=2)
        for input_ids, mask in batches:
            output, log_gates = trained(input_ids, mask)
            assert torch.equal(model(*batches[0], use_cache=False).logits, free)
            losses.append(output.logits[mask.bool()].logsumexp(-1).sum())
            losses.append(sum(phi.exp().mean() for phi in log_gates.values()))
        sum(losses).backward()
        trained.close()
        assert model.config._attn_implementation == "sdpa"
        found.append(gradients(gates).values())
    for plain, checkpointed in zip(*found, strict=True):
        assert plain.any()
        assert_close(checkpointed, plain.double(), ops=MODEL)


def test_a_module_leaves_nothing_behind():
    model, gates = small()
    free = model(INPUT_IDS, attention_mask=MASK).logits
    with SoftGated(model, gates, protected=2) as trained:
        assert {id(one) for one in trained.parameters()} == {id(one) for one in gates.parameters()}
        assert set(trained.state_dict()) == {f"gates.{name}" for name in gates.state_dict()}
        first, _ = trained(INPUT_IDS, MASK)
        assert hooks_of(model) and not torch.equal(first.logits, free)
        with SoftGated(model, gates, protected=2) as other:  # two of them are in nobody's way
            assert torch.equal(other(INPUT_IDS, MASK)[0].logits, first.logits)
        with torch.no_grad():
            output, log_gates = trained(INPUT_IDS, MASK)
        assert not any(one.requires_grad for one in (output.logits, *log_gates.values()))
        assert torch.equal(model(INPUT_IDS, attention_mask=MASK).logits, free)
        assert model.generate(INPUT_IDS, attention_mask=MASK, max_new_tokens=2).shape == (2, 22)
    assert not hooks_of(model) and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_is_given_one_precision(dtype, autocast, monkeypatch):
    """A rotation in float32 makes queries and keys wider than values, which no kernel takes."""
    (model, gates), seen = small("llama", dtype=dtype), []

    def look(*tensors, **settings):
        seen.append([None if given is None else given.dtype for given in tensors])
        return gated_attention(*tensors, **settings)

    monkeypatch.setattr(soft_module, "gated_attention", look)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = SoftGated(model, gates, protected=2)(INPUT_IDS, MASK)[0].logits
    narrow = torch.bfloat16 if autocast else dtype
    assert seen == [[narrow, narrow, narrow, torch.float32, None]] * len(gates.layers)
    logits.float()[MASK.bool()].logsumexp(-1).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in gates.parameters())


def test_no_mask_of_all_pairs_is_made():
    """Layers that evict need none, padded or not, with a window or not; those left alone keep theirs."""
    for family in ("llama", "gemma3"):
        (model, gates), seen, handles = small(family), {}, []

        def look(module, args, kwargs, seen=seen):
            seen[module.layer_idx] = kwargs["attention_mask"]

        for module in model.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "q_proj"):
                handles.append(module.register_forward_pre_hook(look, with_kwargs=True))
        SoftGated(model, gates, protected=2)(INPUT_IDS, MASK)
        assert all(seen[spec.layer_idx] is None for spec in describe(model))
    assert seen[0] is not None


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({CACHE: DynamicCache()}, "a cache was given, and soft gates read whole sequences"),
        ({"attention_mask": MASK.flip(1)}, "right padding"),
        ({"attention_mask": MASK[:, :5]}, r"attention_mask is \(2, 5\)"),
    ],
)
def test_a_forward_that_cannot_be_gated_is_refused(call, said):
    with SoftGated(*small(), protected=2) as trained:
        refused(said, trained, **{"input_ids": INPUT_IDS, "attention_mask": MASK, **call})


def test_models_that_do_not_fit_are_refused():
    model, gates = small()
    refused("these gates do not fit", SoftGated, model, small("llama")[1], protected=2)
    tuned = tiny_model("qwen3")
    tuned.lm_head.requires_grad_(True)
    said = "want a gradient .the first is lm_head.weight.*requires_grad_.False"
    refused(said, SoftGated, tuned, gates, protected=2)
    assert not hooks_of(model) and not hooks_of(tuned)
    model.config._attn_implementation = "flash_attention_2"
    refused("implementation 'flash_attention_2' is not supported", SoftGated, model, gates, protected=2)


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
    assert_same(model, random_gates(model, *FAMILIES_OF_GATES[gate]), **SHOWN)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rope", ["before", "after"])
def test_queries_keys_and_values_before_and_after_rope(rope, model):
    def of_mass(output, gate):
        return torch.nn.functional.logsigmoid(output)

    model = tiny_model(model, dtype=torch.float64)
    assert_same(model, random_gates(model, "qkv", {"F": 8, "rope": rope}), to_log_gate=of_mass, **SHOWN)


def test_families_without_an_openness_are_refused():
    model = tiny_model("llama")
    gates = random_gates(model, "qkv", {"F": 8}, dtype=torch.float32)
    trained = SoftGated(model, gates, protected=2)
    refused("family 'qkv' say no openness.*pass to_log_gate=", trained, INPUT_IDS, MASK)

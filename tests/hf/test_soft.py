import copy
import inspect
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import retain
import retain.hf.training.soft_attention as soft_module
from retain.gates import GateInputs, build_gates
from retain.hf.model.decoder import base_model, describe
from retain.hf.training.soft_attention import SoftGated, above, logistic, soft_gated
from retain.kernels import backend
from retain.kernels.gated_attention import gated_attention
from tests.close import MODEL, assert_close
from tests.kernels.device import DEVICE
from tests.tiny import FAMILIES, PAD, VOCAB, tiny_batch, tiny_model

PADS = (0, 9)
PROTECTED = 6
INPUT_IDS, MASK = tiny_batch(PADS, 20)


def gates_of(model, family="linear", *, level=0.0, spread=1.0, dtype=torch.float64, **dims):
    """Fresh gates whose outputs differ from entry to entry."""
    specs = describe(model)
    made = {spec.layer_idx: {"E": spec.hidden_size, "H": spec.num_kv_heads, **dims} for spec in specs}
    gates = build_gates(family, made).to(dtype)
    for layer in gates.layers:
        gates[layer].start_at_(torch.full([gates[layer].H], level))
        torch.nn.init.normal_(gates[layer].out.weight, std=spread * gates[layer].out.weight.shape[1] ** -0.5)
    return gates


@contextmanager
def dense(
    model,
    gates,
    attention_mask,
    *,
    protected,
    to_log_gate=None,
    decays=None,
    spared_BHT=None,
    shown_to=None,
):
    """The oracle: every evicting module gets the bias of its gate as a 4D mask, T x T a query head; nothing
    of `retain.hf.training.soft_attention` or of the kernels runs.

    Args:
        model, gates, attention_mask, protected, to_log_gate, decays, spared_BHT: as `soft_gated` takes them.
        shown_to: `(module, hidden, its keyword arguments, residual stream, validity) -> GateInputs`; None:
            the attention input alone.
    """
    handles, made, streams = [], {}, {}
    T, valid = attention_mask.shape[1], attention_mask.bool()
    distance = torch.arange(T)[:, None] - torch.arange(T)
    decays = gates.ages if decays is None else decays

    def give_mask(spec):
        def hook(module, args, kwargs):
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            gate = gates[spec.layer_idx]
            shown = GateInputs(hidden_BTE=hidden)
            if shown_to is not None:
                shown = shown_to(module, hidden, kwargs, streams[spec.layer_idx], valid)
            output = gate(shown)
            log_gate = gate.log_gate(output) if to_log_gate is None else to_log_gate(output, gate)
            if spared_BHT is not None:
                log_gate = torch.where(spared_BHT, 0.0, log_gate)
            made[spec.layer_idx] = log_gate
            bias = log_gate[:, :, None] * (distance if decays else 1.0)
            bias = torch.where(distance >= protected, bias, 0.0)
            seen = (distance >= 0) & valid[:, None, None]
            if spec.window is not None:
                seen = seen & (distance < spec.window)
            # A pad's own query may see nothing; let it see itself, nobody looks at what comes out.
            bias = bias.masked_fill(~(seen | (distance == 0)), float("-inf"))
            mask = bias.to(hidden.dtype).repeat_interleave(module.num_key_value_groups, dim=1)
            return args, {**kwargs, "attention_mask": mask}

        return hook

    for spec in describe(model):
        layer = base_model(model).layers[spec.layer_idx]
        note = partial(lambda idx, module, args: streams.__setitem__(idx, args[0]), spec.layer_idx)
        handles.append(layer.register_forward_pre_hook(note))
        handles.append(spec.module.register_forward_pre_hook(give_mask(spec), with_kwargs=True))
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()


def both(model, gates, pads=PADS, num_tokens=34, shown_to=None, **settings):
    """Logits at tokens, log-gates and gate gradients: ours, and the oracle's."""
    input_ids, mask = tiny_batch(pads, num_tokens)
    settings = {"protected": PROTECTED, **settings}
    results = []
    for context in (
        lambda: soft_gated(model, gates, **settings),
        lambda: dense(model, gates, mask, shown_to=shown_to, **settings),
    ):
        gates.zero_grad()
        with context() as made:
            logits = model(input_ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        log_gates = made if isinstance(made, dict) else made.log_gates
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


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_dense_masks(family):
    model = tiny_model(family, dtype=torch.float64)
    gates = gates_of(model, "mlp" if family == "qwen3" else "linear")
    assert_same(model, gates, to_log_gate=logistic, decays=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"protected": 0},
        {"protected": 1},
        {"protected": 0, "decays": True},
        {"protected": 5, "decays": True},
        {"to_log_gate": above(-1.0, 0.5)},
        {"to_log_gate": lambda output, gate: -output.square()},
        {"spared_BHT": (torch.arange(34) % 5 == 0).expand(2, 2, 34)},
        {"pads": (0, 0)},
    ],
    ids=["all", "all but itself", "decays", "late decays", "above", "own form", "spared", "no padding"],
)
def test_every_form_of_gate(settings):
    model = tiny_model("llama", dtype=torch.float64)
    assert_same(model, gates_of(model), **{"to_log_gate": logistic, "decays": False, **settings})


def test_soft_caps():
    """No family of tests/tiny.py has one: Gemma-2 does, in eager attention."""
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=16,
        attn_logit_softcapping=1.0,
        pad_token_id=PAD,
        attn_implementation="eager",
    )
    # In float32: its mask of float64's lowest number would make NaN of padding, since weights are float32's.
    model = Gemma2ForCausalLM(config).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
    gates = gates_of(model, dtype=torch.float32)
    how = {"to_log_gate": logistic, "decays": False}
    (logits, _, found), (wanted, _, wanted_found) = both(model, gates, **how)
    assert_close(logits, wanted.double(), ops=MODEL)
    for name, gradient in found.items():
        assert_close(gradient, wanted_found[name].double(), ops=4 * MODEL)
    for spec in describe(model):
        spec.module.attn_logit_softcapping = None
    (uncapped, _, _), _ = both(model, gates, **how)
    assert float((uncapped - logits).abs().max()) > 0.05


def test_the_decoder_alone_and_embeddings_do_too():
    model = tiny_model("qwen3", dtype=torch.float64)
    gates, (input_ids, mask) = gates_of(model), tiny_batch(PADS, 20)
    with soft_gated(model, gates, protected=3) as soft:
        logits = model(input_ids, attention_mask=mask).logits
        assert torch.equal(soft.valid_BT, mask.bool())
        hidden = base_model(model)(input_ids, mask).last_hidden_state
        embeddings = model.get_input_embeddings()(input_ids)
        again = model(inputs_embeds=embeddings, attention_mask=mask).logits
    assert torch.equal(model.lm_head(hidden), logits)
    assert torch.equal(again, logits)


def test_kernels_give_the_same():
    """In Triton's interpreter, forward and backward."""
    model = tiny_model("llama").to(DEVICE)
    gates, batch = gates_of(model, dtype=torch.float32).to(DEVICE), tiny_batch(PADS, 20)
    (input_ids, mask), found = (one.to(DEVICE) for one in batch), []
    for path in ("reference", "triton"):
        gates.zero_grad()
        with backend.using(path), soft_gated(model, gates, protected=3):
            logits = model(input_ids, attention_mask=mask).logits[mask.bool()]
            logits.logsumexp(-1).sum().backward()
        found.append([logits.detach(), *(parameter.grad.clone() for parameter in gates.parameters())])
    for reference, kernel in zip(*found, strict=True):
        assert_close(kernel, reference.double(), ops=MODEL)


def hooks_of(model):
    return [
        hook
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for hook in hooks
    ]


@pytest.mark.parametrize("attach", [False, True], ids=["alone", "attached"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_everything_is_undone(family, attach):
    model = tiny_model(family)
    input_ids, mask = tiny_batch(PADS, 20)
    handle = retain.attach(model) if attach else None
    before = model(input_ids, attention_mask=mask).logits
    hooks, implementation = hooks_of(model), model.config._attn_implementation
    gates = gates_of(model, dtype=torch.float32)
    with soft_gated(model, gates, protected=2):
        inside = model(input_ids, attention_mask=mask).logits
    assert not torch.equal(inside, before)
    with pytest.raises(KeyError, match="thrown"), soft_gated(model, gates, protected=2):
        model(input_ids, attention_mask=mask)
        raise KeyError("thrown")
    assert hooks_of(model) == hooks and model.config._attn_implementation == implementation
    output = model(input_ids, attention_mask=mask)
    assert torch.equal(output.logits, before) and output.past_key_values is not None
    if handle is not None:
        cache = retain.Cache(model, policy="snapkv", keep_ratio=0.6)
        input_ids, mask = tiny_batch(PADS, 100)
        model.generate(input_ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2)
        assert cache.entries_evicted > 0
        handle.undo()
        assert not hooks_of(model)


def test_without_gradients_nothing_is_kept():
    model = tiny_model("qwen3")
    input_ids, mask = tiny_batch(PADS, 20)
    with torch.no_grad(), soft_gated(model, gates_of(model, dtype=torch.float32), protected=2) as soft:
        logits = model(input_ids, attention_mask=mask).logits
    assert not logits.requires_grad and not any(phi.requires_grad for phi in soft.log_gates.values())


@pytest.mark.parametrize("module", [False, True], ids=["soft_gated", "SoftGated"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_next"])
def test_gradient_checkpointing_changes_nothing(family, module):
    """Two forwards before the first backward, which a module need not be told of: each is computed again
    with its own padding, and a forward without gates between them has none."""
    model = tiny_model(family)
    gates = gates_of(model, dtype=torch.float32)
    batches = [tiny_batch(pads, 20) for pads in ((0, 9), (4, 0))]
    free = model(*batches[0], use_cache=False).logits
    found = []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        gates.zero_grad()
        losses = []
        trained = SoftGated(model, gates, protected=2) if module else None
        with soft_gated(model, gates, protected=2) if trained is None else nullcontext() as soft:
            for input_ids, mask in batches:
                if trained is None:
                    output = model(input_ids, attention_mask=mask)
                    log_gates = soft.log_gates
                else:
                    output, log_gates = trained(input_ids, mask)
                    assert torch.equal(model(*batches[0], use_cache=False).logits, free)
                open_share = sum(phi.exp().mean() for phi in log_gates.values())
                losses.append(output.logits[mask.bool()].logsumexp(-1).sum() + open_share)
            sum(losses).backward()
        assert model.config._attn_implementation == "sdpa"
        found.append([parameter.grad.clone() for parameter in gates.parameters()])
    for plain, checkpointed in zip(*found, strict=True):
        assert plain.any()
        assert_close(checkpointed, plain.double(), ops=MODEL)


@pytest.mark.parametrize("end", ["close", "with", "del", "error"])
def test_a_module_leaves_nothing_behind(end):
    model = tiny_model("qwen3")
    gates = gates_of(model, dtype=torch.float32)
    free = model(INPUT_IDS, attention_mask=MASK).logits
    trained = SoftGated(model, gates, protected=2)
    assert {id(one) for one in trained.parameters()} == {id(one) for one in gates.parameters()}
    assert set(trained.state_dict()) == {f"gates.{name}" for name in gates.state_dict()}
    first, _ = trained(INPUT_IDS, MASK)
    assert hooks_of(model) and not torch.equal(first.logits, free)
    other = SoftGated(model, gates, protected=2)  # two of them are in nobody's way
    assert torch.equal(other(INPUT_IDS, MASK)[0].logits, first.logits)
    other.close()
    assert torch.equal(model(INPUT_IDS, attention_mask=MASK).logits, free)
    assert model.generate(INPUT_IDS, attention_mask=MASK, max_new_tokens=2).shape == (2, 22)
    if end == "error":
        with pytest.raises(ValueError, match="past_key_values was given"):
            trained(INPUT_IDS, MASK, past_key_values=DynamicCache())
        assert torch.equal(model(INPUT_IDS, attention_mask=MASK).logits, free)
        assert torch.equal(trained(INPUT_IDS, MASK)[0].logits, first.logits)
        trained.close()
    elif end == "close":
        trained.close()
        assert torch.equal(trained(INPUT_IDS, MASK)[0].logits, first.logits)
        trained.close()
    elif end == "with":
        with trained:
            pass
    del trained
    assert not hooks_of(model) and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_is_given_one_precision(dtype, autocast, monkeypatch):
    """A rotation in float32 makes queries and keys wider than values, which no kernel takes."""
    model, seen = tiny_model("llama", dtype=dtype), []
    gates = gates_of(model, dtype=torch.float32)

    def look(*tensors, **settings):
        seen.append([None if given is None else given.dtype for given in tensors])
        return gated_attention(*tensors, **settings)

    monkeypatch.setattr(soft_module, "gated_attention", look)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), soft_gated(model, gates, protected=2):
        logits = model(INPUT_IDS, attention_mask=MASK).logits
    narrow = torch.bfloat16 if autocast else dtype
    assert seen == [[narrow, narrow, narrow, torch.float32, None]] * len(gates.layers)
    logits.float()[MASK.bool()].logsumexp(-1).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in gates.parameters())


@pytest.mark.parametrize(
    ("to_log_gate", "said"),
    [
        (
            lambda output, gate: output.sigmoid(),
            r"layer 0, gave 0\.\d+: wanted natural logarithms, of at most 0",
        ),
        (lambda output, gate: output * float("nan"), "layer 0, gave NaN: wanted logarithms"),
        (
            lambda output, gate: output[:, :1],
            r"layer 0, gave torch.float32 \(2, 1, 20\): wanted .*\(2, 2, 20\)",
        ),
        (lambda output, gate: output.long(), "layer 0, gave torch.int64 .*: wanted floating point"),
        (lambda output, gate: 0.0, "layer 0, gave float: wanted floating point"),
    ],
    ids=["openness", "nan", "shape", "whole numbers", "a number"],
)
def test_what_is_no_logarithm_is_refused(to_log_gate, said):
    model = tiny_model("llama")
    gates = gates_of(model, dtype=torch.float32)
    with (
        pytest.raises(ValueError, match=said),
        soft_gated(model, gates, protected=2, to_log_gate=to_log_gate),
    ):
        model(INPUT_IDS, attention_mask=MASK)
    assert not hooks_of(model) and model.config._attn_implementation == "sdpa"


def test_units():
    gates = gates_of(tiny_model("llama"), dtype=torch.float32)
    gate = gates[0]
    output = torch.tensor([[[-2.0, 0.0, 3.0]]])
    risk = output.exp()
    assert_close(logistic(output, gate), (risk.double() / (1 + risk.double())).log())
    assert_close(above(1.0, 2.0)(output, gate), ((output.double() - 1) / 2).sigmoid().log())
    other = copy.copy(gate)
    other.unit = "risk"
    assert_close(logistic(risk, other), (risk.double() / (1 + risk.double())).log())
    assert logistic(torch.zeros(1, 1, 1), other).isfinite().all()
    assert logistic(output.bfloat16(), gate).dtype == torch.float32
    other.unit = "rank"
    with pytest.raises(ValueError, match="a gate in units of 'rank' says no risk.*pass to_log_gate="):
        logistic(output, other)
    with pytest.raises(ValueError, match="temperature=0.0 must be positive"):
        above(1.0, 0.0)


def test_no_mask_of_all_pairs_is_made():
    """Layers that evict need none, padded or not, with a window or not; those left alone keep theirs."""
    seen = {}
    for family in ("llama", "mistral_window", "gemma3"):
        model = tiny_model(family)
        gates, (input_ids, mask) = gates_of(model, dtype=torch.float32), tiny_batch(PADS, 20)
        evicting = {spec.layer_idx for spec in describe(model)}
        handles = []
        for module in model.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "q_proj"):

                def look(module, args, kwargs, family=family):
                    seen[family, module.layer_idx] = kwargs["attention_mask"]

                handles.append(module.register_forward_pre_hook(look, with_kwargs=True))
        with soft_gated(model, gates, protected=2):
            model(input_ids, attention_mask=mask)
        for handle in handles:
            handle.remove()
        assert all(seen[family, layer] is None for layer in evicting)
    assert seen["gemma3", 0] is not None


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            {"past_key_values": DynamicCache()},
            "past_key_values was given, and soft gates read whole sequences",
        ),
        ({"attention_mask": MASK.flip(1)}, "right padding"),
        ({"attention_mask": MASK[:, :5]}, r"attention_mask is \(2, 5\)"),
    ],
)
def test_a_forward_that_cannot_be_gated_is_refused(call, said):
    model = tiny_model("qwen3")
    with (
        soft_gated(model, gates_of(model, dtype=torch.float32), protected=2),
        pytest.raises(ValueError, match=said),
    ):
        model(**{"input_ids": INPUT_IDS, "attention_mask": MASK, **call})
    assert not hooks_of(model)


def test_what_does_not_fit_is_refused_before_anything_changes():
    model = tiny_model("qwen3")
    gates = gates_of(model, dtype=torch.float32)

    def refuses(said, model=model, gates=gates, **settings):
        hooks, implementation = hooks_of(model), model.config._attn_implementation
        with pytest.raises(ValueError, match=said), soft_gated(model, gates, **{"protected": 2, **settings}):
            raise AssertionError("entered")
        assert hooks_of(model) == hooks and model.config._attn_implementation == implementation

    refuses("these gates do not fit", gates=gates_of(tiny_model("llama")))
    refuses("protected=-1 must be at least 0", protected=-1)
    with soft_gated(model, gates, protected=2):
        refuses("soft gates are at work in this model: leave one `with soft_gated` before the next")
    model.config._attn_implementation = "flash_attention_2"
    refuses("attention implementation 'flash_attention_2' cannot be gated softly")
    model.config._attn_implementation = "sdpa"
    tuned = tiny_model("qwen3")
    tuned.lm_head.requires_grad_(True)
    refuses("want a gradient .the first is lm_head.weight.*requires_grad_.False", model=tuned)
    gates[0].inputs = frozenset({"lookahead", "keys"})
    refuses("look at lookahead tokens, .*stage `lookahead`")


@pytest.mark.parametrize("shape", [(2, 19), (1, 20), (2, 3, 20)], ids=["short", "batch", "heads"])
def test_spared_entries_must_be_the_batchs(shape):
    model = tiny_model("llama")
    gates = gates_of(model, dtype=torch.float32)
    spared = torch.zeros(2, 20, dtype=torch.bool).new_zeros(shape)
    trained = SoftGated(model, gates, protected=2)
    with pytest.raises(ValueError, match=r"spared_BHT is .*and the batch is \[2, 20\].*H = 2 KV heads"):
        trained(INPUT_IDS, MASK, spared_BHT=spared)


def test_dropout_is_refused():
    model = tiny_model("llama", attention_dropout=0.5).train()
    gates = gates_of(model, dtype=torch.float32)
    with soft_gated(model, gates, protected=2), pytest.raises(ValueError, match=r"layer 0 drops out .*eval"):
        model(INPUT_IDS, attention_mask=MASK)


def test_our_attention_is_a_function_without_state():
    model = tiny_model("llama")
    with soft_gated(model, gates_of(model, dtype=torch.float32), protected=2):
        model(INPUT_IDS, attention_mask=MASK)
    function = ALL_ATTENTION_FUNCTIONS["retain_soft_sdpa"]
    held = [cell.cell_contents for cell in inspect.unwrap(function).__closure__]
    assert held == ["sdpa"]


def test_one_that_is_alive_when_the_interpreter_ends_says_nothing() -> None:
    """What it would take its hooks out with is gone by then."""
    script = """
import torch
from tests.hf.test_soft import gates_of
from tests.tiny import tiny_model
from retain.hf.training.soft_attention import SoftGated

model = tiny_model("qwen3").requires_grad_(False)
own = SoftGated(model, gates_of(model, dtype=torch.float32), protected=2)
own(torch.arange(1, 12)[None])
assert own._hooks is not None
torch.nn.keep = own  # lives as long as the module does
"""
    root = Path(__file__).resolve().parents[2]
    given = {"env": {**os.environ, "PYTHONPATH": str(root)}, "cwd": root}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, **given)
    assert (done.returncode, done.stderr) == (0, "")

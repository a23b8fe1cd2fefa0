"""Each family against its paper's formula, written here in float64 with loops over everything."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from retain.gates import GATES, Gate, GateInputs, build_gates, dims_for
from retain.gates.admission import UNDECIDED
from retain.gates.base import OPEN

E, H, Q, D, B, T = 10, 2, 6, 4, 2, 7
SIZES = {"E": E, "H": H, "Q": Q, "D": D}
# Settings that no default hides behind.
SETTINGS: dict[str, dict[str, object]] = {
    "admission": {"expand": 1.5, "floor": 0.2, "opens_at": 2.0},
    "context": {"heads": 3, "width": 5},
    "decay": {"F": 9, "opens_at": 3.0},
    "decay_shared": {"F": 9, "tied": True},
    "dms": {"scale": 7.0, "offset": 2.0, "bias": True, "decides": "next"},
    "linear": {},
    "lowrank": {"rank": 3, "sinks": 5},
    "mlp": {"F": 9, "activation": "silu"},
    "qkv": {"F": 9, "bias": True},
}
FAMILIES = sorted(SETTINGS)
# Variants of a family, each with a formula.
VARIANTS: list[tuple[str, dict[str, object]]] = [
    *((family, {}) for family in FAMILIES),
    ("dms", {"decides": "own"}),
    ("dms", {"query_width": 3}),
    ("qkv", {"rope": "after"}),
]


def a_gate(family: str, **settings: object) -> Gate:
    """A gate in float64, with nothing at its first value that could hide a mistake."""
    dims = dims_for(family, {0: SIZES}, {**SETTINGS[family], **settings})
    gate = build_gates(family, dims)[0].double()
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in gate.named_buffers():
            if name.startswith("input_"):
                buffer.add_(torch.rand_like(buffer))
    return gate


def some_inputs(T: int = T) -> GateInputs:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    return GateInputs(
        hidden_BTE=draw(B, T, E),
        stream_BTE=draw(B, T, E),
        queries_BQTD=draw(B, Q, T, D),
        queries_before_BQTD=draw(B, Q, T, D),
        keys_BHTD=draw(B, H, T, D),
        keys_before_BHTD=draw(B, H, T, D),
        values_BHTD=draw(B, H, T, D),
    )


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * weight


def standard(gate: Gate, x: Tensor) -> Tensor:
    return (x - gate.input_mean_E) / gate.input_scale_E


def naive(gate: Any, inputs: GateInputs, b: int, i: int) -> Tensor:
    """The formula of the gate's family for entry `i` of sequence `b`, `[H]`."""
    state = {name: tensor.detach() for name, tensor in gate.state_dict().items()}
    x = standard(gate, inputs.hidden_BTE[b, i]) if hasattr(gate, "input_mean_E") else None

    def layer(name: str, x: Tensor) -> Tensor:
        return state[f"{name}.weight"] @ x + state.get(f"{name}.bias", 0.0)

    def active(name: str, x: Tensor) -> Tensor:
        return functional.silu(layer(name, x))

    match gate.family:
        case "linear":
            return layer("out", x)
        case "mlp":
            return layer("out", active("up", x))
        case "lowrank":
            queries = layer("queries", x).view(Q, gate.rank)
            keys = layer("keys", x).view(H, gate.rank)
            return torch.stack([naive_share(state, queries, keys[h], h) for h in range(H)])
        case "qkv":
            queries, keys = inputs.queries_before_BQTD, inputs.keys_before_BHTD
            if gate.rope == "after":
                queries, keys = inputs.queries_BQTD, inputs.keys_BHTD
            heads = torch.cat([*queries[b, :, i], *keys[b, :, i], *inputs.values_BHTD[b, :, i]])
            return layer("out", active("up", heads))
        case "decay" | "decay_shared":
            hidden = active("up", x)
            if gate.family == "decay_shared":
                hidden = active("middle", hidden)
            return functional.logsigmoid(layer("out", hidden))
        case "admission":
            return torch.stack([naive_admission(gate, state, inputs, b, h, i) for h in range(H)])
        case "dms":
            if gate.decides == "next":
                i = i + 1
                if i == inputs.stream_BTE.shape[1] or not (inputs.valid_BT is None or inputs.valid_BT[b, i]):
                    return torch.full((H,), 1e4, dtype=torch.float64)
            if gate.query_width:  # the last neuron of each normed query head
                heads = layer("out", inputs.hidden_BTE[b, i]).view(H, gate.query_width)
                logits = torch.stack([rms_norm(head, state["norm.weight"])[-1] for head in heads])
            else:
                logits = layer("out", rms_norm(inputs.stream_BTE[b, i], state["norm.weight"]))
            return gate.offset - gate.scale * logits
        case "context":
            return layer("out", naive_seen(gate, state, inputs, b, i))
    raise AssertionError(gate.family)


def naive_share(state: dict[str, Tensor], queries: Tensor, key: Tensor, h: int) -> Tensor:
    root, G, shares = len(key) ** 0.5, Q // H, []
    key = rms_norm(key, state["key_norm.weight"])
    for g in range(G):
        query = rms_norm(queries[h * G + g], state["query_norm.weight"])
        near = query @ key / root + state["bias"][h, g]
        shares.append(1 / (1 + sum((query @ sink / root - near).exp() for sink in state["sink_keys"][h])))
    return sum(shares) / G


def naive_admission(
    gate: Any, state: dict[str, Tensor], inputs: GateInputs, b: int, h: int, i: int
) -> Tensor:
    before = rms_norm(inputs.keys_before_BHTD[b, h, i], state["norm_before.weight"])
    after = rms_norm(inputs.keys_BHTD[b, h, i], state["norm_after.weight"])
    hidden = functional.gelu(state["up_weight"][h] @ torch.cat([before, after]) + state["up_bias"][h])
    logit = state["out_weight"][h] @ hidden + state["out_bias"][h]
    return logit.sigmoid().clamp_min(gate.floor).log()


def naive_seen(gate: Any, state: dict[str, Tensor], inputs: GateInputs, b: int, i: int) -> Tensor:
    entries = [j for j in range(i + 1) if inputs.valid_BT is None or inputs.valid_BT[b, j]]
    x = [standard(gate, inputs.hidden_BTE[b, j]) for j in [*entries, i]]
    queries, keys, values = (
        [(state[f"{name}.weight"] @ one).view(gate.heads, gate.width) for one in x]
        for name in ("queries", "keys", "values")
    )
    seen = []
    for a in range(gate.heads):
        weights = [(queries[-1][a] @ key[a] / gate.width**0.5).exp() for key in keys[:-1]]
        mixed = sum(w * value[a] for w, value in zip(weights, values[:-1], strict=True))
        seen.append(mixed / sum(weights))
    return torch.cat(seen)


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def assert_naive(gate: Gate, inputs: GateInputs, first: int = 0) -> Tensor:
    """Its output, which from the first entry on is the formula's."""
    output = gate(inputs)
    numbers = [torch.stack([naive(gate, inputs, b, i) for i in range(first, T)], -1) for b in range(B)]
    assert_same(output[..., first:], torch.stack(numbers))
    return output


def padded(inputs: GateInputs, *pads: int) -> GateInputs:
    return replace(inputs, valid_BT=torch.arange(T) >= torch.tensor(pads)[:, None])


def test_every_family_is_here() -> None:
    assert set(FAMILIES) <= set(GATES)
    assert set(GATES) - set(FAMILIES) <= {"lookahead"}, "a family without a formula test"


@pytest.mark.parametrize(("family", "settings"), VARIANTS)
def test_formula(family: str, settings: dict[str, object]) -> None:
    gate, inputs = a_gate(family, **settings), some_inputs()
    assert_naive(gate, inputs)
    if family == "qkv":
        suffix = "" if settings else "_before"
        assert gate.inputs == {f"queries{suffix}", f"keys{suffix}", "values"}


def test_the_context_gate_sees_no_padding_and_nothing_later() -> None:
    gate, inputs = a_gate("context"), some_inputs()
    output = assert_naive(gate, padded(inputs, 0, 3), 3)
    assert output.isfinite().all()
    assert_same(output[1:, :, 3:], gate(GateInputs(hidden_BTE=inputs.hidden_BTE[1:, 3:])))
    assert_same(gate(inputs.entries(slice(0, 4))), gate(inputs)[..., :4])


def test_sink_keys_of_a_fresh_lowrank_gate_get_different_gradients() -> None:
    gate = build_gates("lowrank", {0: {"E": E, "H": H, "Q": Q}})[0]
    gate(GateInputs(torch.randn(1, T, E))).square().sum().backward()
    grad = gate.sink_keys.grad
    assert not torch.allclose(grad[:, :1], grad[:, 1:2], atol=0, rtol=1e-4)


def test_the_paper_shifts_the_decisions_of_dms_and_ours_does_not() -> None:
    """`next`: entry `i` is decided by the token after it; without one it is undecided, and kept."""
    following, inputs = a_gate("dms"), some_inputs()
    assert bool((following(inputs)[..., -1] == UNDECIDED).all())
    assert bool((following.log_gate(following(inputs))[..., -1] == 0).all())
    valid_BT = torch.tensor([[True] * T, [False] + [True] * (T - 3) + [False] * 2])
    score = assert_naive(following, replace(inputs, valid_BT=valid_BT))[:, 0, T - 3].detach()
    assert float(score[1]) == UNDECIDED != float(score[0])
    # Of a part it says something else, so that later regimes refuse it; ours, the default, can be asked.
    default = GATES["dms"](E=E, H=H)
    assert following.contextual and not default.contextual and default.dims()["decides"] == "own"
    part = following(inputs.entries(slice(0, 4)))
    assert not torch.allclose(part[..., 3], following(inputs)[..., 3])
    assert build_gates("dms", dims_for("dms", {0: SIZES}, {"decides": "next"})).contextual


def test_a_neuron_of_dms_opens_at_the_offset_and_keeps_the_rest_of_its_head() -> None:
    """With all rows at zero, the norm would multiply the first gradients by a thousand."""
    gate = a_gate("dms", query_width=3, decides="own")
    gate.open_()
    assert bool((gate(some_inputs()) == 2.0).all()) and gate.inputs == {"hidden"}
    zero_HD = gate.get_parameter("out.weight").unflatten(0, (H, 3)).abs().sum(-1) == 0
    assert zero_HD.tolist() == [[False, False, True]] * H


OPENING = ["admission", "context", "decay", "decay_shared", "dms", "linear", "lowrank", "mlp"]


@pytest.mark.parametrize("family", OPENING)
def test_an_opened_gate_is_open_and_learns(family: str) -> None:
    """Retention opens at 9 here, where gradients are far above AdamW's usual eps."""
    keep = {name: value for name, value in SETTINGS[family].items() if name not in ("opens_at", "offset")}
    settings = keep | ({"opens_at": 9.0} if family.startswith("decay") else {})
    gate = build_gates(family, dims_for(family, {0: SIZES}, settings))[0].double()
    gate.open_()
    inputs = some_inputs()
    log_gate = gate.log_gate(gate(inputs))
    assert bool((log_gate <= 0).all()) and bool((log_gate > -0.05).all())
    optimiser = torch.optim.AdamW(gate.parameters(), lr=0.01, weight_decay=0.0)
    before = log_gate.sum().item()
    for _ in range(10):
        optimiser.zero_grad()
        gate.log_gate(gate(inputs)).sum().backward()
        optimiser.step()
    assert gate.log_gate(gate(inputs)).sum().item() < 1.05 * before < 0


def test_opening_sets_the_output() -> None:
    inputs = some_inputs()
    for family, opens_at in (("admission", 1.0), ("admission", 4.0), ("linear", OPEN), ("mlp", OPEN)):
        gate = a_gate(family, **({"opens_at": opens_at} if family == "admission" else {}))
        gate.open_()
        if family == "admission":
            torch.nn.init.zeros_(gate.out_weight)
        wanted = torch.full((B, H, T), opens_at, dtype=torch.float64)
        assert_same(gate(inputs), functional.logsigmoid(wanted) if family == "admission" else wanted)
    gate = a_gate("lowrank")
    norm = gate.query_norm.weight.clone()
    gate.open_()
    assert torch.equal(gate.query_norm.weight, 0.1 * norm)
    torch.nn.init.zeros_(gate.query_norm.weight)
    # The share against 5 base keys that are as near as its own key is sigmoid(OPEN).
    share = torch.full((B, H, T), 1 / (1 + math.exp(-OPEN)), dtype=torch.float64)
    torch.testing.assert_close(gate(inputs), share)


def test_log_gates() -> None:
    """The term that soft attention adds, per family, for an output."""
    output = torch.tensor([[[-2.0, 0.5]]], dtype=torch.float64)
    for family in ("linear", "mlp", "dms", "context"):
        assert_same(a_gate(family).log_gate(output), functional.logsigmoid(output))
    below = output.clamp_max(0)
    for family in ("decay", "decay_shared", "admission"):
        assert torch.equal(a_gate(family).log_gate(below), below)
    log_share = a_gate("lowrank").log_gate(torch.tensor([[[0.0, 0.25]]], dtype=torch.float64))
    assert log_share.isfinite().all() and float(log_share[0, 0, 1]) == math.log(0.25)


@pytest.mark.parametrize("family", ["context", "linear", "lowrank", "mlp", "qkv"])
def test_training_starts_at_the_mean(family: str) -> None:
    gate = a_gate(family)
    with torch.no_grad():
        (gate.query_norm if family == "lowrank" else gate.out).weight.zero_()
    mean_H = torch.tensor([0.25, 0.6], dtype=torch.float64)
    gate.start_at_(mean_H)
    torch.testing.assert_close(gate(some_inputs()), mean_H[None, :, None].expand(B, H, T))


def test_shared_projections_are_one() -> None:
    layers = {layer: {"E": E, "H": H, "F": 5} for layer in (0, 2, 5)}
    gates = build_gates("decay_shared", layers)
    assert gates[0].out is gates[2].out is gates[5].out and gates[0].up is not gates[2].up
    each, shared = E * 5 + 5 + 5 * 5 + 5, 5 * H + H
    assert sum(p.numel() for p in gates.parameters()) == 3 * each + shared
    twin = copy.deepcopy(gates)
    assert twin[0].out is twin[5].out and twin[0].out is not gates[0].out
    gates.double()
    assert gates[0].out is gates[5].out and gates[5].out.weight.dtype == torch.float64
    (2 * gates[0].out.weight.sum() + gates[5].out.weight.sum()).backward()
    assert torch.equal(gates[2].out.weight.grad, torch.full((H, 5), 3.0, dtype=torch.float64))
    gates.load_state_dict(gates.state_dict())
    assert gates[0].out is gates[2].out
    untied = build_gates("decay_shared", {layer: {**dims, "tied": False} for layer, dims in layers.items()})
    assert untied[0].out is not untied[2].out

"""A gate set: one gate a layer, scores in units of risk, -inf on padding."""

import pytest
import torch

from retain.evidence import Evidence
from retain.gates import GATES, GateInputs, GateSet, LinearGate, MLPGate, build_gates

E_WIDTH, H, Q, T, D = 12, 2, 4, 9, 4


def evidence(
    layer_idx: int = 0, pads: tuple[int, ...] = (0, 3), hidden: torch.Tensor | None = None
) -> Evidence:
    B, E = len(pads), E_WIDTH if hidden is None else hidden.shape[-1]
    valid_BT = torch.arange(T) >= torch.tensor(pads)[:, None]
    return Evidence(
        layer_idx=layer_idx,
        queries_BQSD=torch.randn(B, Q, T, D),
        keys_BHTD=torch.randn(B, H, T, D),
        values_BHTD=torch.randn(B, H, T, D),
        output_weight_QDE=torch.randn(Q, D, E),
        scaling=0.5,
        positions_BT=torch.arange(T).expand(B, T),
        valid_BT=valid_BT,
        hidden_BTE=torch.randn(B, T, E) if hidden is None else hidden,
    )


def gates_of(family: str, layers: tuple[int, ...] = (0, 1)) -> GateSet:
    return build_gates(family, {layer: {"E": E_WIDTH, "H": H} for layer in layers})


@pytest.mark.parametrize("family", sorted(GATES))
def test_output_has_one_number_per_entry_and_head(family: str) -> None:
    gates = gates_of(family)
    output = gates({0: GateInputs(torch.randn(3, T, E_WIDTH)), 1: GateInputs(torch.randn(3, T, E_WIDTH))})
    assert {layer: tuple(value.shape) for layer, value in output.items()} == {0: (3, H, T), 1: (3, H, T)}


@pytest.mark.parametrize("family", sorted(GATES))
def test_score_is_the_exponential_in_risk_and_masked(family: str) -> None:
    gates, shown = gates_of(family), evidence(1)
    score = gates.score(shown)
    assert score.unit == "risk" and score.values_BHT.dtype == torch.float32
    assert torch.equal(score.values_BHT.isneginf(), ~shown.valid_BT[:, None].expand(2, H, T))
    expected = gates[1](GateInputs(shown.hidden_BTE)).exp()
    valid = shown.valid_BT[:, None].expand(2, H, T)
    assert torch.equal(score.values_BHT[valid], expected[valid])
    assert not score.values_BHT.requires_grad


def test_half_precision_hidden_states_are_scored_in_float32() -> None:
    gates = gates_of("mlp")
    hidden = torch.randn(2, T, E_WIDTH).bfloat16()
    score = gates.score(evidence(0, hidden=hidden))
    again = gates.score(evidence(0, hidden=hidden.float()))
    assert torch.equal(score.values_BHT, again.values_BHT)


@pytest.mark.parametrize("family", sorted(GATES))
def test_formula(family: str) -> None:
    """The gate against its formula, entry by entry in float64."""
    gate = gates_of(family)[0].double()
    hidden = torch.randn(1, T, E_WIDTH, dtype=torch.float64)
    gate.calibrate_(
        input_mean_E=hidden.mean((0, 1)),
        input_scale_E=hidden.std((0, 1)),
        floor_H=torch.full((H,), 0.1),
        mean_H=torch.tensor([-1.0, 2.0], dtype=torch.float64),
    )
    output = gate(GateInputs(hidden))
    for i in range(T):
        x = (hidden[0, i] - hidden.mean((0, 1))) / hidden.std((0, 1))
        if isinstance(gate, MLPGate):
            z = gate.up.weight @ x + gate.up.bias
            x = 0.5 * z * (1 + torch.erf(z / 2**0.5))
        else:
            assert isinstance(gate, LinearGate)
        torch.testing.assert_close(output[0, :, i], gate.out.weight @ x + gate.out.bias)
    torch.testing.assert_close(gate.out.bias.detach(), torch.tensor([-1.0, 2.0], dtype=torch.float64))


def test_a_dead_input_channel_is_not_blown_up() -> None:
    gate = gates_of("linear")[0]
    zeros = torch.zeros(E_WIDTH)
    gate.calibrate_(input_mean_E=zeros, input_scale_E=zeros, floor_H=torch.ones(H), mean_H=torch.zeros(H))
    assert gate(GateInputs(torch.full((1, T, E_WIDTH), 1e-6))).abs().max() < 1


def test_missing_layer_hidden_and_wrong_width_are_refused() -> None:
    gates = gates_of("linear", (0, 2))
    assert gates.layers == (0, 2)
    with pytest.raises(ValueError, match=r"no gate for layer 1: gates exist for layers \[0, 2\]"):
        gates.score(evidence(1))
    with pytest.raises(ValueError, match="takes hidden states of width 12, got"):
        gates.score(evidence(2, hidden=torch.randn(2, T, 5)))
    shown = evidence(0)
    object.__setattr__(shown, "hidden_BTE", None)
    with pytest.raises(ValueError, match="this evidence holds no hidden states"):
        gates.score(shown)


def test_unknown_family_gets_a_suggestion_and_empty_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        gates_of("liner")
    with pytest.raises(ValueError, match="at least one layer"):
        GateSet({})
    with pytest.raises(ValueError, match="at least 1, got F=0"):
        build_gates("mlp", {0: {"E": 4, "H": 1, "F": 0}})

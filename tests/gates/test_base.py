"""A gate set: one gate a layer, scores in its unit, -inf on padding, decays that age."""

from dataclasses import replace

import pytest
import torch

from retain.attention.rotary import Rotary
from retain.evidence import Evidence
from retain.gates import GATES, GateInputs, GateSet, build_gates, dims_for, inputs_of
from retain.gates.base import UNITS
from retain.gates.calibrate import Calibrator
from retain.shapes import axis_of
from tests.close import assert_close
from tests.naive import random_evidence

E_WIDTH, H, Q, T, D = 12, 2, 4, 9, 4
SIZES = {"E": E_WIDTH, "H": H, "Q": Q, "D": D}
# Those of one layer that ask nothing but the entry itself.
FAMILIES = sorted(set(GATES) - {"lookahead"})


def evidence(layer_idx: int = 0, pads: tuple[int, ...] = (0, 3)) -> Evidence:
    tensors = {f"{name}_BTE": torch.randn(len(pads), T, E_WIDTH) for name in ("hidden", "stream")}
    sizes = {"num_tokens": T, "head_width": D, "model_width": E_WIDTH}
    shown = random_evidence(pads, **sizes, **tensors, rotary=Rotary(torch.tensor([1.0, 0.1])))
    return replace(shown, layer_idx=layer_idx)


def gates_of(family: str, layers: tuple[int, ...] = (0, 1)) -> GateSet:
    return build_gates(family, dims_for(family, dict.fromkeys(layers, SIZES)))


@pytest.mark.parametrize("family", FAMILIES)
def test_score_is_the_output_in_its_unit_and_masked(family: str) -> None:
    gates, shown = gates_of(family), evidence(1)
    score = gates.score(shown)
    assert score.unit == gates.unit == UNITS[GATES[family].unit] and score.values_BHT.dtype == torch.float32
    assert torch.equal(score.values_BHT.isneginf(), ~shown.valid_BT[:, None].expand(2, H, T))
    expected = gates[1](inputs_of(shown, gates[1])).float()
    assert expected.shape == (2, H, T)
    if GATES[family].unit == "log_risk":
        expected = expected.exp()
    assert torch.equal(gates.learned(shown), expected)
    if gates.ages:
        # Entry i of 9 is 8 - i tokens old, in either sequence.
        expected = expected * torch.arange(T - 1, -1, -1)
    valid = shown.valid_BT[:, None].expand(2, H, T)
    assert torch.equal(score.values_BHT[valid], expected[valid])
    assert not score.values_BHT.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(family: str) -> None:
    gates, shown = gates_of(family), evidence(0, (0, 4))
    alone = shown.select_batch(slice(1, 2))
    axes = {name: axis_of(name, "T") for name, value in vars(alone).items() if value is not None}
    cut = {name: getattr(alone, name).narrow(axis, 4, T - 4) for name, axis in axes.items() if axis}
    alone = replace(alone, **cut, queries_BQSD=alone.queries_BQSD[:, :, 4:])
    padded, plain = gates.score(shown).values_BHT[1:, :, 4:], gates.score(alone).values_BHT
    assert_close(padded, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_in_half_precision_is_scored_in_float32(family: str) -> None:
    gates, shown = gates_of(family), evidence()
    names = ("queries_BQSD", "keys_BHTD", "values_BHTD", "hidden_BTE", "stream_BTE")
    half = replace(shown, **{name: getattr(shown, name).bfloat16() for name in names})
    whole = replace(shown, **{name: getattr(half, name).float() for name in names})
    assert torch.equal(gates.score(half).values_BHT, gates.score(whole).values_BHT)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"context"}))
def test_a_gate_that_is_not_contextual_can_be_asked_about_some_entries(family: str) -> None:
    gates = gates_of(family)
    gate, shown = gates[0], evidence()
    inputs, idx = inputs_of(shown, gate), torch.tensor([5, 2, 7])
    assert not gate.contextual
    assert_close(gate(inputs.entries(idx)), gate(inputs)[..., idx])


def test_decays_stored_earlier_age_with_the_sequence() -> None:
    """Decays stored when entries came are multiplied by their age, evicted entries counted."""
    gates, shown = gates_of("decay"), evidence(pads=(0,))
    stored = -torch.rand(1, H, T)
    places = torch.tensor([[0, 1, 5, 6, 7, 20, 21, 22, 30]])
    score = gates.score(replace(shown, learned_BHT=stored, place_BT=places))
    assert torch.equal(score.values_BHT, stored * (30 - places)[:, None])


def test_before_training_gates_remember_the_floor_and_the_inputs() -> None:
    gate, shown = gates_of("linear")[0], evidence()
    floor_H, mean_H = torch.tensor([0.1, 0.2]), torch.tensor([-1.0, 2.0])
    gate.prepare_(inputs_of(shown, gate), shown.valid_BT, floor_H, mean_H)
    counted = shown.hidden_BTE[shown.valid_BT].double()
    torch.testing.assert_close(gate.input_mean_E, counted.mean(0).float())
    torch.testing.assert_close(gate.input_scale_E, counted.std(0, correction=0).float())
    assert torch.equal(gate.risk_floor_H, floor_H) and torch.equal(gate.out.bias, mean_H)
    qkv = gates_of("qkv")[0]
    qkv.prepare_(inputs_of(shown, qkv), shown.valid_BT, floor_H, mean_H)
    assert torch.equal(qkv.risk_floor_H, floor_H)


def test_a_dead_input_channel_is_not_blown_up() -> None:
    gate = gates_of("linear")[0]
    gate.standardise_as_(torch.zeros(5, E_WIDTH))
    assert gate(GateInputs(torch.full((1, T, E_WIDTH), 1e-6))).abs().max() < 1


def test_missing_layers_and_inputs_are_refused() -> None:
    gates = gates_of("linear", (0, 2))
    assert gates.layers == (0, 2)
    with pytest.raises(ValueError, match=r"no gate for layer 1: gates exist for layers \[0, 2\]"):
        gates.score(evidence(1))
    for family, name, missing in (
        ("linear", "hidden_BTE", "looks at the attention input, "),
        ("dms", "stream_BTE", "looks at the residual stream, "),
        ("admission", "rotary", "looks at keys after norm, before RoPE"),
        ("lookahead", "lookahead_BQSD", "retain.hf.intercept.lookahead_pass.look_ahead"),
    ):
        with pytest.raises(ValueError, match=missing):
            gates_of(family).score(replace(evidence(), **{name: None}))


def test_a_calibrated_score_is_the_gates_through_the_curve_of_its_layer() -> None:
    plain, shown = gates_of("linear"), evidence(1)
    made = {layer: Calibrator(H=H, K=3) for layer in (0, 1)}
    for layer, each in made.items():
        each.knots_K.copy_(torch.tensor([-2.0, 0.5, 1.0]) + layer)
        each.gain_H.copy_(1 + torch.arange(H))
    gates = GateSet({layer: plain[layer] for layer in (0, 1)}, {"score_unit": "rank"}, calibrators=made)
    score = gates.score(shown)
    assert score.unit == gates.unit == "risk"
    risk = plain[1](inputs_of(shown, plain[1])).detach().exp()
    wanted = made[1](risk).masked_fill(~shown.exists_BHT, float("-inf"))
    assert torch.equal(score.values_BHT, wanted) and not torch.equal(made[0](risk), made[1](risk))

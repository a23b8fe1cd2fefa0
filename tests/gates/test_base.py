"""A gate set: one gate a layer, scores in its unit, -inf on padding, decays that age."""

import sys
from dataclasses import replace

import pytest
import torch

from retain.evidence import Evidence
from retain.gates import GATES, GateInputs, GateSet, build_gates, dims_for, inputs_of
from retain.gates.base import INPUTS, UNITS
from retain.rotary import Rotary

E_WIDTH, H, Q, T, D = 12, 2, 4, 9, 4
SIZES = {"E": E_WIDTH, "H": H, "Q": Q, "D": D}
# Those of one layer that ask nothing but the entry itself.
FAMILIES = sorted(set(GATES) - {"lookahead"})


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
        stream_BTE=torch.randn(B, T, E),
        token_ids_BT=torch.randint(9, (B, T)),
        rotary=Rotary(torch.tensor([1.0, 0.1])),
    )


def gates_of(family: str, layers: tuple[int, ...] = (0, 1)) -> GateSet:
    return build_gates(family, dims_for(family, dict.fromkeys(layers, SIZES)))


@pytest.mark.parametrize("family", sorted(GATES))
def test_a_family_says_what_it_is(family: str) -> None:
    gate_class = GATES[family]
    assert gate_class.family == family and gate_class.unit in UNITS
    assert gate_class.inputs and gate_class.inputs <= set(INPUTS)
    assert {"E", "H"} <= set(gate_class.sizes) <= {"E", "H", "Q", "D"}
    assert "Parameters" in (gate_class.__doc__ or "") or family == "lookahead"
    assert "arXiv" in f"{gate_class.__doc__} {sys.modules[gate_class.__module__].__doc__}"


@pytest.mark.parametrize("family", FAMILIES)
def test_output_has_one_number_per_entry_and_head(family: str) -> None:
    gates = gates_of(family)
    given = {layer: inputs_of(evidence(layer, (0, 0, 0)), gates[layer]) for layer in (0, 1)}
    output = gates(given)
    assert {layer: tuple(value.shape) for layer, value in output.items()} == {0: (3, H, T), 1: (3, H, T)}


@pytest.mark.parametrize("family", FAMILIES)
def test_score_is_the_output_in_its_unit_and_masked(family: str) -> None:
    gates, shown = gates_of(family), evidence(1)
    score = gates.score(shown)
    assert score.unit == gates.unit == UNITS[GATES[family].unit] and score.values_BHT.dtype == torch.float32
    assert torch.equal(score.values_BHT.isneginf(), ~shown.valid_BT[:, None].expand(2, H, T))
    expected = gates[1](inputs_of(shown, gates[1])).float()
    if GATES[family].unit == "log_risk":
        expected = expected.exp()
    assert torch.equal(gates.noted(shown), expected)
    if gates.ages:
        # Entry i of 9 is 8 - i tokens old, in either sequence.
        expected = expected * torch.arange(T - 1, -1, -1)
    valid = shown.valid_BT[:, None].expand(2, H, T)
    assert torch.equal(score.values_BHT[valid], expected[valid])
    assert not score.values_BHT.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(family: str) -> None:
    gates, shown = gates_of(family), evidence(0, (0, 4))
    alone = Evidence(
        **{
            **{
                name: getattr(shown, name) for name in ("layer_idx", "output_weight_QDE", "scaling", "rotary")
            },
            **{
                name: getattr(shown, name)[1:, :, 4:] for name in ("queries_BQSD", "keys_BHTD", "values_BHTD")
            },
            **{name: getattr(shown, name)[1:, 4:] for name in ("positions_BT", "valid_BT", "hidden_BTE")},
            "stream_BTE": shown.stream_BTE[1:, 4:],
        }
    )
    padded, plain = gates.score(shown).values_BHT[1:, :, 4:], gates.score(alone).values_BHT
    torch.testing.assert_close(padded, plain, rtol=2e-5, atol=2e-6)


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
    torch.testing.assert_close(gate(inputs.entries(idx)), gate(inputs)[..., idx], rtol=1e-5, atol=1e-6)


def test_contextual_families() -> None:
    assert {family for family in GATES if GATES[family].contextual} == {"context", "lookahead"}
    assert {family for family in GATES if GATES[family].ages} == {"decay", "decay_shared"}


def test_decays_noted_earlier_age_with_the_sequence() -> None:
    """What was noted when entries came is multiplied by how long ago that is, evicted entries counted."""
    gates, shown = gates_of("decay"), evidence(pads=(0,))
    noted = -torch.rand(1, H, T)
    places = torch.tensor([[0, 1, 5, 6, 7, 20, 21, 22, 30]])
    score = gates.score(replace(shown, learned_BHT=noted, place_BT=places))
    assert torch.equal(score.values_BHT, noted * (30 - places)[:, None])


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


def test_missing_layer_inputs_and_wrong_width_are_refused() -> None:
    gates = gates_of("linear", (0, 2))
    assert gates.layers == (0, 2)
    with pytest.raises(ValueError, match=r"no gate for layer 1: gates exist for layers \[0, 2\]"):
        gates.score(evidence(1))
    with pytest.raises(ValueError, match="layer 2 takes hidden states of width 12, got"):
        gates.score(evidence(2, hidden=torch.randn(2, T, 5)))
    for family, name, missing in (
        ("linear", "hidden_BTE", "looks at the attention input, .* pass hidden_BTE"),
        ("dms", "stream_BTE", "looks at the residual stream, .* pass stream_BTE"),
        ("admission", "rotary", "looks at keys after norm, before RoPE, .*`rotary`"),
    ):
        with pytest.raises(ValueError, match=missing):
            gates_of(family).score(replace(evidence(), **{name: None}))


def test_a_gate_that_wants_every_query_is_not_given_a_window_of_them() -> None:
    shown = evidence()
    short = replace(shown, queries_BQSD=shown.queries_BQSD[:, :, -4:])
    with pytest.raises(ValueError, match="query of each of the 9 entries, and the evidence holds 4"):
        gates_of("qkv").score(short)


def test_unknown_family_gets_a_suggestion_and_empty_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        gates_of("liner")
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        build_gates("liner", {})
    with pytest.raises(ValueError, match="at least one layer"):
        GateSet({})
    with pytest.raises(ValueError, match="at least 1, got F=0"):
        build_gates("mlp", {0: {"E": 4, "H": 1, "F": 0}})

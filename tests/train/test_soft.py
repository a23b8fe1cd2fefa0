"""The end-to-end objective: terms by hand, gradients that add up, seeds, ramps, refusals; and it learns."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

from retain.gates import GATES, GateSet, build_gates, dims_for, inputs_of
from retain.hf.intercept.observe import observe
from retain.hf.model.decoder import describe
from retain.hf.training.soft_attention import SoftGated
from retain.train.data.document import Document
from retain.train.distill import distill
from retain.train.objectives.soft_losses import capacity_term, open_entries
from retain.train.objectives.soft_threshold import regressed
from retain.train.objectives.targets import TargetSettings
from retain.train.soft_stage import (
    COST,
    FIDELITY,
    EndToEnd,
    SoftSettings,
    check_loophole,
    keep_ratio_at,
)
from retain.train.teacher import Frozen
from tests.close import MODEL, assert_close
from tests.tiny import PAD, tiny_model
from tests.train.made import document, frozen_of, sizes_of

SOFT = SoftSettings(protected=6, sinks=2, keep_from=0.3, keep_to=0.3, ramp_steps=0, chunk=7)
ALL = dict.fromkeys((*FIDELITY, *COST), 1.0)


def gates_of(frozen: Frozen, family: str = "linear", *, spread: float = 1.0, **settings) -> GateSet:
    gates = build_gates(family, sizes_of(frozen.model, **settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in gates.layers:
            out = gates[layer].out
            out.weight.copy_(
                spread * torch.randn(out.weight.shape, generator=generator) / out.weight.shape[1] ** 0.5
            )
            out.bias.fill_(3.0 if gates.ages else 0.0)
    return gates


DOCUMENTS = [document(30, 4, seed=1), document(22, 3, seed=2)]


def of_family(frozen: Frozen, family: str, settings: dict | None = None) -> GateSet:
    spec = describe(frozen.model)[0]
    sizes = sizes_of(frozen.model, Q=spec.num_heads, D=spec.head_dim)
    return build_gates(family, dims_for(family, sizes, settings))


def by_hand(frozen: Frozen, gates: GateSet, one: Document, soft: SoftSettings) -> dict[str, torch.Tensor]:
    """One document, whole logits of the model's own forward, no batch, no chunks."""
    ids = torch.tensor([one.context_ids + one.appendix_ids])
    n = ids.shape[1]
    spared = (torch.arange(n) < soft.sinks)[None]
    full = frozen.model(ids, use_cache=False, output_hidden_states=True)
    with SoftGated(frozen.model, gates, protected=soft.protected) as module:
        gated, log_gates = module(ids, ungated_BT=spared, use_cache=False, output_hidden_states=True)
    first = soft.protected + soft.sinks
    if soft.positions == "appendix":
        first = max(first, len(one.context_ids) - 1)
    logits = [x.logits[0, first:].double() for x in (full, gated)]
    log_p, log_q = ((x / soft.temperature).log_softmax(-1) for x in logits)
    phis = [phi.double() for phi in log_gates.values()]
    valid, rows = torch.ones(1, n, dtype=torch.bool), torch.arange(n)[None]
    opened = torch.cat(
        [open_entries(x, valid, rows, protected=soft.protected, ages=gates.ages) for x in phis], 1
    )
    seen = torch.arange(1, n + 1)[None].double()
    limit = soft.keep_to * seen if soft.budget is None else torch.full_like(seen, soft.budget)
    share = torch.cat(phis, 1).exp().mean()
    off = (soft.protected / (n - torch.arange(n))).clamp_max(1.0)
    return {
        "kl_forward": soft.temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1).mean(),
        "kl_reverse": soft.temperature**2 * (log_q.exp() * (log_q - log_p)).sum(-1).mean(),
        "next_token": torch.nn.functional.cross_entropy(logits[1][:-1], ids[0, first + 1 :]),
        "hidden": (full.hidden_states[-1] - gated.hidden_states[-1])[0, first:].square().mean(),
        "capacity_head": capacity_term(opened, seen, limit, variant=soft.variant)[0],
        "capacity_global": capacity_term(opened.mean(1, keepdim=True), seen, limit, variant=soft.variant)[0],
        "closed": (share - soft.keep_to).relu(),
        "eviction_rate": (share - soft.keep_to).abs(),
        "admitted": torch.cat([off + (1 - off) * (1 - (1 - x.exp()) ** 2) for x in phis], 1).mean(),
        "open": opened[..., -1].mean() / n,
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 2.0, "variant": "code"},
        {"positions": "appendix", "budget": 5},
        {"protected": 0, "sinks": 3},
    ],
    ids=str,
)
def test_a_padded_batch_gives_each_document_its_own_terms(settings: dict) -> None:
    frozen = frozen_of()
    gates = gates_of(frozen)
    soft = replace(SOFT, terms=ALL, **settings)
    objective = EndToEnd(gates, frozen, soft)
    rows = objective.look(DOCUMENTS)
    assert objective.fields == ("loss", *ALL, "open", "keep")
    for row, one in zip(rows, DOCUMENTS, strict=True):
        wanted = {name: value.detach() for name, value in by_hand(frozen, gates, one, soft).items()}
        for name, value in wanted.items():
            assert math.isclose(row[name], float(value), rel_tol=2e-4, abs_tol=1e-6), name
        assert math.isclose(row["loss"], sum(float(wanted[name]) for name in ALL), rel_tol=1e-4)
        assert row["keep"] == pytest.approx(0.3)
    assert rows[0]["kl_forward"] > 1e-3, "the gates must bite"


@pytest.mark.parametrize("protected", [0, 6])
def test_decays_by_hand(protected: int) -> None:
    frozen = frozen_of()
    gates = gates_of(frozen, "decay", F=8)
    terms = {"kl_forward": 1.0, "capacity_head": 1.0, "capacity_global": 0.5}
    soft = replace(SOFT, terms=terms, protected=protected, sinks=0, budget=4)
    for row, one in zip(EndToEnd(gates, frozen, soft).look(DOCUMENTS), DOCUMENTS, strict=True):
        wanted = {name: value.detach() for name, value in by_hand(frozen, gates, one, soft).items()}
        for name in (*terms, "open"):
            value = float(wanted[name].detach())
            assert math.isclose(row[name], value, rel_tol=2e-4, abs_tol=1e-6), name


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss", "qwen3_next"])
def test_the_gradient_is_that_of_the_loss_by_hand(family: str) -> None:
    frozen = frozen_of(family)
    gates = gates_of(frozen)
    soft = replace(SOFT, terms={"kl_forward": 1.0, "hidden": 0.3, "capacity_global": 0.5})
    objective = EndToEnd(gates, frozen, soft)
    rows = objective.accumulate_(DOCUMENTS, 0, 0.5)
    found = [parameter.grad.clone() for parameter in objective.parameters()]

    def plainly(frozen: Frozen, gates: GateSet) -> tuple[list[torch.Tensor], list[float]]:
        gates.zero_grad()
        losses = []
        for one in DOCUMENTS:
            wanted = by_hand(frozen, gates, one, soft)
            losses.append(sum(weight * wanted[name] for name, weight in soft.terms.items()))
        (0.5 * sum(losses)).backward()
        gradients = [parameter.grad.clone() for parameter in gates.parameters()]
        return gradients, [float(loss.detach()) for loss in losses]

    plain, losses = plainly(frozen, gates)
    exact, _ = plainly(Frozen(tiny_model(family, dtype=torch.float64), None, PAD), gates.double())
    for gradient, wanted, rounded in zip(found, exact, plain, strict=True):
        assert gradient.any()
        assert_close(gradient, wanted, rounded, ops=4 * MODEL)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("hard", ["none", "gumbel"])
def test_neither_batches_nor_checkpointing_change_the_gradient(hard: str) -> None:
    frozen = frozen_of()
    gates = gates_of(frozen)
    found = {}
    for name, packs, checkpointing in (
        ("together", [DOCUMENTS], False),
        ("apart", [DOCUMENTS[:1], DOCUMENTS[1:]], False),
        ("again", [DOCUMENTS], True),
    ):
        objective = EndToEnd(gates, frozen, replace(SOFT, hard=hard, checkpointing=checkpointing), seed=4)
        gates.zero_grad()
        rows = [row for pack in packs for row in objective.accumulate_(pack, 3, 0.5)]
        found[name] = rows, [parameter.grad.clone() for parameter in gates.parameters()]
    for name in ("apart", "again"):
        for row, wanted in zip(found[name][0], found["together"][0], strict=True):
            assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        for gradient, wanted in zip(found[name][1], found["together"][1], strict=True):
            assert wanted.any()
            assert_close(gradient, wanted.double(), ops=8 * MODEL)
    layer = frozen.model.model.layers[0]
    assert not layer.training and not layer.gradient_checkpointing, "the model is as it was"


def test_gates_that_are_open_lose_nothing() -> None:
    """Teacher and student are the same weights: an open gate is the model itself, half precision or not."""
    frozen = frozen_of()
    gates = gates_of(frozen, spread=0.0)
    for layer in gates.layers:
        torch.nn.init.constant_(gates[layer].out.bias, 60.0)
    row = EndToEnd(gates, frozen, replace(SOFT, terms=ALL)).look(DOCUMENTS)[0]
    assert abs(row["kl_forward"]) < 1e-6 and abs(row["kl_reverse"]) < 1e-6 and row["hidden"] < 1e-9
    assert row["open"] == 1.0 and row["closed"] == pytest.approx(0.7)


def test_preparing_opens_the_gates_alike_on_every_process() -> None:
    frozen = frozen_of()
    made = []
    for noise in (1, 2):
        gates = gates_of(frozen, "decay", F=8, opens_at=4.0)
        torch.manual_seed(noise)
        before = torch.random.get_rng_state()
        objective = EndToEnd(gates, frozen, replace(SOFT, sinks=0, protected=0), seed=5)
        objective.prepare_(DOCUMENTS)
        assert torch.equal(torch.random.get_rng_state(), before)
        made.append(copy.deepcopy(gates.state_dict()))
        row = objective.look(DOCUMENTS)[0]
        assert row["open"] > 0.7 and all(gates[layer].out.bias.eq(4.0).all() for layer in gates.layers)
    for name, value in made[0].items():
        assert torch.equal(value, made[1][name]), name
    assert any(float(value.abs().max()) > 0 for name, value in made[0].items() if "input_mean" in name)


@pytest.mark.parametrize("shift", [0.0, -6.0])
@pytest.mark.parametrize("cost", ["capacity_head", "capacity_global"])
def test_gates_that_learned_a_risk_begin_at_the_budget(cost: str, shift: float) -> None:
    frozen = frozen_of()
    gates = gates_of(frozen)
    with torch.no_grad():
        for layer in gates.layers:
            gates[layer].out.bias.copy_(torch.tensor([2.0, -1.0]) * layer + shift)
    before = {layer: gates[layer].out.bias.clone() for layer in gates.layers}
    soft = replace(SOFT, terms={"kl_forward": 1.0, cost: 1.0}, keep_to=0.25, protected=0)
    objective = EndToEnd(gates, frozen, soft)
    opened = objective.align_(DOCUMENTS)
    rows = objective.look(DOCUMENTS)
    assert opened == pytest.approx(sum(row["open"] for row in rows) / len(rows), rel=1e-4)
    # Half open at the quartile of what is not spared.
    scores: dict[int, list[torch.Tensor]] = {layer: [] for layer in gates.layers}
    for one in DOCUMENTS:
        ids = torch.tensor([one.context_ids])
        for layer, evidence in zip(gates.layers, observe(frozen.model, ids), strict=True):
            scores[layer].append(gates[layer](inputs_of(evidence, gates[layer]))[0, :, 2:])
    of_heads = torch.cat([torch.cat(parts, -1) for parts in scores.values()])
    above = (of_heads > 0).float().mean(-1)
    moved = torch.cat([before[layer] - gates[layer].out.bias for layer in gates.layers])
    if cost == "capacity_head":
        assert (above - 0.25).abs().max() < 1.5 / of_heads.shape[-1]
    else:
        assert abs(float(above.mean()) - 0.25) < 1.5 / of_heads.numel()
        torch.testing.assert_close(moved, moved[:1].expand_as(moved))
    objective.align_(DOCUMENTS)
    again = torch.cat([before[layer] - gates[layer].out.bias for layer in gates.layers])
    torch.testing.assert_close(again, moved, rtol=1e-4, atol=1e-4)


def test_a_run_that_begins_with_a_local_stages_gates_aligns_them(make_config, tmp_path, capsys) -> None:
    """As they come, a log-risk says nothing of how far an entry is open."""
    first = distill(make_config(**{"training.steps": 2, "calibration": {"kind": "none"}}))
    opened = {}
    for stage, start in (("first", first), ("second", tmp_path / "first")):
        settings = {"training.steps": 1, "training.lr": 1e-9, "soft": {"protected": 4, "sinks": 2}}
        config = make_config(
            stage="end_to_end",
            initial=str(start),
            output=str(tmp_path / stage),
            calibration={"kind": "none"},
            **settings,
        )
        folder = distill(config)
        said = "gates that learned a risk, shifted to the budget" in capsys.readouterr().out
        assert said == (stage == "first"), "once"
        metadata = json.loads((folder / "gates.json").read_text())
        assert metadata["initial_stage"] == ("local" if said else "end_to_end")
        opened[stage] = metadata["training"]["held_out"]["open"]
    assert 0.2 < opened["first"] < 0.6, "half open, and what is protected"
    assert opened["second"] == pytest.approx(opened["first"], rel=1e-3), "the second is not shifted again"


def test_gates_that_cannot_be_shifted_are_refused_unless_they_are_relative() -> None:
    frozen = frozen_of()
    gates = of_family(frozen, "lowrank")
    with pytest.raises(
        ValueError, match=r"'lowrank'.*\(mass\) cannot be shifted.*soft.anchor=256.*initial=null"
    ):
        EndToEnd(gates, frozen, SOFT).align_(DOCUMENTS)
    before = copy.deepcopy(gates.state_dict())
    assert 0 < EndToEnd(gates, frozen, replace(SOFT, anchor=8)).align_(DOCUMENTS) < 1
    assert all(torch.equal(value, before[name]) for name, value in gates.state_dict().items())
    assert regressed(gates, "local") and not regressed(gates, None) and not regressed(gates, "end_to_end")
    assert regressed(gates_of(frozen), None) and not regressed(gates_of(frozen), "end_to_end")


def test_the_budget_is_reported_where_a_term_reads_one() -> None:
    frozen = frozen_of()
    gates, decays = gates_of(frozen), gates_of(frozen, "decay", F=8)
    admission = EndToEnd(gates, frozen, replace(SOFT, terms={"hidden": 1.0, "admitted": 0.1}))
    assert admission.fields == ("loss", "hidden", "admitted", "open")
    assert admission.look(DOCUMENTS)[0].keys() == set(admission.fields)
    fixed = EndToEnd(decays, frozen, replace(SOFT, budget=5, keep_from=1.0, ramp_steps=100))
    keeps = [row["keep"] for row in fixed.accumulate_(DOCUMENTS, 3, 1.0)]
    assert keeps == pytest.approx([5 / 34, 5 / 25]), "and no ramp, which nothing reads"


def test_held_out_overlap_is_that_of_the_order_at_the_end() -> None:
    frozen = frozen_of()
    target = TargetSettings(horizon=6)
    for family, settings in (("linear", {}), ("decay", {"F": 8})):
        objective = EndToEnd(gates_of(frozen, family, **settings), frozen, SOFT, target)
        row = objective.look(DOCUMENTS, baselines=True)[0]
        assert 0 <= row["overlap"] <= 1 and {"overlap_random", "overlap_recency"} <= row.keys()
        assert sorted(row["overlap_of"]) == [str(layer) for layer in objective.gates.layers]
    # A decay that is the same for all entries orders them by age.
    gates = gates_of(frozen, "decay", F=8, spread=0.0)
    row = EndToEnd(gates, frozen, SOFT, target).look(DOCUMENTS, baselines=True)[0]
    assert row["overlap"] == pytest.approx(row["overlap_recency"])


@pytest.mark.parametrize("family", sorted(GATES.keys() - {"lookahead", "qkv"}))
def test_every_family_that_can_be_gated_softly_trains(family: str) -> None:
    frozen = frozen_of()
    torch.manual_seed(0)
    # Where TRIM-KV opens its gates (18), float32 sees nothing of four steps.
    settings = {"opens_at": 5.0} if "decay" in family else {}
    gates = of_family(frozen, family, settings)
    objective = EndToEnd(gates, frozen, SOFT, TargetSettings(horizon=6), seed=1)
    objective.prepare_(DOCUMENTS)
    first = objective.look(DOCUMENTS)[0]
    assert first["open"] > 0.5, "it begins open"
    optimiser = torch.optim.Adam(objective.parameters(), lr=0.05)
    for step in range(4):
        optimiser.zero_grad()
        objective.accumulate_(DOCUMENTS, step, 0.5)
        assert any(one.grad is not None and one.grad.any() for one in objective.parameters())
        optimiser.step()
    row = objective.look(DOCUMENTS)[0]
    assert row["capacity_global"] < first["capacity_global"] and 0 <= row["overlap"] <= 1


def test_the_ramp() -> None:
    soft = SoftSettings(keep_from=1.0, keep_to=0.25, ramp_steps=100)
    assert [keep_ratio_at(step, soft, 500) for step in (0, 50, 100, 400)] == [1.0, 0.625, 0.25, 0.25]
    compression = replace(soft, ramp="compression", keep_to=1 / 16, ramp_steps=510)
    assert 1 / keep_ratio_at(0, compression, 544) == pytest.approx(1.0)
    assert 1 / keep_ratio_at(255, compression, 544) == pytest.approx(8.5)
    assert 1 / keep_ratio_at(510, compression, 544) == pytest.approx(16.0)
    assert keep_ratio_at(3, replace(soft, ramp_steps=None), 12) == 0.625, "half of the run"
    assert keep_ratio_at(0, replace(soft, ramp_steps=0), 12) == 0.25


@pytest.mark.parametrize(
    ("changes", "family", "message"),
    [
        ({"terms": {"kl_foward": 1.0}}, "linear", "did you mean 'kl_forward'"),
        (
            {"protected": 0, "sinks": 0},
            "linear",
            "softmax does not see gates that all close alike.*soft.anchor=256",
        ),
        (
            {"terms": {"kl_forward": 1.0, "capacity_head": 0.0}},
            "linear",
            "never asks a gate to close.*add one of capacity_head",
        ),
        ({}, "qkv", "'qkv' say no openness.*stage `local`"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(changes: dict, family: str, message: str) -> None:
    frozen = frozen_of()
    with pytest.raises(ValueError, match=message):
        EndToEnd(of_family(frozen, family), frozen, replace(SOFT, **changes))


def test_relative_gates_and_decays_need_no_protection() -> None:
    bare, frozen = replace(SOFT, protected=0, sinks=0), frozen_of()
    check_loophole(replace(bare, anchor=256), gates_of(frozen))
    check_loophole(bare, of_family(frozen, "decay"))


def test_documents_in_which_nothing_is_gated_are_refused() -> None:
    frozen = frozen_of()
    gates = gates_of(frozen)
    with pytest.raises(ValueError, match="has 8 tokens.*protected=6 and soft.sinks=2 cover all"):
        EndToEnd(gates, frozen, SOFT).look([document(8)])
    with pytest.raises(ValueError, match="has no appendix: set soft.positions=all"):
        EndToEnd(gates, frozen, replace(SOFT, positions="appendix")).look([document(30)])

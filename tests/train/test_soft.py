"""The end-to-end objective: terms by hand, gradients that add up, seeds, ramps, refusals; and it learns."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from retain.gates import GATES, GateSet, build_gates, dims_for
from retain.hf.model.decoder import describe
from retain.hf.training.soft_attention import SoftGated
from retain.train.data.document import Document
from retain.train.objectives.soft_losses import capacity_term, open_entries
from retain.train.soft_stage import COST, FIDELITY, EndToEnd, SoftSettings, check_loophole, keep_ratio_at
from retain.train.teacher import Frozen
from tests.close import MODEL, assert_close
from tests.tiny import PAD, tiny_model
from tests.train.made import document, frozen_of, look, sizes_of

SOFT = SoftSettings(protected=6, sinks=2, keep_from=0.3, keep_to=0.3, ramp_steps=0)
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
    """Terms of one document, from whole logits of the model's forward, without batch and chunks."""
    ids = torch.tensor([one.context_ids + one.appendix_ids])
    n = ids.shape[1]
    sinks = (torch.arange(n) < soft.sinks)[None]
    full = frozen.model(ids, use_cache=False, output_hidden_states=True)
    with SoftGated(frozen.model, gates, protected=soft.protected) as module:
        gated, log_gates = module(ids, ungated_BT=sinks, use_cache=False, output_hidden_states=True)
    first = soft.protected + soft.sinks
    logits = [x.logits[0, first:].double() for x in (full, gated)]
    log_p, log_q = (x.log_softmax(-1) for x in logits)
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
        "kl_forward": (log_p.exp() * (log_p - log_q)).sum(-1).mean(),
        "kl_reverse": (log_q.exp() * (log_q - log_p)).sum(-1).mean(),
        "next_token": torch.nn.functional.cross_entropy(logits[1][:-1], ids[0, first + 1 :]),
        "hidden": (full.hidden_states[-1] - gated.hidden_states[-1])[0, first:].square().mean(),
        "capacity_head": capacity_term(opened, seen, limit)[0],
        "capacity_global": capacity_term(opened.mean(1, keepdim=True), seen, limit)[0],
        "closed": (share - soft.keep_to).relu(),
        "eviction_rate": (share - soft.keep_to).abs(),
        "admitted": torch.cat([off + (1 - off) * (1 - (1 - x.exp()) ** 2) for x in phis], 1).mean(),
        "open": opened[..., -1].mean() / n,
    }


@pytest.mark.parametrize("settings", [{}, {"budget": 5}, {"protected": 0, "sinks": 3}], ids=str)
def test_a_padded_batch_gives_the_terms_of_each_document(settings: dict) -> None:
    frozen = frozen_of()
    gates = gates_of(frozen)
    soft = replace(SOFT, terms=ALL, **settings)
    objective = EndToEnd(gates, frozen, soft)
    rows = look(objective, DOCUMENTS)
    assert objective.fields == ("loss", *ALL, "open", "keep")
    for row, one in zip(rows, DOCUMENTS, strict=True):
        wanted = {name: value.detach() for name, value in by_hand(frozen, gates, one, soft).items()}
        for name, value in wanted.items():
            assert math.isclose(row[name], float(value), rel_tol=2e-4, abs_tol=1e-6), name
        assert math.isclose(row["loss"], sum(float(wanted[name]) for name in ALL), rel_tol=1e-4)
        assert row["keep"] == pytest.approx(0.3 if soft.budget is None else 5 / one.num_tokens)
    assert rows[0]["kl_forward"] > 1e-3, "the gates must bite"


@pytest.mark.parametrize("protected", [0, 6])
def test_decays_by_hand(protected: int) -> None:
    frozen = frozen_of()
    gates = gates_of(frozen, "decay", F=8)
    terms = {"kl_forward": 1.0, "capacity_head": 1.0, "capacity_global": 0.5}
    soft = replace(SOFT, terms=terms, protected=protected, sinks=0, budget=4)
    for row, one in zip(look(EndToEnd(gates, frozen, soft), DOCUMENTS), DOCUMENTS, strict=True):
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
    rows = objective.rows_of(DOCUMENTS, 0, 0.5)
    found = [parameter.grad.clone() for parameter in objective.gates.parameters()]

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
        rows = [row for pack in packs for row in objective.rows_of(pack, 3, 0.5)]
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
    row = look(EndToEnd(gates, frozen, replace(SOFT, terms=ALL)), DOCUMENTS)[0]
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
        row = look(objective, DOCUMENTS)[0]
        assert row["open"] > 0.7 and all(gates[layer].out.bias.eq(4.0).all() for layer in gates.layers)
    for name, value in made[0].items():
        assert torch.equal(value, made[1][name]), name
    assert any(float(value.abs().max()) > 0 for name, value in made[0].items() if "input_mean" in name)


def test_the_budget_is_reported() -> None:
    frozen = frozen_of()
    decays = gates_of(frozen, "decay", F=8)
    fixed = EndToEnd(decays, frozen, replace(SOFT, budget=5, keep_from=1.0, ramp_steps=100))
    keeps = [row["keep"] for row in fixed.rows_of(DOCUMENTS, 3, 1.0)]
    assert keeps == pytest.approx([5 / 34, 5 / 25]), "and no ramp, which nothing reads"


@pytest.mark.parametrize("family", sorted(GATES.keys() - {"lookahead", "qkv"}))
def test_every_family_that_can_be_gated_softly_trains(family: str) -> None:
    frozen = frozen_of()
    torch.manual_seed(0)
    # Where TRIM-KV opens its gates (18), float32 sees nothing of four steps.
    settings = {"opens_at": 5.0} if "decay" in family else {}
    gates = of_family(frozen, family, settings)
    objective = EndToEnd(gates, frozen, SOFT, seed=1)
    objective.prepare_(DOCUMENTS)
    first = look(objective, DOCUMENTS)[0]
    assert first["open"] > 0.5, "it begins open"
    optimiser = torch.optim.Adam(objective.gates.parameters(), lr=0.05)
    for step in range(4):
        optimiser.zero_grad()
        objective.rows_of(DOCUMENTS, step, 0.5)
        assert any(one.grad is not None and one.grad.any() for one in objective.gates.parameters())
        optimiser.step()
    row = look(objective, DOCUMENTS)[0]
    assert row["capacity_global"] < first["capacity_global"]


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
            "softmax does not see gates that all close alike.*Protect a window",
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


def test_documents_in_which_nothing_is_gated_are_refused() -> None:
    frozen = frozen_of()
    gates = gates_of(frozen)
    with pytest.raises(ValueError, match="has 8 tokens.*protected=6 and soft.sinks=2 cover all"):
        look(EndToEnd(gates, frozen, SOFT), [document(8)])
    check_loophole(replace(SOFT, protected=0, sinks=0), of_family(frozen, "decay"))

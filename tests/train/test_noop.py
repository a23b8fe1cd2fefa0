"""Gates that close alike are found out, gates that choose pass, and the controls are what they say."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from retain.future import future_risk
from retain.gates import GateSet, build_gates
from retain.hf.intercept.observe import observe
from retain.train.calibration import noop_controls as module
from retain.train.calibration.noop_controls import Control, noop_numbers, noop_summary
from retain.train.data.document import Document
from retain.train.objectives.soft_threshold import SoftThreshold, SoftThresholdStep
from retain.train.soft_stage import SoftSettings
from retain.train.teacher import Frozen, load_frozen
from tests.train.made import copying, gates_for


def noop_report(
    gates: GateSet, frozen: Frozen, documents: list[Document], soft: SoftSettings, *, seed: int = 0
) -> dict[str, Any]:
    return noop_summary([noop_numbers(gates, frozen, one, soft, seed=seed) for one in documents], soft)


SOFT = SoftSettings(protected=16, sinks=4, keep_to=0.25)
HORIZON = 16


@pytest.fixture(scope="module")
def frozen() -> Frozen:
    return load_frozen("reference:0", dtype="float32")


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return [copying(150, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def useful(frozen: Frozen, documents: list[Document]) -> GateSet:
    """Linear gates solved for the log future risk of these very documents, closed to the budget."""
    gates, seen = gates_for(frozen.model), {}
    for document in documents:
        n = len(document.context_ids)
        for evidence in observe(frozen.model, torch.tensor([document.context_ids + document.appendix_ids])):
            risk, _ = future_risk(evidence, document_tokens=n, horizon=HORIZON)
            assert evidence.hidden_BTE is not None
            seen.setdefault(evidence.layer_idx, []).append(
                (evidence.hidden_BTE[0, :n], (risk[0] + 1e-4).log())
            )
    for layer, parts in seen.items():
        gate = gates[layer]
        hidden = torch.cat([part[0] for part in parts])
        gate.standardise_as_(hidden)
        x = torch.cat([gate.standardise(hidden[None])[0], torch.ones(len(hidden), 1)], -1)
        y = torch.cat([part[1] for part in parts], -1).T
        weight = 2 * torch.linalg.solve(x.T @ x + torch.eye(x.shape[1]), x.T @ y)
        with torch.no_grad():
            gate.out.weight.copy_(weight[:-1].T)
            gate.out.bias.copy_(weight[-1] - (x @ weight).quantile(0.75, 0) - 1.0)
    return gates


def test_gates_that_choose_pass(frozen: Frozen, documents: list[Document], useful: GateSet) -> None:
    report = noop_report(useful, frozen, documents, SOFT)
    soft, hard = report["soft"], report["hard"]
    assert report["useful"] and report["verdict"].startswith("The gates choose")
    assert (
        soft["trained"] < min(0.9 * soft["shuffled"], soft["random"]) and hard["gate"] < 0.9 * hard["random"]
    )
    assert hard["gate"] < hard["recency"] and hard["wins"] == 1.0 and soft["open"] < 1.25 * soft["budget"]
    assert hard["documents"] == 2 and report["term"] == "kl_forward"
    assert json.loads(json.dumps(report)) == report
    assert noop_report(useful, frozen, documents, SOFT) == report, "keyed draws"
    other = noop_report(useful, frozen, documents, SOFT, seed=1)["hard"]
    assert hard["gate"] == other["gate"] and hard["random"] != other["random"]


def test_gates_that_all_close_alike_are_found_out(frozen: Frozen, documents: list[Document]) -> None:
    """They satisfy a budget of a quarter, and choose nothing."""
    gates = gates_for(frozen.model)
    for layer in gates.layers:
        torch.nn.init.zeros_(gates[layer].out.weight)
        torch.nn.init.constant_(gates[layer].out.bias, -2.0)
    report = noop_report(gates, frozen, documents, SOFT)
    assert not report["useful"] and "do not choose" in report["verdict"]
    soft = report["soft"]
    assert soft["open"] < 0.4
    for how in ("alike", "shuffled", "random"):
        assert math.isclose(soft["trained"], soft[how], rel_tol=1e-3)


def opened(frozen: Frozen) -> GateSet:
    gates = gates_for(frozen.model)
    for layer in gates.layers:
        gates[layer].open_()
    return gates


def test_gates_that_stay_open_are_found_out(
    frozen: Frozen, documents: list[Document], useful: GateSet
) -> None:
    report = noop_report(opened(frozen), frozen, documents[:1], SOFT)
    assert not report["useful"] and report["verdict"].startswith("The gates are open (99%")
    report = noop_report(useful, frozen, documents, replace(SOFT, budget=24))
    assert not report["useful"] and report["verdict"].startswith("The gates are open (30% of the entries")
    assert report["soft"]["budget"] == pytest.approx(24 / 180)


def test_gates_without_a_budget_are_judged_at_what_they_leave_open(
    frozen: Frozen, documents: list[Document], useful: GateSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recorded(monkeypatch)
    report = noop_report(useful, frozen, documents[:1], replace(SOFT, terms={"hidden": 1.0, "admitted": 0.1}))
    assert "budget" not in report["soft"] and "the budget is" not in report["verdict"]
    assert {own["tokens_per_head"] for own in made if "tokens_per_head" in own} == {
        round(report["soft"]["open"] * 150)
    }
    shut = noop_report(
        opened(frozen), frozen, documents[:1], replace(SOFT, terms={"hidden": 1.0, "admitted": 0.1})
    )
    assert shut["verdict"].startswith("The gates are open (99% of the entries): train longer, or weigh its")


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    cache = module.Cache
    monkeypatch.setattr(module, "Cache", lambda *args, **given: made.append(given) or cache(*args, **given))
    return made


@pytest.mark.parametrize("cost", ["capacity_head", "capacity_global"])
def test_evictions_spare_sinks_and_share_the_budget_as_in_training(
    cost: str, frozen: Frozen, documents: list[Document], useful: GateSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recorded(monkeypatch)
    soft = replace(SOFT, sinks=0, terms={"kl_forward": 1.0, cost: 1.0})
    noop_report(useful, frozen, documents[:1], soft)
    found = [(own["policy"], own.get("scope"), own.get("protection", {}).get("sinks")) for own in made]
    joint = "model" if cost == "capacity_global" else None
    controls = [("recency", None, 4), *[("random", None, 4)] * 4]
    assert found == [("full", None, None), ("gate", joint, 4), *controls]
    assert len({own["seeds"][0] for own in made if "seeds" in own}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"gate": 0.96}, "must lose less than 0.9 of the one"),
        ({"recency": 0.6}, "all but the most recent 0.6"),
        ({"open": 0.32}, "The gates are open"),
        ({"shuffled": 0.1}, "do not choose"),
    ],
    ids=str,
)
def test_the_verdict_leaves_a_margin(changes: dict[str, float], message: str | None) -> None:
    means = {"trained": 0.1, "alike": 0.2, "shuffled": 0.2, "random": 0.2, "open": 0.3, "budget": 0.25}
    hard = {"gate": 0.7, "recency": 1.0, "random": 1.0, "wins": 1.0, "documents": 2}
    for name, value in changes.items():
        (hard if name in ("gate", "recency") else means)[name] = value
    problems = module._problems(means, hard)
    assert [message in problem for problem in problems] == ([] if message is None else [True])


def test_scores_upside_down_are_found_out_by_an_eviction(
    frozen: Frozen, documents: list[Document], useful: GateSet
) -> None:
    gates = gates_for(frozen.model)
    gates.load_state_dict(useful.state_dict())
    for layer in gates.layers:
        with torch.no_grad():
            gates[layer].out.weight.neg_()
            gates[layer].out.bias.neg_()
    report = noop_report(gates, frozen, documents, SOFT)
    assert not report["useful"] and "Evicting by the gates loses" in report["verdict"]


def test_documents_that_fit_the_budget_are_not_evicted_from_and_bare_ones_continued_by_their_own_end(
    frozen: Frozen, documents: list[Document], useful: GateSet
) -> None:
    with pytest.raises(ValueError, match="there are none: hold some out"):
        noop_report(useful, frozen, [], SOFT)
    report = noop_report(useful, frozen, documents[:1], replace(SOFT, budget=4096))
    assert report["hard"] == dict.fromkeys(("gate", "recency", "random", "wins", "documents"), 0)
    assert "no document is long enough" in report["verdict"]
    bare = [Document(documents[0].context_ids)]
    report = noop_report(useful, frozen, bare, replace(SOFT, terms={"hidden": 1.0, "admitted": 1.0}))
    assert report["hard"]["documents"] == 1 and report["hard"]["random"] > 0 and report["term"] == "hidden"


def test_controls_are_as_open_and_choose_nothing() -> None:
    gates = build_gates("linear", {0: {"E": 4, "H": 3}, 1: {"E": 4, "H": 3}})
    soft_threshold = SoftThreshold(gates)
    soft_threshold.current = SoftThresholdStep(torch.ones(1, 50, dtype=torch.bool), (7,), 0, False)
    torch.manual_seed(0)
    output = torch.randn(1, 3, 50) + torch.tensor([[-2.0], [0.0], [2.0]])
    made = {
        (how, layer): Control(soft_threshold, how, sinks=5, seed=1)(output, gates[layer])
        for how in ("trained", "alike", "shuffled", "random")
        for layer in (0, 1)
    }
    trained = made["trained", 0]
    assert torch.equal(trained, torch.nn.functional.logsigmoid(output))
    for how in ("alike", "shuffled", "random"):
        assert torch.equal(made[how, 0][..., :5], trained[..., :5]), "sinks take no part"
    own = trained[..., 5:]
    alike, shuffled, random = (made[how, 0][..., 5:] for how in ("alike", "shuffled", "random"))
    assert (alike == alike[..., :1]).all()
    torch.testing.assert_close(alike.exp().mean(-1), own.exp().mean(-1))
    assert torch.equal(shuffled.sort(-1).values, own.sort(-1).values) and not torch.equal(shuffled, own)
    assert set(random.flatten().tolist()) <= set(own.flatten().tolist())
    assert not set(random[0, 0].tolist()) <= set(own[0, 0].tolist()), "of whichever head"
    assert not torch.equal(made["shuffled", 1], made["shuffled", 0]), "each layer its own draws"

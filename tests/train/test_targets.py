"""Targets: the default recipe is future risk, others are as they are set, and senseless ones are refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from retain.attention.chunked import truncate
from retain.config import build
from retain.future import future_use
from retain.gates import build_gates
from retain.hf.intercept.observe import observe
from retain.train.data.document import Branch, Document, Reading
from retain.train.local_stage import LayerLocal
from retain.train.objectives.case import LossSettings
from retain.train.objectives.targets import TargetSettings, check_targets, layer_target
from retain.train.recipe import check
from retain.train.teacher import Frozen, View, walk
from tests.naive import naive_overlap
from tests.refused import refused
from tests.tiny import tiny_model
from tests.train.made import draw_ids, look

READINGS = [
    Reading(
        Document(draw_ids(50, 0), draw_ids(8, 1)),
        (
            Branch("appendix", draw_ids(8, 1)),
            Branch("repeat", draw_ids(30, 2)),
            Branch("repeat", draw_ids(20, 3)),
        ),
    ),
    Reading(Document(draw_ids(30, 4), draw_ids(3, 5)), (Branch("appendix", draw_ids(3, 5)),)),
    Reading(Document(draw_ids(40, 6))),
]

Targets = dict[tuple[int, int], tuple[Tensor, Tensor]]


def targets(family: str, settings: TargetSettings) -> Targets:
    found: Targets = {}

    def see(views: list[View]) -> None:
        found.update({(view.row, view.layer_idx): layer_target(view, settings) for view in views})

    walk(Frozen(tiny_model(family), None, 0), READINGS, see)
    return found


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("sources", [("own",), ("appendix",), ("own", "appendix")])
def test_the_default_recipe_is_the_risk_of_context_and_appendix(
    family: str, sources: tuple[str, ...]
) -> None:
    """Equal numbers, whatever else is in the row."""
    settings = TargetSettings(sources=dict.fromkeys(sources, 1.0), horizon=16)
    found, model = targets(family, settings), tiny_model(family)
    for row, reading in enumerate(READINGS):
        document = reading.document
        chosen = [source for source in sources if source == "own" or document.appendix_ids]
        for evidence in observe(model, torch.tensor([document.context_ids + document.appendix_ids])):
            target_HT, reached_HT = found[row, evidence.layer_idx]
            if not chosen:
                assert not reached_HT.any() and not target_HT.any()
                continue
            size = len(document.context_ids)
            behind = replace(evidence, queries_BQSD=evidence.queries_BQSD[:, :, size:])
            branches = [("appendix", behind)] if "appendix" in chosen else []
            how = {"sources": dict.fromkeys(chosen, 1.0), "horizon": 16}
            risk, reached = future_use(truncate(evidence, size), branches, **how)
            assert target_HT.dtype == torch.float32
            assert torch.equal(reached_HT, reached[0])
            torch.testing.assert_close(target_HT, risk[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aggregate", ["max", "mean"])
@pytest.mark.parametrize("weight", ["none", "value_norm", "value_norm_over_hidden"])
def test_settings_reach_the_definition(aggregate: str, weight: str) -> None:
    sources = {"own": 0.5, "repeat": 2.0, "appendix": 1.0}
    settings = build(
        {"sources": sources, "aggregate": aggregate, "weight": weight, "horizon": 7}, TargetSettings
    )

    def see(views: list[View]) -> None:
        for view in views:
            use_BHT, reached_BHT = future_use(
                view.document, view.branches, sources=sources, aggregate=aggregate, weight=weight, horizon=7,
            )  # fmt: skip
            target_HT, reached_HT = layer_target(view, settings)
            assert torch.equal(target_HT, use_BHT[0]) and torch.equal(reached_HT, reached_BHT[0])
            assert [source for source, _ in view.branches] == [
                branch.source for branch in READINGS[view.row].branches
            ]

    walk(Frozen(tiny_model("qwen3"), None, 0), READINGS, see)


def test_baselines_are_judged_by_the_target_that_gates_are() -> None:
    settings = TargetSettings(horizon=8, sources={"own": 1.0})
    frozen = Frozen(tiny_model("qwen3", num_hidden_layers=2), None, 0)
    document = READINGS[0].document
    objective = LayerLocal(
        build_gates("mlp", {layer: {"E": 48, "H": 2, "F": 4} for layer in range(2)}),
        frozen,
        settings,
        LossSettings(),
        seed=0,
    )
    row, again = (look(objective, [document])[0] for _ in range(2))
    assert row == again and 0 < row["overlap_random"] < 1, "chance is drawn by key, not globally"
    reading = Reading(document)
    recency, value_norm = [], []

    def see(views: list[View]) -> None:
        evidence = views[0].document
        target, reached = layer_target(views[0], settings)
        T = target.shape[1]
        norm = torch.einsum(
            "htd,hgde->hgte", evidence.values_BHTD[0], evidence.output_weight_QDE.unflatten(0, (2, -1))
        )
        recency.extend(naive_overlap(torch.arange(T).expand(2, T), target, reached))
        value_norm.extend(naive_overlap(norm.abs().sum(-1).amax(1), target, reached))

    walk(frozen, [reading], see)
    assert row["overlap_recency"] == pytest.approx(sum(recency) / 4)
    assert row["overlap_value_norm"] == pytest.approx(sum(value_norm) / 4)


def test_settings_that_mean_nothing_are_refused_together() -> None:
    check_targets(TargetSettings())
    refused("sources is empty", check_targets, TargetSettings(sources={}))
    with pytest.raises(
        ValueError, match="'repeats' .did you mean 'repeat'.*'owne' .did you mean 'own'.*[^.][.]$"
    ):
        check_targets(TargetSettings(sources={"repeats": 1.0, "owne": 1.0}))


def test_gates_that_cannot_learn_this_are_refused_with_the_config(make_config: Callable[..., Any]) -> None:
    """Before a model or a document is looked at."""
    with pytest.raises(ValueError, match="loss.terms.bce is for gates whose output is mass, .* is log_risk"):
        check(make_config(loss={"terms": {"bce": 1.0}}), 1)
    with pytest.raises(ValueError, match="say attention .*target.weight=value_norm makes a target in risk"):
        check(make_config(gate={"family": "lowrank"}), 1)
    refused("a decay per token", check, make_config(gate={"family": "decay"}), 1)
    check(make_config(), 1)

"""The layer-local objective: what it starts from, and that its parts add up however they are cut."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from retain.gates import GateSet, build_gates
from retain.train.branches import readings_of
from retain.train.data import Corpus, Document, load_corpus
from retain.train.local import LayerLocal
from retain.train.targets import layer_target, log_risk
from retain.train.teacher import Frozen, View, load_frozen, walk


@pytest.fixture
def config(make_config: Callable[..., Any]) -> Any:
    return make_config()


@pytest.fixture
def frozen(config: Any) -> Frozen:
    return load_frozen(config.model, dtype="float32")


@pytest.fixture
def corpus(config: Any) -> Corpus:
    found = load_corpus(config.data, shortest=8, seed=0, batch_documents=4, encode=None)
    assert isinstance(found, Corpus)
    return found


def fresh(family: str, **settings: int) -> GateSet:
    torch.manual_seed(0)
    return build_gates(family, {layer: {"E": 48, "H": 2, **settings} for layer in range(2)})


def test_gates_begin_with_a_standardised_input_and_the_mean_target(
    config: Any, frozen: Frozen, corpus: Corpus
) -> None:
    gates = fresh("mlp", F=16)
    documents = corpus.documents_of(0)
    LayerLocal(gates, frozen, config.target, config.loss, seed=0).prepare_(documents)
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    risks: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def see(views: list[View]) -> None:
        for view in views:
            risk_HT, reached_HT = layer_target(view, config.target)
            assert view.document.hidden_BTE is not None
            gate: Any = gates[view.layer_idx]
            rows[view.layer_idx].append(gate.standardise(view.document.hidden_BTE)[0, reached_HT.any(0)])
            risks[view.layer_idx].append(risk_HT[:, reached_HT.any(0)])

    walk(frozen, readings_of(documents, config.target, frozen), see)
    for layer in (0, 1):
        found, risk_HN = torch.cat(rows[layer]), torch.cat(risks[layer], dim=1)
        gate: Any = gates[layer]
        torch.testing.assert_close(found.mean(0), torch.zeros(48), atol=1e-4, rtol=0)
        torch.testing.assert_close(found.std(0, correction=0), torch.ones(48), atol=1e-3, rtol=0)
        torch.testing.assert_close(gate.risk_floor_H, config.target.floor * risk_HN.mean(1))
        target_HN = log_risk(risk_HN, gate.risk_floor_H)
        torch.testing.assert_close(gate.out.bias.detach(), target_HN.mean(1))


def gradients(
    config: Any, frozen: Frozen, packs: Sequence[Sequence[Document]]
) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    gates = fresh("linear")
    objective = LayerLocal(gates, frozen, config.target, config.loss, seed=0)
    objective.prepare_([document for pack in packs for document in pack])
    rows = []
    for pack in packs:
        rows += objective.accumulate_(pack, 0, 0.25)
    found = [parameter.grad for parameter in gates.parameters()]
    assert all(gradient is not None and gradient.any() for gradient in found)
    return rows, [gradient for gradient in found if gradient is not None]


def test_packs_change_nothing_but_rounding(config: Any, frozen: Frozen, corpus: Corpus) -> None:
    documents = corpus.documents_of(0)
    whole, whole_grads = gradients(config, frozen, [documents])
    parts, part_grads = gradients(config, frozen, [documents[:1], documents[1:]])
    for one, two in zip(whole, parts, strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    for one_grad, two_grad in zip(whole_grads, part_grads, strict=True):
        torch.testing.assert_close(two_grad, one_grad, rtol=1e-3, atol=1e-6)


def test_the_gradient_is_that_of_the_reported_loss(config: Any, frozen: Frozen, corpus: Corpus) -> None:
    """A small step against it lowers the loss by step times squared norm."""
    documents = corpus.documents_of(0)
    gates = fresh("linear")
    objective = LayerLocal(gates, frozen, config.target, config.loss, seed=0)
    objective.prepare_(documents)
    before = sum(row["loss"] for row in objective.accumulate_(documents, 3, 1.0))
    step = 1e-4
    fall = 0.0
    with torch.no_grad():
        for parameter in gates.parameters():
            assert parameter.grad is not None
            fall += step * float(parameter.grad.square().sum())
            parameter -= step * parameter.grad
    after = sum(row["loss"] for row in objective.accumulate_(documents, 3, 1.0))
    assert before - after == pytest.approx(fall, rel=0.05)


def test_a_look_leaves_no_gradient_and_names_every_head(config: Any, frozen: Frozen, corpus: Corpus) -> None:
    gates = fresh("linear")
    objective = LayerLocal(gates, frozen, config.target, config.loss, seed=0)
    objective.prepare_(corpus.documents_of(0))
    rows = objective.look(corpus.held_out, baselines=True)
    assert len(rows) == len(corpus.held_out) and all(p.grad is None for p in gates.parameters())
    for row in rows:
        assert {"loss", "overlap", "overlap_random", "overlap_recency", "overlap_value_norm"} <= row.keys()
        heads = [value for layer in row["overlap_of"].values() for value in layer]
        assert row["overlap_of"].keys() == {"0", "1"} and len(heads) == 4
        assert sum(heads) / 4 == pytest.approx(row["overlap"])

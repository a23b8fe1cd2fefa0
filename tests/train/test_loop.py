"""The loop's own parts: the calibration, and one micro-batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from retain.gates import build_gates
from retain.train.data import collate, load_corpus, step_indices
from retain.train.loop import Lesson, calibrate_, score_documents
from retain.train.loop import _batches as batches_of
from retain.train.targets import layer_target, log_risk
from retain.train.teacher import load_frozen, look


@pytest.fixture
def lesson(make_config: Callable[..., Any]) -> Lesson:
    config = make_config()
    frozen = load_frozen(config.model, dtype="float32")
    corpus = load_corpus(config.data, shortest=8, seed=0, encode=None)
    return Lesson(frozen, corpus, config.target, config.loss, config.training, 0, torch.device("cpu"))


def test_calibration_standardises_the_input_and_starts_at_the_mean_target(lesson: Lesson) -> None:
    gates = build_gates("mlp", {layer: {"E": 48, "H": 2, "F": 16} for layer in range(2)})
    calibrate_(gates, lesson)
    indices = step_indices(0, num_documents=len(lesson.corpus.train), batch_documents=4, seed=0)
    batch = collate([lesson.corpus.train[i] for i in indices], indices, pad_id=0, device="cpu")
    for evidence in look(lesson.frozen.model, batch):
        gate = gates[evidence.layer_idx]
        risk_BHT, reached_BHT = layer_target(evidence, batch, lesson.target)
        reached_BT = reached_BHT.any(1)
        assert evidence.hidden_BTE is not None
        rows = gate.standardise(evidence.hidden_BTE)[:, : reached_BT.shape[1]][reached_BT]
        torch.testing.assert_close(rows.mean(0), torch.zeros(48), atol=1e-4, rtol=0)
        torch.testing.assert_close(rows.std(0, correction=0), torch.ones(48), atol=1e-3, rtol=0)
        for head in range(2):
            risk = risk_BHT[:, head][reached_BHT[:, head]]
            torch.testing.assert_close(gate.risk_floor_H[head], lesson.target.floor * risk.mean())
            target = log_risk(risk_BHT, gate.risk_floor_H)[:, head][reached_BHT[:, head]]
            assert isinstance(gate.out.bias, torch.Tensor)
            torch.testing.assert_close(gate.out.bias[head].detach(), target.mean())


def test_micro_batches_change_nothing_but_rounding(lesson: Lesson) -> None:
    gates = build_gates("linear", {layer: {"E": 48, "H": 2} for layer in range(2)})
    calibrate_(gates, lesson)
    results = []
    for size in (1, 4):
        small = replace(lesson, training=replace(lesson.training, micro_batch=size))
        parts = [
            score_documents(gates, gates, small, b, 0)
            for b in batches_of(lesson.corpus.train, [0, 1, 2, 3], small)
        ]
        results.append(torch.cat(parts).detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)

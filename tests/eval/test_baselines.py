"""The two controls, against loops over their definitions."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from retain.eval.run import evaluated_model
from retain.eval.run.baselines import fit_token_identity, oracle
from retain.eval.run.evaluated_model import load_evaluated
from retain.evidence import attention_probs
from retain.future import future_risk
from retain.hf.intercept.observe import observe
from tests.eval.stub import STUB, stub_config, stub_documents, stub_model
from tests.refused import refused
from tests.tiny import VOCAB


def test_token_identity_is_the_mean_target_of_an_id():
    model, documents = stub_model(0), list(stub_documents(0, 3, 80))
    fitted = fit_token_identity(model, documents, horizon=16)
    found = {}
    for document in documents:
        ids = [*document.context_ids, *document.appendix_ids]
        evidence = observe(model, torch.tensor([ids]))[1]
        risk, reached = future_risk(evidence, document_tokens=80, horizon=16)
        for i in range(80):
            if reached[0, 1, i]:
                found.setdefault(ids[i], []).append(float(risk[0, 1, i]))
    head_mean = sum(map(sum, found.values())) / sum(map(len, found.values()))
    means = [sum([*found.get(i, []), head_mean]) / (len(found.get(i, [])) + 1) for i in range(VOCAB)]
    assert fitted.mean_LHV[1, 1].tolist() == pytest.approx(means, rel=1e-4)


def test_token_identity_knows_no_context():
    model = stub_model(0)
    fitted = fit_token_identity(model, stub_documents(0, 2, 80), horizon=16)
    (first, *_), (second, *_) = (observe(model, torch.tensor([ids])) for ids in ([5, 6, 7, 8], [9, 5, 5, 7]))
    a, b = fitted.score(first).values_BHT, fitted.score(second).values_BHT
    assert torch.equal(a[:, :, 0], b[:, :, 1]) and torch.equal(b[:, :, 1], b[:, :, 2])
    assert fitted.score(first).unit == "risk" and (a > 0).all()


def test_a_table_is_read_back_only_for_what_it_was_made_from(tmp_path, monkeypatch):
    config = stub_config(tmp_path, policies=("token_identity",))
    fit = Mock(side_effect=fit_token_identity)
    monkeypatch.setattr(evaluated_model, "fit_token_identity", fit)
    first, again = (load_evaluated(config, STUB, 0).token_identity for _ in range(2))
    assert torch.equal(first.mean_LHV, again.mean_LHV)
    shorter = replace(config, horizon=8)
    load_evaluated(shorter, STUB, 0)
    assert [call.kwargs for call in fit.mock_calls] == [{"horizon": 32}, {"horizon": 8}]
    (table,) = config.folder.glob("token_identity*.safetensors")
    table.write_bytes(b"torn")  # and one without a note
    load_evaluated(shorter, STUB, 0)
    table.with_suffix(".json").unlink()
    load_evaluated(shorter, STUB, 0)
    assert fit.call_count == 4


def test_no_documents():
    refused("no documents to be fitted on", fit_token_identity, stub_model(0), [], horizon=8)


def test_oracle_is_the_attention_of_what_really_comes():
    model, size = stub_model(0), 20
    ids = torch.tensor([[*range(2, 22), 3, 9, 4], [*range(30, 50), 51, 2, 30]])
    teacher = observe(model, ids)
    scores = oracle(teacher, size)
    evidence = teacher[2]
    probs = attention_probs(evidence, size, 23).double()
    values = evidence.values_BHTD.double().repeat_interleave(3, 1)
    norms = (values @ evidence.output_weight_QDE.double()).abs().sum(-1)
    for row in range(2):
        for head in range(2):
            for i in range(size):
                group = range(3 * head, 3 * head + 3)
                worst = max(float(probs[row, q, j, i] * norms[row, q, i]) for q in group for j in range(3))
                assert scores[2].values_BHT[row, head, i].item() == pytest.approx(worst, rel=1e-4)
    assert scores[2].values_BHT.shape == (2, 2, size) and scores[2].unit == "risk"

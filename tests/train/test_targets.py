"""Targets of a padded batch are those of each document alone, and are future risk where it is defined."""

import pytest
import torch

from retain.future import future_risk
from retain.train.data import Document, collate
from retain.train.targets import TargetSettings, baseline_overlaps, check_targets, layer_target, log_risk
from retain.train.teacher import look
from tests.tiny import tiny_model


def documents() -> list[Document]:
    ids = torch.randint(2, 97, (3, 60)).tolist()
    return [
        Document(tuple(ids[0][:50]), tuple(ids[0][50:58])),
        Document(tuple(ids[1][:30]), tuple(ids[1][30:33])),
        Document(tuple(ids[2][:40])),
    ]


@pytest.mark.parametrize("sources", [("own",), ("appendix",), ("own", "appendix")])
def test_a_padded_batch_equals_its_documents(sources: tuple) -> None:
    model, settings = tiny_model("qwen3"), TargetSettings(sources=sources, horizon=16, chunk=13)
    given = documents()
    batch = collate(given, [0, 1, 2], pad_id=0, device="cpu")
    lone = [look(model, collate([document], [0], pad_id=0, device="cpu")) for document in given]
    for layer, evidence in enumerate(look(model, batch)):
        risk_BHT, reached_BHT = layer_target(evidence, batch, settings)
        assert risk_BHT.shape[-1] == reached_BHT.shape[-1] <= batch.input_ids_BT.shape[1]
        for row, document in enumerate(given):
            count, appended = len(document.context_ids), len(document.appendix_ids)
            end = batch.input_ids_BT.shape[1] - appended
            inside = torch.zeros(risk_BHT.shape[-1], dtype=torch.bool)
            inside[end - count : end] = True
            assert not reached_BHT[row][:, ~inside].any(), "neither padding nor appendix"
            own = [source for source in sources if source == "own" or appended]
            if not own:
                assert not reached_BHT[row].any()
                continue
            risk, reached = future_risk(lone[row][layer], document_tokens=count, horizon=16, sources=own)
            assert torch.equal(reached_BHT[row][:, inside], reached[0])
            torch.testing.assert_close(risk_BHT[row][:, inside], risk[0], rtol=1e-4, atol=1e-5)
            if own == ["own"]:
                assert not reached[0, :, count - 16 :].any() and reached[0, :, : count - 16].all()


def test_log_risk() -> None:
    risk, floor = torch.rand(1, 2, 5), torch.tensor([0.1, 0.2])
    assert torch.equal(log_risk(risk, floor)[0, 1], (risk[0, 1] + 0.2).log())


def test_baselines_are_overlaps() -> None:
    batch = collate(documents()[:2], [0, 1], pad_id=0, device="cpu")
    found = baseline_overlaps(look(tiny_model(), batch), batch, TargetSettings(horizon=16), seed=0)
    assert sorted(found) == ["overlap_random", "overlap_recency", "overlap_value_norm"]
    assert all(0 <= value <= 2 for value in found.values()), "sums over two documents"


def test_settings_that_mean_nothing_are_refused_together() -> None:
    with pytest.raises(ValueError, match="sources is empty.*horizon=0.*floor=0"):
        check_targets(TargetSettings(sources=(), horizon=0, floor=0.0))

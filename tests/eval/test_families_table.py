"""The table of families: one oracle for all, every family that can be scored, and numbers that add up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from retain.eval.diagnose import families
from retain.future import future_risk
from retain.gates import GATES, GateSet
from retain.gates.artifact import save_gates
from retain.hf.intercept.observe import observe
from retain.hf.model.gates import load_gates
from retain.hf.model.identity import fingerprint
from tests.eval.stub import STUB, gates_of, stub_model
from tests.naive import naive_overlap
from tests.refused import refused

CONTEXT = 480


def settings(folder: Path, **changes: Any) -> families.Settings:
    """A table of two items a task, in this process."""
    made = {"items": 2, "documents": 1, "context_tokens": CONTEXT, "workers": 0, "resamples": 200}
    return families.Settings(**{**made, "results": str(folder / "results"), **changes})


def save_recipe(folder: Path, name: str, family: str, seed: int = 1, **metadata: Any) -> GateSet:
    gates, model = gates_of(family, seed), stub_model(0)
    made = {"base_model": "reference:0", "training": {"seconds": 12.5}, "stage": "local", **metadata}
    save_gates(gates, folder / name, fingerprint=fingerprint(model), metadata=made)
    return gates


def overlap_of(score_BHT: torch.Tensor, risk_BHT: torch.Tensor, reached_BHT: torch.Tensor) -> float:
    """The definition, mean over sequences and heads."""
    of_heads = map(naive_overlap, score_BHT, risk_BHT, reached_BHT)
    shares = [share for heads in of_heads for share in heads]
    return sum(shares) / len(shares)


def test_overlap_is_what_its_formula_says():
    draw = torch.Generator().manual_seed(0)
    score, risk = (torch.randint(0, 9, (2, 3, 37), generator=draw).double() for _ in range(2))
    reached = torch.rand(2, 3, 37, generator=draw) > 0.3
    assert families.top_overlap(score, risk, reached) == pytest.approx(overlap_of(score, risk, reached))
    assert families.top_overlap(risk, risk, reached) == 1.0
    # What no query can reach counts for nothing, however highly it is scored.
    high = score.masked_fill(~reached, 99.0)
    assert families.top_overlap(high, risk, reached) == families.top_overlap(score, risk, reached)


@pytest.mark.parametrize("family", sorted(GATES))
def test_every_family_gets_a_row(family, tmp_path, capsys):
    gates = save_recipe(tmp_path / "runs", "one", family)
    lines = families.write_table(STUB, tmp_path / "runs", settings(tmp_path))
    assert [line.recipe for line in lines] == ["full", families.BASELINE, "one"]
    full, _, line = lines
    assert line.family == family and line.seconds == 12.5 and line.stage == "local"
    assert line.parameters == sum(parameter.numel() for parameter in gates.parameters())
    assert set(line.overlap) == {families.DOCUMENTS, "seen", "held-out"}
    assert all(0 < value < 1 for value in line.overlap.values())
    assert set(line.exact) == {f"{r}/{f}" for r in ("0.1", "0.2") for f in ("seen", "held-out")}
    assert line.items == {"seen": 4, "held-out": 2}
    assert set(full.exact) == {"1/seen", "1/held-out"} and not full.overlap
    text = (tmp_path / "results" / "table.md").read_text()
    assert text in capsys.readouterr().out and "| one | " + family in text
    record = json.loads((tmp_path / "results" / "table.json").read_text())
    assert record["lines"][-1]["overlap"] == line.overlap and len(record["recipes"]["one"]) == 64


def test_the_oracle_is_the_same_for_all_whatever_they_were_trained_on(tmp_path):
    save_recipe(tmp_path, "a", "linear", target={"sources": {"appendix": 1.0}, "aggregate": "mean"})
    save_recipe(tmp_path, "b", "linear")
    found = families.overlaps(STUB, families.find_recipes(tmp_path), settings(tmp_path))
    assert found["a"] == found["b"]
    # Recomputed with no cache of ours: the first document, plain observation.
    name, context, appendix = next(families.sequences(STUB, 0, settings(tmp_path)))
    model = stub_model(0)
    gates = load_gates(tmp_path / "a", model)
    alone, whole = (observe(model, torch.tensor([[*context, *behind]])) for behind in ((), appendix))
    expected = []
    for before, after in zip(alone, whole, strict=True):
        risk, reached = future_risk(after, document_tokens=len(context), horizon=32)
        expected.append(overlap_of(gates.score(before).values_BHT, risk, reached))
    assert name == families.DOCUMENTS
    assert found["a"][families.DOCUMENTS] == pytest.approx(sum(expected) / len(expected), abs=1e-6)
    assert abs(found[families.BASELINE][families.DOCUMENTS] - 0.2) < 0.1


def test_a_second_call_takes_up_what_is_there(tmp_path, monkeypatch):
    save_recipe(tmp_path / "runs", "one", "linear")
    first = families.write_table(STUB, tmp_path / "runs", settings(tmp_path))
    ran, run_all = [], families.run_all
    monkeypatch.setattr(families, "run_all", lambda *given: ran.append(run_all(*given)))
    assert families.write_table(STUB, tmp_path / "runs", settings(tmp_path)) == first
    assert ran == [0, 0]
    # Other weights under the same name are another run.
    save_recipe(tmp_path / "runs", "one", "linear", seed=2, training={})
    lines = families.write_table(STUB, tmp_path / "runs", settings(tmp_path))
    assert ran[2] == 0 and ran[3] > 0 and lines[-1].seconds is None


def test_what_cannot_be_compared_is_refused(tmp_path):
    refused("holds no trained gates: train the recipes first", families.find_recipes, tmp_path)
    save_recipe(tmp_path, "other", "linear", base_model="owner/model")
    refused("trained on 'owner/model'.*model=reference:0", families.find_recipes, tmp_path)
    assert families.main(["--folder", str(tmp_path / "none")]) == 2


def test_markdown_has_a_cell_for_every_column():
    exact = {"0.1/seen": (50.0, 40.0, 60.0), "0.2/seen": (75.0, 70.0, 80.0)}
    lines = [
        families.Line("full", "", "", None, None, {}, {"1/seen": (99.0, 98.0, 100.0)}, {"seen": 6}),
        families.Line(
            "mlp", "mlp", "local", 12345, 61.4, {families.DOCUMENTS: 0.5, "seen": 0.25}, exact, {"seen": 6}
        ),
    ]
    about, _, header, rule, full, mlp, *_ = families.markdown(lines, families.Settings()).splitlines()
    assert "questions: 6 seen" in about and "at keep_ratio 0.1 and 0.2" in about
    assert header.count("|") == rule.count("|") == full.count("|") == mlp.count("|")
    assert full.endswith("| 99.0 [98.0, 100.0] | 99.0 [98.0, 100.0] |")
    assert mlp == (
        "| mlp | mlp | local | 12,345 | 61 | 0.500 | 0.250 | 50.0 [40.0, 60.0] | 75.0 [70.0, 80.0] |"
    )

"""What is shown of a document is what the comparison itself kept."""

import json

import pytest
import yaml

from retain.config import to_mapping
from retain.eval.config import CompareConfig
from retain.eval.report import kept
from retain.eval.report.document_view import view
from retain.eval.report.kept import collect, main, token_texts
from retain.eval.run.evaluated_model import Unit, load_evaluated
from retain.eval.run.runner import run_unit
from tests.eval.stub import MORE_STUB, STUB, stub_config, stub_item

POLICIES = ("random", "snapkv", "adakv", "gate", "oracle", "token_identity")


def words(ids):
    return [f" {token}" for token in ids]


@pytest.mark.parametrize("regime", ["context_only", "query_aware"])
@pytest.mark.parametrize("first", [0, 3])
def test_it_is_what_the_run_kept(stub_gates, regime, first):
    tasks = ("turns", "copy")
    config = stub_config(stub_gates, policies=POLICIES, regimes=(regime,), tasks=tasks, first_item=first)
    made = collect(config, MORE_STUB, words, command="typed", documents=2)
    assert json.loads(json.dumps(made)) == made and made["command"] == "typed"
    assert made["made"]["regime"] == regime and len(made["made"]["layers"]) == 3
    evaluated = load_evaluated(config, MORE_STUB, 0)
    for document in made["documents"]:
        item = stub_item(document["task"], 0, first, 100)
        assert document["item"] == first and f"item {first}," in document["name"]
        seen = 100 if regime == "context_only" else 100 + len(item.question_ids) - 1
        assert document["tokens"] == words((*item.context_ids, *item.question_ids)[:seen])
        assert document["of"] == sum(document["heads"]) == 6
        unit = Unit(0, document["task"], first, first + 1)
        rows = run_unit(config, MORE_STUB, evaluated, unit).rows
        measured = {(row.policy, row.budget): row for row in rows if row.question == 0}
        assert {(own["policy"], own["budget"]) for own in document["kept"]} == {
            key for key in measured if key[0] != "full"
        }
        for own in document["kept"]:
            row = measured[own["policy"], own["budget"]]
            assert sum(own["rows"]) == row.kept_entries and len(own["rows"]) == seen
            assert own["rows"] == [sum(layer) for layer in zip(*own["layers"], strict=True)]
            assert min(own["rows"]) >= 0 and max(own["rows"]) <= 6
            if document["needles"]:
                inside = [own["rows"][token] for a, b in document["needles"] for token in range(a, b)]
                assert row.needles_kept == pytest.approx(sum(inside) / (6 * len(inside)))
    # Tasks that say where their needles are come first; policies differ.
    assert [one["task"] for one in made["documents"]] == ["turns", "copy"]
    assert made["documents"][0]["needles"] == [[0, 4], [50, 60]]
    assert len({tuple(own["rows"]) for own in made["documents"][0]["kept"]}) > 6
    assert len(view(made).documents) == 2


def test_wrong_input(stub_gates):
    config = stub_config(stub_gates, policies=("random",), regimes=("decode",))
    with pytest.raises(ValueError, match=r"kept.json shows .* regimes are decode: add one of context_only"):
        collect(config, STUB, words, command="")
    with pytest.raises(ValueError, match="documents must be at least 1, got 0"):
        collect(stub_config(stub_gates, policies=("random",)), STUB, words, command="", documents=0)


def test_the_command(stub_gates, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kept, "suite_of", lambda config: STUB)
    config = stub_config(stub_gates, policies=("random", "snapkv"), results=str(tmp_path / "results"))
    path = tmp_path / "made.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(to_mapping(config)))))
    arguments = ["--config", str(path), "--documents", "1", "keep_ratios=[0.6]"]
    assert main(arguments) == 0
    written = tmp_path / "results" / "stub" / "kept.json"
    assert capsys.readouterr().out.strip() == str(written)
    made = json.loads(written.read_text())
    typed = f"--config {path} --documents 1 'keep_ratios=[0.6]'"
    assert made["command"] == f"python -m retain.eval.report.kept {typed}"
    cells = [(own["policy"], own["budget"]) for own in made["documents"][0]["kept"]]
    assert cells == [("random", 0.6), ("snapkv", 0.6)]
    assert main(["--config", str(path), "policies=[snapvk]"]) == 2
    assert "snapkv" in capsys.readouterr().err


def test_tokens_say_what_the_model_reads(tmp_path):
    named = {"run": "r", "seeds": (0,), "items_per_task": 1, "gates": ""}
    for config in (CompareConfig(**named), CompareConfig(**named, suite="text", model="reference:0")):
        texts = token_texts(config)
        assert "".join(texts([1, 18, 1660])) == "".join(texts([1])) + "".join(texts([18, 1660]))
        assert texts([1]) == ["<bos>"]
    assert token_texts(stub_config(tmp_path))([3, 4]) == [" 3", " 4"]

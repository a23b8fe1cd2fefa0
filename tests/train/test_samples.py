"""Documents that a model writes for its own gates: facts are in the text, and the question has one answer."""

import json
import random

import pytest

from retain.train.data import samples


def test_a_question_is_answered_by_its_text_and_by_no_other_sentence():
    text, alone = "One sentence. Two sentences! Is this the third? Yes.", 0
    for seed in range(200):
        made = samples.document_of(text, random.Random(seed))
        if "text" in made:
            alone += made["text"] == text
            continue
        assert set(made) == {"context", "question", "answer"} and made["answer"] in made["context"]
        facts = [fact for fact in samples.FACTS if made["question"].startswith(fact[1].split("{")[0])]
        assert facts and len(made["context"]) > len(text)
    assert 30 < alone < 70


@pytest.mark.parametrize("killed_after", [0, 2, 3])
def test_a_run_that_was_cut_goes_on_to_the_same_file(killed_after, tmp_path, capsys):
    command = ["--model", "reference:0", "--texts", "5", "--held", "1", "--batch", "2", "--tokens", "8"]
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut" / "cut.jsonl"
    assert samples.main([*command, "--output", str(whole)]) == 0
    cut.parent.mkdir()
    texts = whole.with_suffix(".texts.jsonl").read_text().splitlines(keepends=True)
    cut.with_suffix(".texts.jsonl").write_text("".join(texts[:killed_after]))
    assert samples.main([*command, "--output", str(cut)]) == 0
    for suffix in (".jsonl", ".texts.jsonl", ".held.txt"):
        assert cut.with_suffix(suffix).read_text() == whole.with_suffix(suffix).read_text()
    rows = [json.loads(line) for line in whole.read_text().splitlines()]
    assert len(rows) == 2 and all("text" in row or row["question"] for row in rows)


def test_no_text_is_in_two_documents_and_the_last_are_in_none(tmp_path, capsys):
    texts, output = [f"Text number {number} says one thing." for number in range(11)], tmp_path / "made.jsonl"
    written = tmp_path / "written.jsonl"
    written.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ["--from", str(written), "--output", str(output)]
    assert samples.main([*command, "--held", "3"]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    counts = [sum(f"number {number} " in str(row) for row in rows) for number in range(11)]
    assert counts == [1] * 8 + [0] * 3 and len(rows) == 4
    assert output.with_suffix(".held.txt").read_text().split("\n\n")[0] == texts[8]
    assert samples.main([*command, "--held", "10"]) == 2
    assert "11 texts, and 10 are kept back" in capsys.readouterr().err
    assert samples.main(["--from", str(tmp_path / "none"), "--output", str(output)]) == 2
    assert "there is no such file" in capsys.readouterr().err

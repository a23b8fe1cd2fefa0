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
    command = ["--model", "reference:0", "--documents", "4", "--batch", "2", "--tokens", "8"]
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut" / "cut.jsonl"
    assert samples.main([*command, "--output", str(whole)]) == 0
    cut.parent.mkdir()
    cut.write_text("".join(whole.read_text().splitlines(keepends=True)[:killed_after]))
    assert samples.main([*command, "--output", str(cut)]) == 0
    assert cut.read_text() == whole.read_text()
    rows = [json.loads(line) for line in whole.read_text().splitlines()]
    assert len(rows) == 4 and all("text" in row or row["question"] for row in rows)

"""Documents that a model writes for its own gates: facts are in the text, and the question has one answer."""

import json
import random

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


def test_the_same_seed_writes_the_same_documents(tmp_path):
    command = ["--model", "reference:0", "--texts", "5", "--held", "3", "--tokens", "8", "--output"]
    for name in ("one", "two"):
        assert samples.main([*command, str(tmp_path / name / "made.jsonl")]) == 0
    one, two = ((tmp_path / name / "made.jsonl").read_text() for name in ("one", "two"))
    rows = [json.loads(line) for line in one.splitlines()]
    assert one == two and len(rows) == 2 and all("text" in row or row["question"] for row in rows)
    assert len((tmp_path / "one" / "made.texts.jsonl").read_text().splitlines()) == samples.BATCH


def test_no_text_is_in_two_documents(tmp_path, capsys):
    texts, output = [f"Text number {number} says one thing." for number in range(11)], tmp_path / "made.jsonl"
    written = tmp_path / "written.jsonl"
    written.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert samples.main(["--from", str(written), "--output", str(output), "--texts", "8"]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    counts = [sum(f"number {number} " in str(row) for row in rows) for number in range(11)]
    assert counts == [1] * 8 + [0] * 3 and len(rows) == 4
    assert (tmp_path / "made.held.txt").read_text() == "\n\n".join(texts[8:]) + "\n"
    assert samples.main(["--from", str(tmp_path / "none"), "--output", str(output)]) == 2
    assert "no such data file" in capsys.readouterr().err

"""RULER's questions on documents, from files in the official layouts and the hub's; and generated ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from retain.eval.metrics.scorers import METRICS
from retain.eval.tasks.ruler_qa import OPENING, load_pool, ruler_qa, ruler_qa_size, synthqa
from retain.eval.tasks.task_card import TextItem
from retain.eval.tasks.text_suite import cards
from tests.eval.asked_in_text import asking_words as asking
from tests.eval.asked_in_text import held, words
from tests.refused import refused


def asked(question: str, *answers: str) -> dict[str, Any]:
    return {
        "question": question,
        "answers": [{"text": text, "answer_start": 0} for text in answers],
        "is_impossible": not answers,
    }


SQUAD: dict[str, Any] = {
    "version": "v2.0",
    "data": [
        {
            "title": "Rivers",
            "paragraphs": [
                {
                    "context": "The Aar is long.",
                    "qas": [asked("Which is long?", "Aar", "The Aar"), asked("No?")],
                },
                {"context": "A Rhine flows.", "qas": [asked("What flows?", "Rhine")]},
            ],
        },
        {
            "title": "Towns",
            "paragraphs": [{"context": f"Town {i} is old.", "qas": [asked("Old?")]} for i in range(9)],
        },
    ],
}
HOTPOT: list[dict[str, Any]] = [
    {
        **{"_id": f"h{i}", "question": f"Who is {i}?", "answer": f"Ann{i}", "type": "bridge"},
        "supporting_facts": [[f"Gold{i}", 0], [f"Other{i}", 1]],
        "context": [
            [f"Gold{i}", [f"Gold{i} is", " Ann."]],
            ["Shared", ["Same."]],
            [f"Other{i}", ["An aunt."]],
        ],
    }
    for i in range(3)
]


def squad(path: Path) -> str:
    (path / "dev-v2.0.json").write_text(json.dumps(SQUAD))
    return str(path)


def hotpot(path: Path) -> str:
    (path / "hotpot_dev_distractor_v1.json").write_text(json.dumps(HOTPOT))
    return str(path)


def documents(item: TextItem) -> list[str]:
    assert item.context.startswith(OPENING)
    parts = item.context.removeprefix(OPENING).split("\n\n")
    assert [part.partition("\n")[0] for part in parts] == [f"Document {i + 1}:" for i in range(len(parts))]
    return [part.partition("\n")[2] for part in parts]


def test_squad_is_read_as_ruler_reads_it(tmp_path: Path) -> None:
    pool = load_pool("squad", squad(tmp_path))
    assert list(pool.documents) == sorted(pool.documents) and len(pool.documents) == 11
    first, second = pool.questions
    assert (first.question, first.answers) == ("Which is long?", ("Aar", "The Aar"))
    assert [pool.documents[i] for i in first.needed + first.related] == ["The Aar is long.", "A Rhine flows."]
    assert (second.needed, second.related) == (first.related, first.needed)
    assert ruler_qa_size(dataset="squad", path=str(tmp_path)) == 2


def test_the_hub_s_rows_are_the_same_pools(tmp_path: Path, hub: Any) -> None:
    flat = [
        {
            "title": article["title"],
            "context": paragraph["context"],
            "question": one["question"],
            "answers": {"text": [a["text"] for a in one["answers"]], "answer_start": []},
        }
        for article in SQUAD["data"]
        for paragraph in article["paragraphs"]
        for one in paragraph["qas"]
    ]
    turned = [
        one
        | {
            "context": {"title": [t for t, _ in one["context"]], "sentences": [s for _, s in one["context"]]},
            "supporting_facts": {"title": [t for t, _ in one["supporting_facts"]], "sent_id": [0, 1]},
        }
        for one in HOTPOT
    ]
    tables = {("rajpurkar/squad_v2", None): flat, ("hotpotqa/hotpot_qa", "distractor"): turned}
    asked = hub(lambda *names: tables[names])
    assert load_pool("squad", revision="stub") == load_pool("squad", squad(tmp_path))
    assert load_pool("hotpotqa", revision="stub") == load_pool("hotpotqa", hotpot(tmp_path))
    assert [how["split"] for *_, how in asked] == ["validation"] * 2


def test_the_answer_s_document_then_its_article_then_others(tmp_path: Path) -> None:
    path = squad(tmp_path)
    seen = []
    for tokens in (words(OPENING) + 6, words(OPENING) + 12, words(OPENING) + 30, 10_000):
        item = ruler_qa(asking(tokens=tokens), dataset="squad", path=path)
        assert words(item.context) <= tokens
        assert held(item) == ["The Aar is long."]
        seen.append({*documents(item)})
    assert seen[0] == {"The Aar is long."}
    assert seen[1] == {"The Aar is long.", "A Rhine flows."}
    assert seen[1] < seen[2] < seen[3] and len(seen[3]) == 11


def test_the_prompt_is_ruler_s(tmp_path: Path) -> None:
    item = ruler_qa(asking(), dataset="squad", path=squad(tmp_path))
    instruction = (
        "Answer the question based on the given documents. "
        "Only give me the answer and do not output any other words."
    )
    assert item.context.startswith(f"{instruction}\n\nThe following are given documents.\n\nDocument 1:\n")
    question = item.questions[0]
    assert question.question == f"\n\n{instruction}\n\nQuestion: Which is long?"
    assert question.answer_prefix == " Answer:"
    assert METRICS[cards()["ruler/qa_1"].metric](" the aar.", question.references) == 1.0


def test_hotpot_has_all_its_documents_and_knows_the_two_that_count(tmp_path: Path) -> None:
    path = hotpot(tmp_path)
    item = ruler_qa(asking(1), dataset="hotpotqa", path=path)
    assert len(documents(item)) == 7
    evidence = {*held(item)}
    assert evidence == {"Gold1\nGold1 is Ann.", "Other1\nAn aunt."}
    least = words(OPENING) + words(
        "Document 1: Gold1 Gold1 is Ann. Document 2: Shared Same. Document 3: Other1 An aunt."
    )
    small = ruler_qa(asking(1, tokens=least), dataset="hotpotqa", path=path)
    assert {*documents(small)} == evidence | {"Shared\nSame."}
    with pytest.raises(ValueError, match=rf"question 1 of hotpotqa needs {least} tokens for the 3 documents"):
        ruler_qa(asking(1, tokens=least - 1), dataset="hotpotqa", path=path)


def test_an_item_is_drawn_alone(tmp_path: Path) -> None:
    path = squad(tmp_path)
    first = ruler_qa(asking(0), dataset="squad", path=path)
    ruler_qa(asking(1), dataset="squad", path=path)
    assert ruler_qa(asking(0), dataset="squad", path=path) == first
    places = {ruler_qa(asking(0, seed=seed), dataset="squad", path=path).needles for seed in range(8)}
    assert len(places) > 3


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown data set of questions 'squat': did you mean 'squad'"):
        ruler_qa(asking(), dataset="squat")
    refused(r"item 2 of .* has 2 items", ruler_qa, asking(2), dataset="squad", path=squad(tmp_path))
    (tmp_path / "dev-v2.0.json").write_text('{"data": [{"paragraphs": [{"qas": []}, {"qas": [{}]}]}]}')
    with pytest.raises(ValueError, match="is not SQuAD 2.0: no 'is_impossible'; wanted data, paragraphs"):
        load_pool("squad", str(tmp_path))
    (tmp_path / "hotpotqa.jsonl").write_text('{"question": "?"}')
    refused("no column 'answer' in row 0", load_pool, "hotpotqa", str(tmp_path))


@pytest.mark.parametrize("hops", [1, 2])
def test_generated_questions_have_one_answer(hops: int) -> None:
    for index in range(20):
        item = synthqa(asking(index, tokens=400), hops=hops)
        (question,) = item.questions
        (answer,) = question.references
        assert 300 < words(item.context) <= 400
        needed = held(item)
        assert len(needed) == hops
        # Whoever reads the needed documents alone can answer; nobody else's document names the answer.
        person = question.question.partition("born?")[0].split()[-2 if hops == 2 else -1]
        person = person if hops == 1 else question.question.split("where ")[1].split()[0]
        by_name = {text.partition("\n")[0]: text for text in documents(item)}
        town = by_name[person].partition("town of ")[2].split()[0]
        assert answer == (town if hops == 1 else by_name[town].partition("river ")[2].partition(".")[0])
        assert any(answer in text for text in needed)
        holding = [text for text in documents(item) if answer.lower() in text.lower()]
        assert len(holding) == (2 if hops == 1 else 1)
    again = synthqa(asking(3, tokens=200), hops=hops)
    assert {*documents(again)} < {*documents(synthqa(asking(3, tokens=400), hops=hops))}


def test_generated_questions_refuse_what_they_cannot_do() -> None:
    refused("hops=1 or hops=2 documents, got 3", synthqa, asking(), hops=3)
    refused(r"synthqa needs \d+ tokens for the 2 documents", synthqa, asking(tokens=30))

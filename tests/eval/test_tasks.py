"""Generated tasks: rows of a request are always the same, hold their answer once, and are scored by it."""

import hashlib
import random
from itertools import product

import pytest

from retain.eval.metrics import METRICS
from retain.eval.run.answers import cut
from retain.eval.tasks import facts, reference
from retain.eval.tasks.encode import answer_text, encode
from retain.eval.tasks.haystacks import identity, load_haystack
from retain.eval.tasks.row import Request, Row
from retain.eval.tasks.ruler import GRID_DEPTHS
from retain.eval.tasks.sources import SOURCES, load_rows, task_names
from retain.reference import load_tokenizer
from retain.reference.items import TASKS
from tests.refused import refused

GENERATED = [name for name in SOURCES if not name.startswith("longbench")]
IN_TEXT = [name for name in GENERATED if not name.startswith("reference")]


def made(task: str, item: int = 0, *, seed: int = 0, context_tokens: int = 1000, **settings) -> Row:
    how = {"context_tokens": context_tokens, "seed": seed, "first_item": item, "items": 1}
    return load_rows(task, load_tokenizer(), **how, **settings)[0]


def measure(text: str) -> int:
    return len(load_tokenizer()(text, add_special_tokens=False)["input_ids"])


def needles(row: Row) -> list[str]:
    return [row.context[start:stop] for start, stop in row.extra["evidence"]]


# Digests of the first row of 1,000 tokens of a group's tasks: other texts are another benchmark.
TEXTS = {
    "facts": "02c4e77b36b8de5b",
    "niah": "aa02a49706aff635",
    "ruler": "0a59a667eb7e2836",
}


@pytest.mark.parametrize("group", TEXTS)
def test_tasks_keep_their_texts(group):
    rows = [made(name) for name in task_names([group])]
    said = [(row.context, row.question, row.answer_prefix, row.answers, row.max_new_tokens) for row in rows]
    assert hashlib.sha256(repr(said).encode()).hexdigest()[:16] == TEXTS[group]


@pytest.mark.parametrize("name", GENERATED)
def test_a_row_is_always_the_same_and_no_other(name):
    row, later = load_rows(name, load_tokenizer(), context_tokens=900, seed=1, first_item=5, items=2)
    assert row == made(name, 5, seed=1, context_tokens=900) and (row.item, later.item) == (5, 6)
    assert (row.task, row.seed, row.stratum) == (name, 1, name)
    contexts = {one.context for one in (row, later, made(name, 5, seed=2, context_tokens=900))}
    assert len(contexts) == 3


@pytest.mark.parametrize("name", GENERATED)
def test_the_right_answer_scores_one_and_an_empty_one_nothing(name):
    tokenizer, row = load_tokenizer(), made(name)
    encoded = encode(row, tokenizer)
    shown = answer_text(row, cut(encoded.answer_ids, encoded.end_ids), tokenizer)
    assert METRICS[row.metric](shown, row) == 1.0 and METRICS[row.metric]("", row) == 0.0
    # Rows of token ids end by their number of tokens.
    assert len(encoded.answer_ids) <= row.max_new_tokens + (not encoded.end_ids)
    assert len(encoded.context_ids) <= 1001 and len(encoded.question_ids) >= 2
    if name.startswith("ruler"):
        assert measure(row.context) > 930  # filled up to what was asked for


@pytest.mark.parametrize("name", IN_TEXT)
def test_every_answer_stands_in_the_evidence_and_nowhere_else(name):
    for item in range(5):
        row = made(name, item, context_tokens=800)
        held = needles(row)
        for value in row.answers:
            assert sum(value in text for text in held) == 1
        assert all(row.context.count(text.rstrip()) == 1 for text in held)
        tokenizer = load_tokenizer()
        encoded = encode(row, tokenizer)
        for text, (start, stop) in zip(held, encoded.evidence, strict=True):
            assert text in tokenizer.decode(list(encoded.context_ids[start:stop]))


def test_facts_lie_at_even_depths_and_never_in_the_last_sentences():
    depths = []
    for item in range(120):
        row = made("facts/place", item, context_tokens=400)
        assert row.context[row.extra["evidence"][0][1] :].count(".") >= facts.LAST
        depths.append(row.extra["depth"])
    quarters = [sum(low <= depth < low + 25 for depth in depths) for low in (0, 25, 50, 75)]
    assert min(quarters) >= 15  # of 30 expected each


def test_every_cell_of_the_grid_once_with_the_needle_in_its_place():
    cells = []
    for item in range(44):
        row = made("niah/grid", item, context_tokens=600)
        cells.append((row.extra["depth"], row.length))
        assert 0.6 * row.length < measure(row.context) <= row.length
        start = row.context.index("\n") + 1
        (first, last) = row.extra["evidence"][0]
        before, behind = first - start, len(row.context) - last
        share = 100 * before / (before + behind)
        # Half a sentence away at most.
        assert share == pytest.approx(row.extra["depth"], abs=6000 / (before + behind))
    assert {*cells} == {*product(map(float, GRID_DEPTHS), (150, 300, 450, 600))}


def test_a_haystack_of_a_file(tmp_path):
    path = tmp_path / "a" / "mine.txt"
    texts = ["Dr. Brown came at 5.30 p.m. today.", "Nobody knew why.", "The end is near.", "It was late!"]
    for name, more in (("a", ""), ("b", ""), ("c", " So it was.")):
        (tmp_path / name).mkdir()
        text = f"{texts[0]} {texts[1]}\n{texts[2]}\n\n{texts[3]}{more}"
        (tmp_path / name / "mine.txt").write_text(text)
    found = load_haystack(f"file:{path}", random.Random(0))
    known = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert found.name == f"file:mine.txt@{known}" and identity(f"file:{path}") == f"file:{known}"
    assert {*found.sentences(8)} == {*texts} and found.sentences(8)[4:] == found.sentences(4)
    rows = [
        made("niah/grid", context_tokens=800, haystack=f"file:{tmp_path}/{name}/mine.txt") for name in "abc"
    ]
    # The same text in another folder gives the same rows, another text others.
    assert rows[0] == rows[1] and rows[0].question != rows[2].question
    (tmp_path / "empty.txt").write_text(" \n")
    refused("holds no sentence", load_haystack, f"file:{tmp_path}/empty.txt", random.Random(0))


@pytest.mark.parametrize("name", ["single", "multikey", "multiquery"])
def test_evidence_of_the_reference_tasks_states_the_answer(name):
    for item in range(3):
        ids = made(f"reference/{name}", item, context_tokens=600).extra["token_ids"]
        assert len(ids["context"]) == 600
        held = {token for start, stop in ids["evidence"] for token in ids["context"][start:stop]}
        assert ({*ids["answer"][:-1]} <= held) == bool(held) == (name != "multiquery")
        assert all(stop - start <= 8 for start, stop in ids["evidence"])


def test_names_of_tasks_and_groups():
    given = ["niah", "niah/grid", "mine.jsonl", "hub:a/b"]
    assert task_names(given) == given[1:]
    assert task_names(["reference"]) == [f"reference/{task}" for task in reference.ABOUT]
    assert {*TASKS} == {*reference.ABOUT}
    refused("unknown task or group 'rulre': did you mean 'ruler'", task_names, ["rulre"])


@pytest.mark.parametrize(
    ("task", "settings", "said"),
    [
        ("niah/gird", {}, "unknown task 'niah/gird': did you mean 'niah/grid'"),
        ("facts/number", {"keyes": 2}, "unknown setting of facts/number 'keyes': did you mean 'keys'"),
        ("facts/number", {"kind": "colr"}, "kind of fact 'colr'"),
        ("facts/number", {"keys": 0}, "keys times values is 1 to 10, got keys=0"),
        ("facts/number", {"context_tokens": 30}, "ask for a longer context"),
        ("facts/number", {"metric": "match"}, "unknown metric 'match'"),
        ("niah/grid", {"depths": [0, 101]}, "depths are per cent, 0 to 100"),
        ("niah/grid", {"lengths": [2000]}, "lengths are shares, above 0 and at most 1"),
        ("niah/grid", {"context_tokens": 60}, "niah_grid has at least .* ask for a longer"),
        ("ruler/niah_single_1", {"haystack": "nose"}, "unknown haystack 'nose': did you mean 'noise'"),
        ("niah/grid", {"haystack": "gen-prosa"}, "unknown haystack 'gen-prosa': .* 'gen-prose'"),
        ("ruler/niah_single_1", {"key_kind": "uuid"}, "unknown kind of key or value 'uuid': .* 'uuids'"),
        ("niah/grid", {"haystack": "file:nowhere.txt"}, "cannot be read"),
    ],
)
def test_wrong_settings_are_refused(task, settings, said):
    refused(said, made, task, **settings)


def test_the_largest_size_that_fits(monkeypatch):
    monkeypatch.setattr(Request, "count", lambda self, text: len(text))
    for limit in (7, 8, 50, 51):
        size = Request(None, limit, 0, 0).fit(lambda count: "abc" * count + ".", least=2, what="it")
        assert 3 * size + 1 <= limit < 3 * size + 4
    refused(
        "it has at least 7 tokens, more than context_tokens=6",
        Request(None, 9, 0, 0).fit,
        lambda count: "abc" * count + ".",
        least=2,
        what="it",
        most=6,
    )
    refused("say how many", load_rows, "niah/grid", load_tokenizer(), items=None)

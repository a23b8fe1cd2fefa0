"""Documents unlike those of gate training: what differs in them, and that they can be answered."""

import re
import types
from collections import Counter

import numpy as np
import pytest

from retain.eval.tasks.prose import compiled_docstrings, paragraphs, prose, prose_text
from retain.eval.tasks.reference_shift import (
    ABOUT,
    CROWD,
    FACT_FORMATS,
    KINDS,
    LINK_FORMATS,
    LIST_FORMATS,
    MULTI_FORMATS,
    SHIFTS,
    random_words,
    reference_shift_item,
    reference_shift_suite,
)
from retain.eval.tasks.suites import load_suite
from retain.reference import documents
from retain.reference.corpus import sources
from retain.reference.documents import fill, words
from retain.reference.tokenizer import QUESTION_ID, load_tokenizer
from tests.eval.asked_in_text import answered, check_item
from tests.refused import refused

UNFAMILIAR = (*FACT_FORMATS, *MULTI_FORMATS, *LINK_FORMATS, *LIST_FORMATS)
KNOWN = (
    *documents.FACT_FORMATS,
    *documents.HELD_OUT_FACT_FORMATS,
    *documents.LINK_FORMATS,
    documents.LIST_FORMAT + "{value};",
    documents.USE_FORMAT,
)


def of_kind(task, kind, context_tokens=1000):
    """Some item of a task that asks a kind of question."""
    return reference_shift_item(task, 0, SHIFTS[task].kinds.index(kind), context_tokens)


def test_the_suite():
    suite, base = load_suite("reference_shift"), load_suite("reference")
    assert suite.name == "reference_shift" and [*suite.tasks] == [*ABOUT] == [*SHIFTS, "crowd"]
    assert all(task.family == "held-out" for task in suite.tasks.values())
    assert [task.name for task in suite.tasks.values() if task.single_key] == ["crowd"]
    assert suite.load_model is base.load_model and suite.documents is base.documents
    assert suite.seeds == base.seeds and suite.train_gates == base.train_gates
    assert suite.item is reference_shift_item
    # A name of its own for every item: none repeats one of the suite it stands beside.
    assert not set(suite.tasks) & set(load_suite("reference_more").tasks)
    refused(
        "is asked of model=reference:0, got 'reference:2': take suite=text",
        reference_shift_suite,
        "reference:2",
    )
    refused("unknown task 'rear': did you mean 'rare'", reference_shift_item, "rear", 0, 0, 1000)
    refused("statements of .* do not fit into a context of 60", reference_shift_item, "short", 0, 0, 120)


@pytest.mark.parametrize("task", ABOUT)
def test_an_item_is_its_own(task):
    item = check_item(reference_shift_item, task, 9, 57, 1000)
    assert len(item.context_ids) == item.about["length"]


@pytest.mark.parametrize("task", SHIFTS)
def test_needles_hold_the_answer_and_scores_want_all_of_it(task):
    shift = SHIFTS[task]
    for index in range(2 * len(shift.kinds)):
        item = reference_shift_item(task, 0, index, 1000)
        kind = item.about["kind"]
        found = [item.context_ids[start:stop] for start, stop in item.needles]
        assert kind == shift.kinds[index % len(shift.kinds)]
        assert len(found) == {"get": 1, "each": 4, "all": 4, "trace": 4, "list": 1, "common": 0}[kind]
        if kind != "common":
            assert {*item.gold_ids[:-1]} <= {token for ids in found for token in ids}
        # Any order where the question asks for a set; that of the document where it does not.
        backwards = item.score(item.gold_ids[: item.generate][::-1])
        assert backwards[0] == float(kind in ("get", "all", "common"))


def test_lengths_fillers_and_kinds_take_turns():
    for task, share in (("short", 0.5), ("mixed", 1.0), ("long", 1.5), ("longest", 2.0)):
        assert {len(reference_shift_item(task, 0, index, 1000).context_ids) for index in range(7)} == {
            round(1000 * share)
        }
    cells = Counter(
        (item.about["kind"], item.about["length"], item.about["filler"])
        for item in (reference_shift_item("everything", 0, index, 1000) for index in range(24))
    )
    kinds = SHIFTS["everything"].kinds
    assert cells == Counter((k, n, f) for k in kinds for n in (500, 1500, 2000) for f in ("prose", "words"))
    # All that a suite asks fits into the positions that the models were trained for.
    item = reference_shift_item("longest", 0, KINDS.index("each"), 1000)
    assert len(item.context_ids) + len(item.question_ids) + len(item.gold_ids) < 2200


def formats_of(shift, kind):
    """Formats that a task states what a kind of question asks for in."""
    known = (documents.FACT_FORMATS, documents.LINK_FORMATS, (documents.LIST_FORMAT + "{value};",))
    facts, links, lists = (FACT_FORMATS, LINK_FORMATS, LIST_FORMATS) if shift.unfamiliar else known
    multis = MULTI_FORMATS if shift.unfamiliar else facts
    return {"get": facts, "each": facts, "all": multis, "trace": links, "list": lists}[kind]


def frame_of(template):
    """What stands before, between and behind key and value of a format."""
    ids = fill(template, -1, -2)
    return ids[: ids.index(-1)], ids[ids.index(-1) + 1 : ids.index(-2)], ids[ids.index(-2) + 1 :]


def stated_in(ids, template, items=1):
    """Spans of the statements of a format, each token read as one character."""
    before, between, behind = (re.escape("".join(map(chr, part))) for part in frame_of(template))
    statement = re.compile(f"(?=({before}.{between}.{{{items}}}{behind}))", re.DOTALL)
    return [match.span(1) for match in statement.finditer("".join(map(chr, ids)))]


@pytest.mark.parametrize("task", SHIFTS)
def test_one_context_states_everything(task):
    shift = SHIFTS[task]
    for index in range(len(shift.kinds)):
        item = reference_shift_item(task, 0, index, 1000)
        found = {
            kind: [
                own
                for template in formats_of(shift, kind)
                for own in stated_in(item.context_ids, template, 3 if kind == "list" else 1)
            ]
            for kind in ("get", "all", "trace", "list")
        }
        # Eight facts, two keys of four values, two chains of four links, two lists: at least.
        least = {"get": 8, "all": 8, "trace": 8, "list": 2}
        assert all(len(found[kind]) >= count for kind, count in least.items())
        assert len({*found["get"], *found["all"]}) >= 16
        if item.about["kind"] != "common":
            kind = "get" if item.about["kind"] == "each" else item.about["kind"]
            assert {*item.needles} <= {*found[kind]}


def test_unfamiliar_formats_are_in_no_training():
    pool = set(words().tolist())
    frames = {frame_of(template) for template in KNOWN}
    for template in UNFAMILIAR:
        assert frame_of(template) not in frames
        # A word of the frame that needles are made of would be a decoy everywhere.
        assert not pool & {token for part in frame_of(template) for token in part}


@pytest.mark.parametrize("task", ["rare", "everything"])
def test_what_is_asked_is_rare_and_the_rest_is_not(task):
    for index in range(12):
        item = reference_shift_item(task, 1, index, 1000)
        ids = item.context_ids
        if item.about["kind"] == "common":
            continue
        # An answer's last word is stated once; other keys come again and again.
        assert ids.count(item.gold_ids[-2]) == 1
        if item.about["kind"] == "get":
            assert ids.count(item.question_ids[-2]) == 1
        if item.about["kind"] == "trace":
            assert all(ids.count(link) == 2 for link in item.gold_ids[:-2])
        assert QUESTION_ID in ids
    repeated = [_most_repeated(reference_shift_item(name, 1, 0, 1000)) for name in ("mixed", "rare")]
    assert repeated[1] > repeated[0]


def _most_repeated(item):
    """How often the fact that is asked for again most often in the text is asked for there."""
    ids = np.asarray(item.context_ids)
    return max(Counter(ids[np.flatnonzero(ids == QUESTION_ID) + 2].tolist()).values())


def test_fillers_are_what_they_are_called():
    pool = words()
    shares = {
        task: np.isin(of_kind(task, "get").context_ids, pool).mean() for task in ("mixed", "prose", "words")
    }
    assert shares["words"] > 0.8 > 0.6 > max(shares["mixed"], shares["prose"])
    english = {" the", " of", " is"}
    common = [token for (token,) in (load_tokenizer()(word)["input_ids"] for word in english)]
    # Of several texts: another Python writes other docstrings.
    of_english = {
        task: np.mean(
            [np.isin(reference_shift_item(task, 0, i, 1000).context_ids, common) for i in range(12)]
        )
        for task in ("mixed", "prose")
    }
    assert of_english["prose"] > 2 * of_english["mixed"]
    assert set(random_words().tolist()) == set(pool.tolist())


def test_the_crowd_is_a_ladder():
    for index, count in enumerate(CROWD):
        item = reference_shift_item("crowd", 0, index, 1000)
        assert item.about == {"facts": count, "length": 1000} and len(item.context_ids) == 1000
        ((start, stop),) = item.needles
        statement = item.context_ids[start:stop]
        assert item.question_ids[-2] in statement and item.gold_ids[0] in statement
        assert item.context_ids.count(item.gold_ids[0]) == 1
    assert (min(CROWD), max(CROWD)) == (8, 120)
    assert reference_shift_item("crowd", 0, len(CROWD), 1000).about["facts"] == CROWD[0]
    refused("do not fit into a context of 300", reference_shift_item, "crowd", 0, len(CROWD) - 1, 300)


def test_paragraphs():
    said = (
        "Return\nit.\n\nReturn all of the entries that\nwere kept by it here.\n\n>>> Show the doctest of it."
    )
    whole = "Return all of the entries that were kept by it here."
    assert [*paragraphs(said)] == [whole]
    assert [*paragraphs(said, frozenset({"Return all of the entries that"}))] == []
    assert [*paragraphs(said, frozenset({"were kept by it here."}))] == [whole]
    assert [*paragraphs("no capital letter stands in front of this one.")] == []


def test_docstrings_of_modules():
    module = types.ModuleType("made", "Of the module.")
    module.number = 3
    module.method = str.upper
    assert [*compiled_docstrings(module)][:2] == ["Of the module.", str.upper.__doc__]
    assert int.__doc__.splitlines()[0] not in "".join(compiled_docstrings(module))


def test_a_source_that_this_python_cannot_read_says_nothing(monkeypatch):
    whole = "Return all of the entries that were kept by it here."
    held = {"train": [("a.py", "")], "eval": [("broken.py", "def (:"), ("b.py", f'"""{whole}"""')]}
    monkeypatch.setattr("retain.eval.tasks.prose.sources", lambda split: held[split])
    monkeypatch.setattr("retain.eval.tasks.prose.COMPILED", ())
    assert prose_text.__wrapped__() == (whole,)


def test_prose_was_in_no_training():
    text, lines = prose_text(), {line for _, text in sources("train") for line in text.splitlines()}
    assert len(text) == len(set(text)) > 500 and len(prose()) > 20_000
    assert not lines & set(text)
    assert load_tokenizer().decode(prose()[:400].tolist()).startswith(f"\n{text[0]}"[:200])
    assert any("iterable" in one for one in text)


@pytest.mark.parametrize("task", ["words", "unfamiliar", "everything", "crowd"])
def test_the_model_answers_with_the_full_cache(task):
    places = (0, len(CROWD) - 1) if task == "crowd" else range(len(SHIFTS[task].kinds))
    assert answered([reference_shift_item(task, 1, index, 1000) for index in places], 0) > 0.9

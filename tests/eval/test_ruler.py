"""RULER's generated tasks: templates word by word, needles where they should be, lengths near the limit."""

import hashlib
import random
import re
import uuid
from collections import Counter

import numpy as np
import pytest

from retain.eval.tasks.haystacks import different_places, identity, load_haystack
from retain.eval.tasks.niah import niah_grid
from retain.eval.tasks.ruler import DEPTHS, NOISE, ruler_niah, singular
from retain.eval.tasks.ruler_counting import ruler_cwe, ruler_fwe, ruler_vt
from retain.eval.tasks.task_card import Asking
from retain.eval.tasks.words import all_words, listed
from tests.eval.asked_in_text import asking, held, made, measure
from tests.refused import refused

NIAH = ["niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2"]
NIAH += ["niah_multikey_3", "niah_multivalue", "niah_multiquery"]
EXACT = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe"]


def named(task: str) -> str:
    return f"{'ruler' if task in EXACT else 'ruler_like'}/{task}"


@pytest.mark.parametrize("task", [*NIAH, "vt", "cwe"])
def test_a_question_depends_on_the_item_and_not_on_the_length(task):
    item = made(named(task))
    for other in (made(named(task), seed=1), made(named(task), index=1)):
        assert other.questions[0].references != item.questions[0].references
    assert made(named(task), context_tokens=1500).questions == item.questions


@pytest.mark.parametrize("task", NIAH)
def test_needles(task):
    item = made(named(task))
    (question,) = item.questions
    texts = held(item)
    for value in question.references:
        assert item.context.count(value) == 1
        assert sum(value in text for text in texts) == 1
    assert len(texts) == len(question.references) == (4 if task[5:] in ("multivalue", "multiquery") else 1)
    one = len(question.references) == 1
    kind = ("uuids" if task in ("niah_single_3", "niah_multikey_3") else "numbers")[: -1 if one else None]
    every = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", item.context)
    assert len({value for _, value in every}) == len(every)  # no distractor has the answer
    wanted = [key for key, value in every if value in question.references]
    asked = re.findall(r"for (.*) mentioned", question.question)[0]
    assert all(key in asked for key in wanted)
    # Keys are asked for in an order of their own, values come in theirs.
    verb, opening = ("is the", "A") if one else ("are all the", "Some")
    assert (
        question.question == f"\nWhat {verb} special magic {kind} for {asked} mentioned in the provided text?"
    )
    end = "is" if one else "are"
    prefix = f" The special magic {kind} for {asked} mentioned in the provided text {end}"
    assert question.answer_prefix == prefix
    assert item.context.startswith(
        f"{opening} special magic {kind} {end} hidden within the following text. Make sure to memorize it. I "
        f"will quiz you about the {kind} afterwards.\n"
    )


def test_kinds_of_keys_and_values():
    item = made("ruler/niah_multikey_3")
    lines = item.context.split("\n")[1:]
    pairs = [re.fullmatch(r"One of the special magic uuids for (\S+) is: (\S+)\.", line) for line in lines]
    assert len(lines) > 5 and all(pair and uuid.UUID(pair[1]).version == 4 for pair in pairs)
    assert len({pair[1] for pair in pairs}) == len(lines)
    (value,) = made("ruler/niah_single_1").questions[0].references
    assert re.fullmatch("[1-9][0-9]{6}", value)
    key = re.findall(r"for (.*) is:", held(made("ruler/niah_single_1"))[0])[0]
    adjective = next(word for word in listed("adjective") if key.startswith(f"{word}-"))
    assert key.removeprefix(f"{adjective}-") in listed("noun") or key.count("-") > 1


def test_noise_is_the_sentence_again_and_again():
    item = made("ruler/niah_single_1")
    lines = item.context.split("\n")[1:]
    (needle,) = held(item)
    assert Counter(lines) == {NOISE: len(lines) - 1, needle: 1}
    assert item.about["haystack"] == "noise"


def test_forty_depths_of_which_all_are_used():
    assert np.round(np.linspace(0, 100, num=40, endpoint=True)).astype(int).tolist() == [*DEPTHS]
    found = []
    for index in range(30):
        item = made("ruler_like/niah_single_2", index=index, context_tokens=400)
        (span,) = item.needles
        start = len(item.context.partition("\n")[0]) + 1
        share = 100 * (span[0] - start) / (len(item.context) - start - (span[1] - span[0]))
        assert share == pytest.approx(item.about["depth"], abs=8)
        found.append(item.about["depth"])
    assert min(found) < 15 and max(found) > 85 and item.about["haystack"] == "gen-prose"


def test_singular_is_the_released_replacements():
    assert singular("Some answers are all here, and are there") == "A answer is here, and is there"


def test_vt():
    item = made("ruler/vt")
    (question,) = item.questions
    names, value = question.references, re.findall(r"value (\d+) in", question.question)[0]
    assert len(set(names)) == 5 and all(re.fullmatch("[A-Z]{5}", name) for name in names)
    wanted = [f"VAR {names[0]} = {value}"]
    wanted += [f"VAR {b} = VAR {a}" for a, b in zip(names, names[1:], strict=False)]
    assert held(item) == wanted
    assert all(item.context.count(line) == 1 for line in wanted)
    places = [item.context.index(line) for line in wanted]
    assert places == sorted(places)
    # The worked example stands before it, solved, with other names of three letters.
    example, _, main = item.context.partition("\n\nMemorize")
    assert measure(example) <= 500 and "they are: " in example and main
    assert re.fullmatch("[A-Z]{3}( [A-Z]{3}){4}", example.rpartition("they are: ")[2].strip())
    assert not {*names} & {*example.split()}
    assert question.answer_prefix.endswith(f"5 variables are assgined the value {value}, they are: ")


def test_vt_with_more_chains_asks_for_the_first():
    item = ruler_vt(asking(), chains=3, hops=2)
    assert len(item.questions[0].references) == 3 == len(item.needles)
    _, _, main = item.context.partition("\n\nMemorize")
    assert main.count("VAR ") == 3 + 2 * 3 * 2


def _places(context: str, wanted: list[str], between: str) -> list[int]:
    """How many sentences stand before each line."""
    lines = context.split("\n")
    return [sum(between in line for line in lines[: lines.index(line)]) for line in wanted]


@pytest.mark.parametrize("tokens", [700, 1000], ids=["short", "long"])
def test_assignments_of_a_chain_have_places_of_their_own(tokens):
    for index in range(30):
        item = made("ruler/vt", index=index, context_tokens=tokens)
        example, _, main = item.context.partition("\n\nMemorize")
        wanted = [f"{line} " if " = VAR " in line else line for line in held(item)]
        assert len(wanted) == 5
        assert max(Counter(_places(main, wanted, NOISE)).values()) == 1
        shown = [line for line in example.split("\n") if line.startswith("VAR ")]
        # At 700 tokens the example has as many hops as half of them hold.
        assert len(shown) == 5 if tokens == 1000 else 2 <= len(shown) < 5
        assert f" {len(shown)} variables are assgined" in example
        assert max(Counter(_places(example, shown, NOISE)).values()) == 1
        assert item.questions == made("ruler/vt", index=index, context_tokens=2000).questions


@pytest.mark.parametrize("haystack", ["noise", "needle"])
def test_needles_among_scattered_sentences_have_places_of_their_own(haystack):
    for index in range(20):
        item = ruler_niah(asking(index=index, context_tokens=500), haystack=haystack, values=4)
        lines = item.context.split("\n")[1:]
        needles = held(item)
        assert len(needles) == 4
        # Behind every needle stands another sentence: at most one of them before each.
        places = sorted(lines.index(needle) for needle in needles)
        assert all(after - before > 1 for before, after in zip(places, places[1:], strict=False))
        assert places[-1] < len(lines) - 1


def test_different_places():
    assert different_places([0.0, 0.0, 0.0], 3) == [0, 1, 2] == different_places([0.99, 0.99, 0.999], 3)
    assert different_places([0.1, 0.5, 0.999], 12) == [1, 6, 11]
    assert different_places([0.25], 8) == [2]
    refused("2 sentences have no 3 different places", different_places, [0.1, 0.2, 0.3], 2)


@pytest.mark.parametrize(
    ("tokens", "often", "seldom", "words"), [(1000, 6, 1, 20), (6000, 30, 3, 40)], ids=["short", "long"]
)
def test_cwe(tokens, often, seldom, words):
    item = made("ruler/cwe", context_tokens=tokens)
    example, _, main = item.context.partition("\nBelow is a numbered list")
    counted = Counter(re.findall(r"\d+\. (.*?)(?= \d+\. |$)", main.rpartition("most often.\n")[2]))
    answers = item.questions[0].references
    assert {word for word, count in counted.items() if count == often} == {*answers} and len(answers) == 10
    assert {count for word, count in counted.items() if word not in answers} == {seldom}
    assert {*counted} <= {*all_words()} and len(counted) == item.about["words"]
    shown = re.findall(r"\d+\. (.*?)(?= \d+\. |$)", example.partition("\nQuestion")[0].partition("\n")[2])
    assert len(Counter(shown)) == words and max(Counter(shown).values()) == (3 if tokens < 4096 else 10)


def test_fwe_counts_follow_zeta():
    item = made("ruler/fwe", context_tokens=2000)
    words = item.context.partition("coded words. ")[2].split()
    counted = Counter(words)
    (dots, most), *rest = counted.most_common()
    assert dots == "..." and [word for word, _ in rest[:3]] == [*item.questions[0].references]
    assert rest[2][1] > rest[3][1]
    zeta = sum(1 / k**2 for k in range(1, 10**6))
    size = most * zeta  # about: counts are rounded down
    for rank, (_, count) in enumerate(rest[:6], 2):
        assert count == pytest.approx(size / rank**2 / zeta, abs=1.5)
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in rest)
    assert len(counted) <= 2000 // 50


def test_wrong_settings():
    refused("values is 1 or more, got 0", ruler_niah, asking(), values=0)
    refused("unknown haystack 'gen-prosa': .* 'gen-prose'", ruler_niah, asking(), haystack="gen-prosa")
    refused("unknown kind of key or value 'uuid': .* 'uuids'", ruler_niah, asking(), key_kind="uuid")
    refused("cannot be read", ruler_niah, asking(), haystack="file:nowhere.txt")
    refused("chains and hops are 1 or more, got 0 and 4", ruler_vt, asking(), chains=0)
    refused("got frequency=3, other_frequency=3", ruler_cwe, asking(), frequency=3)
    refused("alpha above 1, got 1.0", ruler_fwe, asking(), alpha=1.0)
    longer = " .* ask for a longer context"
    refused(f"context_tokens=30.{longer[3:]}", ruler_niah, asking(context_tokens=30))
    refused(f"ruler_vt with 1 chains of 20 hops{longer}", ruler_vt, asking(context_tokens=600), hops=20)
    refused(f"the worked example of ruler_vt{longer}", ruler_vt, asking(context_tokens=300), hops=6)


def test_a_text_of_ones_own(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("Dr. Brown came at 5.30 p.m. today. Nobody knew why.\nThe end is near.\n\nIt was late!")
    found = load_haystack(f"file:{path}", random.Random(0))
    known = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert found.name == f"file:own.txt@{known}" and identity(f"file:{path}") == f"file:{known}"
    assert {*found.sentences(8)} == {
        "Dr. Brown came at 5.30 p.m. today.",
        "Nobody knew why.",
        "The end is near.",
        "It was late!",
    }
    assert found.sentences(8)[:4] == found.sentences(4) == found.sentences(8)[4:]
    item = ruler_niah(asking(context_tokens=200), haystack=f"file:{path}")
    assert item.about["haystack"] == found.name and str(tmp_path) not in str(item.about)
    # The same text in another folder gives the same items, another text others.
    moved, changed = tmp_path / "there" / "own.txt", tmp_path / "here" / "own.txt"
    for other, text in ((moved, path.read_text()), (changed, path.read_text() + " So it was.")):
        other.parent.mkdir()
        other.write_text(text)
    assert ruler_niah(asking(context_tokens=200), haystack=f"file:{moved}") == item
    others = ruler_niah(asking(context_tokens=200), haystack=f"file:{changed}")
    assert others.questions != item.questions and others.about["haystack"] != item.about["haystack"]
    grids = [niah_grid(asking(context_tokens=800), haystack=f"file:{own}") for own in (path, moved, changed)]
    assert grids[0] == grids[1] and grids[0].questions != grids[2].questions
    assert grids[0].about["haystack"] == found.name and identity("gen-prose") == "gen-prose"
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    refused("holds no sentence", load_haystack, f"file:{empty}", random.Random(0))


def test_the_size_that_fits():
    for limit in (7, 8, 50, 51):
        size = Asking(0, 0, limit, len).fit(lambda count: "abc" * count + ".", least=2, what="it")
        assert 3 * size + 1 <= limit < 3 * size + 4
    with pytest.raises(ValueError, match="it has at least 7 tokens, more than context_tokens=6"):
        Asking(0, 0, 9, len).fit(lambda count: "abc" * count + ".", least=2, what="it", context_tokens=6)

"""The report of a made-up run: its words, tables, page and picture, and a text token by token."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.image import imread
from pandas import DataFrame

from retain.eval.report.page import Shown, document_page, page_of, plain
from retain.eval.report.render import write_report
from retain.eval.report.table import Table, with_lines
from retain.eval.report.text import answer_of
from retain.eval.stats.scores import comparisons, scores
from tests.eval.made_table import rows, write
from tests.refused import refused

UGLY = "<script>alert(1)</script> **b** | `c` [d](javascript:e) _f_ &amp;\n# g"


class Reader(HTMLParser):
    """Reads tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(write(tmp_path_factory.mktemp("report") / "made"))


def test_the_answer_comes_first_in_words_then_the_scores(report):
    assert report.answer.splitlines()[2:6] == [
        "**Eviction once, behind the prompt; the question comes afterwards.** The full cache scores 90.0.",
        "",
        "- With 10 % of the cache **learned** (90.0) is better than **snapkv** (40.0), the best policy "
        "without training: +50.0 points [+33.6, +66.4]. Also better: **gate**.",
        "- With 20 % of the cache **learned** (90.0) is better than **snapkv** (60.0), the best policy "
        "without training: +30.0 points [+15.0, +46.8].",
    ]
    assert [line.split() for line in report.answer.splitlines() if line.startswith("| snapkv")] == [
        ["|", "snapkv", "|", "40.0", "±", "15.6", "|", "60.0", "±", "15.6", "|"]
    ]
    assert "oracle" not in report.answer.split("Scores in points")[0], "a control is no method"


def test_the_order_of_a_report(report):
    text = report.path.read_text()
    marks = ["# Comparison made", "Scores in points", "](scores.png)", "## Comparisons", "## Scores by task"]
    marks += ["## What this rests on", "### Memory", "### Answers"]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert re.search(
        r"\| 20 % of the cache \| gate +\| snapkv +\| +\+0.0 \|.*\| inconclusive, equal on ev", text
    )
    assert "- Code: 0123456789ab with uncommitted changes\n" in text and "- Versions: torch 2.13.0\n" in text
    assert "Policies of a budget held the same bytes on every item." in text
    assert re.search(
        r"\| 10 % of the cache +\| +100.0 of 1000.0 +\| +0.006 of 0.061 +\| random, snapkv, gate, l", text
    )


def test_verdicts_that_were_not_asked_for_do_not_appear(tmp_path):
    lines = [line for line in rows() if line["gates"] is None]
    text = write_report(write(tmp_path, lines)).path.read_text()
    assert "- With 10 % of the cache **snapkv** scores highest, 40.0." in text
    assert not re.search("better|worse|equivalent|inconclusive|## Comparisons", text)


def said(lines, **config) -> str:
    """The answer in words, without its tables."""
    table = Table(with_lines(DataFrame(lines)), {"config": {"run": "made", **config}})
    made = comparisons(table.frame, margin=2.0, resamples=500, baseline=config.get("baseline"))
    return answer_of(table, scores(table.frame), made).split("Scores in points")[0]


def test_the_words_of_each_verdict():
    text = said(rows(), baseline="gate")
    assert "With 10 % of the cache **learned** (90.0) is better than **gate** (70.0): +20.0 points" in text
    assert "Also worse: **random**, **snapkv**." in text
    bare = [line for line in rows() if line["policy"] not in ("learned", "oracle")]
    text = said(bare, baseline="gate")
    assert "With 10 % of the cache **snapkv** (40.0) is worse than **gate** (70.0): -30.0 points" in text
    text = said(bare)
    assert "With 20 % of the cache **gate** (60.0) has on every item the score of **snapkv** (60.0)" in text
    text = said([line for line in rows() if line["item"] in (3, 4, 5, 6, 7, 10)])
    assert "With 10 % of the cache **gate** (100.0) is not shown to differ from **snapkv** (83.3)" in text
    rng = np.random.default_rng(0)
    text = said(
        [
            {**line, "score": 0.5 + 0.01 * rng.random(), "item": item, "context_id": str(item)}
            for line in rows()
            if line["item"] == 0
            for item in range(200)
        ],
        baseline="snapkv",
    )
    assert re.search(r"With 10 % of the cache \*\*\w+\*\* \(50.\d\) is equivalent to \*\*snapkv\*\*", text)
    none = [line | {"score": 0.0} for line in bare if line["gates"] is None]
    assert "With 10 % of the cache every policy scores 0.0." in said(none)


def test_a_run_that_has_grown_reports_what_its_newest_config_asks_for(tmp_path):
    old = [
        {**line, "policy": "keydiff"} for line in rows() if line["policy"] == "snapkv" and line["item"] < 5
    ]
    full = [line for line in rows() if line["policy"] == "full"]
    more = [
        *[{**line, "budget": "keep_ratio=0.4"} for line in old],
        *[{**line, "question": "known"} for line in full],
        *[{**line, "when": "chunk"} for line in full],
        *[{**line, "task": "niah/grid"} for line in full],
        *[{**line, "seed": 3} for line in full],
        *[{**line, "item": line["item"] + 20} for line in full],
    ]
    asked = {"policies": ["random", "snapkv", "gate", "learned", "oracle"], "tasks": ["facts", "niah_grid"]}
    asked |= {"keep_ratios": [0.1, 0.2], "when": ["prefill"], "question": ["unknown"]}
    asked |= {"asked": {task: {"0": [*range(20)]} for task in ("facts/number", "niah_grid")}}
    grown = write_report(write(tmp_path / "grown", [*rows(), *old, *more], **asked))
    alone = write_report(write(tmp_path / "alone", rows(), **asked))
    assert grown.path.read_text() == alone.path.read_text()
    refused("keydiff at .* has 10 of 40 answers", write_report, write(tmp_path / "c", [*rows(), *old]))


def test_where_the_full_cache_fails_nothing_can_be_lost(tmp_path):
    lines = [{**line, "score": line["score"] * (line["task"] != "niah_grid"), "text": ""} for line in rows()]
    text = write_report(write(tmp_path, lines)).path.read_text()
    assert "- Nothing to lose: the full cache scores below 10 points on niah_grid\n" in text
    assert f"- Empty answers: {len(lines)} of {len(lines)}\n" in text


def test_the_page_holds_everything_and_runs_nothing(report):
    html = report.page.read_text()
    read = Reader(html)
    assert not {"script", "iframe", "form", "link"} & {*read.tags}
    assert (
        read.tags.count("img") == 1
        and "data:image/png;base64," in html
        and "http" not in html.replace("http-equiv", "")
    )
    assert "default-src 'none'" in html and "overflow: auto" not in html and "overflow-x" not in html
    assert read.tags.count("table") == 6  # scores, comparisons, two by task, memory, answers


def test_what_a_model_wrote_is_shown_as_it_is(tmp_path):
    lines = [{**line, "text": UGLY} for line in rows()]
    made = write_report(write(tmp_path, lines, run=UGLY))
    read = Reader(made.page.read_text())
    assert read.text.count(" ".join(UGLY.split())) == 7  # the title, and what six policies wrote
    assert not {"script", "a", "em"} & {*read.tags}
    assert [name for name, _ in read.attributes if name.startswith("on")] == []


@pytest.mark.parametrize(
    "text", [UGLY, "<b onclick='x'>", "![x](scores.png)", "facts/number_of_four", "\\*x\\*"]
)
def test_plain_text_survives_markdown(text, tmp_path):
    body = page_of(f"| column |\n| --- |\n| {plain(text)} |", "title", tmp_path)
    read = Reader(body)
    assert " ".join(text.split()) in read.text and read.tags.count("td") == 1
    assert not {"script", "b", "img", "a", "em", "strong"} & {*read.tags}


def test_the_picture(report, tmp_path):
    height, width, _ = imread(report.path.with_name("scores.png")).shape
    assert width > 400 and height > 400
    many = [{**line, "policy": f"{line['policy']}{copy}"} for copy in range(3) for line in rows()]
    known = [{**line, "question": "known"} for line in many]
    full = [line for line in rows() if line["policy"] == "full"]
    lines = [line for line in many + known if not line["policy"].startswith("full")]
    write_report(write(tmp_path, lines + full + [{**line, "question": "known"} for line in full]))
    assert imread(tmp_path / "scores.png").shape[1] > width


def test_a_text_token_by_token():
    shown = [
        Shown("full cache", "58213", 4.0, (8, 8, 8), 8),
        Shown("<b>learned</b>", UGLY, 0.5, (0, 2, 8), 8),
    ]
    html = document_page("A <title>", "Which number?", ["The ", "<i>number", ""], shown)
    read = Reader(html)
    assert read.tags.count("section") == 1, "the full cache is not shaded"
    assert re.findall(r'--a:([\d.]+)" title="(\d of 8)', html) == [
        ("0.00", "0 of 8"),
        ("0.50", "2 of 8"),
        ("1.00", "8 of 8"),
    ]
    assert not {"script", "b", "i"} & {*read.tags}
    assert "<i>number" in read.text and "Which number?" in read.text and "0.5" in read.text

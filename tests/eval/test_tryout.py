"""`retain try`: the same text and question under each policy, printed and on a page."""

import re

import pytest

import retain
from retain.eval import cli
from retain.eval.tryout import TEXT
from retain.gates.artifact import save_gates
from retain.hf.model.identity import fingerprint
from retain.reference import load_model

QUESTION = "What is <b> & what is not?"


@pytest.fixture
def paths(tmp_path):
    model = load_model()
    save_gates(retain.new_gates(model), tmp_path / "gates", fingerprint=fingerprint(model))
    (tmp_path / "text.txt").write_text("import os\n<script>alert(1)</script>\n" * 60)
    return tmp_path


def try_it(paths, *more):
    fixed = ("--model", "reference:0", "--gates", str(paths / "gates"), "--out", str(paths / "page.html"))
    return cli.main(["try", *fixed, "--keep-ratio", "0.2", *more])


def test_answers_bytes_and_a_page_that_is_safe(paths, capsys):
    assert try_it(paths, "--text", str(paths / "text.txt"), "--question", QUESTION) == 0
    said = capsys.readouterr().out
    rows = re.findall(r"^  ([\w ]+?) +(all|20%) +([\d.]+) MiB", said, flags=re.MULTILINE)
    assert [name for name, _, _ in rows] == ["full cache", "snapkv", "keydiff", "merge"]
    full, *others = (float(mib) for _, _, mib in rows)
    assert full > 1 and all(mib <= 0.2 * full + 0.1 for mib in others)  # printed to a tenth
    page = (paths / "page.html").read_text()
    assert "<script>alert" not in page and "What is &lt;b&gt; &amp; what is not?" in page
    assert page.count('<div class="tokens">') == 3 and "--a:1.00" in page and "--a:0.00" in page


def test_the_text_that_ships_has_its_fact_once():
    text = TEXT.read_text(encoding="utf-8")
    assert text.count("58213") == 1 and "The registration number of the ferry is 58213." in text


def test_what_is_wrong_is_said_in_a_line(paths, capsys):
    assert try_it(paths, "--question", QUESTION) == 2
    assert "--text and --question go together" in capsys.readouterr().err
    assert try_it(paths, "--device", "foo") == 2
    assert "device is 'foo', and must be 'cpu'" in capsys.readouterr().err
    assert try_it(paths, "--text", str(paths / "none.txt"), "--question", QUESTION) == 2
    assert "none.txt" in capsys.readouterr().err

"""The demonstration, with a stand-in for vLLM's server (`test_server.py` has the real one)."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import httpx
import pytest

from retain.vllm import demo
from tests.vllm import stub_server
from tests.vllm.server import serving

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter that is none."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {stub_server.__file__} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def url(stub: str, tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path, {"policy": "snapkv"}, tmp_path / "log", python=stub) as url:
        yield url


def test_it_asks_two_rounds_and_shows_answers_and_counters(stub, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "folder_of", lambda name: tmp_path / name)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert demo.main(["--requests", "4", "--keep-ratio", "0.3", "--python", stub]) == 0
    said, full, *answers = capsys.readouterr().out.splitlines()
    assert "writes to results/serve-demo.log" in said and (tmp_path / "results/serve-demo.log").is_file()
    assert re.match(r"full cache: 1 of 4 right, at most 0 at once, \d+ s$", full)
    right = [demo.write_question(place)[2] for place in range(4)]
    assert answers[0].split(", ") == [f"   {right[0]}", *(f"{right[0]!r} for {one}" for one in right[1:])]
    assert answers[1].startswith("keep 0.3: 1 of 4 right") and answers[2] == answers[0]
    counts = {"evictions": 4, "entries_freed": 0, "blocks_freed": 28, "requests_in_full": 4}
    assert answers[3:] == [f"vllm:retain_{name}_total {count}" for name, count in counts.items()]


def test_a_question_has_its_answer_in_its_text() -> None:
    for place in range(20):
        question, begins, right = demo.write_question(place)
        assert f"{begins} {right}.\n" in question and question.endswith("?")


def test_the_end_of_its_log_says_why_a_server_did_not_start(stub, tmp_path) -> None:
    with (
        pytest.raises(ValueError, match=r"(?s)not start .status 1.; .*log ends:.*this engine cannot evict"),
        serving(tmp_path, {}, tmp_path / "log", "--broken", python=stub),
    ):
        pass


def test_neither_the_server_nor_its_child_is_left(stub, tmp_path) -> None:
    with (
        pytest.raises(KeyError, match="body"),
        serving(tmp_path, {}, tmp_path / "log", python=stub) as url,
    ):
        child = int((tmp_path / "log").read_text().split()[1])
        os.kill(child, 0)
        raise KeyError("body")
    with pytest.raises(httpx.TransportError):
        httpx.get(url, trust_env=False)
    for _ in range(50):
        # Gone, or waiting for init to ask how it ended.
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the server's child is alive")


def test_the_block_of_the_page_streams_and_is_refused(url, capsys) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(), re.DOTALL)
    exec(block, {"url": url, "model": "reference", "prompt": [1, 2, 3]})
    assert capsys.readouterr().out.startswith("0.4! 400 options of the request do not fit: keep_ratio is")


def test_a_policy_of_the_page_is_served_or_refused_as_it_says() -> None:
    """Both tables of policies hold all presets, each where it belongs."""
    from retain import policies
    from retain.capability import problems
    from retain.gates import GATES
    from retain.policy import load_policy
    from retain.vllm.settings import Options

    page = (ROOT / "docs" / "serving.md").read_text()
    served, refused = re.findall(r"\| (?:served|refused at start) \|.*?\n\n", page, re.DOTALL)
    serves = set(re.findall(r"`([\w:]+)`", served)) & {one.name for one in policies()}
    named = set(re.findall(r"^\| (`.*?) \|", refused, re.MULTILINE))
    refuses = {name for cell in named for name in re.findall(r"`([\w:]+)`", cell)}
    for one in policies():
        for name in (one.name, *(f"{one.name}:{variant}" for variant in one.variants)):
            policy = load_policy(name)
            found = problems(policy, ("vllm",))
            assert bool(found) == bool({name, one.name} & refuses), name
            if not found:
                assert one.name in serves, name
    families = {name for name in re.findall(r"`(\w+)`", served + refused) if name in GATES}
    assert families == set(GATES)
    options = set(re.findall(r"`retain\.(\w+)`", page.partition("## Options")[2].partition("```")[0]))
    assert options == {field.name for field in fields(Options)}

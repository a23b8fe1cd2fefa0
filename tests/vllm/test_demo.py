"""The demonstration, with a stand-in for vLLM's server (`test_server.py` has the real one)."""

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from retain.vllm import demo
from tests.vllm import stub_server

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
    with demo.serving(tmp_path, {"policy": "snapkv"}, tmp_path / "log", python=stub) as url:
        yield url


def test_it_asks_three_rounds_and_shows_answers_and_counters(stub, tmp_path, capsys) -> None:
    (tmp_path / "gates.json").write_text("{}")
    out = tmp_path / "out"
    words = ["--gates", str(tmp_path), "--requests", "4", "--python", stub, "--out", str(out)]
    assert demo.main(words) == 0
    shown = capsys.readouterr().out
    for task in ("single", "multikey", "multivalue", "multiquery"):
        assert re.search(rf"^{task} +\d", shown, re.MULTILINE)
    rows = {row[0]: row for line in shown.splitlines() if "/4" in line and (row := re.split("  +", line))}
    assert rows.keys() == {"full", "keep 0.2", "mixed"}
    assert rows["full"][-4:] == ["0", "0", "0", "4"] and rows["keep 0.2"][-4:] == ["4", "0", "28", "0"]
    assert rows["mixed"][-4:] == ["3", "0", "21", "1"]
    assert (out / "demo.txt").read_text() in shown


def test_gates_that_are_not_there_are_named(tmp_path, capsys) -> None:
    assert demo.main(["--gates", str(tmp_path / "none")]) == 2
    assert re.search(r"no gates at '.*none': train them with `make gates-seed0`", capsys.readouterr().err)


def test_the_end_of_its_log_says_why_a_server_did_not_start(stub, tmp_path) -> None:
    with (
        pytest.raises(ValueError, match=r"(?s)ended with status 1; .*log:.*this engine cannot evict"),
        demo.serving(tmp_path, {}, tmp_path / "log", "--broken", python=stub),
    ):
        pass


def test_neither_the_server_nor_its_child_is_left(stub, tmp_path) -> None:
    with (
        pytest.raises(KeyError, match="body"),
        demo.serving(tmp_path, {}, tmp_path / "log", python=stub) as url,
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
    from retain.gates import GATES
    from retain.policy import load_policy
    from retain.vllm.settings import OPTIONS, problems_of_policy

    page = (ROOT / "docs" / "serving.md").read_text()
    served, refused = re.findall(r"\| (?:served|refused at start) \|.*?\n\n", page, re.DOTALL)
    serves = set(re.findall(r"`([\w:]+)`", served)) & {one.name for one in policies()}
    named = set(re.findall(r"^\| (`.*?) \|", refused, re.MULTILINE))
    refuses = {name for cell in named for name in re.findall(r"`([\w:]+)`", cell)}
    for one in policies():
        for name in (one.name, *(f"{one.name}:{variant}" for variant in one.variants)):
            policy = load_policy(name)
            problems = problems_of_policy(policy, "folder" if policy.learned else None)
            assert bool(problems) == bool({name, one.name} & refuses), name
            if not problems:
                assert one.name in serves, name
    families = {name for name in re.findall(r"`(\w+)`", served + refused) if name in GATES}
    assert families == set(GATES)
    options = set(re.findall(r"`retain\.(\w+)`", page.partition("## Options")[2].partition("```")[0]))
    assert options == set(OPTIONS)

"""What the README shows runs: its Python block as it stands, its commands as far as a test can take them."""

import ast
import re
from pathlib import Path

import pytest
import torch

import retain
from retain.gates.artifact import save_gates
from retain.hf.model.identity import fingerprint
from retain.reference import load_model, load_tokenizer
from tests.chat import chat_tokenizer

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """The reference model as a folder that `from_pretrained` takes, and untrained gates for it."""
    model = load_model(0)
    model.save_pretrained(tmp_path / "model")
    load_tokenizer().save_pretrained(tmp_path / "model")
    save_gates(retain.new_gates(model), tmp_path / "gates", fingerprint=fingerprint(model))
    return tmp_path / "model", tmp_path / "gates"


def test_the_python_block_runs_and_frees_memory(
    saved: tuple[Path, Path], capsys: pytest.CaptureFixture
) -> None:
    block, _ = blocks("python")
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    name, folder = saved
    scope = {"name": name, "folder": folder, "prompt": "import os\n" * 100}
    exec(block, scope)
    cache, prompt_tokens = scope["cache"], scope["inputs"]["input_ids"].shape[1]
    assert scope["output"].shape[1] > prompt_tokens
    assert cache.bytes_held() < 0.5 * cache.bytes_full()
    assert cache.entries_evicted > 0
    assert str(cache.entries_held) in capsys.readouterr().out.replace(",", "")


def test_every_statement_of_the_second_block_makes_a_cache_that_evicts() -> None:
    _, block = blocks("python")
    model, tokenizer = load_model(0), chat_tokenizer("chatml", "words")
    scope = {"retain": retain, "model": model, "tokenizer": tokenizer}
    ids = torch.arange(3000)[None] % model.config.vocab_size
    made = []
    with retain.attach(model):
        for statement in ast.parse(block).body:
            line = ast.unparse(statement)
            exec(line, scope)
            if line.startswith("cache"):
                made.append(scope["cache"].prefill(ids).entries_evicted)
    assert len(made) == 3 and all(made)


def test_the_page_is_short() -> None:
    assert len(README.split()) <= 1300


def test_the_tree_is_the_tree() -> None:
    _, tree, _ = re.split(r"## The tree\n\n```\n(.*?)```", README, flags=re.DOTALL)
    named, top = set(), ""
    for line in tree.splitlines():
        room = line.split("/ ")[0] + "/"
        top = "" if room[0] != " " else top
        named.add(top + room.strip())
        top = top or room
    packages = {
        path.parent for folder in ("retain", "train", "eval") for path in (ROOT / folder).rglob("__init__.py")
    }
    rooms = {f"{path.relative_to(ROOT)}/" for path in packages if path != ROOT / "retain" / "hf"}
    tops = {"kernels/", "configs/", "docs/", "tests/", "eval/findings/"}
    assert named == rooms | tops


def test_every_file_and_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for path in re.findall(r"(?:configs|train|eval)/[\w/]+\.(?:yaml|py)", README):
        assert (ROOT / path).exists(), path

"""Recipes of CONTRIBUTING.md: each addition is made in a copy of the tree, as its blocks say, and run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TEXT, flags=re.DOTALL | re.MULTILINE))
FILE = r"`([\w/]+\.(?:py|yaml|md))`"
# 400 tokens in 2 KV heads of 4 layers, of which 0.4 are held.
HELD = r"total +3,200 +1,280 +1,920"
READ = {"Add a scorer": 2, "Add a family of gates": 2}
# Recipe -> lines in a registry besides one file to write, and what its run prints.
ADDITIONS = {
    "Add a scorer": (1, HELD),
    "Add a family of gates": (2, HELD),
    "Add a budget rule": (0, HELD),
    "Add a target": (2, r"gates: runs/value_size"),
    "Add a task": (0, r"runs/houses.py \('Bergen',\) 1.0"),
}


def listed(recipe: str) -> list[str]:
    """The files of a recipe's numbered list."""
    return re.findall(rf"^\d\. {FILE}", RECIPES[recipe], flags=re.MULTILINE)


def written(recipe: str) -> dict[str, tuple[str, str]]:
    """File -> language and text of the block that comes right behind its name."""
    found = re.findall(rf"{FILE}:\n\n```(\w+)\n(.*?)```", RECIPES[recipe], flags=re.DOTALL)
    return {name: (language, block) for name, language, block in found}


def put(path: Path, language: str, block: str) -> None:
    """Write a file, or add the `+` lines of each hunk behind the lines that it quotes."""
    if language != "diff":
        assert not path.exists()
        path.write_text(block)
        return
    text = path.read_text()
    for hunk in block.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if not line.startswith("+"))
        assert text.count(before) == 1, f"{path.name} does not hold once: {before}"
        text = text.replace(before, "".join(line[1:] for line in lines))
    path.write_text(text)


def add_and_run(recipe: str, tmp_path: Path) -> None:
    registered, printed = ADDITIONS[recipe]
    files = written(recipe)
    new = [name for name, (language, _) in files.items() if language != "diff"]
    lines = [line for name, (_, block) in files.items() if name not in new for line in block.splitlines()]
    assert len(listed(recipe)) == READ.get(recipe, 1) and len(new) == 1
    assert sum(line.startswith("+") for line in lines) == registered
    for folder in ("retain", "kernels", "train", "eval", "configs"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "findings")
        )
    (tmp_path / "runs").mkdir()
    run = re.findall(r"```python\n(.*?)```", RECIPES[recipe], flags=re.DOTALL)[-1]
    for name, (language, block) in files.items():
        put(tmp_path / name, language, block)
    done = subprocess.run([sys.executable, "-c", run], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(printed, done.stdout), done.stdout


# One function: of a grid the default tier would run a single case.
@pytest.mark.always
def test_additions_are_made_by_their_recipes(tmp_path: Path) -> None:
    for number, recipe in enumerate(ADDITIONS):
        (tmp_path / str(number)).mkdir()
        add_and_run(recipe, tmp_path / str(number))


def test_every_recipe_names_files_that_exist() -> None:
    assert len(RECIPES) == 10
    for recipe in RECIPES:
        made = written(recipe)
        missing = [name for name in re.findall(FILE, RECIPES[recipe]) if not (ROOT / name).exists()]
        assert {name for name in missing if "NAME" not in name} <= made.keys(), recipe
    assert len(listed("Change when eviction happens")) <= 4

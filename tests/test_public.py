"""The citation and the version of the repository."""

import tomllib
from pathlib import Path

import yaml

import retain

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def read(path: Path) -> dict:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def test_the_citation_is_of_this_version_and_licence() -> None:
    cited = read(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= set(cited) and cited["cff-version"] == "1.2.0"
    assert cited["version"] == retain.__version__ and cited["license"] == project["license"]
    assert project["name"] == f"{cited['title']}-kv" and all("name" in author for author in cited["authors"])
    # The one place: pyproject.toml reads it there.
    assert project["dynamic"] == ["version"] and "version" not in project

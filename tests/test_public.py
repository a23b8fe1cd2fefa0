"""What a public repository has: citation, a workflow, one version."""

import re
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


def phony() -> set[str]:
    (listed,) = re.findall(r"^\.PHONY:((?:.*\\\n)*.*)", MAKEFILE, flags=re.MULTILINE)
    return set(listed.replace("\\\n", " ").split())


def test_the_citation_is_of_this_version_and_licence() -> None:
    cited = read(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= set(cited) and cited["cff-version"] == "1.2.0"
    assert cited["version"] == retain.__version__ and cited["license"] == project["license"]
    assert project["name"] == f"{cited['title']}-kv" and all("name" in author for author in cited["authors"])
    # The one place: pyproject.toml reads it there.
    assert project["dynamic"] == ["version"] and "version" not in project


def test_the_workflow_runs_what_a_machine_here_runs() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "test.yml")
    assert {"push", "pull_request"} <= set(workflow[True])  # YAML reads `on` so
    (job,) = workflow["jobs"].values()
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert runs == ["make test", "make docs"]
    assert {run.removeprefix("make ") for run in runs} <= phony()
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
    (pin,) = re.findall(r"^TORCH \?= (\S+)$", MAKEFILE, flags=re.MULTILINE)
    assert job["env"]["TORCH"].split()[0] == pin and "/whl/cpu" in job["env"]["TORCH"]
    python = next(step["with"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert python["python-version"] == "3.11"
    assert all((ROOT / name).is_file() for name in python["cache-dependency-path"].split())

"""The notebooks run from top to bottom; their outputs are committed, without traces of a machine."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
NAMES = ("chat", "compare", "gates")
NEEDS_IPYTHON = pytest.mark.skipif(
    not importlib.util.find_spec("IPython"), reason="this notebook needs the extra `docs`"
)


def cells(name: str) -> list[dict]:
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_these_are_all() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_committed(name: str) -> None:
    """`make notebooks` writes them: as from a fresh kernel, without errors, paths or the kernel's version."""
    shown = [(cell, cell["outputs"]) for cell in cells(name)]
    for number, (cell, outputs) in enumerate(shown, 1):
        assert cell["execution_count"] == number and cell["metadata"] == {}
        assert {own["output_type"] for own in outputs} <= {"stream", "display_data", "execute_result"}
        last = "".join(cell["source"]).splitlines()[-1].lstrip()
        assert outputs or not last.startswith(("print(", "display(", "Image(", "Markdown(")), number
    text = json.dumps(shown)
    assert not re.search(r"/tmp/|/home/|/root/|/work/|site-packages|it/s\]", text)
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 250_000
    pictures = sum("image/png" in own.get("data", {}) for _, outputs in shown for own in outputs)
    assert pictures == {"chat": 0, "compare": 1, "gates": 2}[name]


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Its cells in order, in one namespace, with warnings as errors."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    scope: dict = {}
    for number, cell in enumerate(cells(name)):
        exec(compile("".join(cell["source"]), f"{name}.ipynb, cell {number}", "exec"), scope)
    return scope


@pytest.mark.always
def test_a_document_is_compressed_and_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = run("chat", tmp_path, monkeypatch)
    whole, kept, recent = (own.bytes_held() for own in scope["others"].values())
    assert kept == recent == whole // 4


@pytest.mark.slow
@NEEDS_IPYTHON
def test_a_gate_is_trained_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = run("gates", tmp_path, monkeypatch)
    assert scope["last"]["overlap"] > 1.2 * scope["first"]["overlap"]


@pytest.mark.slow
@NEEDS_IPYTHON
def test_policies_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run("compare", tmp_path, monkeypatch)["report"]
    assert report.is_file() and report.with_name("scores.png").is_file()

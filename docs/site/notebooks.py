"""Runs the notebooks of `docs/notebooks` and writes what they show into them: `make notebooks`.

Nothing of the machine stays in a file: no times, no versions, no progress bars.
"""

import base64
import io
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"


def run(path: Path) -> None:
    """Execute a notebook in its folder, in a process of its own, and put the outputs into the file.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell does; the file is as it was.
    """
    notebook = nbformat.read(path, as_version=4)
    settings = {"record_timing": False, "coalesce_streams": True, "timeout": 600}
    NotebookClient(notebook, resources={"metadata": {"path": str(path.parent)}}, **settings).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            # Progress bars go there; warnings are errors in the test.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            output.get("metadata", {}).clear()
            if len(shown := output.get("data", {})) > 1:
                shown.pop("text/plain", None)  # `<IPython.core.display.Image object>`
            if "image/png" in shown:
                shown["image/png"] = smaller(shown["image/png"])
    nbformat.write(notebook, path)


def smaller(png: str) -> str:
    """The picture in 64 colours, in base64 as before."""
    made = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png))) as picture:
        picture.convert("RGB").quantize(64).save(made, "png", optimize=True)
    return base64.b64encode(made.getvalue()).decode()


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(map(str, FOLDER.glob("*.ipynb"))):
        run(Path(name))

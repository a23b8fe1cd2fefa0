"""The site builds with warnings as errors, holds every page, and fetches nothing from other hosts."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXTRA = all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings")))
PUBLIC = ("attach", "detach", "Cache", "policies", "load_policy", "load_gates", "new_gates")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EXTRA, reason="the site needs the extra `docs`: pip install -e '.[docs]'"),
]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of `make docs`, in another folder, by a process of its own: mkdocs sets up logging."""
    out = tmp_path_factory.mktemp("site")
    # Without `--quiet`, which hides warnings from `--strict`.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_it_builds_without_a_warning_and_holds_every_page(site: Path) -> None:
    folders = ("docs", "eval", "kernels", "retain", "train")
    pages = [*ROOT.glob("*.md"), *(path for name in folders for path in (ROOT / name).rglob("*.md"))]
    assert len(pages) > 30
    for page in pages:
        folder = page.relative_to(ROOT).with_suffix("")
        folder = folder.parent if folder.name == "README" else folder
        assert (site / folder / "index.html").is_file(), page
    text = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    reference = text["docs/reference/index.html"]
    assert all(re.search(rf'<h3 id="retain\.[\w.]+\.{name}"', reference) for name in PUBLIC)

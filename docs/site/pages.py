"""Lays the repository's pages out as the site's, for mkdocs (`hooks` in mkdocs.yml).

A page of the site keeps the path that it has in the repository: `docs/cache.md`, `eval/FINDINGS.md`. So a
relative link leads to the same page on the site and in the files, and no text is there twice. Files that a
page links to (pictures, records, code) go along. A notebook is shown as it was committed, with its outputs;
nothing is executed.
"""

import re
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

FOLDERS = ("docs", "eval", "kernels", "retain", "train")
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


class NotebookPage(File):
    """A page whose source is a notebook: links lead to the `.ipynb`, as in the repository."""

    def is_documentation_page(self) -> bool:
        return True


@event_priority(100)  # before plug-ins look at the pages
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the repository's pages, and what they link to, in place of those of `docs_dir` alone."""
    root = Path(config.config_file_path).parent
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    found = [*root.glob("*.md"), *(page for name in FOLDERS for page in sorted((root / name).rglob("*.md")))]
    for page in found:
        _add(files, config, root, page)
    for page in sorted((root / "docs" / "notebooks").glob("*.ipynb")):
        _add_notebook(files, config, root, page)
    for page in found:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            if path.is_file() and path.is_relative_to(root):
                _add(files, config, root, path)
    _add(files, config, root, Path(__file__).with_name("site.css"))
    return files


def _add(files: Files, config: MkDocsConfig, root: Path, path: Path) -> None:
    name = path.relative_to(root).as_posix()
    if files.get_file_from_path(name) is None:
        files.append(File.generated(config, name, abs_src_path=str(path)))


def _add_notebook(files: Files, config: MkDocsConfig, root: Path, path: Path) -> None:
    """The notebook as Markdown, its pictures as files beside it."""
    name = path.relative_to(root).as_posix()
    notebook = nbformat.read(path, as_version=4)
    text, made = MarkdownExporter().from_notebook_node(notebook, {"unique_key": f"{path.stem}_files/at"})
    files.append(NotebookPage.generated(config, name, content=text))
    for picture, data in made["outputs"].items():
        files.append(File.generated(config, f"{Path(name).parent.as_posix()}/{picture}", content=data))

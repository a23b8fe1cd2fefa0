"""Lays the repository's pages out as the site's, for mkdocs (`hooks` in mkdocs.yml).

A page of the site keeps the path that it has in the repository: `docs/cache.md`, `eval/FINDINGS.md`. So a
relative link leads to the same page on the site and in the files. Files that a page links to (pictures,
records, code) go along.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

FOLDERS = ("docs", "eval", "kernels", "retain", "train")
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


@event_priority(100)  # before plug-ins look at the pages
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the pages of `docs_dir` by all pages of the repository and the files that they link to."""
    root = Path(config.config_file_path).parent
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    found = [*root.glob("*.md"), *(page for name in FOLDERS for page in sorted((root / name).rglob("*.md")))]
    for page in found:
        _add(files, config, root, page)
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

"""Makes pages of HTML, each one file without an address in it that runs no script: it reads the same in an
archive and without a network, whatever a model wrote."""

import base64
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from retain.process.extras import require

# What Markdown or HTML would take for markup; an underscore within a word is none.
_MARKS = re.compile(r"[\\`*\[\]<>&|]|(?<!\w)_|_(?!\w)")


def plain(text: object) -> str:
    """Text from anywhere (a model's answer, a name) as Markdown that shows it as it is, on one line."""
    return _MARKS.sub(lambda mark: f"&#{ord(mark[0])};", " ".join(str(text).split()))


def html_page(title: str, **values: Any) -> str:
    """The template `page.html.j2`, filled in; text is escaped.

    Args:
        title: Of the page.
        values: `body`, HTML; or the values of a document view (`document_page`).
    """
    require("eval", "jinja2", what="a page")
    import jinja2

    loader = jinja2.FileSystemLoader(str(files("retain.eval.report") / "template"))
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html.j2").render(title=title, **values)


def page_of(text: str, title: str, folder: Path) -> str:
    """A page of Markdown, with its pictures inside.

    Args:
        text: Markdown; HTML in it is shown as text.
        title: Of the page.
        folder: Where the pictures (PNG) lie that the text names.
    """
    require("eval", "markdown", what="a page")
    import markdown

    reader = markdown.Markdown(extensions=["tables"])
    reader.preprocessors.deregister("html_block")
    reader.inlinePatterns.deregister("html")
    body = reader.convert(text)
    for name in dict.fromkeys(re.findall(r'src="([\w-]+\.png)"', body)):
        image = base64.b64encode((folder / name).read_bytes()).decode()
        body = body.replace(f'src="{name}"', f'src="data:image/png;base64,{image}"')
    return html_page(title, body=body)


class Shown(NamedTuple):
    """A policy on a text: its answer, the MiB of keys and values that it answered from, and how many of all
    (layer, KV head) pairs hold each token."""

    policy: str
    answer: str
    mib_held: float
    kept: tuple[int, ...]
    of: int


def document_page(title: str, question: str, pieces: Sequence[str], shown: Sequence[Shown]) -> str:
    """A page with the answers of all policies to a question, and the text, one piece a token, as each of them
    keeps it, shaded by the share of heads that hold a token; a policy that holds every token everywhere, as
    the full cache does, is shown with its answer alone."""
    return html_page(title, question=question, pieces=pieces, shown=shown)

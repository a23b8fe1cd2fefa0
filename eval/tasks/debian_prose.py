"""Prose that no gate was trained on: paragraphs of books that Debian packages, in two halves.

    apt-get download debian-handbook debian-reference-en anarchism developers-reference
    for file in *.deb; do dpkg-deb -x $file books; done
    python -m retain.eval.tasks.debian_prose --books books --out runs/prose

Paragraphs of more than 250 characters, each once: the first 3,000 of a book, and the first one of each file
behind them. The half `train` is for gates that are said to be trained on it; `facts` is what facts are hidden
in, and `going_on` what a model goes on with.
"""

import argparse
import hashlib
import html.parser
import re
from collections.abc import Sequence
from pathlib import Path

from retain.process.command import command

BOOKS = {
    "debian-handbook": "doc/debian-handbook/html/en-US/*.html",
    "anarchism": "doc/anarchism/html/*.html",
    "debian-reference-en": "doc/debian-reference-en/docs/*.en.html",
    "developers-reference": "developers-reference/*.html",
}
LEAST, MOST, FACTS = 250, 3000, 900
# What ends a paragraph and is none.
OTHER = ("pre", "table", "ul", "ol", "dl", "h1", "h2", "h3", "script", "style")


class Paragraphs(html.parser.HTMLParser):
    """Collects the text of `<p>`, and of DocBook's `<div class="para">`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside, self._parts = False, list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "p" or (tag == "div" and ("class", "para") in attrs):
            self.end()
            self._inside = True
        elif tag in OTHER:
            self.end()

    def handle_endtag(self, tag: str) -> None:
        if tag in ("p", "div"):
            self.end()

    def handle_data(self, data: str) -> None:
        if self._inside:
            self._parts.append(data)

    def end(self) -> None:
        text = re.sub(r"\s+", " ", "".join(self._parts)).strip()
        self._inside, self._parts = False, []
        if len(text) > LEAST:
            self.found.append(text)


def halves(books: Path) -> tuple[list[str], list[str]]:
    """The paragraphs of all books, parted by their hash, in the order of another hash.

    Raises:
        ValueError: a book that is not there.
    """
    found: dict[str, None] = {}
    for name, pattern in BOOKS.items():
        own: dict[str, None] = {}
        for path in sorted((books / "usr" / "share").glob(pattern)):
            parser = Paragraphs()
            parser.feed(path.read_text(encoding="utf-8", errors="replace"))
            parser.end()
            for text in parser.found:
                if text not in found and text not in own:
                    own[text] = None
                    if len(own) >= MOST:
                        break
        if not own:
            raise ValueError(f"{books} holds no {name}: fetch and unpack its package first.")
        found |= own
    parts: tuple[list[str], list[str]] = [], []
    for text in sorted(found, key=lambda text: _digest(f"o{text}")):
        parts[0 if _digest(text) % 2 else 1].append(text)
    return parts


def _digest(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the texts, paragraphs with an empty line between them."""
    parser = argparse.ArgumentParser(
        prog="python -m retain.eval.tasks.debian_prose", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--books", type=Path, required=True, help="folder of unpacked packages")
    parser.add_argument("--out", type=Path, required=True, help="folder that the texts are written to")
    given = parser.parse_args(arguments)
    train, held = halves(given.books)
    given.out.mkdir(parents=True, exist_ok=True)
    for name, texts in {"train": train, "facts": held[:FACTS], "going_on": held[FACTS:]}.items():
        (given.out / f"{name}.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
        print(f"{name}.txt: {len(texts)} paragraphs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`report.md`, `report.html` and their pictures of a run, from one list of sections.

    python -m retain.eval.report.render results/RUN

The page is one file without an address in it, so that it reads the same in an archive, in a mail and without
a network. Nothing in it is trusted: what models answered and documents say is escaped like everything else.
"""

import json
import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from retain.eval.report.blocks import colours
from retain.eval.report.document_view import STEPS
from retain.eval.report.picture import draw
from retain.eval.report.plots import as_svg
from retain.eval.report.run import MANY, Run, parser_of
from retain.eval.report.sections import report_of
from retain.process.command import command
from retain.process.extras import require
from retain.process.provenance import write_text

REPORT, PAGE = "report.md", "report.html"
TEMPLATES = Path(__file__).parent / "template"
SHADES = ("by none", "up to 1/4", "up to 1/2", "up to 3/4", "most", "by all")
# Marks of prose, and the elements of a page that they stand for.
MARKS = {"**": "strong", "`": "code", "*": "em"}


def write_report(run: Run) -> Path:
    """Writes `report.md`, `scores.png` (of many policies `ranking.png` too) and `report.html` of a finished
    run, and says where the report is.

    Raises:
        ValueError: If jinja2 is not installed, or a file of the folder is damaged.
    """
    require("eval", "jinja2", what=PAGE)
    import jinja2

    folder, report = run.folder, report_of(run)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=lambda name: name is not None and name.endswith("html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"marked": marked, "svg": as_svg, "inert": inert}
    draw(run.scores, folder / "scores.png", title=run.title, names=run.drawn)
    if len(run.scores.policies) > MANY:
        draw(run.scores, folder / "ranking.png", title=run.title, variants=run.variants)
    write_text(folder / REPORT, environment.get_template(f"{REPORT}.j2").render(report=report))
    levels = "\n".join(
        f".h{level} {{ background: {ground}; color: {ink}; }}"
        for level, (ground, ink) in enumerate(colours())
    )
    own = {
        "style": (TEMPLATES / "report.css").read_text(encoding="utf-8") + levels,
        "script": (TEMPLATES / "report.js").read_text(encoding="utf-8"),
        "shades": SHADES[: STEPS + 1],
    }
    write_text(folder / PAGE, environment.get_template(f"{PAGE}.j2").render(report=report, **own))
    return folder / REPORT


def section(report: Path, title: str) -> str:
    """The text of one section of a written report, without its heading."""
    return report.read_text().split(f"## {title}\n\n", 1)[1].split("\n\n## ", 1)[0]


def marked(text: str) -> str:
    """Prose as markup: escaped, then its marks as elements."""
    made = escape(text)
    for mark, element in MARKS.items():
        made = re.sub(
            rf"{re.escape(mark)}(\S(?:.*?\S)?){re.escape(mark)}", rf"<{element}>\1</{element}>", made
        )
    return made


def inert(value: object) -> str:
    """JSON that can stand inside a script element: no character of it can end one."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report of a folder again."""
    given = parser_of("Write report.md, report.html and their pictures again.").parse_args(arguments)
    print(write_report(Run.read(given.folder)).with_name(PAGE))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Makes the Markdown table of a fault run: what each tier caught, by room, and the verdict."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.faults.draw import Fault

# The default tier must catch 36 of 40.
WANTED, OF = 36, 40

COLUMNS = ("default tier", "whole tier only", "neither", "equivalent")


def read_reasons(path: Path) -> dict[str, str]:
    """Read why equivalent faults change no behaviour, by the fault's id."""
    reasons = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    wrong = [
        key for key, reason in reasons.items() if not isinstance(key, str) or not isinstance(reason, str)
    ]
    if wrong:
        raise ValueError(f'{path}: write "id": one sentence, both as text, for {wrong}')
    return reasons


def column(row: dict[str, Any], reasons: dict[str, str]) -> str:
    """Return the column that a fault counts in.

    Raises:
        ValueError: A fault that a tier caught is listed as equivalent.
    """
    caught = (
        "default" if row["default"]["caught"] else "whole" if (row["whole"] or {}).get("caught") else None
    )
    if caught and row["id"] in reasons:
        raise ValueError(f"fault {row['id']} is listed as equivalent, but the {caught} tier caught it")
    if caught:
        return COLUMNS[0] if caught == "default" else COLUMNS[1]
    return COLUMNS[3] if row["id"] in reasons else COLUMNS[2]


def make_table(faults: list[Fault], rows: Iterable[dict[str, Any]], reasons: dict[str, str]) -> str:
    """Return the table, the verdict, every fault that the default tier missed and what caught the others."""
    unknown = sorted(reasons.keys() - {fault.id for fault in faults})
    if unknown:
        raise ValueError(f"equivalent faults that are not drawn: {', '.join(unknown)}")
    found = {row["id"]: row for row in rows}
    places = {fault.id: column(found[fault.id], reasons) for fault in faults if fault.id in found}
    lines = ["| room | drawn | " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * (len(COLUMNS) + 1)]
    for room in [*sorted({fault.room for fault in faults}), None]:
        own = [fault.id for fault in faults if room is None or fault.room == room]
        counts = [sum(places.get(key) == name for key in own) for name in COLUMNS]
        lines.append(f"| {room or '**all**'} | {len(own)} | {' | '.join(map(str, counts))} |")

    wanted = math.ceil(len(faults) * WANTED / OF)
    caught = sum(place == COLUMNS[0] for place in places.values())
    waiting = [fault.id for fault in faults if fault.id not in found]
    waiting += [key for key, row in found.items() if not row["default"]["caught"] and row["whole"] is None]
    verdict = "met" if caught >= wanted else "missed"
    if waiting and verdict == "missed":
        verdict = "open"
    lines += ["", f"The default tier catches {caught} of {len(faults)}; {wanted} are wanted: **{verdict}**."]
    if waiting:
        lines.append(f"Unfinished: {len(waiting)} faults have not been asked of every tier.")
    by_timeout = [row for row in found.values() if _how(row) == "timeout"]
    if by_timeout:
        lines.append(f"Caught by timeout alone, no test failed: {len(by_timeout)}.")
    trees = sorted({row["tree"] for row in found.values()})
    lines.append(
        f"Tree: {', '.join(trees)}." + (" The results are of several trees." if len(trees) > 1 else "")
    )

    missed = [fault for fault in faults if places.get(fault.id) in COLUMNS[1:]]
    if missed:
        lines += ["", "What the default tier missed:"]
    for fault in missed:
        place = places[fault.id]
        note = reasons.get(fault.id) or (_test(found[fault.id]["whole"]) if place == COLUMNS[1] else "")
        lines += [
            "",
            f"- `{fault.id}` {fault.file} line {fault.line}, {place}{': ' if note else ''}{note}",
            "",
        ]
        lines += ["  ```diff", f"  - {fault.before.strip()}", f"  + {fault.after.strip()}", "  ```"]
    lines += ["", "| fault | place | operator | caught by |", "| --- | --- | --- | --- |"]
    for fault in faults:
        if places.get(fault.id) == COLUMNS[0]:
            operator = fault.operator.removeprefix("core/")
            test = _test(found[fault.id]["default"])
            lines.append(f"| {fault.id} | {fault.file} line {fault.line} | {operator} | {test} |")
    return "\n".join(lines) + "\n"


def _how(row: dict[str, Any]) -> str | None:
    caught = row["default"]["caught"] or (row["whole"] or {}).get("caught")
    return caught["how"] if caught else None


def _test(asked: dict[str, Any]) -> str:
    caught = asked["caught"]
    how = "" if caught["how"] == "test" else f"{caught['how']}: "
    where = " (mirrored tests)" if caught["scope"] == "mirrored" else ""
    return f"{how}{caught['test']}{where}".replace("|", "\\|")

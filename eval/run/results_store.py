"""Stores what a comparison leaves in a folder of its own.

- `items.jsonl`: one row per item, question, regime, policy, protection and budget. It grows by whole units (a
  few items of one task and seed), so a killed run has lost at most one unit of each process; a half-written
  unit is dropped when the folder is opened again. Where several processes write, each has a file of its own,
  `items-<rank>.jsonl`, which the next one to open the folder takes in.
- `references.jsonl`: what was asked.
- `manifest.json`: the resolved config, its hash, the code, the versions, the machine, the models. Rows of
  different configurations never share a folder, and rows made by different code are marked as such.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from retain.gates.artifact import read_metadata
from retain.process.disk import disk_errors
from retain.process.provenance import write_json, write_text

ITEMS = "items.jsonl"
REFERENCES = "references.jsonl"
MANIFEST = "manifest.json"
# What rows of every version have.
NEEDED: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("regime", "policy", "task", "family"), str),
    **dict.fromkeys(("seed", "item"), int),
    "keep_ratio": (int, float),
}
RESTORE = "restore it from a copy, or run its command again with that folder out of the way"


@dataclass(frozen=True)
class Row:
    """One answer: one question on one item, under one policy, protection and budget.

    Entries and bytes are counted over all layers that evict and all their KV heads. In the regimes that evict
    once (`context_only`, `query_aware`) they are counted behind the eviction, in those that evict
    again, when the answer has been read.

    Attributes:
        unit, unit_rows: Key of the unit that wrote the row, and how many rows it has.
        family: "seen" by gate training, or "held-out" from it.
        regime: Of `retain.eval.config.REGIMES`.
        policy: Label in tables: `base_policy`, with `+name` where its protection is not its preset's.
        protection: "preset", or a name of the config's `protections`.
        budget: Below 1 a keep_ratio, from 2 on tokens per head; 1 is the full cache.
        keep_ratio: Kept / seen, as it came out.
        score: What the task is judged by, in 0..1: `exact` (1.0 where the whole answer is right), or
            `partial` (share of it that is right).
        null: Whether nothing was answered: no token before an end token, or no text. Its score is 0.
        ended: Whether an end token came before the answer's longest length.
        num_prompt, num_generated: Tokens of context and question, and of the answer without its end token.
        kept_entries, seen_entries: Entries held and seen.
        peak_entries: Entries held at most between two forwards, from the context's end on.
        bytes_held, bytes_full: Bytes of keys and values of the entries held, and of all seen.
        gate_bytes: Bytes of the gates' parameters and buffers, once for the model; 0 without gates.
        tokens, tokens_sha: Generated ids, and first 12 hex digits of their sha256.
        text: What they say, as it was scored; empty where tokens are not text.
        about: What a table may be split by: of the item and the question.
        needles_kept: Share of the entries that hold the answer that survived, mean over layers and heads;
            None where the item does not say which they are.
        attended_ratio: Entries held / seen before the forward that gave a token of the answer, mean over its
            tokens: `keep_ratio` may be of a moment after it. 1: nothing had gone. None: not known (rows of
            earlier versions).
        read_entries: Sum of the entries held before each forward that gave a token of the answer. None: not
            known (rows of earlier versions).
        bytes_beside: Bytes that the cache keeps beside entries in order to evict again (recent queries,
            running statistics), counted when entries are.
        seeded: Whether every seed is asked items of its own (`Task.seeded`).
        gates: First 12 hex digits of the sha256 of the weights of the gates that the policy took; empty
            without gates.
        trained: Whether something trained or measured beforehand belongs to the policy: gates, head classes.
    """

    run: str
    unit: str
    unit_rows: int
    seed: int
    task: str
    family: str
    item: int
    question: int
    regime: str
    policy: str
    base_policy: str
    protection: str
    budget: float
    keep_ratio: float
    score: float
    exact: float
    partial: float
    null: bool
    ended: bool
    num_prompt: int
    num_generated: int
    kept_entries: int
    seen_entries: int
    peak_entries: int
    bytes_held: int
    bytes_full: int
    gate_bytes: int
    tokens: tuple[int, ...]
    tokens_sha: str
    text: str = ""
    about: Mapping[str, str | float] = field(default_factory=dict)
    needles_kept: float | None = None
    attended_ratio: float | None = None
    read_entries: int | None = None
    bytes_beside: int = 0
    seeded: bool = True
    gates: str = ""
    trained: bool = False


@dataclass(frozen=True)
class Reference:
    """One question on one item, as all policies are asked it.

    Attributes:
        context_sha: `tokens_sha` of the context, which has `num_context` tokens.
        gold_ids: A right continuation.
        references: Right answers, as text; empty where tokens are not text.
    """

    seed: int
    task: str
    item: int
    question: int
    context_sha: str
    num_context: int
    question_ids: tuple[int, ...]
    gold_ids: tuple[int, ...]
    references: tuple[str, ...]


def tokens_sha(tokens: Sequence[int]) -> str:
    """First 12 hex digits of the sha256 of a token sequence."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:12]


def mapping_hash(mapping: Mapping[str, Any]) -> str:
    """First 16 hex digits of the sha256 of a mapping's canonical JSON."""
    return hashlib.sha256(json.dumps(mapping, sort_keys=True).encode()).hexdigest()[:16]


def gates_identity(folder: str | Path) -> dict[str, Any]:
    """The part of a gate artifact that decides its scores: the weights' sha256, and what they are read as.
    When, by what code and on what data it was trained is left out: the same weights are the same gates."""
    metadata = read_metadata(folder)
    return {name: metadata.get(name) for name in ("sha256", "family", "layers", "inputs", "unit")}


def open_run(folder: Path, manifest: dict[str, Any], units: Collection[str]) -> dict[str, Any]:
    """Creates a run's folder, or takes up a run that left rows; without rows a run starts over.

    Args:
        manifest: Of this run. `identity` is the mapping that two runs must share to be one run; `code` is
            this process's `code_state`, `environment` where it runs.

    Returns:
        The manifest that now lies in the folder. With units left to run: the one given, with the code states
        and environments of earlier processes. With none: the earlier one, since this process makes no row,
        but for `config`, whose fields outside the identity decide how the rows are reported.

    Raises:
        ValueError: If the folder holds rows of another configuration; it names the fields that differ.
    """
    path = folder / MANIFEST
    lists = {"code_states": [manifest["code"]], "environments": [manifest.get("environment")]}
    if not any(file.stat().st_size > 0 for file in _files(folder, ITEMS)):
        for leftover in (*_files(folder, ITEMS), *_files(folder, REFERENCES)):
            leftover.unlink()  # what an earlier run asked is not what this one asks
    elif not path.exists():
        raise ValueError(
            f"{folder} holds {ITEMS} but no {MANIFEST}: nothing says what made those rows. Choose another "
            f"name (run=...), or delete that folder."
        )
    else:
        before = read_manifest(folder)
        if differing := _differing(before.get("identity", {}), manifest["identity"]):
            raise ValueError(
                f"{folder} holds the items of another configuration; these fields differ: "
                f"{', '.join(differing)}. Their rows must not be mixed: choose another name (run=...), or "
                f"delete that folder."
            )
        if take_up(folder, units) == {*units}:
            manifest = {**before, "config": manifest["config"]}
            write_json(path, manifest)
            return manifest
        manifest = {**manifest, "started": before.get("started", manifest.get("started"))}
        before.setdefault("environments", [before.get("environment")])
        for name, own in lists.items():
            lists[name] = [one for one in before.get(name, []) if one not in own] + own
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {**manifest, "identity_sha": mapping_hash(manifest["identity"]), **lists}
    write_json(path, manifest)
    return manifest


def finished(folder: Path, units: Collection[str]) -> set[str]:
    """Keys of the units whose rows are all there; nothing is changed."""
    return _whole(_lines(folder)[0], units)


def take_up(folder: Path, units: Collection[str]) -> set[str]:
    """Finds the finished units of a run, drops what a killed process left half-written, and takes what
    several processes wrote into one file.

    Args:
        folder: `results/<run>`; no other process may write to it now.

    Returns:
        Keys of the units whose rows are all there.
    """
    lines, torn = _lines(folder)
    done = _whole(lines, units)
    shares = _shares(folder, ITEMS)
    if torn or shares or len(done) < len(lines):
        write_text(folder / ITEMS, "".join(line for unit in lines if unit in done for line in lines[unit]))
    asked = _shares(folder, REFERENCES)
    if asked or any(own is None for path in _files(folder, REFERENCES) for own, _ in _parsed(path)):
        write_text(folder / REFERENCES, "".join(_line(own) for own in read_references(folder)))
    for path in (*shares, *asked):
        path.unlink()  # what it held is in the one file by now
    return done


def append_unit(
    folder: Path, rows: Sequence[Row], references: Sequence[Reference] = (), *, rank: int | None = None
) -> None:
    """Appends the rows of one finished unit, in one write that reaches the disk, and before them what was
    asked.

    Args:
        references: Of its items. Units of one batch say the same; it is read once.
    """
    parts: tuple[tuple[str, Sequence[Any]], ...] = ((REFERENCES, references), (ITEMS, rows))
    for name, values in parts:
        path = folder / (name if rank is None else f"{name.removesuffix('.jsonl')}-{rank}.jsonl")
        if not values:
            continue
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(_line(asdict(value)) for value in values))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = error.filename or str(path)  # the system names a file only where it opens it
            raise


def full_disk_explained(folder: Path, key: str = "results") -> AbstractContextManager[None]:
    """Says where room is missing, and how the run in `results/<run>` goes on, in errors of the disk."""
    goes_on = "The same command then goes on behind the last whole unit."
    return disk_errors(folder, key=key, goes_on=lambda: goes_on)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads what a run says of itself.

    Raises:
        FileNotFoundError: If the folder holds no run.
        ValueError: If the manifest is damaged.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: {folder} is no run of eval/compare.py. Pass results/<run>."
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): {RESTORE}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no object: {RESTORE}.")
    for name in ("config", "identity"):
        if not isinstance(found.get(name, {}), dict):
            raise ValueError(f"{path} holds {found[name]!r:.60} as its {name!r}, no object: {RESTORE}.")
    return found


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Reads all rows of a run; a unit that two files hold is read once.

    Raises:
        FileNotFoundError: If there are none.
        ValueError: If one lacks what every row has.
    """
    if not _files(folder, ITEMS):
        raise FileNotFoundError(
            f"{folder / ITEMS} does not exist: nothing was measured there yet. Run eval/compare.py first."
        )
    rows = [json.loads(line) for own in _lines(folder)[0].values() for line in own]
    for row in rows:
        wrong = [name for name, kind in NEEDED.items() if not isinstance(row.get(name), kind)]
        if wrong:
            got = f"{wrong[0]} {row[wrong[0]]!r:.60}" if wrong[0] in row else f"no {wrong[0]}"
            raise ValueError(
                f"{folder / ITEMS} holds a row of unit {row.get('unit')!r} with {got}, which eval/compare.py "
                f"does not write: {RESTORE}."
            )
    return rows


def read_references(folder: Path) -> list[dict[str, Any]]:
    """Reads what was asked, each question once, in order of seed, task, item and question; nothing, where
    nothing was."""
    parsed = [own for path in _files(folder, REFERENCES) for own, _ in _parsed(path) if own is not None]
    found = {asked_as(own): own for own in parsed}
    return [found[key] for key in sorted(found)]


class Asking:
    """The questions of a run so far: one that is asked again must be the same, and is written down once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.known = {asked_as(own): own for own in read_references(folder)}

    def fresh(self, unit: str, references: Sequence[Reference]) -> list[Reference]:
        """Those of a unit that are not written down yet; from now on they count as written.

        Raises:
            ValueError: If one is not what was asked before: the rows before and after would be of different
                items.
        """
        new = []
        for one in references:
            now = json.loads(json.dumps(asdict(one)))
            known = self.known.setdefault(asked_as(now), now)
            if known is now:
                new.append(one)
            differing = [name for name in now if name in known and known[name] != now[name]]
            if differing:
                raise ValueError(
                    f"in {unit}: question {one.question} of item {one.item} is not the one whose answers lie "
                    f"in {self.folder}: {', '.join(differing)} differ. The data, the tokenizer or its chat "
                    "template, or a library that writes the items has changed since: choose another name "
                    "(run=...), or delete that folder."
                )
        return new


def asked_as(reference: Mapping[str, Any]) -> tuple[Any, ...]:
    """Key of a question, in a reference and in a row; rows of early versions knew one question an item."""
    return reference["seed"], reference["task"], reference["item"], reference.get("question", 0)


def _whole(lines: Mapping[str, Sequence[str]], units: Collection[str]) -> set[str]:
    """Units of this run that have as many rows as each of their rows says."""
    return {
        unit
        for unit in {*units} & {*lines}
        if len(lines[unit]) == json.loads(lines[unit][0]).get("unit_rows")
    }


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def _shares(folder: Path, name: str) -> list[Path]:
    """Files of processes of their own."""
    return sorted(folder.glob(f"{name.removesuffix('.jsonl')}-*.jsonl"))


def _files(folder: Path, name: str) -> list[Path]:
    """The run's own file and those of processes, where they exist."""
    return [path for path in (folder / name, *_shares(folder, name)) if path.exists()]


def _parsed(path: Path) -> Iterator[tuple[dict[str, Any] | None, str]]:
    """Lines of a file, with what they say; None: torn."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                own = json.loads(line) if line.endswith("\n") else None
            except (json.JSONDecodeError, RecursionError):
                own = None
            yield own if isinstance(own, dict) else None, line


def _lines(folder: Path) -> tuple[dict[str, list[str]], bool]:
    """Lines of each unit, from the first file that has the most of them, and whether any were torn."""
    found: dict[str, list[str]] = {}
    torn = False
    for path in _files(folder, ITEMS):
        here: dict[str, list[str]] = {}
        for own, line in _parsed(path):
            torn |= own is None
            if own is not None:
                here.setdefault(own.get("unit", ""), []).append(line)
        found |= {unit: lines for unit, lines in here.items() if len(lines) > len(found.get(unit, ()))}
    return found, torn


def _differing(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    before, after = (json.loads(json.dumps(mapping)) for mapping in (before, after))
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names += _differing(old, new, f"{prefix}{key}.")
        elif old != new:
            names.append(f"{prefix}{key} ({old!r} there, {new!r} now)")
    return names

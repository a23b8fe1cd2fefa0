"""Stores what a comparison measures: one table, a line an answer, and a manifest.

`results.jsonl` has one JSON object a line (`Line`); `manifest.json` says what made them. Lines are appended
whole, under a lock where several processes write. A run that was killed resumes: keys that are there are not
measured again, and a torn line is dropped. Lines of another identity are refused.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from retain.config import leaves
from retain.process.provenance import write_json, write_text

RESULTS = "results.jsonl"
LOCK = f"{RESULTS}.lock"
MANIFEST = "manifest.json"
KEY = ("policy", "budget", "when", "question", "protection", "task", "seed", "item")
# Parts of an identity that may grow from one run to the next: what is in both must be equal.
GROWING = ("policies", "tasks")
OTHER_RUN = "choose another name (run=...), or delete that folder"


@dataclass(frozen=True)
class Line:
    """A line of the table: an answer to a row, from the cache of a policy at a budget.

    Entries and bytes are counted over all layers that evict and their KV heads: behind the eviction, if there
    is one behind the prompt, and elsewhere when the answer is complete.

    Attributes:
        run, model: Of the config.
        gates: Label of the gates that the policy takes; None if it takes none.
        policy: As the config names it; "full" is the full cache.
        keep_ratio: Stated kept / seen; None under a budget of tokens, 1 for the full cache.
        budget: As stated: "keep_ratio=0.1", "tokens_per_head=64".
        when: When entries are evicted: "prefill", "chunk", "decode", "prefill+decode" or "chunk+decode".
        question: Whether the eviction has seen the question: "known" or "unknown".
        protection: "own": that of the policy's preset; else a label of the config.
        task, stratum, item, context_id, seed: Of the row.
        score: In [0, 1].
        entries_held, entries_seen, bytes_held, bytes_seen: Of keys and values.
        seconds: Share of the answer in the time of eviction and decoding; candidates decode together.
        tokens: Tokens of the answer.
        text: Answer as it was scored.
        identity: 16 hex digits of all that decides the line's values, apart from its key.
    """

    run: str
    model: str
    gates: str | None
    policy: str
    keep_ratio: float | None
    budget: str
    when: str
    question: str
    protection: str
    task: str
    stratum: str
    item: int
    context_id: str
    seed: int
    score: float
    entries_held: int
    entries_seen: int
    bytes_held: int
    bytes_seen: int
    seconds: float
    tokens: int
    text: str
    identity: str


Key = tuple[Any, ...]


def key_of(line: Mapping[str, Any]) -> Key:
    """Key of a line."""
    return tuple(line[name] for name in KEY)


def read_table(folder: Path) -> dict[Key, dict[str, Any]]:
    """Reads the lines of a run by key, without torn ones; none if there is no table."""
    found: dict[Key, dict[str, Any]] = {}
    if not (path := folder / RESULTS).exists():
        return found
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line: Any = json.loads(text) if text.endswith("\n") else None
                found[key_of(line)] = line
            except (ValueError, TypeError, KeyError):
                continue
    return found


def append_lines(folder: Path, lines: Iterable[Line]) -> None:
    """Appends lines in one write, and flushes it."""
    text = "".join(_text(asdict(line)) for line in lines)
    with FileLock(folder / LOCK), (folder / RESULTS).open("a", encoding="utf-8") as file:
        file.write(text)


def digest(value: Any) -> str:
    """First 16 hex digits of the sha256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest of a run; a ValueError if there is none, or it is damaged."""
    path = folder / MANIFEST
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {**found, "identity": {**found["identity"]}}
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: {folder} holds no run of retain compare.") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Restore it from a copy, or {OTHER_RUN}.") from None


def open_run(folder: Path, manifest: Mapping[str, Any], expected: Mapping[Key, str]) -> bool:
    """Prepares a folder for a run: checks that lines which are there may stand in its table, drops torn ones,
    and writes the manifest.

    Args:
        folder: Of the run.
        manifest: Of this run; `identity` holds what decides a value.
        expected: Key -> identity of every line of this run.

    Returns:
        Whether all lines are there already; the manifest then stays what it was, but for config and rows.

    Raises:
        ValueError: The folder holds lines of another identity; names what differs.
    """
    lines, here = read_table(folder), {**manifest}
    complete = expected.keys() <= lines.keys()
    if lines:
        before = read_manifest(folder)
        old, new = before["identity"], manifest["identity"]
        what = differences(old, new)
        if not what and any(
            expected.get(key, line["identity"]) != line["identity"] for key, line in lines.items()
        ):
            what = ["the rows themselves (data, tokenizer or chat template)"]
        if what:
            raise ValueError(
                f"{folder} holds lines of another identity; these differ: {', '.join(what)}. Lines of two "
                f"identities are never mixed: {OTHER_RUN}."
            )
        here["identity"] = {**new, **{name: {**old[name], **new[name]} for name in GROWING}}
        if complete:
            here = {**before, "config": manifest["config"], "rows": manifest["rows"]}
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / RESULTS).exists():  # without torn lines
        write_text(folder / RESULTS, "".join(map(_text, lines.values())))
    write_json(folder / MANIFEST, here)
    return complete


def finish_run(folder: Path, **more: Any) -> None:
    """Adds to the manifest what is known at a run's end."""
    write_json(folder / MANIFEST, {**read_manifest(folder), **more})


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names fields of two identities that differ. Policies and tasks of one alone do not count."""
    old, new = ({**json.loads(json.dumps(identity))} for identity in (before, after))
    for part in GROWING:
        both = old[part].keys() & new[part].keys()
        old[part], new[part] = ({name: one[part][name] for name in both} for one in (old, new))
    there, now = leaves(old), leaves(new)
    return [
        f"{name} ({there.get(name)!r} there, {now.get(name)!r} now)"
        for name in sorted(there.keys() | now.keys())
        if there.get(name) != now.get(name)
    ]


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"

"""What a comparison leaves behind: `items.jsonl` and `manifest.json`, in a folder of its own.

`items.jsonl` holds one row per item, regime, policy and keep_ratio. It grows by whole units (one batch of
items of one task, seed and regime), so a killed run has lost at most one unit; what it left half-written is
dropped when it is opened again. `manifest.json` says what was run: the resolved config, its hash, the code,
the versions, the machine, the models. The one decision taken here: rows of different configurations never
share a folder, and rows made by different code are marked as such.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retain.gates.store import read_metadata
from retain.provenance import write_json, write_text

ITEMS = "items.jsonl"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Row:
    """One answer: one item under one policy.

    Attributes:
        run: Name of the run.
        unit: Key of the unit that wrote the row.
        seed: Seed of the reference model.
        task: Task of the item.
        family: "seen" by gate training, or "held-out" from it.
        item: Index of the item in its task and seed.
        regime: "context_only" or "query_aware".
        policy: Name of the policy.
        keep_ratio: Kept / seen that was asked for; 1.0 for the full cache.
        exact: 1.0 where the whole answer is right.
        partial: Share of the answer that is right.
        kept_entries: Entries held after eviction, over all layers and KV heads.
        seen_entries: Entries seen, over all layers and KV heads.
        bytes_held: Bytes of keys and values of the entries held, as the cache reports them.
        bytes_full: The same for all entries seen.
        tokens: Generated token ids.
        tokens_sha: First 12 hex digits of the sha256 of the ids, to compare answers quickly.
    """

    run: str
    unit: str
    seed: int
    task: str
    family: str
    item: int
    regime: str
    policy: str
    keep_ratio: float
    exact: float
    partial: float
    kept_entries: int
    seen_entries: int
    bytes_held: int
    bytes_full: int
    tokens: tuple[int, ...]
    tokens_sha: str


def tokens_sha(tokens: Sequence[int]) -> str:
    """First 12 hex digits of the sha256 of a token sequence."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:12]


def mapping_hash(mapping: Mapping[str, Any]) -> str:
    """First 16 hex digits of the sha256 of a mapping's canonical JSON."""
    return hashlib.sha256(json.dumps(mapping, sort_keys=True).encode()).hexdigest()[:16]


def gates_identity(folder: str | Path) -> dict[str, Any]:
    """What of a gate artifact decides its scores: the weights' sha256, and what they are read as. When, by
    what code and on what data it was trained is left out: the same weights are the same gates."""
    metadata = read_metadata(folder)
    return {name: metadata.get(name) for name in ("sha256", "family", "layers", "inputs", "unit")}


def open_run(folder: Path, manifest: dict[str, Any], rows_per_unit: Mapping[str, int]) -> dict[str, Any]:
    """Create a run's folder, or take up a run that left rows; without rows a run starts over.

    Args:
        folder: `results/<run>`.
        manifest: Of this run. `identity` is the mapping that two runs must share to be one run; `code` is
            this process's `code_state`.
        rows_per_unit: How many rows each unit of this run has.

    Returns:
        The manifest that now lies in the folder. With units left to run: the one given, with the code states
        of earlier processes. With none: the earlier one, since this process makes no row, but for `config`,
        whose fields outside the identity decide how the rows are reported.

    Raises:
        ValueError: If the folder holds rows of another configuration; it names the fields that differ.
    """
    path, items = folder / MANIFEST, folder / ITEMS
    states = [manifest["code"]]
    has_rows = items.exists() and items.stat().st_size > 0
    if has_rows and path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        differing = _differing(before.get("identity", {}), manifest["identity"])
        if differing:
            raise ValueError(
                f"{folder} holds the items of another configuration; these fields differ: "
                f"{', '.join(differing)}. Their rows must not be mixed: choose another name (run=...), or "
                f"delete that folder."
            )
        if take_up(folder, rows_per_unit) == set(rows_per_unit):
            manifest = {**before, "config": manifest["config"]}
            write_json(path, manifest)
            return manifest
        manifest = {**manifest, "started": before.get("started", manifest.get("started"))}
        states = [state for state in before.get("code_states", []) if state not in states] + states
    elif has_rows:
        raise ValueError(
            f"{folder} holds {ITEMS} but no {MANIFEST}: nothing says what made those rows. Choose another "
            f"name (run=...), or delete that folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {**manifest, "identity_sha": mapping_hash(manifest["identity"]), "code_states": states}
    write_json(path, manifest)
    return manifest


def take_up(folder: Path, rows_per_unit: Mapping[str, int]) -> set[str]:
    """Find the finished units of a run; drop what a killed process left half-written.

    Args:
        folder: `results/<run>`.
        rows_per_unit: How many rows each unit of this run has.

    Returns:
        Keys of the units whose rows are all there.
    """
    path = folder / ITEMS
    if not path.exists():
        return set()
    lines: dict[str, list[str]] = {}
    torn = False
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                unit = json.loads(line)["unit"] if line.endswith("\n") else None
            except json.JSONDecodeError:
                unit = None
            if unit is None:
                torn = True
            else:
                lines.setdefault(unit, []).append(line)
    done = {unit for unit, own in lines.items() if len(own) == rows_per_unit.get(unit)}
    if torn or len(done) < len(lines):
        write_text(path, "".join(line for unit in lines if unit in done for line in lines[unit]))
    return done


def append_unit(folder: Path, rows: Sequence[Row]) -> None:
    """Append the rows of one finished unit, in one write that reaches the disk."""
    text = "".join(json.dumps(asdict(row), separators=(",", ":")) + "\n" for row in rows)
    with (folder / ITEMS).open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read all rows of a run.

    Raises:
        FileNotFoundError: If there are none.
    """
    path = folder / ITEMS
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: nothing was measured there yet. Run eval/compare.py first."
        )
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


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

"""Compares gates that a study reads with the training that the study states.

A folder is compared by every setting that the training's YAML or the study's changes state, and by no other:
where it lies, and on what machine it was made, is not asked. A folder without a `config.yaml` was made by
something else, and cannot be asked.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from retain.config import leaves, read_mapping
from retain.eval.config import gate_names
from retain.eval.study.plan import CONFIG, Plan, StudyConfig, resolved_training

# Settings that hold a mapping of free names: another name in it is another setting.
WHOLE = ("sources", "settings", "terms", "columns", "quantization")
# Where things lie and how a run is made; models and seeds are compared by the gates' own fingerprint.
NOT_ASKED = ("output", "model", "seed", "revision", "tracker", "overwrite", "resume", "path", "folder")


def stale_gates(study: StudyConfig, plan: Plan) -> list[str]:
    """Gates that a plan reads and that something else than the study's `train` made, one message each."""
    compare = study.compare
    read = {compare.gates_of(seed, name): seed for name in gate_names(plan.compare) for seed in compare.seeds}
    problems = []
    for name, own in study.train.items():
        training = resolved_training(study, own)
        if training.config is None or not Path(training.config).is_file():
            continue
        for seed in compare.seeds:
            folder = compare.gates_of(seed, name)
            path = Path(folder) / CONFIG
            if folder not in read or not path.is_file():
                continue
            there = read_mapping(path)
            stated = read_mapping(Path(training.config))
            for change in training.changes:
                _change(stated, change.replace("{seed}", str(seed)))
            differing = [
                f"{key} is {_at(there, key)!r} there and {value!r} here"
                for key, value in _stated(stated)
                if not _same(_at(there, key), value)
            ]
            if differing:
                problems.append(
                    f"the gates in {folder} were trained otherwise than train.{name} says: "
                    f"{'; '.join(differing)}. Train them again (--train-commands, with that folder out of "
                    "the way), or say in the study how they were made"
                )
    return problems


def _change(mapping: dict[str, Any], change: str) -> None:
    key, _, value = change.partition("=")
    *sections, last = key.split(".")
    for section in sections:
        mapping = mapping.setdefault(section, {})
    mapping[last] = yaml.safe_load(value)


def _stated(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings that are asked about: whole where names are free, leaf by leaf otherwise."""
    for key, value in mapping.items():
        if key in NOT_ASKED:
            continue
        if isinstance(value, dict) and key not in WHOLE:
            yield from _stated(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _at(mapping: Mapping[str, Any], key: str) -> Any:
    found: Any = mapping
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _same(there: Any, here: Any) -> bool:
    """Numbers alike as numbers: YAML reads 1e-3 as text."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        one, other = leaves(there), leaves(here)
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(there, list) and isinstance(here, list):
        return len(there) == len(here) and all(map(_same, there, here))
    try:
        return there == here or float(there) == float(here)
    except (TypeError, ValueError):
        return False

"""Makes of a configured study the one comparison that it comes to: a winner, and other levels in its place.

A level is a list of changes to the winner's policy, or other gates, and nothing else. Each becomes a variant
of one comparison, whose own checks find policies and gates that cannot be. Two levels that come to the same
policy and gates are one variant that is measured once.
"""

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from retain.config import leaves, read_mapping
from retain.eval.config import CONTROLS, OWN_GATES, CompareConfig, gate_names
from retain.eval.run.checks import stated_problems
from retain.eval.tasks.suite import Suite
from retain.presets import Policy, load_policy
from retain.registry import suggest

WINNER = "winner"
# The resolved recipe, which training leaves beside gates.
CONFIG = "config.yaml"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
# Settings that hold a mapping of free names: another name in it is another setting.
WHOLE = ("sources", "settings", "terms", "columns", "quantization")
# Where things lie and how a run is made; models and seeds are compared by the gates' own fingerprint.
NOT_ASKED = ("output", "model", "seed", "revision", "tracker", "overwrite", "resume", "path", "folder")


@dataclass(frozen=True)
class Winner:
    """The policy that the study is about.

    Attributes:
        policy: A preset, then `key=value` changes to it, e.g. `[fused, scope=model]`.
        gates: Name in `compare.gate_sets`, or "gates", those of the folder `compare.gates`.
    """

    policy: tuple[str, ...]
    gates: str = OWN_GATES


@dataclass(frozen=True)
class Level:
    """One choice of an ingredient.

    Attributes:
        changes: `key=value` changes of the winner's policy, behind its own.
        gates: Name in `compare.gate_sets`, or "gates"; null: the winner's.
        absent: Whether this is the winner without an ingredient, which pays where the winner is better.
        elsewhere: Why this level is not measured here and which command measures it; empty: it is measured.
    """

    changes: tuple[str, ...] = ()
    gates: str | None = None
    absent: bool = False
    elsewhere: str = ""


@dataclass(frozen=True)
class Training:
    """The training of a set of gates.

    Attributes:
        config: YAML of `train/distill.py`; null: that of the winner's gates, with their changes before these.
        changes: `key=value` overrides of it, `{seed}` in them filled in; model, seed and output are added.
    """

    config: str | None = None
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StudyConfig:
    """One study.

    Attributes:
        compare: Fields of the comparison; `policies` is left out, `variants` and `uses` may name references.
        winner: The policy that levels are put into.
        factors: Ingredient -> level. A level that comes to the winner is the winner.
        plan: `ablation`: the winner, and each level of each factor in the winner's place, one at a time;
            `grid`: the cross of the factors in `cross`.
        cross: Factors of a grid; a level whose combination contradicts itself is left out, and said.
        references: Policies beside: presets, controls, variants of `compare`. Those that take gates take the
            winner's, unless `compare.uses` says which.
        train: Set of gates (a name in `compare.gate_sets`, or "gates") -> how it is made.
    """

    compare: CompareConfig
    winner: Winner
    factors: dict[str, dict[str, Level]]
    plan: Literal["ablation", "grid"] = "ablation"
    cross: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    train: dict[str, Training] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One policy that a study measures: factor -> level where it is not as the winner, preset with changes,
    and the name of its set of gates (None where it takes none)."""

    name: str
    levels: Mapping[str, str]
    policy: tuple[str, ...]
    gates: str | None


@dataclass(frozen=True)
class Plan:
    """The comparison of a study, and its lines.

    Attributes:
        compare: The comparison.
        lines: By name, the winner first; without references.
        place: (factor, level) -> line, in an ablation; of a level measured elsewhere there is none.
        skipped: Combinations of a grid that cannot be, with the reason.
    """

    compare: CompareConfig
    lines: Mapping[str, Line]
    place: Mapping[tuple[str, str], str]
    skipped: Mapping[str, str]


def plan_of(study: StudyConfig, suite: Suite) -> Plan:
    """Make a study's comparison.

    Raises:
        ValueError: All problems of the study and of its comparison, in one message. Budgets and gates are
            checked by the comparison itself.
    """
    lines, place, skipped = _lines(study)
    uses = {name: line.gates for name, line in lines.items() if line.gates is not None}
    for name in study.references:
        policy, _ = _policy(study.compare.variants.get(name, (name,)))
        if name not in CONTROLS and policy is not None and policy.learned:
            uses[name] = study.winner.gates
    compare = replace(
        study.compare,
        policies=(*lines, *study.references),
        variants={**study.compare.variants, **{name: line.policy for name, line in lines.items()}},
        uses={**uses, **study.compare.uses},
    )
    problems = _problems(study) + stated_problems(compare, suite)
    if problems:
        raise ValueError("This study cannot start:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return Plan(compare, lines, place, skipped)


def _lines(study: StudyConfig) -> tuple[dict[str, Line], dict[tuple[str, str], str], dict[str, str]]:
    """The lines of a study, where each level stands, and what of a grid could not be."""
    winner, grid = _line(study, {}), study.plan == "grid"
    found = {_identity(study, winner): winner}
    place: dict[tuple[str, str], str] = {}
    skipped: dict[str, str] = {}
    # Levels of a winner that is no policy are not looked at.
    for levels in _combinations(study) if _policy(winner.policy)[0] else ():
        line = _line(study, levels)
        policy, fault = _policy(line.policy)
        if grid and policy is None:
            skipped[line.name] = fault
            continue
        key = _identity(study, line)
        own = found.setdefault(key, line)
        if grid and own.name == WINNER:
            found[key] = replace(own, levels=levels)
        elif not grid:
            place |= dict.fromkeys(levels.items(), own.name)
    return {line.name: line for line in found.values()}, place, skipped


def _combinations(study: StudyConfig) -> list[dict[str, str]]:
    """Levels that are put into the winner together: one in an ablation, one of each crossed factor in a
    grid."""
    measured = {
        factor: [name for name, level in levels.items() if not level.elsewhere]
        for factor, levels in study.factors.items()
    }
    if study.plan == "ablation":
        return [{factor: name} for factor, names in measured.items() for name in names]
    names_of = itertools.product(*(measured.get(factor, []) for factor in study.cross))
    return [dict(zip(study.cross, names, strict=True)) for names in names_of]


def _line(study: StudyConfig, levels: Mapping[str, str]) -> Line:
    """The winner with levels in its place."""
    chosen = [study.factors[factor][name] for factor, name in levels.items()]
    parts = (*study.winner.policy, *(change for level in chosen for change in level.changes))
    gates = next((level.gates for level in chosen if level.gates is not None), study.winner.gates)
    policy, _ = _policy(parts)
    name = ",".join(f"{factor}={name}" for factor, name in levels.items()) or WINNER
    return Line(name, levels, parts, gates if policy is None or policy.learned else None)


@cache
def _policy(parts: tuple[str, ...]) -> tuple[Policy | None, str]:
    """A preset with changes; None, and why, where there is no such policy."""
    try:
        return load_policy(parts[0] if parts else "", parts[1:]), ""
    except ValueError as error:
        return None, str(error)


def _identity(study: StudyConfig, line: Line) -> tuple[str, str]:
    """A key that is equal for lines whose policies and gates do the same, under whatever name."""
    policy, _ = _policy(line.policy)
    if policy is None:
        return line.name, ""
    bare = repr(replace(policy, name="", paper="", regime="any", variants={}))
    if line.gates is None:
        return bare, ""
    known = line.gates in (OWN_GATES, *study.compare.gate_sets)
    source = study.compare.source_of(line.gates) if known else None
    # The weights of a random control follow from its name.
    named = source is None or source.control == "random"
    return bare, f"{source} {line.gates if named else ''}"


def _problems(study: StudyConfig) -> list[str]:
    """Problems of a study by itself."""
    compare, cross, factors = study.compare, study.cross, study.factors
    sets, problems = [OWN_GATES, *compare.gate_sets], []
    if compare.policies != CompareConfig.policies:
        problems.append("compare.policies is made from the winner and its levels: name others in references")
    if compare.protections or not compare.preset_protection:
        problems.append(
            "compare.protections would measure every level again under each of them: make protection a factor"
        )
    if not factors:
        problems.append("factors is empty: name an ingredient and its levels, or run a comparison")
    elif study.plan == "grid" and len(cross) < 2:
        problems.append(f"plan 'grid' crosses two factors at least; cross names {[*cross]}")
    elif study.plan == "ablation" and cross:
        problems.append(f"plan 'ablation' changes one factor at a time, and cross names {[*cross]}")
    problems += [
        f"cross: unknown factor {name!r}{suggest(name, factors)}; there are {', '.join(factors)}"
        for name in cross
        if name not in factors
    ]
    if len({*cross}) < len(cross):
        problems.append(f"cross names a factor twice: {[*cross]}")
    crossed = [name for name in cross if any(one.gates for one in factors.get(name, {}).values())]
    if len(crossed) > 1:
        both = " and ".join(crossed)
        problems.append(f"cross: {both} both change the gates, and a line has one set of them")
    for factor, levels in factors.items():
        if not levels:
            problems.append(f"factors.{factor} has no levels")
        problems += [
            f"factors.{factor}.{name}: names are letters, digits, '_', '-' and '.', since they name lines"
            for name in levels
            if not _NAME.fullmatch(factor) or not _NAME.fullmatch(name)
        ]
    for name in compare.variants:
        if name == WINNER or "=" in name:
            problems.append(f"compare.variants: {name!r} is how the study names its own lines")
        if name not in study.references:
            problems.append(f"compare.variants: {name!r} is not among the references: it would not run")
    by_folder: dict[str, str] = {}
    for name, training in study.train.items():
        resolved = resolved_training(study, training)
        if resolved.config is None:
            problems.append(_no_config(study, name))
        elif not Path(resolved.config).is_file():
            problems.append(f"train.{name}: there is no config {resolved.config!r}")
        if name not in sets:
            problems.append(f"train: unknown set of gates {name!r}{suggest(name, sets)}")
            continue
        first = by_folder.setdefault(compare.source_of(name).folder, name)
        if resolved_training(study, study.train[first]) != resolved:
            problems.append(
                f"train.{first} and train.{name} make the gates of one folder in two ways: give one of them "
                "a folder of its own in compare.gate_sets"
            )
    return problems


def _no_config(study: StudyConfig, name: str) -> str:
    return f"train.{name} has no config, and neither has train.{study.winner.gates}"


def resolved_training(study: StudyConfig, training: Training) -> Training:
    """A training with the winner's config and changes where it has no config; without one if neither has."""
    if training.config is not None:
        return training
    base = study.train.get(study.winner.gates, Training())
    return Training(base.config, (*base.changes, *(training.changes if training is not base else ())))


def train_commands(study: StudyConfig, processes: int = 1) -> list[str]:
    """The commands that make the gates of a study, one for each set and seed.

    Sets whose folder another set has (controls do) are made with it. Gates that are there are a comment.

    Raises:
        ValueError: If gates are named that no `train` entry makes, naming all of them.
    """
    lacking = [name for name, own in study.train.items() if resolved_training(study, own).config is None]
    if lacking:
        problem = _no_config(study, lacking[0])
        raise ValueError(f"{problem}: name a YAML of train/distill.py in one of them.")
    compare = study.compare
    levels = [level for own in study.factors.values() for level in own.values()]
    wanted = [study.winner.gates, *(level.gates for level in levels), *compare.gate_sets]
    made = {compare.source_of(name).folder for name in study.train}
    missing = [name for name in dict.fromkeys(wanted) if name and compare.source_of(name).folder not in made]
    if missing:
        raise ValueError(
            f"train says nothing of the gates {', '.join(map(repr, missing))}: add `train: "
            f"{{{missing[0]}: {{config: configs/distill/reference.yaml, changes: [...]}}}}`."
        )
    commands: dict[str, str] = {}  # by folder: one model whose items have seeds has one set of gates
    for seed in compare.seeds:
        for name in study.train:
            training = resolved_training(study, study.train[name])
            folder = compare.gates_of(seed, name)
            own = [change.replace("{seed}", str(seed)) for change in training.changes]
            model = compare.model.replace("{seed}", str(seed))
            arguments = [f"model={model}", f"seed={seed}", f"output={folder}", *own]
            command = shlex.join(
                ["accelerate", "launch", "--num_processes", str(processes), "train/distill.py"]
                + ["--config", str(training.config), *arguments]
            )
            commands.setdefault(folder, f"# there: {folder}" if _is_there(folder) else command)
    return [*commands.values()]


def _is_there(folder: str) -> bool:
    return (Path(folder) / "gates.json").is_file()


def absent_gates(study: StudyConfig, plan: Plan) -> list[str]:
    """Folders that a plan reads and that hold no gates, with the command for each if the study says it."""
    own = plan.compare
    folders = {own.gates_of(seed, name) for name in gate_names(own) for seed in own.seeds}
    lacking = sorted(folder for folder in folders if not _is_there(folder))
    try:
        commands = train_commands(study) if lacking else []
    except ValueError:
        commands = []  # of gates that something else made
    problems = []
    for folder in lacking:
        how = [one for one in commands if f"output={folder}" in shlex.split(one, comments=True)]
        step = f"; train them first:\n      {how[0]}" if how else ""
        problems.append(f"there are no gates in {folder}{step}")
    return problems


def stale_gates(study: StudyConfig, plan: Plan) -> list[str]:
    """Gates that a plan reads and that something else than the study's `train` made, one message each.

    A folder is compared by every setting that the training's YAML or the study's changes state, and by no
    other. One without a `config.yaml` was made by something else, and cannot be asked.
    """
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

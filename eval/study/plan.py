"""What a study is told, and the comparison that it comes to: a winner, and what stands in its place.

In: a YAML file and `key=value` overrides. Out: a `StudyConfig`; its `Plan`, which is one `CompareConfig` of
variants and what each of them stands for; the commands that train the gates it needs.

The one decision taken here: a level is a list of changes to the winner's policy, or other gates, and nothing
else. So an ablation and a grid are the same thing with more or fewer changes at once, two levels that come to
the same policy and gates are one line that is measured once, and the runner knows nothing of studies.
"""

import itertools
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from retain.eval.config import CONTROLS, FULL, OWN_GATES, CompareConfig, gate_names
from retain.eval.run.checks import check
from retain.eval.tasks.suite import Suite
from retain.presets import Policy, load_policy, policies
from retain.registry import suggest

WINNER = "winner"
# What training leaves beside gates: the resolved recipe.
CONFIG = "config.yaml"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


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
    """What an ingredient may be.

    Attributes:
        changes: `key=value` changes of the winner's policy, behind its own.
        gates: Name in `compare.gate_sets`, or "gates"; null: the winner's.
        absent: Whether this is the winner without something: what it leaves out pays where the winner is
            better than this.
        elsewhere: Why this level is not measured here and which command measures it; empty: it is measured.
    """

    changes: tuple[str, ...] = ()
    gates: str | None = None
    absent: bool = False
    elsewhere: str = ""


@dataclass(frozen=True)
class Training:
    """How a set of gates is made.

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
        factors: Ingredient -> level -> what it is. A level that comes to the winner is the winner.
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
    """One policy that a study measures.

    Attributes:
        name: Its label in rows and tables.
        levels: Factor -> level, of what is not as in the winner.
        policy: Preset and changes.
        gates: Name of its set of gates; None where it takes none.
    """

    name: str
    levels: Mapping[str, str]
    policy: tuple[str, ...]
    gates: str | None


@dataclass(frozen=True)
class Plan:
    """What a study measures.

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

    Args:
        study: As read.
        suite: That its comparison names.

    Raises:
        ValueError: Everything that is wrong with the study, in one message, with what is wrong with the
            comparison apart from its policies. Budgets and gates are looked at by the comparison itself.
    """
    problems = _problems(study)
    if problems:
        plain = replace(study.compare, policies=("random",), variants={}, uses={}, gate_sets={})
        try:
            check(plain, suite)
        except ValueError as error:
            problems += [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]
        raise ValueError("This study cannot start:\n" + "\n".join(f"  - {problem}" for problem in problems))
    lines, place, skipped = _lines(study)
    uses = {name: line.gates for name, line in lines.items() if line.gates is not None}
    uses |= {
        name: study.winner.gates
        for name in study.references
        if name not in CONTROLS and _policy(study.compare.variants.get(name, (name,))).learned
    }
    compare = replace(
        study.compare,
        policies=(*lines, *study.references),
        variants={**study.compare.variants, **{name: line.policy for name, line in lines.items()}},
        uses={**uses, **study.compare.uses},
    )
    return Plan(compare, lines, place, skipped)


def _lines(study: StudyConfig) -> tuple[dict[str, Line], dict[tuple[str, str], str], dict[str, str]]:
    """The lines of a study that has no problems, where each level stands, and what could not be."""
    own = study.winner
    found = {
        _identity(study, own.policy, own.gates): Line(WINNER, {}, own.policy, _gates(own.policy, own.gates))
    }
    place: dict[tuple[str, str], str] = {}
    skipped: dict[str, str] = {}
    if study.plan == "ablation":
        for factor, levels in study.factors.items():
            for name, level in levels.items():
                if level.elsewhere:
                    continue
                line = _line(study, {factor: name})
                place[factor, name] = found.setdefault(_identity(study, line.policy, line.gates), line).name
    else:
        measured = [
            [(factor, name) for name, level in study.factors[factor].items() if not level.elsewhere]
            for factor in study.cross
        ]
        for pairs in itertools.product(*measured):
            levels_of = {pair[0]: pair[1] for pair in pairs}
            try:
                line = _line(study, levels_of)
            except ValueError as error:
                skipped[_label(levels_of)] = str(error)
                continue
            key = _identity(study, line.policy, line.gates)
            if key in found and found[key].name == WINNER:
                found[key] = replace(found[key], levels=levels_of)
            found.setdefault(key, line)
    return {line.name: line for line in found.values()}, place, skipped


def _label(levels: Mapping[str, str]) -> str:
    return ",".join(f"{factor}={name}" for factor, name in levels.items())


def _line(study: StudyConfig, levels: Mapping[str, str]) -> Line:
    """The winner with levels in its place.

    Raises:
        ValueError: If they contradict one another.
    """
    chosen = [study.factors[factor][name] for factor, name in levels.items()]
    policy = (*study.winner.policy, *(change for level in chosen for change in level.changes))
    gates = next((level.gates for level in chosen if level.gates is not None), study.winner.gates)
    return Line(_label(levels), levels, policy, _gates(policy, gates))


@cache
def _policy(parts: tuple[str, ...]) -> Policy:
    return load_policy(parts[0], parts[1:])


def _gates(parts: tuple[str, ...], gates: str | None) -> str | None:
    return gates if _policy(parts).learned else None


def _identity(study: StudyConfig, parts: tuple[str, ...], gates: str | None) -> tuple[str, str]:
    """What makes two lines one: what their policies do, and their gates, under whatever name."""
    policy = _policy(parts)
    bare = replace(policy, name="", paper="", regime="any", variants={})
    if not policy.learned or gates is None:
        return repr(bare), ""
    source = study.compare.source_of(gates)
    # The weights of a random control follow from its name.
    return repr(bare), f"{source} {gates if source.control == 'random' else ''}"


def _problems(study: StudyConfig) -> list[str]:
    """All that is wrong with a study by itself."""
    problems = []
    sets = [OWN_GATES, *study.compare.gate_sets]
    if study.compare.policies != CompareConfig.policies:
        problems.append("compare.policies is made from the winner and its levels: name others in references")
    if study.compare.protections or not study.compare.preset_protection:
        problems.append(
            "compare.protections would measure every level again under each of them: make protection a factor"
        )
    if not study.factors:
        problems.append("factors is empty: name an ingredient and its levels, or run a comparison")
    elif study.plan == "grid" and len(study.cross) < 2:
        problems.append(f"plan 'grid' crosses two factors at least; cross names {list(study.cross)}")
    elif study.plan == "ablation" and study.cross:
        problems.append(f"plan 'ablation' changes one factor at a time, and cross names {list(study.cross)}")
    problems += [
        f"cross: unknown factor {name!r}{suggest(name, study.factors)}; there are {', '.join(study.factors)}"
        for name in study.cross
        if name not in study.factors
    ]
    if len(set(study.cross)) < len(study.cross):
        problems.append(f"cross names a factor twice: {list(study.cross)}")
    problems += _of_winner(study) + _of_levels(study)
    crossed = [name for name in study.cross if any(one.gates for one in study.factors.get(name, {}).values())]
    if len(crossed) > 1:
        problems.append(
            f"cross: {' and '.join(crossed)} both change the gates, and a line has one set of them"
        )
    known = [*(one.name for one in policies()), *study.compare.variants, *CONTROLS]
    for name in study.references:
        if name == FULL:
            problems.append(f"references: {FULL!r} is always measured: leave it out")
        elif name == WINNER or name not in known:
            problems.append(f"references: unknown policy {name!r}{suggest(name, known)}")
    if len(set(study.references)) < len(study.references):
        problems.append(f"references names a policy twice: {list(study.references)}")
    reserved = [name for name in study.compare.variants if name == WINNER or "=" in name]
    problems += [f"compare.variants: {name!r} is how the study names its own lines" for name in reserved]
    idle = [name for name in study.compare.variants if name not in study.references]
    problems += [f"compare.variants: {name!r} is not among the references: it would not run" for name in idle]
    for name, training in study.train.items():
        if name not in sets:
            problems.append(f"train: unknown set of gates {name!r}{suggest(name, sets)}")
        config = resolved_training(study, training).config
        if config is None:
            problems.append(f"train.{name} has no config, and neither has train.{study.winner.gates}")
        elif not Path(config).is_file():
            problems.append(f"train.{name}: there is no config {config!r}")
    by_folder: dict[str, str] = {}
    for name in (name for name in study.train if name in sets):
        first = by_folder.setdefault(study.compare.source_of(name).folder, name)
        if resolved_training(study, study.train[first]) != resolved_training(study, study.train[name]):
            problems.append(
                f"train.{first} and train.{name} make the gates of one folder in two ways: give one of them "
                "a folder of its own in compare.gate_sets"
            )
    return problems


def _of_winner(study: StudyConfig) -> list[str]:
    if not study.winner.policy:
        return ["winner.policy is empty: a preset, then changes to it, as in [fused, scope=model]"]
    problems = _set_named("winner", study.winner.gates, study)
    try:
        _policy(study.winner.policy)
    except ValueError as error:
        problems.append(f"winner: {error}")
    return problems


def _of_levels(study: StudyConfig) -> list[str]:
    problems = []
    try:
        _policy(study.winner.policy)
        sound = True
    except (ValueError, IndexError):
        sound = False
    for factor, levels in study.factors.items():
        if not levels:
            problems.append(f"factors.{factor} has no levels")
        for name, level in levels.items():
            where = f"factors.{factor}.{name}"
            if not _NAME.fullmatch(factor) or not _NAME.fullmatch(name):
                problems.append(
                    f"{where}: names are letters, digits, '_', '-' and '.', since they name lines"
                )
            problems += _set_named(where, level.gates, study)
            if level.elsewhere or not sound:
                continue
            try:
                _policy((*study.winner.policy, *level.changes))
            except ValueError as error:
                problems.append(f"{where}: {error}")
    return problems


def _set_named(where: str, name: str | None, study: StudyConfig) -> list[str]:
    sets = [OWN_GATES, *study.compare.gate_sets]
    if name is None or name in sets:
        return []
    return [
        f"{where}: no gates {name!r}{suggest(name, sets)} in compare.gate_sets; there are {', '.join(sets)}"
    ]


def resolved_training(study: StudyConfig, training: Training) -> Training:
    """A training with what it has of the winner's; without a config where neither says one."""
    if training.config is not None:
        return training
    base = study.train.get(study.winner.gates, Training())
    return Training(base.config, (*base.changes, *(training.changes if training is not base else ())))


def train_commands(study: StudyConfig, processes: int = 1) -> list[str]:
    """The commands that make the gates of a study, one for each set and seed.

    Sets whose folder another set has (controls do) are made with it. Gates that are there are a comment.

    Args:
        study: Of the gates.
        processes: Of each launch.

    Raises:
        ValueError: If gates are named that no `train` entry makes, naming all of them.
    """
    lacking = [name for name, own in study.train.items() if resolved_training(study, own).config is None]
    if lacking:
        raise ValueError(
            f"train.{lacking[0]} has no config, and neither has train.{study.winner.gates}: name a YAML of "
            "train/distill.py in one of them."
        )
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
    names = gate_names(plan.compare)
    folders = {plan.compare.gates_of(seed, name) for name in names for seed in plan.compare.seeds}
    lacking = sorted(folder for folder in folders if not _is_there(folder))
    try:
        commands = train_commands(study) if lacking else []
    except ValueError:
        commands = []  # what it says is of gates that something else made
    how = {
        folder: next((c for c in commands if f"output={folder}" in shlex.split(c, comments=True)), "")
        for folder in lacking
    }
    step = "; train them first:\n      "
    return [
        f"there are no gates in {folder}" + (step + how[folder] if how[folder] else "") for folder in lacking
    ]

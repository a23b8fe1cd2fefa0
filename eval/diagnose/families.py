"""Families of gates side by side: what each makes of the same model, documents and questions.

    python -m retain.eval.diagnose.families --folder runs/families [--items 50 --workers 2]

A folder of trained artifacts, one a recipe, becomes one table (`table.md`, `table.json`): for each recipe the
held-out overlap with one and the same oracle, and exact match at equal memory. Every recipe is judged by the
same future, whatever it was trained to predict: the future risk of `retain.future` (own later tokens and the
appended question and answer), at the top fifth of each head's entries; and by the answers of the model, with
the question unseen, under the `gate` preset's protection and budget.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from retain.attention.chunked import truncate
from retain.eval.compare import describe_run
from retain.eval.config import CompareConfig
from retain.eval.diagnose.teacher_forced import read_context
from retain.eval.run.answers import read_back
from retain.eval.run.checks import check
from retain.eval.run.evaluated_model import plan
from retain.eval.run.results_store import open_run, read_rows
from retain.eval.run.runner import run_all
from retain.eval.run.scoring import gate_scores
from retain.eval.stats.significance import paired_interval
from retain.eval.stats.summary import FAMILIES, Cell, Scores, gather
from retain.eval.tasks.suite import Suite
from retain.eval.tasks.suites import load_suite
from retain.future import future_risk
from retain.gates.artifact import METADATA_FILE, read_metadata
from retain.hf.intercept.attach import attach
from retain.hf.intercept.observe import observe
from retain.hf.model.gates import load_gates
from retain.process.command import command
from retain.process.extras import require
from retain.process.provenance import code_state, environment, now, write_json, write_text
from retain.ranking import rank_entries

# Of a head's entries: those that the oracle would keep.
TOP_SHARE = 0.2
KEEP_RATIOS = (0.1, 0.2)
REFERENCE = "reference:"
# What stands beside the recipes: a floor that needs no gates.
BASELINE = "random"
DOCUMENTS = "documents"
# Settings that a comparison has too.
SHARED = ("context_tokens", "horizon", "batch_items", "workers", "resamples")


@dataclass(frozen=True)
class Recipe:
    """One trained artifact, by its folder's name; `seed` is of the reference model that it was trained on."""

    name: str
    folder: Path
    seed: int
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Size of a comparison of families.

    Args:
        items: questions of each task.
        documents: documents, and items of each task, on which overlap is measured.
        context_tokens: of every context.
        horizon: distance from which a document's own tokens count in the oracle.
        workers: processes; 0: this one.
        resamples: of a sign-flip test.
        batch_items: questions that are read together.
        results: where runs and tables go.
    """

    items: int = 50
    documents: int = 8
    context_tokens: int = 1000
    horizon: int = 32
    workers: int = 2
    resamples: int = 2000
    batch_items: int = 8
    results: str = "results/families"


@dataclass(frozen=True)
class Line:
    """One row of the table.

    Args:
        recipe: name, or `full`, `random`.
        family: of the gates.
        stage: that trained them.
        parameters: numbers that were trained, of all layers; None: nothing was.
        seconds: of training.
        overlap: set of documents (`documents`, `seen`, `held-out`) -> overlap with the oracle's top fifth.
        exact: `keep_ratio/family` -> exact match in %, and its 95 % interval.
        items: questions of each family.
    """

    recipe: str
    family: str
    stage: str
    parameters: int | None
    seconds: float | None
    overlap: dict[str, float]
    exact: dict[str, tuple[float, float, float]]
    items: dict[str, int]


def find_recipes(folder: Path) -> list[Recipe]:
    """The finished artifacts below a folder, by name.

    Raises:
        ValueError: there are none, or one was trained on another model than a reference one.
    """
    found = []
    for path in sorted(folder.glob(f"*/{METADATA_FILE}")):
        metadata = dict(read_metadata(path.parent))
        base = str(metadata.get("base_model", ""))
        seed = base.removeprefix(REFERENCE)
        if not base.startswith(REFERENCE) or not seed.isdigit():
            raise ValueError(
                f"{path.parent} was trained on {base or 'a model that it does not name'!r}, and families are "
                "compared on the reference models: train it with model=reference:0."
            )
        found.append(Recipe(path.parent.name, path.parent, int(seed), metadata))
    if not found:
        raise ValueError(
            f"{folder} holds no trained gates: train the recipes first (make gates), or name another "
            "--folder."
        )
    return found


def top_overlap(
    score_BHT: Float[Tensor, "B H T"], risk_BHT: Float[Tensor, "B H T"], reached_BHT: Bool[Tensor, "B H T"]
) -> float:
    """Share of the oracle's entries that a score finds.

    Of each head's `n` reached entries, the `k = max(1, round(0.2 n))` of highest risk and the `k` of highest
    score: `|both| / k`, mean over sequences and heads. Chance: about 0.2. Ties fall as in `rank_entries`.

    Args:
        risk_BHT: the oracle's.
        reached_BHT: entries that some future query can reach; the others are in neither set.
    """
    size_BH1 = torch.round(TOP_SHARE * reached_BHT.sum(-1, keepdim=True)).long().clamp_min(1)

    def top(values_BHT: Tensor) -> Tensor:
        return (rank_entries(values_BHT.masked_fill(~reached_BHT, float("-inf"))) < size_BH1) & reached_BHT

    both_BH = (top(score_BHT.float()) & top(risk_BHT.float())).sum(-1)
    return float((both_BH / size_BH1[..., 0]).mean())


def sequences(
    suite: Suite, seed: int, settings: Settings
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Sequences that overlap is measured on: (set, context, appendix). `documents` are like those that gates
    train on (and none of them); `seen` and `held-out` are contexts with one question of a task, and its
    answer."""
    for document in suite.documents(seed, settings.documents, settings.context_tokens):
        yield DOCUMENTS, tuple(document.context_ids), tuple(document.appendix_ids)
    for task in suite.tasks.values():
        for index in range(settings.documents):
            item = suite.item(task.name, seed, index, settings.context_tokens)
            yield task.family, tuple(item.context_ids), (*item.question_ids, *read_back(item))


@torch.no_grad()
def overlaps(suite: Suite, recipes: Sequence[Recipe], settings: Settings) -> dict[str, dict[str, float]]:
    """Recipe (and `random`) -> set of documents -> mean overlap with the oracle."""
    found: dict[str, dict[str, list[float]]] = {}
    for seed in sorted({recipe.seed for recipe in recipes}):
        model = suite.load_model(seed)
        attach(model)
        gates = {one.name: load_gates(one.folder, model) for one in recipes if one.seed == seed}
        wanted = frozenset[str]().union(*(one.inputs for one in gates.values()))
        draw = torch.Generator().manual_seed(seed)
        todo = list(sequences(suite, seed, settings))
        for name, context, appendix in tqdm(todo, desc=f"overlap, seed {seed}", unit="document"):
            size = len(context)
            teacher = observe(model, torch.tensor([[*context, *appendix]]), wanted=wanted)
            oracle = [future_risk(layer, document_tokens=size, horizon=settings.horizon) for layer in teacher]
            observed = [truncate(layer, size) for layer in teacher]
            prompt = partial(read_context, model, context)
            made = {
                recipe: [score.values_BHT for score in gate_scores(model, one, observed, prompt)]
                for recipe, one in gates.items()
            }
            made[BASELINE] = [torch.rand(risk_BHT.shape, generator=draw) for risk_BHT, _ in oracle]
            for recipe, scores in made.items():
                parts = [
                    top_overlap(own_BHT, *future) for own_BHT, future in zip(scores, oracle, strict=True)
                ]
                found.setdefault(recipe, {}).setdefault(name, []).append(fmean(parts))
    return {recipe: {name: fmean(values) for name, values in own.items()} for recipe, own in found.items()}


def answers(
    suite: Suite, name: str, seeds: Sequence[int], gates: str, policy: str, settings: Settings
) -> Scores:
    """Compares one policy, with the question unseen; takes up what is there, and gathers the scores.

    Raises:
        ValueError: the settings are wrong, or the comparison's folder holds the rows of another.
    """
    config = CompareConfig(
        run=name,
        suite=suite.name,
        seeds=tuple(seeds),
        items_per_task=settings.items,
        gates=gates,
        regimes=("context_only",),
        keep_ratios=KEEP_RATIOS,
        policies=(policy,),
        results=str(Path(settings.results) / "runs"),
        **{name: getattr(settings, name) for name in SHARED},
    )
    check(config, suite)
    open_run(config.folder, describe_run(config, suite), [unit.key for unit in plan(config, suite)])
    run_all(config, suite)
    return gather(read_rows(config.folder), suite.tasks)


def exact_of(scores: Scores, policy: str) -> dict[str, tuple[float, float, float]]:
    """`keep_ratio/family` -> mean over tasks of exact match in %, with its 95 % interval."""
    found = {}
    for ratio in (1.0,) if policy == "full" else KEEP_RATIOS:
        for family in FAMILIES:
            strata = scores.strata(Cell("context_only", policy, ratio), scores.tasks(family))
            if strata:
                interval = paired_interval(strata)
                found[f"{ratio:g}/{family}"] = (interval.estimate, interval.low, interval.high)
    return found


def tabulate(suite: Suite, recipes: Sequence[Recipe], settings: Settings) -> list[Line]:
    """Measures everything; the full cache and random stand first."""
    overlap = overlaps(suite, recipes, settings)
    seeds = sorted({recipe.seed for recipe in recipes})
    name = f"{BASELINE}-{'-'.join(map(str, seeds))}-{settings.items}"
    scores = answers(suite, name, seeds, "no-gates-{seed}", BASELINE, settings)
    items = {family: scores.num_items(scores.tasks(family)) for family in FAMILIES if scores.tasks(family)}
    lines = [
        Line(own, "", "", None, None, overlap.get(own, {}), exact_of(scores, own), items)
        for own in ("full", BASELINE)
    ]
    for recipe in recipes:
        # Weights that were trained anew are another run; what the table had of the old ones stays on disk.
        name = f"{recipe.name}-{str(recipe.metadata['sha256'])[:8]}-{settings.items}"
        scores = answers(suite, name, [recipe.seed], str(recipe.folder), "gate", settings)
        lines.append(
            Line(
                recipe=recipe.name,
                family=str(recipe.metadata.get("family", "")),
                stage=str(recipe.metadata.get("stage") or "local"),
                # Tied parameters once, buffers left out.
                parameters=sum(own.numel() for own in load_gates(recipe.folder).parameters()),
                seconds=recipe.metadata.get("training", {}).get("seconds"),
                overlap=overlap[recipe.name],
                exact=exact_of(scores, "gate"),
                items={family: scores.num_items(scores.tasks(family)) for family in items},
            )
        )
    return lines


def markdown(lines: Sequence[Line], settings: Settings) -> str:
    """The table, with what its columns are above it."""
    families = [family for family in FAMILIES if any(family in line.items for line in lines)]
    sets = [name for name in (DOCUMENTS, *FAMILIES) if any(name in line.overlap for line in lines)]
    columns = [(ratio, family) for ratio in KEEP_RATIOS for family in families]
    header = ["recipe", "family", "stage", "parameters", "training s"]
    header += [f"overlap, {name}" for name in sets]
    header += [f"exact, {ratio:g}, {family}" for ratio, family in columns]
    rows = []
    for line in lines:
        cells = [line.exact.get(f"{ratio:g}/{own}") or line.exact.get(f"1/{own}") for ratio, own in columns]
        rows.append(
            [
                *(line.recipe, line.family, line.stage),
                "" if line.parameters is None else f"{line.parameters:,}",
                "" if line.seconds is None else f"{line.seconds:.0f}",
                *(f"{line.overlap[name]:.3f}" if name in line.overlap else "" for name in sets),
                *("" if cell is None else "{:.1f} [{:.1f}, {:.1f}]".format(*cell) for cell in cells),
            ]
        )
    aligned = ["---"] * 3 + ["---:"] * (len(header) - 3)
    counts = ", ".join(f"{count} {family}" for family, count in lines[0].items.items())
    ratios = " and ".join(f"{ratio:g}" for ratio in KEEP_RATIOS)
    about = (
        "Overlap: share of the entries of highest future risk (own later tokens and what is appended, a "
        f"fifth of each head's) that the score finds, on {settings.documents} documents and "
        f"{settings.documents} items of each task, of {settings.context_tokens} tokens. Exact match in %, "
        f"mean over tasks with its 95 % interval, question unseen, at keep_ratio {ratios}; questions: "
        f"{counts}. `full` keeps everything."
    )
    table = [f"| {' | '.join(row)} |" for row in (header, aligned, *rows)]
    return "\n".join([about, "", *table, ""])


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m retain.eval.diagnose.families",
        description="Compare trained families of gates in one table.",
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/families"), help="one artifact a recipe")
    parser.add_argument("--suite", default="reference", help="suite of tasks")
    for name, default in asdict(Settings()).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, help=f"default {default}")
    given = vars(parser.parse_args(arguments))
    suite, folder = load_suite(given.pop("suite")), given.pop("folder")
    write_table(suite, folder, Settings(**given))
    return 0


def write_table(suite: Suite, folder: Path, settings: Settings) -> list[Line]:
    """Measures the recipes of a folder, prints their table, and writes it to `table.md` and `table.json`."""
    require("eval", "scipy", what="a table of families with its intervals")
    recipes = find_recipes(folder)
    lines = tabulate(suite, recipes, settings)
    results = Path(settings.results)
    results.mkdir(parents=True, exist_ok=True)
    record = {
        "date": now(),
        "settings": asdict(settings),
        "recipes": {recipe.name: recipe.metadata["sha256"] for recipe in recipes},
        "lines": [asdict(line) for line in lines],
        "environment": environment("cpu", 1 if settings.workers else torch.get_num_threads()),
        "code": code_state(Path(__file__).parent),
    }
    write_json(results / "table.json", record)
    text = markdown(lines, settings)
    write_text(results / "table.md", text)
    print(text)
    print(f"written: {results / 'table.md'}, {results / 'table.json'}")
    return lines


if __name__ == "__main__":
    sys.exit(main())

"""Makes scores and comparisons from the table of a run.

A *setting* is one (when, question, budget) of the table, a *line* a policy under one protection. The scores
of a line in a setting are arrays over the same items in the same order, one a stratum, in points of 100.
Rows with one `context_id` are not independent of each other: they are one item, and their scores are
averaged before anything is tested.

Every line gets its score. A verdict is given only where it was asked for: to each line against the config's
`baseline`; or without one to each trained policy against the best of the others in the same setting. That
one is chosen by the same scores, and a maximum is biased upwards (the winner's curse): "better" is
conservative for this reason, and "worse" leans against the policy. All comparisons of one (when, question),
over its budgets, are one Holm family.
"""

from dataclasses import dataclass
from typing import Any

import pandas
from numpy import ndarray
from pandas import DataFrame

from retain.eval.config import CONTROLS, FULL
from retain.eval.stats.interval import macro_mean, standard_error
from retain.eval.stats.paired import Comparison, judge

WHERE = ["when", "question"]
SETTING = [*WHERE, "budget"]
KEY = ["task", "seed", "item"]


@dataclass(frozen=True)
class Compared:
    """A comparison that was asked for: a line minus its baseline in one setting."""

    when: str
    question: str
    budget: str
    line: str
    baseline: str
    result: Comparison


def checked(frame: "DataFrame") -> "DataFrame":
    """The table of a finished run.

    Raises:
        ValueError: It has no row, or a line that lacks items which another has.
    """
    if not len(frame):
        raise ValueError("There are no results to report. Run the comparison first.")
    counts = frame.groupby([*SETTING, "line"], sort=False).size()
    asked = frame.drop_duplicates([*WHERE, *KEY]).groupby(WHERE, sort=False).size()
    for (when, question, budget, line), count in counts.items():
        if count < asked[when, question]:
            raise ValueError(
                f"{line} at {budget} (when={when}, question={question}) has {count} of "
                f"{asked[when, question]} answers: the run is unfinished. Run it again with the same config."
            )
    return frame


def strata(rows: "DataFrame") -> list[ndarray]:
    """Scores of one line in one setting, in points: one array a stratum, one number an item, in an order
    that does not depend on that of the rows."""
    means = 100.0 * rows.groupby(["stratum", "context_id"], sort=True)["score"].mean()
    return [group.to_numpy() for _, group in means.groupby(level="stratum", sort=True)]


def scores(frame: "DataFrame") -> "DataFrame":
    """Summarise every line of every setting.

    Returns:
        A row a (when, question, budget, line), in the order of the table, with `score` (macro mean, points),
        `error` (its standard error), `items`, and `keep_ratio` (entries held / seen, mean over answers).
    """
    made = []
    for (when, question, budget, line), rows in frame.groupby([*SETTING, "line"], sort=False):
        values = strata(rows)
        made.append(
            {
                **{"when": when, "question": question, "budget": budget, "line": line},
                **{"score": macro_mean(values), "error": standard_error(values)},
                "items": sum(one.size for one in values),
                "keep_ratio": float((rows["entries_held"] / rows["entries_seen"]).mean()),
            }
        )
    return pandas.DataFrame(made)


def comparisons(
    frame: "DataFrame", *, margin: float, resamples: int = 5000, baseline: str | None = None
) -> list[Compared]:
    """Compare what was asked for, and judge it: one Holm family a (when, question).

    Args:
        frame: Table of a finished run (`checked`).
        margin: Largest difference that does not matter, in points.
        resamples: Of sign flips, at least.
        baseline: Line that every other is compared with in its setting (the full cache in all);
            None: each trained policy is compared with the best policy of its setting that needs no training.

    Raises:
        ValueError: There is no such line.
    """
    lines = frame.drop_duplicates("line").set_index("line")["policy"]
    if baseline is not None and baseline not in lines:
        raise ValueError(f"baseline={baseline!r} was not measured. There are: {', '.join(lines.index)}.")
    taught = set(frame.loc[frame["trained"], "line"])
    unfit = {line for line, policy in lines.items() if policy in (FULL, *CONTROLS)}
    made = []
    for (when, question), group in frame.groupby(WHERE, sort=False):
        by_line: dict[tuple[Any, Any], list[ndarray]] = {
            pair: strata(rows) for pair, rows in group.groupby(["budget", "line"], sort=False)
        }
        whole = next((values for (_, line), values in by_line.items() if line == FULL), [])
        pairs: dict[tuple[str, str, str], tuple[list[ndarray], list[ndarray]]] = {}
        for budget in dict.fromkeys(budget for budget, _ in by_line):
            there = [line for at, line in by_line if at == budget]
            if baseline is None:
                asked = [line for line in there if line in taught and line not in unfit]
                others = [line for line in there if line not in taught and line not in unfit]
                against = max(others, key=lambda line: macro_mean(by_line[budget, line]), default=None)
            else:
                asked = [line for line in there if line not in unfit and line != baseline]
                against = baseline if baseline in (FULL, *there) else None
            if against is not None:
                other = whole if against == FULL else by_line[budget, against]
                pairs |= {(budget, line, against): (by_line[budget, line], other) for line in asked}
        if pairs:
            results = judge(pairs, margin=margin, resamples=resamples)
            made += [
                Compared(str(when), str(question), budget, line, against, result)
                for (budget, line, against), result in results.items()
            ]
    return made

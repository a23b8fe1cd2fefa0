"""Reads the table of a run, and names its settings in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pandas import DataFrame, Series

from retain.eval.config import FULL, PRESET
from retain.eval.run.table import read_manifest, read_table

WHEN = {
    "prefill": "Eviction once, behind the prompt",
    "chunk": "Eviction behind each chunk of the prompt",
    "decode": "Eviction while decoding",
    "prefill+decode": "Eviction behind the prompt and while decoding",
    "chunk+decode": "Eviction behind each chunk and while decoding",
}
QUESTION = {"unknown": "the question comes afterwards", "known": "the question is known"}


@dataclass(frozen=True)
class Table:
    """The results of a run.

    Attributes:
        frame: A row an answer: the columns of `results.jsonl`; `line`: the policy, with its protection where
            that is not the policy's usual one; and `trained`: whether it takes gates, or weights of heads,
            which are measured beforehand.
        manifest: Content of `manifest.json`.
    """

    frame: "DataFrame"
    manifest: Mapping[str, Any]

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved config of the comparison."""
        return self.manifest["config"]


def read(folder: Path) -> Table:
    """Reads the folder of a run; a ValueError if it holds none, or a damaged one."""
    manifest = read_manifest(folder)
    frame = asked_for(DataFrame(list(read_table(folder).values())), manifest)
    return Table(with_lines(frame, manifest["identity"]), manifest)


def asked_for(frame: "DataFrame", manifest: Mapping[str, Any]) -> "DataFrame":
    """Answers that the newest config asks for: a run that has grown may hold others, of policies, items and
    seeds that were measured before. What a manifest does not state asks for everything."""
    if not len(frame):
        return frame
    config, rows = manifest["config"], manifest.get("rows")
    budgets = [f"keep_ratio={ratio:g}" for ratio in config.get("keep_ratios", ())]
    budgets += [f"tokens_per_head={tokens}" for tokens in config.get("tokens_per_head", ())]
    whole, early = frame["policy"] == FULL, frame["when"] != "prefill"  # the question is unknown then
    asked = whole | frame["budget"].isin(budgets) | (not budgets)
    for key, column, always in (
        ("policies", "policy", whole),
        ("protections", "protection", frame["protection"] == PRESET),
        ("when", "when", False),
        ("question", "question", early),
    ):
        asked &= frame[column].isin(config[key]) | always if key in config else True
    if rows is not None:
        places = zip(frame["task"], frame["seed"].astype(str), frame["item"], strict=True)
        there = [item in rows.get(task, {}).get(seed, ()) for task, seed, item in places]
        asked &= Series(there, frame.index)
    return frame[asked]


def with_lines(frame: "DataFrame", identity: Mapping[str, Any] | None = None) -> "DataFrame":
    """The table with the columns `line` and `trained`; none where it has no row. By a run's `identity` also
    policies are trained that take measured weights of heads, whatever they are called."""
    if not len(frame):
        return frame
    pairs = [*zip(frame["policy"], frame["protection"], strict=True)]
    by_heads = {
        label
        for label, one in (identity or {}).get("policies", {}).items()
        if (one["policy"].get("allocation") or {}).get("weights")
    }
    labels = [policy if under == PRESET else f"{policy}+{under}" for policy, under in pairs]
    return frame.assign(
        line=[policy if under == PRESET else f"{policy}, protection {under}" for policy, under in pairs],
        trained=frame["gates"].notna() | Series([label in by_heads for label in labels], frame.index),
    )


def where_words(when: str, question: str) -> str:
    """When entries are evicted, and whether the question is known by then."""
    return f"{WHEN.get(when, when)}; {QUESTION.get(question, question)}"


def budget_words(budget: str) -> str:
    """A budget of the table: "10 % of the cache"."""
    name, _, value = budget.partition("=")
    return f"{100 * float(value):g} % of the cache" if name == "keep_ratio" else f"{value} entries per head"


def line_words(line: str) -> str:
    """The name of a line in text."""
    return "full cache" if line == FULL else line

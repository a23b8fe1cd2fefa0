"""Writes checked claims: `claims.md` for people, `claims.json` for programs.

A line that was not measured is printed too, so that no claim holds by being left out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from retain.eval.claims.claim import CheckedClaim, Condition, Line, Parts, all_hold
from retain.eval.claims.runs import gates_of, policies_in
from retain.eval.report.blocks import markdown_table
from retain.process.provenance import now, write_json, write_text

SCHEMA = 1


def write_claims(
    folder: Path,
    manifests: Sequence[Mapping[str, Any]],
    parts: Parts,
    claims: Sequence[CheckedClaim],
    conditions: Sequence[Condition],
    options: Mapping[str, Any],
) -> Path:
    """Write `claims.md`, whose path is returned, and `claims.json` into a folder.

    `options` are the settings that the numbers depend on beside the rows.
    """
    resolved = {
        name: {**own, **_gates_named(one, name, own)}
        for one in manifests
        for name, own in policies_in(one).items()
    }
    runs = " and ".join(str(one.get("run", "unknown")) for one in manifests)
    named = (parts.policy, parts.gate, parts.oracle, *parts.also)
    write_json(
        folder / "claims.json",
        {
            "schema": SCHEMA,
            "run": runs,
            "identity_sha": " and ".join(str(one.get("identity_sha")) for one in manifests),
            "made": now(),
            "options": {**options},
            "parts": asdict(parts),
            "policies": {name: resolved[name] for name in named if name in resolved},
            "holds": all_hold(claims, conditions),
            "conditions": [asdict(one) for one in conditions],
            "claims": [{**asdict(one), "outcome": one.outcome} for one in claims],
        },
    )
    path = folder / "claims.md"
    write_text(path, as_markdown(runs, parts, claims, conditions, resolved))
    return path


def _gates_named(manifest: Mapping[str, Any], name: str, resolved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a policy that reads gates: which, seed by seed."""
    if not resolved.get("learned"):
        return {}
    return {"gates": " ".join(str(own.get("sha256"))[:8] for own in gates_of(manifest, name).values())}


def as_markdown(
    runs: str,
    parts: Parts,
    claims: Sequence[CheckedClaim],
    conditions: Sequence[Condition],
    resolved: Mapping[str, Mapping[str, Any]],
) -> str:
    """The page: claims first, conditions, then every line of every claim."""
    lines = [
        f"# Claims of `{parts.policy}` in run `{runs}`",
        "",
        f"Its gate alone: `{parts.gate}`. The oracle: `{parts.oracle}`. The best heuristic of each cell is "
        f"chosen, on the items it is compared on, from: {', '.join(parts.heuristics) or 'none'}.",
    ]
    for regime, names in parts.unmeasured.items():
        said = ", ".join(names) or "none"
        lines.append(f"Training-free presets that were not measured in {regime}: {said}.")
    for other in (parts.gate, *parts.also):
        differing = _settings_differing(resolved.get(parts.policy, {}), resolved.get(other, {}))
        if differing:
            lines.append(f"`{parts.policy}` and `{other}` differ in: {', '.join(differing)}.")
    if parts.also:
        lines.append(f"Shown beside: {', '.join(f'`{name}`' for name in parts.also)}.")
    counts = [Counter(line.outcome for line in claim.lines if line.counts) for claim in claims]
    rows = [
        (claim.text, f"**{claim.outcome}**", ", ".join(f"{number} {word}" for word, number in own.items()))
        for claim, own in zip(claims, counts, strict=True)
    ]
    lines += ["", *markdown_table(("claim", "outcome", "lines it rests on"), rows), "", "## Conditions", ""]
    met = [(one.text, "yes" if one.holds else "**no**", one.numbers) for one in conditions]
    lines += markdown_table(("condition", "met", "found"), met)
    for claim in claims:
        lines += ["", f"## {claim.name.capitalize()}: {claim.outcome}", "", f"{claim.text}.", ""]
        shown = sorted(claim.lines, key=lambda line: not line.required)
        lines += markdown_table(HEADS, [_row(line, 100 if claim.of_gap else 1) for line in shown])
    return "\n".join([*lines, "", *READING, ""])


HEADS = (
    *("outcome", "regime", "budget", "tasks", "against", "own mean", "its mean", "full cache", "estimate"),
    *("95 % interval", "must exceed", "Holm p", "adjusted end", "items (differ)", "seeds"),
    *("lowest task", "note"),
)
READING = (
    "Scores are points of 100; means are over tasks, each counting alike. An outcome in brackets is shown "
    "beside: the claim does not rest on it.",
    "",
    'Estimate: the paired difference in points; under "Gap closed" the share of the gap in %. Intervals: '
    "Student's t over items within tasks, widened where differences are skewed, not adjusted. Adjusted end: "
    "the lower end, at the level that Holm's method leaves the line, of a bound that counts losses too rare "
    "to be seen. Seeds: the estimate of each seed apart, in their order; they are not "
    "resampled. Lowest task: where the policy falls furthest behind what it is compared with.",
    "",
    "Of several heuristics that are all alike one comes out best on any set of items, so the best one's mean "
    'is too high and what is said of the policy against it too little. "Crossed" is the share closed when '
    "the heuristic is chosen on one half of the items, drawn at random, and compared on the other, both "
    "ways, over several draws.",
)


def _row(line: Line, unit: int) -> tuple[str, ...]:
    own = [line.estimate, line.low, line.high, line.bound, *line.by_seed.values()]
    estimate, low, high, bound, *seeds = [None if one is None else one * unit for one in own]
    notes = [line.note]
    notes += [] if line.gap is None else [f"gap {line.gap:.1f} points"]
    notes += [] if line.crossed is None else [f"crossed {100 * line.crossed:.0f} %"]
    lowest = min(line.by_task, key=lambda task: line.by_task[task], default=None)
    no_interval = "" if estimate is None else "no interval"
    return (
        line.outcome if line.counts else f"({line.outcome})",
        line.regime,
        f"{line.budget:g}" if line.budget else "any",
        line.family,
        line.against,
        *(_number(mean, ".1f") for mean in (line.policy_mean, line.against_mean, line.full_mean)),
        _number(estimate),
        f"[{low:+.1f}, {high:+.1f}]" if low is not None and high is not None else no_interval,
        _number(bound),
        _number(line.p, ".2g"),
        _number(line.adjusted_low),
        f"{line.num_items} ({line.num_differ})" if line.num_items else "",
        " / ".join(_number(seed) for seed in seeds),
        "" if lowest is None else f"{lowest} {line.by_task[lowest]:+.1f}",
        "; ".join(note for note in notes if note),
    )


def _number(value: float | None, form: str = "+.1f") -> str:
    return "" if value is None else f"{value:{form}}"


def _settings_differing(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings in which two resolved policies differ, but for their names."""
    found: list[str] = []
    for key in {**one, **other} if one and other else ():
        mine, its = one.get(key), other.get(key)
        if isinstance(mine, dict) and isinstance(its, dict) and mine and its:
            found += _settings_differing(mine, its, f"{prefix}{key}.")
        elif mine != its and prefix + key != "name":
            found.append(f"{prefix}{key} ({mine} / {its})")
    return found

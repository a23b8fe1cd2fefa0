"""Claims about a policy, as a YAML file states them and as a check finds them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from retain.config import Positive, Share, Whole, load
from retain.eval.stats.summary import SAME_BYTES

BEST_HEURISTIC = "best heuristic"

Outcome = Literal["holds", "does not hold", "undecided", "not measured", "no gap"]


@dataclass(frozen=True)
class Parts:
    """Which lines of a run play which part.

    Attributes:
        policy: The policy that claims are about.
        gate: Its own gate alone.
        oracle: The reference that knows the future.
        heuristics: All that the best one is chosen from.
        also: Other lines that are shown beside.
        unmeasured: Regime -> training-free presets that have no line there.
    """

    policy: str
    gate: str
    oracle: str
    heuristics: tuple[str, ...]
    also: tuple[str, ...] = ()
    unmeasured: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def named(self, role: str) -> tuple[str, ...]:
        """Lines that an opponent of a claim stands for."""
        roles = {BEST_HEURISTIC: self.heuristics, "gate": (self.gate,), "oracle": (self.oracle,)}
        return roles.get(role, (role,))


@dataclass(frozen=True)
class ClaimRow:
    """Places that a claim speaks of, and how far it goes there.

    Attributes:
        regimes, keep_ratios: All of their combinations.
        tasks: One macro-average; null: all tasks, with each task family shown beside.
        margin: In points: of the equivalence that "better" reports, or the most that "not worse" may lose.
        share: Of the gap, the least that "closes the gap" must close.
    """

    regimes: tuple[str, ...]
    keep_ratios: tuple[float, ...]
    tasks: Literal["seen", "held-out", "all"] | None = None
    margin: Positive = 2.0
    share: Share = 1.0


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        name: Heading.
        text: The sentence; `{policy}`, `{gate}`, `{oracle}`, `{regimes}`, `{keep_ratios}`, `{margins}`,
            `{shares}` and `{gap_from}` are filled in.
        says: "better": the interval excludes 0 and the test passes; "not worse": by the margin; "closes the
            gap": `(policy - other) / (oracle - other)` is at least the share.
        against: "best heuristic" (of the very cell), "gate", "oracle", or a line of the run.
        rows: Where.
        pick: Whether the policy is compared with each opponent, or with the best of them in each cell.
        elsewhere: Whether places that no row names but that were measured are shown beside, asked as well, or
            asked as well at the keep_ratios of the row.
        adjusted: Whether the lines of one macro-average are one Holm family; other lines of the run are then
            shown beside, in a family of their own.
        gap_from: "closes the gap" asks nothing where the gap is smaller, in points.
    """

    name: str
    text: str
    says: Literal["better", "not worse", "closes the gap"]
    against: tuple[str, ...]
    rows: tuple[ClaimRow, ...]
    pick: Literal["each", "best"] = "each"
    elsewhere: Literal["beside", "asked", "other regimes"] = "asked"
    adjusted: bool = True
    gap_from: Positive = 5.0

    @property
    def of_gap(self) -> bool:
        """Whether its numbers are shares of a gap, in [0, 1], and not points."""
        return self.says == "closes the gap"

    @property
    def needs_oracle(self) -> bool:
        """Whether there is nothing to compare with in a regime without an oracle."""
        return self.of_gap or "oracle" in self.against

    def bound(self, row: ClaimRow) -> float:
        """The number that an interval must lie above for a line of the row to hold."""
        return {"better": 0.0, "not worse": -row.margin, "closes the gap": row.share}[self.says]

    def sentence(self, parts: Parts) -> str:
        """The text, filled in."""
        margins = [f"{row.margin:g} at {_listed(row.keep_ratios)}" for row in self.rows]
        return self.text.format(
            policy=parts.policy,
            gate=parts.gate,
            oracle=parts.oracle,
            regimes=_listed(dict.fromkeys(name for row in self.rows for name in row.regimes)),
            keep_ratios=_listed(dict.fromkeys(ratio for row in self.rows for ratio in row.keep_ratios)),
            margins=f"{self.rows[0].margin:g}" if len(margins) == 1 else _listed(margins),
            shares=_listed([f"{100 * row.share:g} % ({row.tasks or 'all'})" for row in self.rows]),
            gap_from=f"{self.gap_from:g}",
        )


def _listed(names: Iterable[str | float]) -> str:
    shown = [name if isinstance(name, str) else f"{name:g}" for name in names]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if shown[1:] else shown)


@dataclass(frozen=True)
class Conditions:
    """Conditions under which the claims on a run count: fewest items of a task, fewest seeds, each with gates
    of its own, the index from which on nothing was chosen, the share by which bytes of lines may differ."""

    items: Whole = 200
    seeds: Whole = 3
    first_item: Whole = 0
    bytes_apart: Share = SAME_BYTES


@dataclass(frozen=True)
class ClaimsConfig:
    """A file of claims; `policy`, `gate` and `oracle` name lines of the run."""

    policy: str
    gate: str
    oracle: str
    claims: tuple[Claim, ...]
    conditions: Conditions = field(default_factory=Conditions)


def load_claims(path: Path | None = None) -> ClaimsConfig:
    """Read a file of claims; None: those of the fused policy."""
    return load(shipped("fused") if path is None else path, ClaimsConfig)


def shipped(name: str) -> Path:
    """A file of claims that ships: in an installed package, or in `configs/claims` of a checkout."""
    home = Path(__file__).resolve().parents[2]
    path = home / "claims" / f"{name}.yaml"
    return path if path.is_file() else home / "configs" / "claims" / f"{name}.yaml"


@dataclass(frozen=True)
class Line:
    """One checked number.

    Attributes:
        outcome: Of its interval and test.
        required: Whether the claim rests on it; otherwise it is shown beside.
        regime, budget, family: Of which cell, and over which tasks.
        against: The line that the policy is compared with.
        estimate: Macro-mean difference in points, or the share of the gap that is closed; None: not measured.
        low, high: Its 95 % interval, not adjusted; None: there is none.
        bound: The number that the interval must lie above for the line to hold.
        p: Holm-adjusted, of the test that the outcome rests on; None: none is adjusted.
        adjusted_low: The lower end at the level that Holm's method leaves this line.
        policy_mean, against_mean, full_mean: In points; the last of the full cache, the ceiling.
        gap: Oracle minus best heuristic, in points.
        crossed: The share closed when the heuristic is chosen on one half of the items and compared on the
            other, both ways: without the winner's curse.
        num_items, num_differ: Clusters, and those on which the two differ.
        by_seed: The estimate of every seed.
        by_task: The difference in points on every task.
        note: Remark for the reader.
    """

    outcome: Outcome
    required: bool
    regime: str
    budget: float
    family: str
    against: str
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    bound: float = 0.0
    p: float | None = None
    adjusted_low: float | None = None
    policy_mean: float | None = None
    against_mean: float | None = None
    full_mean: float | None = None
    gap: float | None = None
    crossed: float | None = None
    num_items: int = 0
    num_differ: int = 0
    by_seed: Mapping[int, float] = field(default_factory=dict)
    by_task: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def counts(self) -> bool:
        """Whether it stands among the lines that the claim rests on, or has no gap to close."""
        return self.required or self.outcome == "no gap"


@dataclass(frozen=True)
class CheckedClaim:
    """A claim with its lines; it is as strong as its weakest required line (`of_gap`: `Claim.of_gap`)."""

    name: str
    text: str
    lines: tuple[Line, ...]
    of_gap: bool = False

    @property
    def outcome(self) -> Outcome:
        """Of the whole claim: undecided where any line is, or where any is missing."""
        found = {line.outcome for line in self.lines if line.required and line.outcome != "no gap"}
        if not found:
            return "no gap" if any(line.outcome == "no gap" for line in self.lines) else "not measured"
        if "does not hold" in found:
            return "does not hold"
        return found.pop() if len(found) == 1 else "undecided"


@dataclass(frozen=True)
class Condition:
    """A condition as it was found in a run."""

    text: str
    holds: bool
    numbers: str


def all_hold(claims: Sequence[CheckedClaim], conditions: Sequence[Condition]) -> bool:
    """Whether every claim holds under every condition; where no cell has a gap there is none to close."""
    met = all(one.holds for one in conditions)
    return met and all(claim.outcome in ("holds", "no gap") for claim in claims)

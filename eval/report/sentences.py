"""Says of each regime, in a few sentences, who wins, by how much, at which budgets, and what it costs.

`sentences` is the start of `report.md` and of `report.html`. It computes nothing: each
difference is one of `judge` (a policy minus the best heuristic) or of `learned_against_each` (a learned
policy minus any other, the full cache too), with its interval and with the verdict of its Holm family.

At each place (budget and task family) one judged policy leads: those that are better than the best heuristic
before those that are not, then by the mean. Of several that are not shown to differ it is the one that leads
at most places, and the others are named beside it. Controls and the full cache are bounds and lead nowhere.
Variants lead where no preset is judged; elsewhere nothing compares them with the leader, so that those with a
higher mean are named. Places of one leader and verdict share a clause, which has the smallest and the largest
of their differences.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from retain.eval.config import FULL
from retain.eval.stats.comparisons import Judged, Place, is_bound, is_judged, places
from retain.eval.stats.significance import Interval, Verdict
from retain.eval.stats.summary import Cell, Comparison, Scores, best_heuristic, preset_of

# A clause names so many policies beside or above the leader.
NAMED = 3
OTHER_SIDE: dict[Verdict, Verdict] = {"better": "worse", "worse": "better"}
# No difference was shown.
OPEN = ("equivalent", "identical", "inconclusive")
Difference = tuple[Verdict, Interval]
# (place, policy, the other) -> policy minus the other.
Known = Mapping[tuple[Place, str, str], Difference]


@dataclass(frozen=True)
class Sentence:
    """Where a regime came out: `text` has names between `**`; `names` are the policies that it speaks of."""

    regime: str
    text: str
    names: tuple[str, ...]

    @property
    def plain(self) -> str:
        """For a terminal."""
        return self.text.replace("**", "")


@dataclass(frozen=True)
class _Led:
    """A place, the policy that leads there, and the one that it is compared with: the best heuristic, or one
    that it is shown to be worse than. `word` is a verdict, "unjudged" or "no baseline"."""

    place: Place
    leader: str
    word: str
    against: str = ""
    interval: Interval | None = None

    @property
    def ahead(self) -> str:
        """Who is ahead by the verdict."""
        return self.against if self.word == "worse" else self.leader


def sentences(
    scores: Scores,
    judged: Sequence[Judged],
    each: Sequence[Comparison],
    *,
    variants: Collection[str] = (),
    controls: Collection[str] = (),
    speed: Mapping[str, Any] | None = None,
) -> list[Sentence]:
    """A few sentences a regime: verdict, cost, and what else must be known.

    Args:
        scores: Of the run.
        judged: All of `judge`.
        each: All of `learned_against_each`.
        variants: Policies that are no presets.
        controls: Policies that are controls beside those of `retain.eval.config.CONTROLS`: of gates with
            random weights, say.
        speed: Content of `speed.json`, if it was measured.
    """
    made = [(Place(one.regime, one.budget, one.family), one.policy, one.baseline, one.result) for one in each]
    # After the others: of a pair that both families hold, the declared primary one decides.
    made += [(one.place, one.policy, one.baseline, one.result) for one in judged]
    known: dict[tuple[Place, str, str], Difference] = {}
    for place, policy, other, result in made:
        own = result.interval
        turned = replace(own, estimate=-own.estimate, low=-own.high, high=-own.low)
        known[place, policy, other] = result.verdict, own
        known[place, other, policy] = OTHER_SIDE.get(result.verdict, result.verdict), turned
    names = [name for name in scores.policies if not is_bound(name) and preset_of(name) not in controls]
    said = []
    for regime in scores.regimes:
        written = _Regime(scores, regime, names, known, variants)
        text = written.text(judged[0].result.margin if judged else 0.0, (speed or {}).get("rows", ()))
        said.append(Sentence(regime, f"**{regime}**: {text}.", tuple(dict.fromkeys(written.spoken_of))))
    return said


class _Regime:
    """One regime while its sentence is written; `spoken_of` grows."""

    def __init__(
        self, scores: Scores, regime: str, names: Sequence[str], known: Known, variants: Collection[str]
    ) -> None:
        self.scores, self.regime, self.names, self.known = scores, regime, names, known
        self.every = [place for place in places(scores) if place.regime == regime]
        self.spoken_of: list[str] = []
        tops = {place: self._tops(place, variants) for place in self.every}
        often = Counter(name for own in tops.values() for name in own)
        leaders = {place: max(own, key=often.__getitem__, default="") for place, own in tops.items()}
        found = (self._lead(place, leader) for place, leader in leaders.items())
        self.led = [one for one in found if one is not None]

    def mean(self, name: str, place: Place) -> float:
        """Of a policy at a place; nan where it was not measured."""
        cell = Cell(self.regime, name, place.budget)
        there = cell in self.scores.exact
        return self.scores.mean(cell, self.scores.tasks(place.family)) if there else float("nan")

    def word(self, place: Place, name: str, other: str) -> str:
        """Verdict on a policy minus another; empty where nothing compares them."""
        return self.known.get((place, name, other), ("", None))[0]

    def _baseline(self, place: Place) -> str | None:
        return best_heuristic(self.scores, place.regime, place.budget, place.family)

    def _tops(self, place: Place, variants: Collection[str]) -> list[str]:
        """The judged policy that comes first, and those that are not shown to differ from it."""
        base = self._baseline(place) or ""
        words = {name: self.word(place, name, base) for name in self.names}
        asked = [own for own, word in words.items() if word and is_judged(own, self.scores.trained)]
        asked = [own for own in asked if preset_of(own) not in variants] or asked
        asked.sort(key=lambda own: (words[own] != "better", -self.mean(own, place)))
        alike = [own for own in asked[1:] if words[own] == words[asked[0]]]
        return asked[:1] + [own for own in alike if self.word(place, asked[0], own) in OPEN]

    def _lead(self, place: Place, leader: str) -> _Led | None:
        base, there = self._baseline(place), [own for own in self.names if self.mean(own, place) >= 0]
        if leader and base:
            above = [own for own in there if self.word(place, leader, own) == "worse"]
            against = max(above, key=lambda own: self.mean(own, place), default=base)
            return _Led(place, leader, *self._difference(place, leader, against))
        if not there:
            return None
        best = base or max(there, key=lambda own: self.mean(own, place))
        return _Led(place, best, "unjudged" if base else "no baseline")

    def _difference(self, place: Place, name: str, other: str) -> tuple[str, str, Interval]:
        word, interval = self.known[place, name, other]
        return word, other, interval

    def text(self, margin: float, timed: Sequence[Mapping[str, Any]]) -> str:
        """Verdict, cost, and what else must be known; without the regime's name and the last full stop."""
        if not self.led:
            full = Cell(self.regime, FULL, 1.0)
            mean = self.scores.mean(full, [*self.scores.families]) if full in self.scores.exact else None
            only = "controls and the full cache" if self.every else "the full cache"
            return f"undecided: nothing but {only} was measured" + (f", {mean:.1f} %" if mean else "")
        groups: dict[tuple[str, str], list[_Led]] = defaultdict(list)
        for one in self.led:
            groups[one.word, one.leader if one.interval else ""].append(one)
        first = sorted(groups, key=lambda one: one[0] not in ("better", "worse"))
        verdict, *others = [self._verdict(key[0], groups[key], margin) for key in first]
        costs = self._costs(groups[first[0]], timed)
        more = [*costs, *others, *self._beside(), self._against_full(), self._missing()]
        return ". ".join([verdict, *(_capital(text) for text in more if text)])

    def _verdict(self, word: str, own: Sequence[_Led], margin: float) -> str:
        leaders, others = ({getattr(one, what): 0 for one in own} for what in ("leader", "against"))
        self.spoken_of += [name for name in (*leaders, *others) if name]
        at, by = self.at(one.place for one in own), self.spread(own)
        name, base = (" or ".join(f"**{one}**" for one in names) for names in (leaders, others))
        if word == "better":
            return f"{name} wins {at}: better than the best baseline ({base}) by {by}"
        if word == "worse":
            return f"{base} wins {at}: {name}, the best learned policy, is worse by {by}"
        if word == "inconclusive":
            return f"undecided: {at} {name} minus the best baseline ({base}) is {by}"
        if word == "equivalent":
            return f"no winner {at}: {name} is equivalent to the best baseline ({base}), ±{margin:g}: {by}"
        if word == "identical":
            return f"no winner {at}: {name} is identical to the best baseline ({base}), item by item"
        if len(self.names) == 1:
            return f"undecided: {name} was measured alone"
        highest = self._listed({one: [led.place for led in own if led.leader == one] for one in leaders})
        why = "no training-free baseline was measured"
        if word == "unjudged":
            why = "training-free policies are not judged against the best of them"
        return f"undecided: {why}; the highest mean has {highest}"

    def _beside(self) -> list[str]:
        """Policies that the winner is not shown to be better than, or that nothing compares it with and have
        a higher mean."""
        beside: dict[str, list[Place]] = defaultdict(list)
        above: dict[str, list[Place]] = defaultdict(list)
        for one in self.led:
            for name in self.names:
                word, mean = self.word(one.place, one.ahead, name), self.mean(name, one.place)
                if one.word == "better" and word in OPEN and mean > self.mean(one.against, one.place):
                    beside[name].append(one.place)
                elif word in ("", "unjudged") and mean > self.mean(one.ahead, one.place):
                    above[name].append(one.place)
        leads = (("not shown to be better than", beside), ("higher, but not compared:", above))
        return [f"{lead} {self._listed(own)}" for lead, own in leads if own]

    def _against_full(self) -> str:
        """The differences of who is ahead from the full cache, by verdict."""
        found: dict[str, list[_Led]] = defaultdict(list)
        for one in self.led:
            if (one.place, one.ahead, FULL) in self.known:
                made = self._difference(one.place, one.ahead, FULL)
                found[made[0]].append(_Led(one.place, one.ahead, *made))
        said = [
            f"{word} {self.at(one.place for one in own)}"
            + ("" if word in ("equivalent", "identical") else f" ({self.farthest(own)})")
            for word, own in found.items()
        ]
        return f"against the full cache {', '.join(said)}" if said else ""

    def _costs(self, led: Sequence[_Led], timed: Sequence[Mapping[str, Any]]) -> list[str]:
        """Bytes and time of who is ahead at these places, and how many of those answers were empty."""
        cells = {Cell(self.regime, one.ahead, one.place.budget) for one in led}
        own = [self.scores.memory[cell] for cell in cells]
        shares = sorted(100 * one.bytes_held / one.bytes_full for one in own)
        held = " to ".join(dict.fromkeys(f"{share:.1f}" for share in (shares[0], shares[-1])))
        said = f"it holds {held} % of the full cache's bytes"
        if gates := max(one.gate_bytes for one in own):
            said += f" and {gates / 1024:,.0f} KiB of gates"
        if empty := sum(len(made) for (cell, _), made in self.scores.nulls.items() if cell in cells):
            said += f", and {empty} of its answers were empty and count as 0"
        return [said, self._time(timed, {cell.policy for cell in cells})]

    def _time(self, timed: Sequence[Mapping[str, Any]], names: Collection[str]) -> str:
        """The smallest batch and budget of `speed.json` at which one of these policies was timed."""
        for row in sorted(timed, key=lambda row: (row["batch"], row["keep_ratio"])):
            first, token = (row.get(f"{part}_over_plain") for part in ("ttft", "token"))
            if row["policy"] in names and not row.get("failed") and first and token:
                return (
                    f"time of **{row['policy']}** over a plain cache's: {first['median']:.2f} to the first "
                    f"token, {token['median']:.2f} a token (keep_ratio {row['keep_ratio']:g}, batch "
                    f"{row['batch']})"
                )
        return "time not measured"

    def _missing(self) -> str:
        """Policies without answers at a budget at which others have some."""
        there = {(cell.policy, cell.budget) for cell in self.scores.exact if cell.regime == self.regime}
        own = {name: 0 for name, _ in there if name != FULL}
        gone = {name: [place for place in self.every if (name, place.budget) not in there] for name in own}
        gone = {name: gone[name] for name in self.scores.policies if gone.get(name)}
        return f"no answers of {self._listed(gone)}" if gone else ""

    def _listed(self, found: Mapping[str, Sequence[Place]]) -> str:
        """Policies, each with its places; names of a picture are these too."""
        self.spoken_of += [*found][:NAMED]
        said = [f"**{name}** {self.at(own)}" for name, own in [*found.items()][:NAMED]]
        return ", ".join(said) + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")

    def spread(self, found: Sequence[_Led]) -> str:
        """The smallest and the largest difference, each with its interval and its place."""
        said: dict[str, str] = {}
        own = sorted((one for one in found if one.interval), key=_size)
        for one in (*own[:1], *own[-1:]):
            said.setdefault(_spelled(one), self._where(one.place))
        if len(said) == 1:
            return next(iter(said))
        return " to ".join(f"{text} at {place}" for text, place in said.items())

    def farthest(self, found: Sequence[_Led]) -> str:
        """The largest difference with its interval."""
        return ("up to " if len(found) > 1 else "") + _spelled(max(found, key=_size))

    def _where(self, place: Place) -> str:
        families = {one.family for one in self.every}
        return f"{_short(place.budget)} {place.family}" if len(families) > 1 else _short(place.budget)

    def at(self, found: Iterable[Place]) -> str:
        """Places in words: "at every budget", "at 0.1, 0.2 (seen) and 0.1 (held-out)"."""
        own = [*dict.fromkeys(found)]
        if len(own) == len(self.every) and len({place.budget for place in own}) > 1:
            return "at every budget"
        budgets: dict[tuple[float, ...], list[str]] = defaultdict(list)
        for family in dict.fromkeys(place.family for place in own):
            budgets[tuple(place.budget for place in own if place.family == family)].append(family)
        families = len({place.family for place in self.every})
        said = [
            ", ".join(map(_short, each)) + (f" ({' and '.join(names)})" if len(names) < families else "")
            for each, names in budgets.items()
        ]
        return f"at {' and '.join(said)}"


def _capital(text: str) -> str:
    """A text that begins as a sentence does; names of policies stay as they are."""
    return text[:1].upper() + text[1:]


def _short(budget: float) -> str:
    return f"{budget:g}" if budget <= 1 else f"{budget:g} tokens"


def _size(one: _Led) -> float:
    return abs(one.interval.estimate) if one.interval else 0.0


def _spelled(one: _Led) -> str:
    return f"{one.interval.estimate:+.1f} {one.interval.spelled()}" if one.interval else ""

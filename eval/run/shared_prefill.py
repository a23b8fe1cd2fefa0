"""One prefill for every policy, protection and budget: the regimes that evict once, behind the context.

The model reads `[context; question; right answer]` *once*, with nothing evicted (of the answer, what
generation will have read): that is the teacher whose attention the oracle looks at, and, cropped to what a
regime has seen before it evicts, the prefill of every policy (a causal model's entries do not depend on what
comes after them; a test compares with caches that never saw more). Layers with a sliding window or a
recurrent state let go of what came before, and cannot be cropped: a model that has them reads once more for
every moment of eviction. Every policy and budget evicts from a fork, the forks are put side by side, as many
as `max_sequences` allows, and decode as one batch of `model.generate`, greedily, through the ragged cache;
no more forks than that live at a time. Items whose contexts differ in length are left-padded; items whose
questions do are read apart.

Regimes. `context_only`: the context is prefilled and evicted, then each question is read, every one on the
same evicted context. `query_aware`: scores have observed the context and the whole first question; evicted
are the entries of all but the question's last token, which is then read again, so that the answer's first
token too comes from what was kept (a prefill's own last logits would have seen everything). A later question
of the same item is asked of the context alone, evicted by those same scores: what was kept with another
question in view. In all of them, what is read after the eviction (and the answer) is held on top of the
budget, and is the same for every policy.

The oracle looks at the questions that are asked of what is left, and no other: where there are several, an
entry's risk is the largest under any of them.

The one decision taken here: equal memory is checked, not assumed. Per item, every policy of one budget must
hold the same number of entries, and the cache's own count of entries and bytes must agree with it, or the run
stops.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retain.attention.chunked import truncate
from retain.eval.config import FULL, CompareConfig, Line, budget_of, lines_of
from retain.eval.run.answers import (
    Answer,
    Held,
    alike,
    make_row,
    needle_share,
    needle_tokens,
    padded,
    read_back,
    respond,
)
from retain.eval.run.baselines import largest, oracle
from retain.eval.run.evaluated_model import Subject, Unit, item_seed, naming
from retain.eval.run.results_store import Row
from retain.eval.tasks.suite import Item, Suite
from retain.evidence import Evidence
from retain.hf.cache.cache import Cache
from retain.hf.intercept.lookahead_pass import look_ahead
from retain.hf.model.decoder import layout_of
from retain.policy import Policy, decide_layers, score_entries
from retain.scores import Score

FULL_LINE = Line(FULL, FULL)


@dataclass(frozen=True)
class Eviction:
    """One policy at one budget: its cache after eviction, and what each item of the batch holds there."""

    line: Line
    budget: float
    cache: Cache
    kept_entries: tuple[int, ...]
    bytes_held: tuple[int, ...]
    seen_entries: tuple[int, ...]
    needles_kept: tuple[float | None, ...]

    def held(self, place: int, unread: int, answer: Answer, heads: int) -> Held:
        """Of one item, which has read so many tokens of its question since, and answered, with an entry in
        each of so many heads."""
        kept, seen = self.kept_entries[place], self.seen_entries[place]
        own, since = self.bytes_held[place], [heads * (unread + made) for made in range(answer.num_read)]
        return Held(
            kept,
            seen,
            kept + heads * (unread + answer.num_read),
            own,
            own * seen // kept,
            self.needles_kept[place],
            before=((kept, seen), *((kept + new, seen + new) for new in since)),
        )


class Stage(NamedTuple):
    """What has been seen when entries go, and which questions are asked of what is left."""

    num_seen: int
    questions: tuple[int, ...]


class Amount(NamedTuple):
    """What the first policy of a budget holds of each item: what all others must hold too."""

    name: str
    entries: tuple[int, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Items that are read together, by index, and who answers. `context` and what is counted from it are
    places in the padded rows."""

    config: CompareConfig
    suite: Suite
    subject: Subject
    unit: Unit
    items: Mapping[int, Item]

    @property
    def first(self) -> Item:
        """One of them; what follows their contexts is equally long, and ends alike."""
        return next(iter(self.items.values()))

    @property
    def context(self) -> int:
        """Width of the contexts."""
        return max(len(item.context_ids) for item in self.items.values())

    @property
    def shift(self) -> int:
        """Padding before the first item."""
        return self.context - len(self.first.context_ids)

    @property
    def seeds(self) -> list[int]:
        """Of what policies draw."""
        return [item_seed(self.unit.seed, self.unit.task, index) for index in self.items]

    def ids(self, question: int, *, answered: bool) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
        """Token ids and mask of `[context; question]`, and of what generation reads of the right answer."""
        rows = [
            [
                *item.context_ids,
                *item.asked[question].question_ids,
                *(read_back(item, question) if answered else ()),
            ]
            for item in self.items.values()
        ]
        ids_BT, mask_BT = padded(rows)
        return ids_BT.to(self.subject.device), mask_BT.to(self.subject.device)

    def read(
        self, ids_BT: Int[Tensor, "B T"], mask_BT: Int[Tensor, "B T"], *, evidence: bool, wanted: Any = ()
    ) -> Cache:
        """A cache that has read these tokens, and evicted nothing."""
        cache = Cache(self.subject.model, policy=None, slack=0)  # concat gives what decoding needs
        mask = None if bool(mask_BT.all()) else mask_BT
        return cache.prefill(ids_BT, mask, evict=False, hold_evidence=evidence, wanted=wanted)

    def upto(self, whole: Cache, count: int) -> Cache:
        """A cache that has seen the first tokens of `[context; question]`: what another one, which saw
        more, is cropped to, or where layers cannot be, one that reads them."""
        if layout_of(self.subject.model).alone:
            ids_BT, mask_BT = self.ids(0, answered=True)
            return self.read(ids_BT[:, :count], mask_BT[:, :count], evidence=False)
        cache = whole.fork()
        cache.crop(count)
        return cache


def run_shared(
    config: CompareConfig, suite: Suite, subject: Subject, unit: Unit, items: Mapping[int, Item]
) -> list[Row]:
    """Measure one unit.

    Returns:
        Its rows: regime by regime, item by item, question by question, the full cache first.
    """
    regimes = unit.regimes(config)
    groups = [Group(config, suite, subject, unit, items) for items in alike({**items})]
    rows = [row for group in groups for row in run_alike(group)]
    order = {regime: place for place, regime in enumerate(regimes)}
    return sorted(rows, key=lambda row: (order[row.regime], row.item, row.question))  # cells stay in order


def run_alike(group: Group) -> Iterator[Row]:
    """Measure items that are read together, in all regimes that share a prefill."""
    config, subject, unit, first = group.config, group.subject, group.unit, group.first
    with naming(unit, "the prefill"):
        every = [line for regime in unit.regimes(config) for line in lines_of(config, regime)]
        whole = group.read(*group.ids(0, answered=True), evidence=True, wanted=wanted_by(subject, every))
    assert whole.evidence is not None
    teacher = whole.evidence
    futures: dict[tuple[int, int], list[Score]] = {}
    for regime in unit.regimes(config):
        lines = lines_of(config, regime)
        with naming(unit, f"{regime}, scoring"):
            num_observed = observed_tokens(first, regime) + group.shift
            observed = [truncate(layer, num_observed) for layer in teacher]
            extended = extended_by(subject, lines, observed, partial(group.upto, whole, num_observed))
        for stage in stages_of(first, regime):
            num_seen = stage.num_seen + group.shift
            with naming(unit, f"{regime}, scoring"):
                base = group.upto(whole, num_seen)
                evidence = [truncate(layer, num_seen) for layer in teacher]
                future = None
                if any(line.policy == "oracle" for line in lines):
                    future = future_of(group, teacher, num_seen, stage.questions, futures)
                scores = score_all(lines, subject, teacher, observed, num_seen, group.seeds, future, extended)
            for budget in (1.0, *config.budgets):
                yield from run_budget(group, regime, stage, budget, base, evidence, scores)


def future_of(
    group: Group,
    teacher: Sequence[Evidence],
    num_seen: int,
    questions: Sequence[int],
    known: dict[tuple[int, int], list[Score]],
) -> list[Score]:
    """What the oracle knows of the first `num_seen` entries: the largest risk under any of these questions
    and its right answer. A later question is read for it, behind the context alone.

    Args:
        group: Of items.
        teacher: Over the context, the first question and its answer.
        num_seen: Entries that eviction will see.
        questions: That are asked of what is left.
        known: By question and `num_seen`; what is found is added.
    """
    for question in questions:
        if (question, num_seen) not in known:
            own = teacher
            if question > 0:
                evidence = group.read(*group.ids(question, answered=True), evidence=True).evidence
                assert evidence is not None
                own = evidence
            known[question, num_seen] = oracle(own, num_seen)
    return largest([known[question, num_seen] for question in questions])


def run_budget(
    group: Group,
    regime: str,
    stage: Stage,
    budget: float,
    base: Cache,
    evidence: Sequence[Evidence],
    scores: Mapping[str, Sequence[Score]],
) -> Iterator[Row]:
    """Every policy at one budget, as many at a time as `max_sequences` allows.

    Raises:
        RuntimeError: If they do not hold the same, in one slice or another.
    """
    lines = (FULL_LINE,) if budget == 1.0 else lines_of(group.config, regime)
    width = max(1, group.config.max_sequences // len(group.items))
    amount: Amount | None = None
    for start in range(0, len(lines), width):
        rows, amount = run_slice(
            group, regime, stage, budget, base, evidence, scores, lines[start : start + width], amount
        )
        yield from rows


def run_slice(
    group: Group,
    regime: str,
    stage: Stage,
    budget: float,
    base: Cache,
    evidence: Sequence[Evidence],
    scores: Mapping[str, Sequence[Score]],
    lines: Sequence[Line],
    amount: Amount | None,
) -> tuple[list[Row], Amount]:
    """Some policies at one budget: their forks are gone when this returns."""
    config, subject, unit = group.config, group.subject, group.unit
    evictions = []
    for line in lines:
        with naming(unit, f"{regime}, {line.name} at {budget:g}"):
            own = scores.get(line.name, ())
            policy = subject.policies.get(line.name)
            evictions.append(evict(base, evidence, line, policy, budget, own, [*group.items.values()]))
    amount = check_equal_memory(evictions, unit, amount)
    heads = sum(layer.num_heads for layer in evidence)
    rows = []
    for question in stage.questions:
        ids, mask = group.ids(question, answered=False)
        with naming(unit, f"{regime}, {budget:g}, {', '.join(line.name for line in lines)}"):
            answers = generate_all(subject, evictions, ids, mask, group.first, question)
        unread = ids.shape[1] - base.num_seen
        for one, found in zip(evictions, answers, strict=True):
            for place, (index, item) in enumerate(group.items.items()):
                rows.append(
                    make_row(
                        config,
                        group.suite,
                        unit,
                        index=index,
                        item=item,
                        question=question,
                        regime=regime,
                        line=one.line,
                        budget=budget,
                        held=one.held(place, unread, found[place], heads),
                        answer=found[place],
                        gate_bytes=subject.gate_bytes(one.line),
                        gates=subject.gates_sha(one.line),
                        trained=subject.trained(one.line),
                    )
                )
    return rows, amount


def stages_of(item: Item, regime: str) -> list[Stage]:
    """When entries go, and what is asked then; tokens without padding."""
    context, later = len(item.context_ids), tuple(range(1, len(item.asked)))
    if regime == "context_only":
        return [Stage(context, (0, *later))]
    return [Stage(seen_tokens(item, regime), (0,)), *([Stage(context, later)] if later else [])]


def seen_tokens(item: Item, regime: str) -> int:
    """How many tokens' entries are there to evict from, before the first question is answered."""
    context = len(item.context_ids)
    return context if regime == "context_only" else context + len(item.question_ids) - 1


def observed_tokens(item: Item, regime: str) -> int:
    """How many tokens' queries the scores have observed: with the question seen, its last token too, at which
    a model that answers at once does its looking up."""
    context = len(item.context_ids)
    return context if regime == "context_only" else context + len(item.question_ids)


def wanted_by(subject: Subject, lines: Sequence[Line]) -> frozenset[str]:
    """What the gates of these lines look at, of all sets together."""
    return frozenset[str]().union(*(gates.inputs for gates in subject.sets_of(lines).values()))


def extended_by(
    subject: Subject, lines: Sequence[Line], observed: Sequence[Evidence], behind: Callable[[], Cache]
) -> dict[str, list[Evidence]]:
    """What is observed with the lookahead tokens of each set of gates that has some, each behind the same
    prompt and apart from the others.

    Args:
        subject: Whose gates look.
        lines: That take them.
        observed: Every layer, without.
        behind: Makes the cache that such tokens are read behind.

    Returns:
        By name of the set; sets without an extension are left out.
    """
    found = {}
    for name, gates in subject.sets_of(lines).items():
        if getattr(gates, "extension", None) is not None:
            found[name] = [*look_ahead(subject.model, gates, behind().engine.read_only(), observed)]
    return found


def score_all(
    lines: Sequence[Line],
    subject: Subject,
    teacher: Sequence[Evidence],
    observed: Sequence[Evidence],
    num_seen: int,
    seeds: Sequence[int],
    future: Sequence[Score] | None = None,
    extended: Mapping[str, Sequence[Evidence]] | None = None,
) -> dict[str, list[Score]]:
    """Each line's score of the first `num_seen` entries per layer, from what was observed, for all budgets;
    gates and controls are handed to it. `future` is the oracle's; without one it is what `teacher` has
    behind these entries: the first question. `extended` is what sets of gates with an extension observed."""
    learned = {
        name: [gates.score(layer) for layer in (extended or {}).get(name, observed)]
        for name, gates in subject.sets_of(lines).items()
    }
    handed: dict[str, list[Score]] = {}
    if subject.token_identity is not None:
        handed["token_identity"] = [subject.token_identity.score(layer) for layer in observed]
    if any(line.policy == "oracle" for line in lines):
        handed["oracle"] = oracle(teacher, num_seen) if future is None else [*future]
    made: dict[tuple[str, ...], list[Score]] = {}
    scores = {}
    for line in lines:
        policy = subject.policies[line.name]
        takes = subject.users.get(line.policy, "")
        key = (line.policy,) if line.policy in handed else (takes, *scored_by(policy))
        if key not in made:
            gate: Sequence[Score | None]
            gate = handed.get(line.policy) or learned.get(takes) or [None] * len(observed)
            made[key] = [
                first_entries(score_entries(policy, layer, learned=own, seeds_B=seeds), num_seen)
                for layer, own in zip(observed, gate, strict=True)
            ]
        scores[line.name] = made[key]
    return scores


def scored_by(policy: Policy) -> tuple[str, ...]:
    """What its score depends on, beside whose gates it takes: policies that agree in it share one."""
    how = (policy.observed, policy.learned, policy.fusion, policy.fusion_weight, policy.draw is not None)
    return (*map(str, how), json.dumps(policy.observed_settings, sort_keys=True))


def first_entries(score: Score, count: int) -> Score:
    """The score of the first `count` entries, with what of its window is among them."""
    first_BHT, draw_BHT = score.first_BHT, score.draw_BHT
    return replace(
        score,
        values_BHT=score.values_BHT[..., :count],
        first_BHT=None if first_BHT is None else first_BHT[..., :count],
        draw_BHT=None if draw_BHT is None else draw_BHT[..., :count],
        window=max(0, score.window - (score.values_BHT.shape[-1] - count)),
    )


def evict(
    base: Cache,
    evidence: Sequence[Evidence],
    line: Line,
    policy: Policy | None,
    budget: float,
    scores: Sequence[Score],
    items: Sequence[Item],
) -> Eviction:
    """Fork the prefilled cache and evict from the fork, by one policy's scores, to one budget; without a
    policy, everything is kept.

    Raises:
        RuntimeError: If the cache does not hold what was kept.
    """
    fork = base.fork()
    if policy is None:
        keeps = [keep_all(layer) for layer in evidence]
    else:
        made = decide_layers(policy, evidence, budget_of(budget), scores=scores)
        keeps = [one.keep_BHT for one in made]
    fork.evict_with(keeps)
    kept = torch.stack([keep_BHT.sum((1, 2)).cpu() for keep_BHT in keeps]).sum(0).tolist()
    heads = sum(layer.num_heads for layer in evidence)
    seen = (heads * evidence[0].valid_BT.sum(-1)).tolist()
    held, entries = fork.bytes_held(), fork.entries_held
    if entries != sum(kept):
        raise RuntimeError(
            f"{line.name} at {budget:g}: the cache holds {entries} entries, {sum(kept)} were kept"
        )
    return Eviction(
        line,
        budget,
        fork,
        tuple(kept),
        tuple(held * own // entries for own in kept),
        tuple(seen),
        tuple(needles_in(keeps, evidence[0].valid_BT, place, item) for place, item in enumerate(items)),
    )


def needles_in(
    keeps: Sequence[Bool[Tensor, "B H T"]], valid_BT: Bool[Tensor, "B T"], place: int, item: Item
) -> float | None:
    """Share of the entries of an item's needles that are kept; None where it does not say which they are."""
    if not item.needles:
        return None
    tokens = torch.tensor(needle_tokens(item)) + int((~valid_BT[place]).sum())
    hits = [int(keep_BHT[place][:, tokens.to(keep_BHT.device)].sum()) for keep_BHT in keeps]
    return needle_share(hits, [keep_BHT.shape[1] for keep_BHT in keeps], len(tokens))


def keep_all(evidence: Evidence) -> Tensor:
    """Every entry that exists."""
    B, T = evidence.valid_BT.shape
    return evidence.valid_BT[:, None].expand(B, evidence.num_heads, T)


def check_equal_memory(evictions: Sequence[Eviction], unit: Unit, amount: Amount | None) -> Amount:
    """Check that all policies of one budget hold the same entries and bytes, item by item.

    Args:
        evictions: Of policies at one budget.
        unit: Theirs.
        amount: What the first policy of the budget holds; None: it is among these.

    Returns:
        That amount.

    Raises:
        RuntimeError: If one holds another.
    """
    for one in evictions:
        own = Amount(one.line.name, one.kept_entries, one.bytes_held)
        amount = amount or own
        if own[1:] != amount[1:]:
            raise RuntimeError(
                f"unequal memory in {unit.key} at budget {one.budget:g}: {own.name} holds {own.entries} "
                f"entries and {own.bytes} bytes, {amount.name} {amount.entries} and {amount.bytes}"
            )
    assert amount is not None
    return amount


def generate_all(
    subject: Subject,
    evictions: Sequence[Eviction],
    ids_BT: Int[Tensor, "B T"],
    mask_BT: Int[Tensor, "B T"],
    first: Item,
    question: int,
) -> list[list[Answer]]:
    """Greedy answers of several cells of a budget, all in one batch: per cell, per item.

    Args:
        subject: Whose model answers.
        evictions: Caches after eviction.
        ids_BT: `[context; question]` of each item; what the caches have not seen of it is read first.
        mask_BT: 1 on tokens, 0 on padding.
        first: One of the items; they end alike.
        question: Which of its questions is asked.
    """
    B, T = ids_BT.shape
    new_tokens = first.asked[question].generate
    made = respond(
        subject.model,
        Cache.concat([one.cache for one in evictions], slack=T - evictions[0].cache.num_seen + new_tokens),
        ids_BT.repeat(len(evictions), 1),
        mask_BT.repeat(len(evictions), 1),
        new_tokens=new_tokens,
        end_ids=first.end_ids,
    )
    return [made[place : place + B] for place in range(0, len(made), B)]

"""One prefill for every policy, protection and budget: the regimes that evict once, behind the context.

The model reads `[context; question; right answer]` *once*, with nothing evicted (of the answer, what
generation will have read): that is the teacher whose attention the oracle looks at, and, cropped to what a
regime has seen before it evicts, the prefill of every policy (a causal model's entries do not depend on what
comes after them; a test compares with caches that never saw more). Every policy and budget evicts from a
fork, the forks are put side by side, and all of them decode as one batch of `model.generate`, greedily,
through the ragged cache. Items whose contexts differ in length are left-padded; items whose questions do are
read apart.

Regimes. `context_only`: the context is prefilled and evicted, then each question is read, every one on the
same evicted context. `query_aware`: scores have observed the context and the whole first question; evicted
are the entries of all but the question's last token, which is then read again, so that the answer's first
token too comes from what was kept (a prefill's own last logits would have seen everything). A later question
of the same item is asked of the context alone, evicted by those same scores: what was kept with another
question in view. In all of them, what is read after the eviction (and the answer) is held on top of the
budget, and is the same for every policy.

The one decision taken here: equal memory is asserted, not assumed. Per item, every policy of one budget must
hold the same number of entries, and the cache's own count of entries and bytes must agree with it, or the run
stops.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retain.attention_chunks import truncate
from retain.eval.answers import (
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
from retain.eval.baselines import oracle
from retain.eval.config import FULL, CompareConfig, Line, budget_of, lines_of
from retain.eval.record import Row
from retain.eval.subject import Subject, Unit, item_seed, naming
from retain.eval.tasks import Item, Suite
from retain.evidence import Evidence
from retain.hf.cache import Cache
from retain.hf.lookahead import look_ahead
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

    def held(self, place: int, read: int, heads: int) -> Held:
        """Of one item, which read so many tokens since, with an entry in each of so many heads."""
        kept, seen = self.kept_entries[place], self.seen_entries[place]
        own = self.bytes_held[place]
        return Held(kept, seen, kept + read * heads, own, own * seen // kept, self.needles_kept[place])


class Stage(NamedTuple):
    """What has been seen when entries go, and which questions are asked of what is left."""

    num_seen: int
    questions: tuple[int, ...]


def run_shared(
    config: CompareConfig, suite: Suite, subject: Subject, unit: Unit, items: Mapping[int, Item]
) -> list[Row]:
    """Measure one unit.

    Returns:
        Its rows: regime by regime, item by item, question by question, the full cache first.
    """
    regimes = unit.regimes(config)
    groups = alike({**items})
    rows = [row for group in groups for row in run_alike(config, suite, subject, unit, group)]
    order = {regime: place for place, regime in enumerate(regimes)}
    return sorted(rows, key=lambda row: (order[row.regime], row.item, row.question))  # cells stay in order


def run_alike(
    config: CompareConfig, suite: Suite, subject: Subject, unit: Unit, items: Mapping[int, Item]
) -> Iterator[Row]:
    """Measure items whose questions are equally long, by index, in all regimes that share a prefill."""
    device = subject.device
    whole = Cache(subject.model, policy=None, slack=0)  # concat gives what decoding needs
    ids_BT, mask_BT = padded([[*i.context_ids, *i.question_ids, *read_back(i)] for i in items.values()])
    wanted = () if subject.gates is None else subject.gates.inputs
    with naming(unit, "the prefill"):
        mask = None if bool(mask_BT.all()) else mask_BT.to(device)
        whole.prefill(ids_BT.to(device), mask, evict=False, hold_evidence=True, wanted=wanted)
    assert whole.evidence is not None
    teacher = whole.evidence
    first = next(iter(items.values()))
    context = ids_BT.shape[1] - len(first.question_ids) - len(read_back(first))  # with its padding
    shift = context - len(first.context_ids)
    asked = [
        padded([[*i.context_ids, *i.asked[question].question_ids] for i in items.values()])
        for question in range(len(first.asked))
    ]
    seeds = [item_seed(unit.seed, unit.task, index) for index in items]
    for regime in unit.regimes(config):
        lines = lines_of(config, regime)
        with naming(unit, f"{regime}, scoring"):
            num_observed = observed_tokens(first, regime) + shift
            observed = [truncate(layer, num_observed) for layer in teacher]
            if subject.gates is not None and getattr(subject.gates, "extension", None) is not None:
                asked_behind = whole.fork()
                asked_behind.crop(num_observed)
                observed = look_ahead(subject.model, subject.gates, asked_behind.read_only(), observed)
        for stage in stages_of(first, regime):
            num_seen = stage.num_seen + shift
            base = whole.fork()
            base.crop(num_seen)
            evidence = [truncate(layer, num_seen) for layer in teacher]
            with naming(unit, f"{regime}, scoring"):
                scores = score_all(lines, subject, teacher, observed, num_seen, seeds)
            for budget in (1.0, *config.budgets):
                here = (FULL_LINE,) if budget == 1.0 else lines
                group = []
                for line in here:
                    with naming(unit, f"{regime}, {line.name} at {budget:g}"):
                        group.append(
                            evict(
                                base,
                                evidence,
                                line,
                                subject.policies.get(line.name),
                                budget,
                                scores.get(line.name, ()),
                                [*items.values()],
                            )
                        )
                check_equal_memory(group, unit)
                heads = sum(layer.num_heads for layer in evidence)
                for question in stage.questions:
                    ids, mask = (side.to(device) for side in asked[question])
                    with naming(unit, f"{regime}, {budget:g}, {', '.join(line.name for line in here)}"):
                        answers = generate_all(config, subject, group, ids, mask, first, question)
                    unread = ids.shape[1] - num_seen
                    for one, own in zip(group, answers, strict=True):
                        for place, (index, item) in enumerate(items.items()):
                            yield make_row(
                                config,
                                suite,
                                unit,
                                index=index,
                                item=item,
                                question=question,
                                regime=regime,
                                line=one.line,
                                budget=budget,
                                held=one.held(place, unread + own[place].num_read, heads),
                                answer=own[place],
                                gate_bytes=subject.gate_bytes(one.line),
                            )


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


def score_all(
    lines: Sequence[Line],
    subject: Subject,
    teacher: Sequence[Evidence],
    observed: Sequence[Evidence],
    num_seen: int,
    seeds: Sequence[int],
) -> dict[str, list[Score]]:
    """Each line's score of the first `num_seen` entries per layer, from what was observed, for all budgets;
    gates and controls are handed to it."""
    learned: list[Score] | None = None
    if subject.gates is not None:
        learned = [subject.gates.score(layer) for layer in observed]
    handed: dict[str, list[Score]] = {}
    if subject.token_identity is not None:
        handed["token_identity"] = [subject.token_identity.score(layer) for layer in observed]
    if any(line.policy == "oracle" for line in lines):
        handed["oracle"] = oracle(teacher, num_seen)
    made: dict[tuple[str, ...], list[Score]] = {}
    scores = {}
    for line in lines:
        policy = subject.policies[line.name]
        key = (line.policy,) if line.policy in handed else scored_by(policy)
        if key not in made:
            gate: Sequence[Score | None] = handed.get(line.policy) or learned or [None] * len(observed)
            made[key] = [
                first_entries(score_entries(policy, layer, learned=own, seeds_B=seeds), num_seen)
                for layer, own in zip(observed, gate, strict=True)
            ]
        scores[line.name] = made[key]
    return scores


def scored_by(policy: Policy) -> tuple[str, ...]:
    """What its score depends on: policies that agree in it share one."""
    how = (policy.observed, policy.learned, policy.fusion, policy.fusion_weight)
    return (*map(str, how), json.dumps(policy.observed_settings, sort_keys=True))


def first_entries(score: Score, count: int) -> Score:
    """The score of the first `count` entries, with what of its window is among them."""
    first_BHT = score.first_BHT
    return replace(
        score,
        values_BHT=score.values_BHT[..., :count],
        first_BHT=None if first_BHT is None else first_BHT[..., :count],
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
    policy, everything is kept."""
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
    assert entries == sum(kept), (
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


def check_equal_memory(group: Sequence[Eviction], unit: Unit) -> None:
    """Assert that all policies of one budget hold the same entries and bytes, item by item."""
    for one in group[1:]:
        first = group[0]
        assert (one.kept_entries, one.bytes_held) == (first.kept_entries, first.bytes_held), (
            f"unequal memory in {unit.key} at budget {one.budget:g}: {one.line.name} holds "
            f"{one.kept_entries} entries, {first.line.name} {first.kept_entries}"
        )


def generate_all(
    config: CompareConfig,
    subject: Subject,
    group: Sequence[Eviction],
    ids_BT: Int[Tensor, "B T"],
    mask_BT: Int[Tensor, "B T"],
    first: Item,
    question: int,
) -> list[list[Answer]]:
    """Greedy answers of all cells of a budget, as many at once as `max_sequences` allows: per cell, per item.

    Args:
        config: Of the comparison.
        subject: Whose model answers.
        group: Caches after eviction.
        ids_BT: `[context; question]` of each item; what the caches have not seen of it is read first.
        mask_BT: 1 on tokens, 0 on padding.
        first: One of the items; they end alike.
        question: Which of its questions is asked.
    """
    B, T = ids_BT.shape
    new_tokens = first.asked[question].generate
    width = max(1, config.max_sequences // B)
    answers: list[list[Answer]] = []
    for start in range(0, len(group), width):
        chunk = group[start : start + width]
        slack = T - chunk[0].cache.num_seen + new_tokens
        made = respond(
            subject.model,
            Cache.concat([one.cache for one in chunk], slack=slack),
            ids_BT.repeat(len(chunk), 1),
            mask_BT.repeat(len(chunk), 1),
            new_tokens=new_tokens,
            end_ids=first.end_ids,
        )
        answers += [made[place : place + B] for place in range(0, len(made), B)]
    return answers

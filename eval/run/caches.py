"""Makes the caches of all cells (a policy at a budget) from one reading of the contexts.

On the shared path (`context_only`, `query_aware`) the model reads `[context; question; right
answer]` once, with nothing evicted (of the answer, what generation would have read). Cropped to what a regime
has seen before it evicts, this is the prefill of every policy, since a causal model's entries do not depend
on later tokens; uncropped, it is what the oracle looks at. Each cell is a fork that evicts by scores that are
made once for all budgets. Layers with a sliding window or a recurrent state cannot be cropped: a model that
has them reads once more for each eviction step.

- `context_only`: the context is evicted, then each question is read behind the same evicted context.
- `query_aware`: scores have observed the context and the first question. All but the question's last token
  compete, and that token is read after the eviction, so that the answer's first token too comes from what was
  kept. Later questions are asked of the context alone, evicted by those same scores.

The other regimes evict again while they read or decode, so each cell has a `retain.Cache` with its own
policy. Only the first forward is shared (`retain.eval.run.first_forward`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retain.attention.chunked import truncate
from retain.eval.config import FULL, CompareConfig, Line, budget_of, lines_of
from retain.eval.run.answers import padded, read_back
from retain.eval.run.baselines import largest, oracle
from retain.eval.run.evaluated_model import EvaluatedModel, Unit, item_seed, naming
from retain.eval.run.first_forward import read_first_forward
from retain.eval.run.scoring import first_entries, learned_scores, score_lines, wanted_by
from retain.eval.tasks.suite import Item, Suite
from retain.evidence import Evidence
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import layout_of
from retain.policy import Policy, decide_layers
from retain.scores import Score


@dataclass(frozen=True)
class Batch:
    """Items that are read together, by index. What follows their contexts is equally long and ends alike."""

    config: CompareConfig
    suite: Suite
    evaluated: EvaluatedModel
    unit: Unit
    items: Mapping[int, Item]

    @property
    def first(self) -> Item:
        """One of the items, where all agree."""
        return next(iter(self.items.values()))

    @property
    def padding(self) -> int:
        """Padding before that item."""
        return max(len(item.context_ids) for item in self.items.values()) - len(self.first.context_ids)

    @property
    def seeds(self) -> list[int]:
        """Seeds of policies that draw, one for each item."""
        return [item_seed(self.unit.seed, self.unit.task, index) for index in self.items]

    def ids(
        self, question: int | None, *, answered: bool = False
    ) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
        """Token ids and mask of the contexts, with a question behind them, and what generation reads of its
        right answer."""
        rows = []
        for item in self.items.values():
            asked = () if question is None else item.asked[question].question_ids
            answer = read_back(item, question or 0) if answered else ()
            rows.append([*item.context_ids, *asked, *answer])
        ids_BT, mask_BT = padded(rows)
        return ids_BT.to(self.evaluated.device), mask_BT.to(self.evaluated.device)

    def read(
        self, ids_BT: Int[Tensor, "B T"], mask_BT: Int[Tensor, "B T"], *, evidence: bool, wanted: Any = ()
    ) -> Cache:
        """Reads tokens into a cache that evicts nothing."""
        cache = Cache(self.evaluated.model, policy=None, slack=0)  # concat gives what decoding needs
        mask = None if bool(mask_BT.all()) else mask_BT
        return cache.prefill(ids_BT, mask, evict=False, hold_evidence=evidence, wanted=wanted)


def steps_of(item: Item, regime: str) -> list[tuple[int, tuple[int, ...]]]:
    """Returns the eviction steps of a regime that evicts once: tokens seen by then, padding not counted, and
    the questions that are asked of what is left."""
    context, later = len(item.context_ids), tuple(range(1, len(item.asked)))
    if regime == "context_only":
        return [(context, (0, *later))]
    return [(context + len(item.question_ids) - 1, (0,)), *([(context, later)] if later else [])]


def observed_tokens(item: Item, regime: str) -> int:
    """Returns how many tokens' queries the scores observe: with the question seen, its last token too, at
    which a model that answers at once does its looking up."""
    return len(item.context_ids) + (0 if regime == "context_only" else len(item.question_ids))


@dataclass(frozen=True)
class SingleEviction:
    """Forks of one prefill, each evicted once by scores that are made already; they evict no more, so that
    several decode as one batch.

    Attributes:
        questions: Asked of what is left.
        base: The prefill.
        evidence: Of its entries, every layer.
        scores: By label of a line, of every layer.
        policies: By label of a line.
    """

    questions: tuple[int, ...]
    base: Cache
    evidence: Sequence[Evidence]
    scores: Mapping[str, Sequence[Score]]
    policies: Mapping[str, Policy]

    def keeps(self, line: Line, budget: float) -> list[Bool[Tensor, "B H T"]]:
        """Returns what a line keeps of every layer."""
        policy, scores = self.policies[line.name], self.scores[line.name]
        stated = budget_of(budget, policy)
        made = decide_layers(policy, self.evidence, stated, scores=scores)
        return [layer.keep_BHT for layer in made]

    def cache_of(self, line: Line, budget: float) -> Cache:
        """Forks the prefill and evicts from the fork."""
        fork = self.base.fork()
        if line.policy == FULL:
            return fork
        policy = self.policies[line.name]
        return fork.evict_with(
            self.keeps(line, budget), correction=policy.correction, precision=policy.precision
        )


class Prefill:
    """One prefill of a batch, for every regime that evicts once.

    Args:
        batch: To read, with the first question and its right answer.
    """

    def __init__(self, batch: Batch):
        self.batch = batch
        config, unit = batch.config, batch.unit
        with naming(unit, "the prefill"):
            lines = [line for regime in unit.regimes(config) for line in lines_of(config, regime)]
            wanted = wanted_by(batch.evaluated, lines)
            self.whole = batch.read(*batch.ids(0, answered=True), evidence=True, wanted=wanted)
        if config.cache_dtype is not None:
            hold_in_(self.whole, getattr(torch, config.cache_dtype))
        assert self.whole.evidence is not None
        self.teacher = self.whole.evidence
        self.futures: dict[tuple[int, int], list[Score]] = {}

    def upto(self, count: int) -> Cache:
        """Returns a cache that has seen the first `count` tokens, padding included: cropped, or where layers
        cannot be cropped, read again."""
        if layout_of(self.batch.evaluated.model).alone:
            ids_BT, mask_BT = self.batch.ids(0, answered=True)
            cache = self.batch.read(ids_BT[:, :count], mask_BT[:, :count], evidence=False)
            if (dtype := self.batch.config.cache_dtype) is not None:
                hold_in_(cache, getattr(torch, dtype))
            return cache
        cache = self.whole.fork()
        cache.crop(count)
        return cache

    def future(self, num_seen: int, questions: Sequence[int]) -> list[Score]:
        """Returns the oracle's score of the first `num_seen` entries: their largest risk under any of these
        questions and its right answer. A later question is read behind the context alone."""
        for question in questions:
            if (question, num_seen) not in self.futures:
                own = self.teacher
                if question > 0:
                    ids_BT, mask_BT = self.batch.ids(question, answered=True)
                    own = self.batch.read(ids_BT, mask_BT, evidence=True).evidence or []
                self.futures[question, num_seen] = oracle(own, num_seen)
        return largest([self.futures[question, num_seen] for question in questions])

    def evictions(self, regime: str) -> Iterator[SingleEviction]:
        """Yields the eviction steps of a regime, with all lines' scores."""
        batch, lines = self.batch, lines_of(self.batch.config, regime)
        policies = batch.evaluated.policies
        knowing = [line for line in lines if line.policy == "oracle"]
        others = [line for line in lines if line.policy != "oracle"]
        with naming(batch.unit, f"{regime}, scoring"):
            count = observed_tokens(batch.first, regime) + batch.padding
            observed = [truncate(layer, count) for layer in self.teacher]
            learned = learned_scores(batch.evaluated, others, observed, lambda: self.upto(count))
            scores = score_lines(policies, others, observed, learned, batch.seeds)
        for num_seen, questions in steps_of(batch.first, regime):
            with naming(batch.unit, f"{regime}, scoring"):
                num_seen += batch.padding
                if knowing:
                    future = {"oracle": self.future(num_seen, questions)}
                    scores |= score_lines(policies, knowing, observed, future, batch.seeds)
                evidence = [truncate(layer, num_seen) for layer in self.teacher]
                own = {
                    name: [first_entries(score, num_seen) for score in layers]
                    for name, layers in scores.items()
                }
                made = SingleEviction(questions, self.upto(num_seen), evidence, own, policies)
            yield made


class OwnEvictions:
    """A cache for each cell, which evicts by its own policy and regime, as a user's would.

    Args:
        batch: Whose contexts are read.
    """

    def __init__(self, batch: Batch, regime: str):
        self.batch, self.regime = batch, regime
        self.questions = range(len(batch.first.asked))
        config = batch.config
        with naming(batch.unit, "the first forward"):
            self.first_forward = read_first_forward(
                batch.evaluated.model,
                *batch.ids(None),
                chunk=config.chunk_tokens if "chunked" in regime else None,
                wanted=wanted_by(batch.evaluated, lines_of(config, regime)),
            )

    def asked(self, cache: Cache, question: int) -> Cache:
        """The cache that a question is asked of: a copy, but for the last one."""
        return cache.fork() if question < self.questions[-1] else cache

    def cache_of(self, line: Line, budget: float) -> Cache:
        """Makes a cache that has read the contexts under a line's policy."""
        batch, evaluated = self.batch, self.batch.evaluated
        policy, gates = evaluated.policies.get(line.name), evaluated.gates_of(line)
        cache = open_cache(evaluated.model, batch.config, self.regime, policy, budget, gates, batch.seeds)
        return self.first_forward.into(cache)


def hold_in_(cache: Cache, dtype: torch.dtype) -> None:
    """Rounds a dense prefill to another precision, and the queries that its evidence shows too."""
    for layer in cache.state.ragged:
        layer.hold(*(own.to(dtype) for own in layer.dense()))
    if cache.state.evidence is not None:
        shown = zip(cache.state.evidence, (layer.dense() for layer in cache.state.ragged), strict=True)
        cache.state.evidence = [
            replace(own, queries_BQSD=own.queries_BQSD.to(dtype), keys_BHTD=keys, values_BHTD=values)
            for own, (keys, values) in shown
        ]


CellCaches = SingleEviction | OwnEvictions


def open_cache(
    model: Any, config: CompareConfig, regime: str, policy: Any, budget: float, gates: Any, seeds: Any = None
) -> Cache:
    """Makes the empty cache of one cell.

    Raises:
        ValueError: A policy, regime, budget and gates that do not go together.
    """
    if policy is None:
        return Cache(model, policy=None)
    stated = budget_of(budget, policy)
    return Cache(
        model,
        policy,
        keep_ratio=stated.keep_ratio,
        tokens_per_head=stated.tokens_per_head,
        byte_ratio=stated.byte_ratio,
        regime="prefill" if regime == "context_only" else regime,  # its name there
        every=config.every,
        gates=gates if policy.learned else None,
        seeds=seeds,
        # At equal memory no short row is held whole.
        short="raise",
    )


def caches_of(batch: Batch) -> Iterator[tuple[str, CellCaches]]:
    """Yields the regimes of a batch's unit, each with the caches of its cells, step by step."""
    regimes = batch.unit.regimes(batch.config)
    if not batch.unit.shared:
        yield from ((regime, OwnEvictions(batch, regime)) for regime in regimes)
        return
    prefill = Prefill(batch)
    yield from ((regime, step) for regime in regimes for step in prefill.evictions(regime))

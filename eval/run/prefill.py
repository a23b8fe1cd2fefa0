"""Makes the caches of all candidates and budgets from one reading of the context.

Behind the prompt (when = prefill), the model reads `[context; question; right answer]` once, with nothing
evicted (of the answer, what generation would have read). Cropped to what an eviction has seen, this is the
prefill of every policy, since a causal model's entries do not depend on later tokens; uncropped, it is what
the oracle looks at. Each cache is a fork that evicts by scores that are made once for all budgets. Layers
with a sliding window or a recurrent state cannot be cropped: a model that has them reads once more.

- question unknown: the context is evicted, then each question is read behind the same evicted context.
- question known: scores have observed the context and the question. All but the question's last token
  compete, and that token is read after the eviction, so that the answer's first token too comes from what was
  kept. Each question has its eviction.

Elsewhere entries go while the model reads or decodes, so each candidate has a `retain.Cache` of its policy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from retain.attention.chunked import truncate
from retain.budget.statement import Budget
from retain.eval.config import FULL, Candidate, CompareConfig, budget_for, candidates_of
from retain.eval.run.plan import Loaded, Unit
from retain.eval.run.scores import first_entries, gate_scores, oracle
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import layout_of
from retain.policy import Policy, decide_layers, score_entries
from retain.scores import Score

# Makes the cache of a candidate at a budget.
Make = Callable[[Candidate, Budget], Cache]


@dataclass(frozen=True)
class Reader:
    """Reads the context of a unit."""

    config: CompareConfig
    loaded: Loaded
    unit: Unit

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Candidates of the unit, without the full cache."""
        return candidates_of(self.config, self.unit.when)

    def ids(self, number: int | None, *, answered: bool = False) -> Int[Tensor, "1 T"]:
        """Token ids of the context, with a question behind it, and what generation reads of its right
        answer."""
        context = self.unit.context
        asked = () if number is None else context.encoded[number].question_ids
        answer = context.read_back(number or 0) if answered else ()
        return torch.tensor([[*context.ids, *asked, *answer]], device=self.loaded.device)

    def read(self, ids_BT: Int[Tensor, "1 T"], *, evidence: bool) -> Cache:
        """Reads tokens into a cache that evicts nothing."""
        sets = self.loaded.sets_of(self.candidates).values() if evidence else ()
        wanted = frozenset[str]().union(*(gates.inputs for gates in sets))
        cache = Cache(self.loaded.model, policy=None)
        return cache.prefill(ids_BT, evict=False, hold_evidence=evidence, wanted=wanted)


def caches_of(reader: Reader) -> Iterator[tuple[str, Sequence[int], Make]]:
    """Yields the evictions of a unit: whether each has seen the question ("known" or "unknown"), the numbers
    of the questions that are asked of its caches, and what makes these."""
    numbers = range(len(reader.unit.context.rows))
    if reader.unit.when != "prefill":
        yield "unknown", numbers, partial(repeated_eviction, reader)
        return
    for number in numbers:
        states = [state for state in reader.config.question if state == "known" or number == 0]
        if states:
            whole = reader.read(reader.ids(number, answered=True), evidence=True)
            for state in states:
                asked = (number,) if state == "known" else numbers
                yield state, asked, single_eviction(reader, whole, number, known=state == "known")


def single_eviction(reader: Reader, whole: Cache, number: int, *, known: bool) -> Make:
    """Scores the entries of a prefill for all candidates; each cache is a fork that is evicted once."""
    context, policies = reader.unit.context, reader.loaded.policies
    count = len(context.ids) + (len(context.encoded[number].question_ids) - 1 if known else 0)
    scores = scores_of(reader, whole, number, count, known=known)
    evidence = [truncate(layer, count) for layer in whole.evidence or []]
    base = _upto(reader, whole, number, count)

    def make(candidate: Candidate, budget: Budget) -> Cache:
        fork = base.fork()
        if candidate.policy == FULL:
            return fork
        policy = policies[candidate]
        layers = decide_layers(policy, evidence, budget_for(budget, policy), scores=scores[candidate])
        keep = [layer.keep_BHT for layer in layers]
        return fork.evict_with(keep, correction=policy.correction, precision=policy.precision)

    return make


def scores_of(
    reader: Reader, whole: Cache, number: int, count: int, *, known: bool
) -> dict[Candidate, list[Score]]:
    """Scores the first `count` entries of every layer for all candidates, once for all budgets. The oracle's
    score stands in the gate's place.

    Args:
        reader: Of the unit.
        whole: The context, a question and its right answer, with evidence.
        number: Of that question.
        count: Entries that compete.
        known: Whether scores observe the question, whose last token does not compete.
    """
    loaded, teacher, upto = reader.loaded, whole.evidence or [], count + (1 if known else 0)
    observed = [truncate(layer, upto) for layer in teacher]
    of_set = {
        place: gate_scores(loaded.model, gates, observed, lambda: _upto(reader, whole, number, upto))
        for place, gates in loaded.sets_of(reader.candidates).items()
    }
    learned = {name: of_set[place] for name, place in loaded.users.items() if place in of_set}
    if any(one.policy == "oracle" for one in reader.candidates):
        others = [] if known else [one for one in range(len(reader.unit.context.rows)) if one != number]
        read = (reader.read(reader.ids(one, answered=True), evidence=True).evidence or [] for one in others)
        learned["oracle"] = oracle(chain([teacher], read), count)
    seeds = [reader.unit.context.random_seed]

    def scored(one: Candidate) -> list[Score]:
        pairs = zip_longest(observed, learned.get(one.policy, ()))
        policy = loaded.policies[one]
        layers = (score_entries(policy, seen, learned=score, seeds_B=seeds) for seen, score in pairs)
        return [first_entries(score, count) for score in layers]

    return {one: scored(one) for one in reader.candidates}


def _upto(reader: Reader, whole: Cache, number: int, count: int) -> Cache:
    """A cache that has seen the first `count` tokens: cropped, or if layers cannot be cropped, read again."""
    if layout_of(reader.loaded.model).alone:
        return reader.read(reader.ids(number)[:, :count], evidence=False)
    cache = whole.fork()
    cache.crop(count)
    return cache


def repeated_eviction(reader: Reader, candidate: Candidate, budget: Budget) -> Cache:
    """Makes a cache that has read the context, and evicts by a candidate's policy while it reads or
    decodes."""
    loaded, config, when = reader.loaded, reader.config, reader.unit.when
    if candidate.policy == FULL:
        cache = Cache(loaded.model, policy=None)
    else:
        policy, gates = loaded.policies[candidate], loaded.gates_of(candidate)
        seeds = [reader.unit.context.random_seed]
        cache = open_cache(loaded.model, config, when, policy, budget, gates, seeds)
    return cache.prefill(reader.ids(None), chunk_size=config.chunk_tokens if "chunk" in when else None)


def open_cache(
    model: Any,
    config: CompareConfig,
    when: str,
    policy: Policy,
    budget: Budget,
    gates: Any,
    seeds: Sequence[int] | None = None,
) -> Cache:
    """Makes the empty cache of a candidate at a budget.

    Raises:
        ValueError: Policy, time of eviction, budget and gates do not go together.
    """
    how: dict[str, Any] = {**vars(budget_for(budget, policy)), "when": when, "every": config.every}
    # At equal memory no short row is held whole.
    return Cache(model, policy, **how, gates=gates, seeds=seeds, short="raise")

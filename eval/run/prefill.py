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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from retain.attention.chunked import truncate
from retain.budget.statement import Budget
from retain.eval.config import FULL, Candidate, CompareConfig, budget_for, candidates_of
from retain.eval.run.plan import Loaded, Unit
from retain.eval.run.scores import first_entries, gate_scores, oracle, score_candidates
from retain.evidence import Evidence
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import layout_of
from retain.policy import Policy, decide_layers
from retain.scores import Score


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

    @property
    def questions(self) -> range:
        """Numbers of the questions on the context."""
        return range(len(self.unit.context.rows))

    def ids(self, question: int | None, *, answered: bool = False) -> Int[Tensor, "1 T"]:
        """Token ids of the context, with a question behind it, and what generation reads of its right
        answer."""
        context = self.unit.context
        asked = () if question is None else context.encoded[question].question_ids
        answer = context.read_back(question or 0) if answered else ()
        return torch.tensor([[*context.ids, *asked, *answer]], device=self.loaded.device)

    def read(self, ids_BT: Int[Tensor, "1 T"], *, evidence: bool) -> Cache:
        """Reads tokens into a cache that evicts nothing."""
        sets = self.loaded.sets_of(self.candidates).values() if evidence else ()
        wanted = frozenset[str]().union(*(gates.inputs for gates in sets))
        cache = Cache(self.loaded.model, policy=None, slack=0)  # concat gives what decoding needs
        return cache.prefill(ids_BT, evict=False, hold_evidence=evidence, wanted=wanted)


@dataclass(frozen=True)
class SingleEviction:
    """Forks of one prefill, each evicted once by scores that are made already; they evict no more, so that
    several decode as one batch.

    Attributes:
        questions: Numbers of the questions that are asked of what is left.
        base: The prefill.
        evidence: Of its entries, every layer.
        scores: By candidate, of every layer.
        policies: By candidate.
    """

    questions: Sequence[int]
    base: Cache
    evidence: Sequence[Evidence]
    scores: Mapping[Candidate, Sequence[Score]]
    policies: Mapping[Candidate, Policy]

    def cache_of(self, candidate: Candidate, budget: Budget) -> Cache:
        """Forks the prefill and evicts from the fork."""
        fork = self.base.fork()
        if candidate.policy == FULL:
            return fork
        policy = self.policies[candidate]
        stated = budget_for(budget, policy)
        made = decide_layers(policy, self.evidence, stated, scores=self.scores[candidate])
        keep = [layer.keep_BHT for layer in made]
        return fork.evict_with(keep, correction=policy.correction, precision=policy.precision)


@dataclass(frozen=True)
class RepeatedEviction:
    """Caches that evict by their policy while they read or decode."""

    reader: Reader

    @property
    def questions(self) -> range:
        """Numbers of the questions that are asked of each cache."""
        return self.reader.questions

    def cache_of(self, candidate: Candidate, budget: Budget) -> Cache:
        """Makes a cache that has read the context under a candidate's policy."""
        reader, loaded = self.reader, self.reader.loaded
        cache = Cache(loaded.model, policy=None)
        if candidate.policy != FULL:
            policy, gates = loaded.policies[candidate], loaded.gates_of(candidate)
            seeds = [reader.unit.context.random_seed]
            cache = open_cache(loaded.model, reader.config, reader.unit.when, policy, budget, gates, seeds)
        chunk = reader.config.chunk_tokens if "chunk" in reader.unit.when else None
        return cache.prefill(reader.ids(None), chunk_size=chunk)


class Prefill:
    """A reading of a context, with a question and its right answer behind it."""

    def __init__(self, reader: Reader, question: int):
        self.reader, self.question = reader, question
        self.ids_BT = reader.ids(question, answered=True)
        self.whole = reader.read(self.ids_BT, evidence=True)
        assert self.whole.evidence is not None
        self.teacher = self.whole.evidence

    def upto(self, count: int) -> Cache:
        """Returns a cache that has seen the first `count` tokens: cropped, or if layers cannot be cropped,
        read again."""
        if layout_of(self.reader.loaded.model).alone:
            return self.reader.read(self.ids_BT[:, :count], evidence=False)
        cache = self.whole.fork()
        cache.crop(count)
        return cache

    def evict(self, known: bool) -> SingleEviction:
        """Scores the entries for all candidates, and returns their caches to be."""
        reader, loaded, context = self.reader, self.reader.loaded, self.reader.unit.context
        asked = len(context.encoded[self.question].question_ids) if known else 0
        seen = len(context.ids) + asked
        count = seen - (1 if known else 0)
        questions = (self.question,) if known else reader.questions
        observed = [truncate(layer, seen) for layer in self.teacher]
        of_set = {
            label: gate_scores(loaded.model, gates, observed, lambda: self.upto(seen))
            for label, gates in loaded.sets_of(reader.candidates).items()
        }
        learned = {name: of_set[label] for name, label in loaded.users.items() if label in of_set}
        if any(one.policy == "oracle" for one in reader.candidates):
            others = (reader.ids(number, answered=True) for number in questions if number != self.question)
            teachers = (reader.read(ids_BT, evidence=True).evidence or [] for ids_BT in others)
            learned["oracle"] = oracle(chain([self.teacher], teachers), count)
        seeds = [context.random_seed]
        scores = score_candidates(loaded.policies, reader.candidates, observed, learned, seeds)
        cut = {one: [first_entries(score, count) for score in layers] for one, layers in scores.items()}
        evidence = [truncate(layer, count) for layer in self.teacher]
        return SingleEviction(questions, self.upto(count), evidence, cut, loaded.policies)


Caches = SingleEviction | RepeatedEviction


def caches_of(reader: Reader) -> Iterator[tuple[str, Caches]]:
    """Yields the caches of a unit, eviction by eviction, with whether the question is known by then."""
    if reader.unit.when != "prefill":
        yield "unknown", RepeatedEviction(reader)
        return
    for question in reader.questions:
        states = [state for state in reader.config.question if state == "known" or question == 0]
        prefill = Prefill(reader, question) if states else None
        for state in states:
            assert prefill is not None
            yield state, prefill.evict(state == "known")


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
    stated = budget_for(budget, policy)
    return Cache(
        model,
        policy,
        keep_ratio=stated.keep_ratio,
        tokens_per_head=stated.tokens_per_head,
        byte_ratio=stated.byte_ratio,
        regime=when.replace("chunk", "chunked"),  # its name there
        every=config.every,
        gates=gates if policy.learned else None,
        seeds=seeds,
        short="raise",  # at equal memory no short row is held whole
    )

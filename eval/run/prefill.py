"""Makes the caches of all candidates and budgets from one reading of the contexts.

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
from typing import Any

from jaxtyping import Int
from torch import Tensor

from retain.attention.chunked import truncate
from retain.budget.statement import Budget
from retain.eval.config import FULL, Candidate, CompareConfig, budget_for, candidates_of
from retain.eval.run.answers import padded
from retain.eval.run.plan import Loaded, Unit, naming
from retain.eval.run.scores import first_entries, gate_scores, largest, oracle, score_candidates
from retain.evidence import Evidence
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import layout_of
from retain.policy import Policy, decide_layers
from retain.scores import Score


@dataclass(frozen=True)
class Reader:
    """Reads the contexts of a unit."""

    config: CompareConfig
    loaded: Loaded
    unit: Unit

    @property
    def padding(self) -> int:
        """Padding before the first context."""
        lengths = [len(context.ids) for context in self.unit.contexts]
        return max(lengths) - lengths[0]

    @property
    def seeds(self) -> list[int]:
        """Seeds of policies that draw, one for each context."""
        return [context.random_seed for context in self.unit.contexts]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Candidates of the unit, without the full cache."""
        return candidates_of(self.config, self.unit.when)

    @property
    def wanted(self) -> frozenset[str]:
        """Inputs of the gates of all candidates."""
        sets = self.loaded.sets_of(self.candidates)
        return frozenset[str]().union(*(gates.inputs for gates in sets.values()))

    def ids(
        self, question: int | None, *, answered: bool = False
    ) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
        """Token ids and mask of the contexts, with a question behind them, and what generation reads of its
        right answer."""
        rows = []
        for context in self.unit.contexts:
            asked = () if question is None else context.encoded[question].question_ids
            answer = context.read_back(question or 0) if answered else ()
            rows.append([*context.ids, *asked, *answer])
        ids_BT, mask_BT = padded(rows)
        return ids_BT.to(self.loaded.device), mask_BT.to(self.loaded.device)

    def read(self, ids_BT: Tensor, mask_BT: Tensor, *, evidence: bool, wanted: Any = ()) -> Cache:
        """Reads tokens into a cache that evicts nothing."""
        cache = Cache(self.loaded.model, policy=None, slack=0)  # concat gives what decoding needs
        mask = None if bool(mask_BT.all()) else mask_BT
        return cache.prefill(ids_BT, mask, evict=False, hold_evidence=evidence, wanted=wanted)


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


class Prefill:
    """One reading of a unit's contexts, with a question and its right answer behind them."""

    def __init__(self, reader: Reader, question: int):
        self.reader, self.question = reader, question
        with naming(reader.unit, "the prefill"):
            self.ids_BT, self.mask_BT = reader.ids(question, answered=True)
            self.whole = reader.read(self.ids_BT, self.mask_BT, evidence=True, wanted=reader.wanted)
        assert self.whole.evidence is not None
        self.teacher = self.whole.evidence

    def upto(self, count: int) -> Cache:
        """Returns a cache that has seen the first `count` tokens, padding included: cropped, or if layers
        cannot be cropped, read again."""
        if layout_of(self.reader.loaded.model).alone:
            return self.reader.read(self.ids_BT[:, :count], self.mask_BT[:, :count], evidence=False)
        cache = self.whole.fork()
        cache.crop(count)
        return cache

    def future(self, count: int, questions: Sequence[int]) -> list[Score]:
        """Returns the oracle's score of the first `count` entries, over these questions."""
        made = []
        for question in questions:
            teacher = self.teacher
            if question != self.question:
                ids_BT, mask_BT = self.reader.ids(question, answered=True)
                teacher = self.reader.read(ids_BT, mask_BT, evidence=True).evidence or []
            made.append(oracle(teacher, count))
        return largest(made)

    def evict(self, known: bool) -> SingleEviction:
        """Scores the entries for all candidates, and returns their caches to be."""
        reader, loaded = self.reader, self.reader.loaded
        first = reader.unit.contexts[0]
        asked = len(first.encoded[self.question].question_ids) if known else 0
        observed_tokens = len(first.ids) + reader.padding + asked
        count = observed_tokens - (1 if known else 0)
        questions = (self.question,) if known else reader.unit.questions
        observed = [truncate(layer, observed_tokens) for layer in self.teacher]
        with naming(reader.unit, "scoring"):
            of_set = {
                label: gate_scores(loaded.model, gates, observed, lambda: self.upto(observed_tokens))
                for label, gates in loaded.sets_of(reader.candidates).items()
            }
            learned = {name: of_set[label] for name, label in loaded.users.items() if label in of_set}
            others = [one for one in reader.candidates if one.policy != "oracle"]
            scores = score_candidates(loaded.policies, others, observed, learned, reader.seeds)
            if knowing := [one for one in reader.candidates if one.policy == "oracle"]:
                future = {"oracle": self.future(count, questions)}
                scores |= score_candidates(loaded.policies, knowing, observed, future, reader.seeds)
            evidence = [truncate(layer, count) for layer in self.teacher]
            first_scores = {
                candidate: [first_entries(score, count) for score in layers]
                for candidate, layers in scores.items()
            }
            return SingleEviction(questions, self.upto(count), evidence, first_scores, loaded.policies)


class RepeatedEviction:
    """A cache for each candidate and budget, which evicts by its policy while it reads or decodes."""

    def __init__(self, reader: Reader):
        self.reader, self.questions = reader, reader.unit.questions

    def asked(self, cache: Cache, question: int) -> Cache:
        """The cache that a question is asked of: a copy, but for the last question."""
        return cache.fork() if question < self.questions[-1] else cache

    def cache_of(self, candidate: Candidate, budget: Budget) -> Cache:
        """Makes a cache that has read the contexts under a candidate's policy."""
        reader, loaded, cache = self.reader, self.reader.loaded, None
        if candidate.policy != FULL:
            policy, gates = loaded.policies[candidate], loaded.gates_of(candidate)
            cache = open_cache(
                loaded.model, reader.config, reader.unit.when, policy, budget, gates, reader.seeds
            )
        chunk = reader.config.chunk_tokens if "chunk" in reader.unit.when else None
        return (cache or Cache(loaded.model, policy=None)).prefill(*reader.ids(None), chunk_size=chunk)


Caches = SingleEviction | RepeatedEviction


def caches_of(reader: Reader) -> Iterator[tuple[str, Caches]]:
    """Yields the caches of a unit, eviction by eviction, with whether the question is known by then."""
    if reader.unit.when != "prefill":
        yield "unknown", RepeatedEviction(reader)
        return
    for question in reader.unit.questions:
        if question > 0 and "known" not in reader.config.question:
            return
        prefill = Prefill(reader, question)
        for state in reader.config.question:
            if state == "known" or question == 0:
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

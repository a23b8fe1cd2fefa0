"""Decides which entries stay: a policy that is bound to a model, and one eviction by it.

Layers are shown one after another. While a model first reads, each is decided on as it comes, and lower ones
shrink; where layers must be decided on together (a later eviction, when heads hold different numbers of
entries already; a correction of entries that layers compete for), all are decided on in the end. A sequence
whose budget holds all that it has is neither scored nor checked for what a score wants, so that a batch
decides for each sequence what a run of its own would.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retain.budget.allocation import Candidates
from retain.budget.cascade import Cascade, keep_sets
from retain.budget.statement import Budget
from retain.cache.precision import Precision
from retain.capability import Use, refuse
from retain.correction.merge import Merge
from retain.evidence import Evidence, Stock
from retain.gates import GateSet
from retain.kernels.backend import without_autocast
from retain.policy import Plan, candidates_of, plan_of, score_entries, stock_of
from retain.presets import Policy
from retain.process.registry import check_choice
from retain.scores import Score, ScoreFamily
from retain.scores.value_norm import value_norms
from retain.shapes import LayerShape

Keep = Bool[Tensor, "B H T"]
# A scorer that is no score of ours (`retain.hf.intercept.press`), or stands in for one.
Scorer = Callable[[Evidence], Score]


# When a cache evicts, parts joined by `+`: `prefill`, once, when the first prompt was read, all its chunks
# together; `chunk`, after every read: each chunk of a prompt, each later turn; `decode`, whenever so many
# tokens have come since the last eviction, or since the first prompt.
WHEN = ("prefill", "chunk", "decode", "prefill+decode", "chunk+decode")


@dataclass(frozen=True)
class When:
    """When to evict.

    Args:
        name: one of `WHEN`.
        every: tokens between evictions, for `decode`.

    Examples:
        >>> When("prefill+decode").due(read=False, prompt_ends=False, tokens=32)
        True
    """

    name: str = "prefill"
    every: int = 32

    def __post_init__(self) -> None:
        check_choice("when", self.name, WHEN)
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every is {self.every!r}, and must be a whole number of tokens, at least 1.")

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.name.split("+"))

    @property
    def again(self) -> bool:
        """True if it evicts after the first prompt too."""
        return self.name != "prefill"

    @property
    def evicts_prompt(self) -> bool:
        """True if it evicts from the first prompt."""
        return self.parts != ("decode",)

    def due(self, *, read: bool, prompt_ends: bool, tokens: int) -> bool:
        """True if it evicts after a forward.

        Args:
            read: it was part of a prompt: the first forward, or more than one new token.
            prompt_ends: the first prompt ended with it.
            tokens: that have come since the last eviction, or since the first prompt ended; 0 before that.
        """
        parts = self.parts
        return (
            ("prefill" in parts and prompt_ends)
            or ("chunk" in parts and read)
            or ("decode" in parts and tokens >= self.every)
        )


@dataclass(frozen=True, eq=False)
class Arriving:
    """A batch, before any layer of it is scored.

    Args:
        valid_BT: False on padding.
        element_size: bytes of a number of the model's weights, and so, most likely, of its keys.
        stock: what there is to choose from, where that is not simply all of the tokens.
        seeds_B: for scores that draw numbers.
        pinned_BT: entries that the caller wants kept.
    """

    valid_BT: Bool[Tensor, "B T"]
    element_size: int
    stock: Stock | None = None
    seeds_B: Sequence[int] | None = None
    pinned_BT: Bool[Tensor, "B T"] | None = None


@dataclass(frozen=True)
class Wants:
    """The record of earlier entries that a later eviction needs.

    Args:
        queries: last queries that an evidence shows, of each sequence; None for all since the last eviction.
        learned: what the gate says of an entry, made when it comes, since attention inputs are not kept.
        inputs: what the gate looks at for that, of `retain.gates.base.INPUTS`.
        running: statistics of all queries.
        value_norm: the norms of projected values.
        keys, values: those of the entries, beside what stands beside them.
    """

    queries: int | None = 0
    learned: bool = False
    inputs: frozenset[str] = frozenset()
    running: bool = False
    value_norm: bool = False
    keys: bool = True
    values: bool = True

    @property
    def entry_queries(self) -> bool:
        """True where the gate looks at the query of each entry, when it comes."""
        return not self.inputs.isdisjoint(("queries", "queries_before"))


@dataclass(frozen=True, eq=False)
class BoundPolicy:
    """How the evidence of layers becomes keep masks: by a policy, by a function, or not at all.

    Args:
        name: for reports.
        policy: the stages' settings, checked; None for a function, and where everything is kept.
        budget: of the policy: what may be kept.
        gates: that score entries, if the policy takes a gate's score.
        scorer: stands in for the policy's own score.
        layers: KV heads, and numbers of an entry, of each layer that evicts.
        short_tokens: a sequence of at most so many tokens is held whole where its budget, or the sequence
            itself, is too short for the policy; 0: that is an error.
        function: of one layer's evidence.
        precision: in how many bits what stays is held; None: as it was.
    """

    name: str
    policy: Policy | None = None
    budget: Budget | None = None
    gates: GateSet | None = None
    scorer: Scorer | None = None
    layers: tuple[tuple[int, int], ...] = ()
    short_tokens: int = 0
    function: Callable[[Evidence], Keep] | None = None
    precision: Precision | None = None

    @property
    def keeps_all(self) -> bool:
        """True where nothing is evicted."""
        return self.policy is None and self.function is None

    @property
    def correction(self) -> Merge | None:
        """How what stays makes up for what goes."""
        return None if self.policy is None else self.policy.correction

    @property
    def gates_source(self) -> str | None:
        """Where the gates came from, for reports; None: the policy takes none."""
        return (self.gates.source or "made by the caller") if self.gates is not None else None

    @cached_property
    def inputs(self) -> frozenset[str]:
        """Inputs of the gates, of `retain.gates.base.INPUTS`."""
        return frozenset() if self.gates is None else self.gates.inputs

    @property
    def looks_ahead(self) -> bool:
        """True where gates ask through lookahead tokens, behind a whole prompt."""
        return "lookahead" in self.inputs

    @cached_property
    def reads_output(self) -> bool:
        """True where a score looks at the output projections; gates of `retain` never do."""
        if self.policy is None or self.scorer is not None:
            return not self.keeps_all
        return self._score is not None and not {"value_norm", "output_weight"}.isdisjoint(self._score.needs)

    @cached_property
    def _score(self) -> ScoreFamily | None:
        """Declaration of the policy's observed score."""
        return None if self.policy is None else self.policy.score_family

    @cached_property
    def window(self) -> int:
        """Last queries that the policy's score observes."""
        return 0 if self.policy is None or self.scorer is not None else self.policy.window

    @cached_property
    def wants(self) -> Wants:
        """The record of earlier entries that a later eviction needs."""
        policy, score = self.policy, self._score
        if policy is None:
            return Wants(queries=1)
        if score is None:
            return Wants(learned=policy.learned, inputs=self.inputs, keys=False, values=False)
        needs, read = score.needs, score.reads
        return Wants(
            queries=None if "queries" in needs else policy.window,
            learned=policy.learned,
            inputs=self.inputs,
            running="running" in needs,
            value_norm="value_norm" in needs,
            keys="keys" in read,
            values="values" in read,
        )

    def refuse(self, *uses: Use) -> None:
        """Refuse uses that do not go with a part of it (`retain.capability`).

        Raises:
            ValueError: with all problems.
        """
        if self.policy is not None and self.budget is not None:
            stated = ("bytes",) if self.budget.bytes or self.budget.byte_ratio else ()
            refuse(self.policy, (*uses, *stated), gates=self.gates, scorer=self.scorer)

    def with_metadata(self, evidence: Evidence) -> Evidence:
        """The evidence with what later evictions want to know of its entries, made from what it shows now."""
        if self.policy is None:
            return evidence
        if self.gates is not None and evidence.learned_BHT is None:
            evidence = replace(evidence, learned_BHT=self.gates.learned(evidence))
        if self.wants.value_norm and evidence.value_norm_BQT is None:
            evidence = replace(evidence, value_norm_BQT=value_norms(evidence))
        return evidence

    def counted(self, evidence: Evidence) -> Evidence:
        """The evidence with running statistics that its own queries are part of, if they are wanted."""
        if self.policy is None or self._score is None or not self.wants.running:
            return evidence
        return self._score.counted(evidence, self.policy.observed_settings)

    def score(self, evidence: Evidence, seeds_B: Sequence[int] | None) -> Score:
        """The policy's score of one layer."""
        assert self.policy is not None
        learned = None if self.gates is None else self.gates.score(evidence)
        observed = None if self.scorer is None else self.scorer(evidence)
        return score_entries(self.policy, evidence, learned=learned, observed=observed, seeds_B=seeds_B)

    def plan(self, call: Arriving) -> Plan:
        """The plan before any layer is scored; refuses sequences that are too short for the policy."""
        assert self.policy is not None and self.budget is not None
        size = call.element_size
        shapes = [LayerShape(heads, width * size, element_size=size) for heads, width in self.layers]
        given = self.policy, self.budget, call.valid_BT, shapes, call.pinned_BT
        plan = plan_of(*given, stock=call.stock, short_tokens=self.short_tokens)
        lengths_B, short = call.valid_BT.sum(-1).tolist(), []
        for row, (covered, length) in enumerate(zip(plan.covers_B, lengths_B, strict=True)):
            if not covered and length < self.window:
                if plan.totals.lengths_B[row] <= self.short_tokens:
                    short.append(row)
                    continue
                raise ValueError(
                    f"sequence {row} of {len(lengths_B)} has {length} tokens, which is shorter than the "
                    f"observation window of {self.window} of policy {self.policy.name!r}: pass a smaller "
                    'window (observed_settings={"window": ...}), or read this sequence in a batch of its own '
                    "with a policy that keeps everything."
                )
        return plan.hold_whole(short, call.valid_BT) if short else plan

    def begin(self, call: Arriving, *, joint: bool = False) -> "Eviction | None":
        """Start an eviction, and refuse what cannot be; None keeps everything.

        Args:
            call: padding of all tokens seen, what there is to choose from, seeds and pins.
            joint: decide on all layers in the end, rather than on each as it comes.
        """
        if self.function is not None:
            return ByFunction(self.function, joint)
        return None if self.policy is None else ByPolicy(self, call, joint=joint)

    @without_autocast
    def decide(
        self,
        evidence: Sequence[Evidence],
        seeds_B: Sequence[int] | None = None,
        pinned_BT: Bool[Tensor, "B T"] | None = None,
    ) -> "Eviction | None":
        """An eviction that has seen all layers, of evidence that shows everything; None keeps it."""
        first, size = evidence[0], evidence[0].keys_BHTD.element_size()
        call = Arriving(first.valid_BT, size, stock_of(evidence), seeds_B, pinned_BT)
        eviction = self.begin(call, joint=True)
        if eviction is not None:
            for layer in evidence:
                eviction.look(layer)
        return eviction


class ByFunction:
    """An eviction by a function of one layer's evidence."""

    rows: list[int] | None = None  # the sequences that are decided on; None: all
    lower: Sequence[Tensor | None] = ()
    held_whole: Sequence[int] = ()
    crosses_layers = idle = False

    def __init__(self, function: Callable[[Evidence], Keep], joint: bool = False):
        self.function, self.joint = function, joint
        self.kept: list[Keep] = []

    def measure(self, element_size: int) -> None:
        """Nothing depends on it."""

    def look(self, evidence: Evidence, token_BT: Int[Tensor, "B T"] | None = None) -> Keep | None:
        keep_BHT, shape = self.function(evidence), tuple(evidence.exists_BHT.shape)
        if not isinstance(keep_BHT, Tensor) or keep_BHT.dtype != torch.bool or keep_BHT.shape != shape:
            shown = f"{keep_BHT.dtype} {tuple(keep_BHT.shape)}" if isinstance(keep_BHT, Tensor) else keep_BHT
            raise ValueError(
                f"the policy function gave {shown} for layer {evidence.layer_idx}, which shows {shape[2]} "
                f"columns: return a bool tensor {list(shape)}, True = kept. At a later eviction the columns "
                "are the tokens that are still held."
            )
        if not self.joint:
            return keep_BHT
        self.kept.append(keep_BHT)
        return None

    def finish(self) -> list[Keep]:
        return self.kept


class ByPolicy:
    """An eviction by a policy.

    Attributes:
        rows: the sequences that are decided on; all others keep everything.
        joint: whether all layers are decided on in the end (`finish`), not each as it comes.
        lower: after a look, what each lower layer still keeps of the entries that it holds of these
            sequences; None for one that keeps them all.
    """

    def __init__(self, bound: BoundPolicy, call: Arriving, *, joint: bool = False):
        self.bound, self.asked_jointly = bound, joint
        self.lower: Sequence[Tensor | None] = ()
        self.candidates: list[Candidates] = []
        self.whole: list[Keep] = []
        self._plan(call)

    def _plan(self, call: Arriving) -> None:
        self.call, self.plan, self.num_looked = call, self.bound.plan(call), 0
        covers_B, correction = self.plan.covers_B, self.bound.correction
        self.rows = [row for row, covered in enumerate(covers_B) if not covered]
        self.part = self.plan if len(self.rows) == len(covers_B) else self.plan.select_batch(self.rows)
        self.cascade = Cascade(self.part)
        # A correction wants the final sets: cut again and again while layers come, an entry would be merged
        # into one that goes later, and from there into one that is unlike it.
        corrects = correction is not None and self.crosses_layers and bool(self.rows)
        self.joint = self.asked_jointly or corrects

    @property
    def idle(self) -> bool:
        """True where every budget holds all that there is."""
        return not self.rows

    @property
    def crosses_layers(self) -> bool:
        """True where the keep set of a layer depends on other layers."""
        return self.plan.crosses_layers

    @property
    def held_whole(self) -> Sequence[int]:
        """Short sequences that are held whole, by number."""
        return [row for row, whole in enumerate(self.plan.totals.whole_B) if whole]

    def measure(self, element_size: int) -> None:
        """Plan anew where keys come in another precision than weights are in (autocast), as long as no layer
        was shown: bytes hold other entries then, and `rows` may be others.

        Args:
            element_size: bytes of a number of the keys.
        """
        if element_size != self.call.element_size and not self.num_looked:
            self._plan(replace(self.call, element_size=element_size))

    def look(self, evidence: Evidence, token_BT: Int[Tensor, "B T"] | None = None) -> Keep | None:
        """Look at the next layer.

        Args:
            evidence: what it shows; its columns may be some of the tokens seen.
            token_BT: the token of each column; None where columns are the tokens.

        Returns:
            its keep mask; None where all layers are decided on in the end.
        """
        whole_BHT, self.lower = evidence.exists_BHT, ()
        self.num_looked += 1
        if self.joint:
            self.whole.append(whole_BHT)
        if not self.rows:
            return None if self.joint else whole_BHT
        part, seeds = evidence, self.call.seeds_B
        if len(self.rows) < len(whole_BHT):
            part = evidence.select_batch(torch.tensor(self.rows, device=evidence.valid_BT.device))
            seeds = None if seeds is None else [seeds[row] for row in self.rows]
        protected_BT = place_BT = None
        if token_BT is not None:
            device = part.valid_BT.device
            tokens_BT = token_BT.to(device)[torch.tensor(self.rows, device=device)]
            protected_BT = self.part.protected_BT.to(device).gather(1, tokens_BT) & part.valid_BT
            place_BT = part.places_BT
        score = self.bound.score(part, seeds)
        candidates = candidates_of(self.part, score, protected_BT, place_BT=place_BT)
        if self.joint:
            self.candidates.append(candidates)
            return None
        keep_BHT, self.lower = self.cascade.add(candidates)
        return _with_others(keep_BHT, self.rows, whole_BHT)

    def finish(self) -> list[Keep]:
        """Decide on all layers: which columns each keeps."""
        if not self.rows:
            return self.whole
        kept = zip(keep_sets(self.part, self.candidates), self.whole, strict=True)
        return [_with_others(keep_BHT, self.rows, whole_BHT) for keep_BHT, whole_BHT in kept]


Eviction = ByPolicy | ByFunction


def _with_others(keep_BHT: Bool[Tensor, "rows H T"], rows: list[int], whole_BHT: Keep) -> Keep:
    """Keep masks of some of the sequences, together with all that the others have."""
    if len(rows) == whole_BHT.shape[0]:
        return keep_BHT
    full_BHT = whole_BHT.clone()
    full_BHT[torch.tensor(rows, device=full_BHT.device)] = keep_BHT.to(full_BHT.device)
    return full_BHT

"""A policy with everything that it needs, which turns the evidence of layers into keep masks.

It decides layer by layer while a model first reads (`LayerByLayer`), or of all layers at once at a later
eviction, when heads hold different numbers of entries already (`JointReEviction`). A sequence whose budget
holds all that it has is neither scored nor checked for what a score wants, so that a batch decides for each
sequence what a run of its own would.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retain.budget.allocation import Candidates
from retain.budget.cascade import Cascade
from retain.budget.statement import Budget, LayerShape, Stock
from retain.evidence import Evidence
from retain.gate_fit import unit_of
from retain.gates import GateSet
from retain.hf.cache.batch_context import Arriving, BatchContext
from retain.hf.model.layout import LayerSpec
from retain.policy import Plan, candidates_of, keep_masks, plan_of, score_entries, stock_of
from retain.presets import Policy
from retain.scores import SCORES, Score, masked_score
from retain.scores.trial import entries_read
from retain.scores.value_norm import value_norms

Keep = Bool[Tensor, "B H T"]
# A scorer that is no score of ours (`retain.hf.intercept.press`), or stands in for one.
Scorer = Callable[[Evidence], Score]


@dataclass(frozen=True)
class Wants:
    """What a later eviction wants to know of entries that came before it.

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
    def own_queries(self) -> bool:
        """Whether the gate looks at the query of each entry, at the time when it comes."""
        return not self.inputs.isdisjoint(("queries", "queries_before"))


@dataclass(frozen=True, eq=False)
class EvictionRequest:
    """A policy, checked.

    Args:
        policy: the stages' settings.
        budget: what may be kept.
        gates: that score entries, if the policy takes a gate's score.
        scorer: stands in for the policy's own score.
        layers: those that evict.
        short_tokens: a sequence of at most so many tokens is held whole where its budget, or the sequence
            itself, is too short for the policy; 0: that is an error.
    """

    policy: Policy
    budget: Budget
    gates: Any
    scorer: Scorer | None
    layers: tuple[LayerSpec, ...]
    short_tokens: int = 0

    @cached_property
    def inputs(self) -> frozenset[str]:
        """What the gates look at; a control that does not say is shown the attention input."""
        return frozenset(getattr(self.gates, "inputs", ("hidden",))) if self.policy.learned else frozenset()

    @cached_property
    def wants(self) -> Wants:
        """What a later eviction by this policy wants."""
        if self.policy.observed is None:
            return Wants(learned=self.policy.learned, inputs=self.inputs, keys=False, values=False)
        needs = SCORES[self.policy.observed].needs_with(self.policy.observed_settings)
        queries = None if "queries" in needs else max(int("window" in needs), self.window)
        read = entries_read(self.policy.observed, self.policy.observed_settings)
        return Wants(
            queries,
            self.policy.learned,
            self.inputs,
            "running" in needs,
            "value_norm" in needs,
            keys="keys" in read,
            values="values" in read,
        )

    @property
    def gates_source(self) -> str | None:
        """Where the gates came from, for reports; None: the policy takes none."""
        if not self.policy.learned:
            return None
        return getattr(self.gates, "source", "") or "made by the caller"

    @cached_property
    def reads_output(self) -> bool:
        """Whether its score looks at the output projection; gates of ours never do."""
        if self.scorer is not None or (self.policy.learned and not isinstance(self.gates, GateSet)):
            return True
        if self.policy.observed is None:
            return False
        return "output_weight" in entries_read(self.policy.observed, self.policy.observed_settings)

    @cached_property
    def window(self) -> int:
        """Last queries that the policy's score observes."""
        return 0 if self.scorer is not None else self.policy.window

    def noted(self, evidence: Evidence) -> Evidence:
        """The evidence with what later evictions want to know of its entries, made from what it shows now."""
        wants = self.wants
        if wants.learned and evidence.learned_BHT is None:
            own = self.gates
            # A control has no more than a score, which does not age.
            noted_BHT = own.noted(evidence) if hasattr(own, "noted") else own.score(evidence).values_BHT
            evidence = replace(evidence, learned_BHT=noted_BHT)
        if wants.value_norm and evidence.value_norm_BQT is None:
            evidence = replace(evidence, value_norm_BQT=value_norms(evidence))
        return evidence

    def counted(self, evidence: Evidence) -> Evidence:
        """The evidence with running statistics that its own queries are part of."""
        assert self.policy.observed is not None
        return SCORES[self.policy.observed].counted(evidence, self.policy.observed_settings)

    def score(self, evidence: Evidence, batch: BatchContext) -> Score:
        """The policy's score of one layer."""
        learned = None
        if self.policy.learned and evidence.learned_BHT is not None and not hasattr(self.gates, "noted"):
            unit = unit_of(self.gates)
            learned = masked_score(evidence.learned_BHT, evidence.exists_BHT, unit)
        elif self.policy.learned:
            learned = self.gates.score(evidence)
        observed = None if self.scorer is None else self.scorer(evidence)
        return score_entries(self.policy, evidence, learned=learned, observed=observed, seeds_B=batch.seeds_B)

    def plan(self, call: Arriving, batch: BatchContext, stock: Stock | None = None) -> Plan:
        """What is settled before any layer is scored, and what can be found to be wrong by then."""
        size = call.element_size
        shapes = [
            LayerShape(own.num_kv_heads, own.entry_width * size, element_size=size) for own in self.layers
        ]
        plan = plan_of(
            self.policy,
            self.budget,
            call.valid_BT,
            shapes,
            batch.pinned_BT,
            stock=stock,
            short_tokens=self.short_tokens,
        )
        lengths_B, short = call.valid_BT.sum(-1).tolist(), []
        for row, (covered, length) in enumerate(zip(plan.covers_B, lengths_B, strict=True)):
            if not covered and length < self.window:
                if plan.shares.totals.lengths_B[row] <= self.short_tokens:
                    short.append(row)
                    continue
                raise ValueError(
                    f"sequence {row} of {len(lengths_B)} has {length} tokens, which is shorter than the "
                    f"observation window of {self.window} of policy {self.policy.name!r}: pass a smaller "
                    'window (observed_settings={"window": ...}), or read this sequence in a batch of its own '
                    "with a policy that keeps everything."
                )
        return plan.hold_whole(short, call.valid_BT) if short else plan

    def decide(self, evidence: Sequence[Evidence], batch: BatchContext) -> list[Keep]:
        """Keep masks of all layers at once, of evidence that shows everything."""
        return self.joint_eviction(evidence, batch).keeps()

    def joint_eviction(self, evidence: Sequence[Evidence], batch: BatchContext) -> "JointReEviction":
        """An eviction that has looked at all layers, of evidence that shows everything."""
        first, size = evidence[0], evidence[0].keys_BHTD.element_size()
        call = Arriving(first.valid_BT, size, stock_of(evidence))
        step = JointReEviction(self, batch, call)
        for layer in evidence:
            step.look(layer, None)
        return step


class OneByOne:
    """A function of one layer's evidence, whenever it is asked."""

    rows: list[int] | None = None

    def __init__(self, keep: Callable[[Evidence], Keep]):
        self.keep = keep
        self.kept: list[Keep] = []

    def add(self, evidence: Evidence) -> tuple[Keep, Sequence[Tensor | None]]:
        return self.keep(evidence), ()

    @property
    def idle(self) -> bool:
        return False

    def look(self, evidence: Evidence, token_BT: Int[Tensor, "B T"] | None) -> None:
        keep_BHT, shape = self.keep(evidence), tuple(evidence.exists_BHT.shape)
        if tuple(keep_BHT.shape) != shape or keep_BHT.dtype != torch.bool:
            raise ValueError(
                f"the policy function gave {keep_BHT.dtype} {tuple(keep_BHT.shape)} for layer "
                f"{evidence.layer_idx}, which shows {shape[2]} columns: return a bool tensor "
                f"{list(shape)}, True = "
                "kept. At a later eviction the columns are the tokens that are still held."
            )
        self.kept.append(keep_BHT)

    def keeps(self) -> list[Keep]:
        return self.kept


class _Decides:
    """A policy at work: its plan, the sequences that are decided on, and their part of the plan."""

    def _settle(
        self, request: EvictionRequest, batch: BatchContext, call: Arriving, spared: Collection[int] = ()
    ) -> None:
        self.request, self.batch, self.call = request, batch, call
        self.plan = request.plan(call, batch, call.stock)
        covers_B = self.plan.covers_B
        self.rows = [row for row, covered in enumerate(covers_B) if not covered and row not in spared]
        self.part = self.plan if len(self.rows) == len(covers_B) else self.plan.select_batch(self.rows)


class LayerByLayer(_Decides):
    """A policy while a model first reads; lower layers may shrink as layers come."""

    def __init__(self, request: EvictionRequest, batch: BatchContext, call: Arriving):
        self._begin(request, batch, call)

    def _begin(self, request: EvictionRequest, batch: BatchContext, call: Arriving) -> None:
        self._settle(request, batch, call)
        self.cascade = Cascade(self.part.shares) if self.rows else None

    def measure(self, element_size: int) -> None:
        """Settle it anew where keys come in another precision than weights are in (autocast), as long as no
        layer has been decided on: bytes hold other entries then, and `rows` may be others.

        Args:
            element_size: bytes of a number of the keys.
        """
        if element_size != self.call.element_size and (self.cascade is None or not self.cascade.num_added):
            self._begin(self.request, self.batch, replace(self.call, element_size=element_size))

    def add(self, evidence: Evidence) -> tuple[Keep, Sequence[Tensor | None]]:
        self.measure(evidence.keys_BHTD.element_size())
        if self.cascade is None:
            return evidence.exists_BHT, ()
        part, batch = _part(self.rows, evidence, self.batch)
        keep_BHT, lower = self.cascade.add(candidates_of(self.part, self.request.score(part, batch)))
        return _beside_others(keep_BHT, self.rows, evidence.exists_BHT), lower


class JointReEviction(_Decides):
    """One eviction by a policy, of all layers at once.

    Args:
        request: the policy.
        batch: seeds and pins of the batch.
        call: padding of all tokens seen, and what there is to choose from.
        spared: sequences from which nothing goes this time.
    """

    def __init__(
        self, request: EvictionRequest, batch: BatchContext, call: Arriving, spared: Collection[int] = ()
    ):
        self._settle(request, batch, call, spared)
        self.candidates: list[Candidates] = []
        self.whole: list[Keep] = []

    @property
    def idle(self) -> bool:
        """Whether every budget holds all that there is, so that nothing goes."""
        return not self.rows

    def look(self, evidence: Evidence, token_BT: Int[Tensor, "B T"] | None) -> None:
        """Score one layer.

        Args:
            evidence: what it shows; its columns may be some of the tokens seen.
            token_BT: the token of each column; None where columns are the tokens.
        """
        self.whole.append(evidence.exists_BHT)
        if not self.rows:
            return
        part, batch = _part(self.rows, evidence, self.batch)
        protected_BT = None
        if token_BT is not None:
            device = part.valid_BT.device
            tokens_BT = token_BT.to(device)[torch.tensor(self.rows, device=device)]
            protected_BT = self.part.protected_BT.to(device).gather(1, tokens_BT) & part.valid_BT
        score = self.request.score(part, batch)
        place_BT = None if token_BT is None else part.places_BT
        self.candidates.append(candidates_of(self.part, score, protected_BT, place_BT=place_BT))

    def keeps(self) -> list[Keep]:
        """Which columns each layer keeps."""
        if not self.rows:
            return self.whole
        kept = keep_masks(self.part, self.candidates)
        return [
            _beside_others(keep_BHT, self.rows, whole_BHT)
            for keep_BHT, whole_BHT in zip(kept, self.whole, strict=True)
        ]


def _part(rows: list[int], evidence: Evidence, batch: BatchContext) -> tuple[Evidence, BatchContext]:
    """Of some of the sequences."""
    if len(rows) == evidence.valid_BT.shape[0]:
        return evidence, batch
    return evidence.select_batch(torch.tensor(rows, device=evidence.valid_BT.device)), batch.select_batch(
        rows
    )


def _beside_others(keep_BHT: Bool[Tensor, "rows H T"], rows: list[int], whole_BHT: Keep) -> Keep:
    """Keep masks of some of the sequences, beside all that the others have."""
    if len(rows) == whole_BHT.shape[0]:
        return keep_BHT
    full_BHT = whole_BHT.clone()
    full_BHT[torch.tensor(rows, device=full_BHT.device)] = keep_BHT.to(full_BHT.device)
    return full_BHT

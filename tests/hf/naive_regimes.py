"""The regimes of `retain.Cache`, the plain way: all is held dense and masked, and decided anew each time.

A full DynamicCache runs under the masks of `tests.hf.masked`, and its attention calls are recorded: queries,
keys, values and attention inputs of every token that ever came. At each moment each sequence is decided on
its own, without its padding, by the stages that a single eviction runs through
(`retain.policy.decide_layers`), on all of its tokens, `held_BHT` saying what is still there. Nothing of
`retain.hf.{cache,engine,later,request}` or of `retain.attention.dense_view` runs.

Two things of a later moment are counted here by formulas of their own: when one is due, and running
statistics.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from retain.budget.statement import Budget
from retain.evidence import Evidence, RunningStatistics, Stock
from retain.hf.model.decoder import describe, rotary_of
from retain.hf.model.layout import LayerSpec
from retain.policy import decide_layers, plan_of, score_entries, shape_of
from retain.presets import Policy
from retain.protection import pinned_mask
from retain.scores import Score, masked_score
from tests.hf.masked import masked_logits, positions_of
from tests.naive import MASK, mixed, naive_gumbel, naive_state

# What `retain.attention.received` calls an access: rounding must not decide about an indifferent
# query.
ROUNDING = 1e-5


def due_after(when: str, every: int, sizes: Sequence[int], prompt: int) -> list[bool]:
    """True for each forward behind which an eviction is due.

    Args:
        regime: as `retain.Cache` takes it.
        every: tokens between evictions, for `decode`.
        sizes: tokens of each forward, padding included.
        prompt: forwards that read the first prompt.
    """
    answer, since = [], 0
    for number, size in enumerate(sizes):
        ends = number == prompt - 1
        since = since + size if number >= prompt else 0
        is_due = "prefill" in when and ends
        is_due |= "chunk" in when and (number < prompt or size > 1)
        is_due |= "decode" in when and number >= prompt and since >= every
        since = 0 if is_due else since
        answer.append(is_due)
    return answer


@dataclass
class Seen:
    """The arguments of one layer's attention: queries, inputs, residual streams of each forward, all keys and
    values."""

    queries: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    stream: list[Tensor] = field(default_factory=list)
    keys: Tensor | None = None
    values: Tensor | None = None
    scaling: float = 1.0


@contextmanager
def recorded(model: PreTrainedModel, specs: Sequence[LayerSpec]) -> Iterator[dict[int, Seen]]:
    """Inside, what the attention of these layers is called with is noted down."""
    previous = str(model.config._attn_implementation)
    seen = {spec.layer_idx: Seen() for spec in specs}

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **how: Any) -> Any:
        if (layer := seen.get(module.layer_idx)) is not None:
            layer.queries.append(query)
            layer.keys, layer.values, layer.scaling = key, value, how["scaling"]
        eager = getattr(__import__(type(module).__module__, fromlist=["x"]), "eager_attention_forward", None)
        inner = eager if previous == "eager" else ALL_ATTENTION_FUNCTIONS[previous]
        return inner(module, query, key, value, mask, **how)

    def note(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        seen[module.layer_idx].hidden.append(
            kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        )

    def note_stream(module: Any, args: tuple) -> None:
        seen[layers.index(module)].stream.append(args[0])

    layers = list(model.model.layers)
    AttentionInterface.register("recorded", attention)
    AttentionMaskInterface.register("recorded", ALL_MASK_ATTENTION_FUNCTIONS[previous])
    hooks = [spec.module.register_forward_pre_hook(note, with_kwargs=True) for spec in specs]
    hooks += [layers[spec.layer_idx].register_forward_pre_hook(note_stream) for spec in specs]
    model.set_attn_implementation("recorded")
    try:
        yield seen
    finally:
        model.set_attn_implementation(previous)
        for hook in hooks:
            hook.remove()


class Naive:
    """A policy in a regime on a masked full cache.

    Args:
        model: unattached.
        policy: the stages' settings.
        budget: what may be kept.
        regime: when it evicts.
        every: tokens between evictions, for `decode`.
        seeds: one a sequence.
        gates: of a learned policy.
        pinned: spans of the first prompt.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        budget: Mapping[str, Any],
        *,
        when: str,
        every: int = 32,
        seeds: Sequence[int] | None = None,
        gates: Any = None,
        pinned: Any = None,
    ):
        self.model, self.policy, self.budget = model, policy, Budget(**budget)
        self.when, self.every, self.seeds = when, every, seeds
        self.gates, self.pinned = gates, pinned
        self.specs, self.rotary = describe(model), rotary_of(model)
        self.held: list[Tensor] = []
        self.mass: list[Tensor] = []
        self.last: list[Tensor] = []
        self.gap: list[Tensor] = []
        # After each forward: what each layer holds, `[B, H, T]`.
        self.history: list[list[Tensor]] = []

    def run(
        self, chunks: Sequence[Tensor], attention_mask: Tensor, prompt: int, *, positions: bool = True
    ) -> list[Tensor]:
        """Logits of each forward; `history` is what was held after it.

        Args:
            chunks: token ids `[B, S]`.
            attention_mask: over all of them.
            prompt: chunks that are the first prompt.
            positions: whether positions are passed.
        """
        self.valid_BT = attention_mask.bool()
        self.positions_BT = positions_of(attention_mask)
        sizes = [ids.shape[1] for ids in chunks]
        self.prompt_tokens, self.since = sum(sizes[:prompt]), 0
        due = due_after(self.when, self.every, sizes, prompt)
        with recorded(self.model, self.specs) as self.seen:

            def after(number: int, kept: list[Tensor]) -> None:
                self._extend(sizes[number])
                if due[number]:
                    self._evict(reading=number < prompt)
                if due[number] or number == prompt - 1:
                    self.since = sum(sizes[: number + 1])
                kept[:] = [held.clone() for held in self.held]
                self.history.append([held.clone() for held in self.held])

            return masked_logits(self.model, None, chunks, attention_mask, positions=positions, after=after)

    def _extend(self, S: int) -> None:
        """New tokens have come, and their queries have paid."""
        for number, spec in enumerate(self.specs):
            seen = self.seen[spec.layer_idx]
            assert seen.keys is not None
            B, H, T, _ = seen.keys.shape
            valid_BT = self.valid_BT[:, :T]
            place_BT = valid_BT.cumsum(-1) - 1
            fresh_BHS = valid_BT[:, None, T - S :].expand(B, H, S)
            zeros_BHS = torch.zeros(B, H, S, dtype=torch.float64)
            place_BHS = place_BT[:, None, T - S :].expand(B, H, S)
            if number == len(self.held):
                self.held.append(fresh_BHS.clone())
                self.mass.append(zeros_BHS)
                self.last.append(place_BHS.clone())
                self.gap.append(torch.zeros_like(place_BHS))
            else:
                self.held[number] = torch.cat([self.held[number], fresh_BHS], -1)
                self.mass[number] = torch.cat([self.mass[number], zeros_BHS], -1)
                self.last[number] = torch.cat([self.last[number], place_BHS], -1)
                self.gap[number] = torch.cat([self.gap[number], torch.zeros_like(place_BHS)], -1)
            if self.policy.observed in ("h2o", "lru", "vatp", "lazy_eviction", "keyformer"):
                self._pay(number, spec, S)

    def _pay(self, number: int, spec: LayerSpec, S: int) -> None:
        """Fold the attention of the last S queries into the statistics, a head at a time."""
        seen, held = self.seen[spec.layer_idx], self.held[number]
        assert seen.keys is not None
        B, H, T, _ = seen.keys.shape
        G, valid_BT = spec.num_heads // H, self.valid_BT[:, :T]
        place_BT = valid_BT.cumsum(-1) - 1
        causal = torch.arange(T) <= torch.arange(T - S, T)[:, None]
        for b in range(B):
            for h in range(H):
                sees = causal & held[b, h] & valid_BT[b, T - S :, None]
                logits = seen.queries[-1][b, h * G : (h + 1) * G].double() @ seen.keys[b, h].double().T
                weight = (logits * seen.scaling).exp() * sees
                total = weight.sum(-1, keepdim=True)
                if spec.sinks_Q is not None:
                    total = total + spec.sinks_Q[h * G : (h + 1) * G].double().exp()[:, None, None]
                paid = torch.where(total > 0, weight / total, 0.0)
                if self.policy.observed == "keyformer":
                    noise = self._noise(spec.layer_idx, range(h * G, (h + 1) * G), place_BT[b], S)
                    weight = weight * noise.exp()
                    paid = weight / weight.sum(-1, keepdim=True).clamp_min(1e-300)
                self.mass[number][b, h] += paid.sum(1).mean(0)
                share = float(self.policy.observed_settings.get("share", 1.0))
                least = share * (1 - ROUNDING) / sees.sum(-1, keepdim=True).clamp_min(1)
                if "alpha" in self.policy.observed_settings:
                    least = float(self.policy.observed_settings["alpha"]) * (1 - ROUNDING)
                used = (paid.amax(0) >= least) & sees
                last, gap = self.last[number][b, h], self.gap[number][b, h]
                for s in range(S):
                    place = place_BT[b, T - S + s]
                    gap = torch.where(used[s], gap.maximum((place - last).clamp_min(1)), gap)
                    last = torch.where(used[s], last.maximum(place), last)
                self.last[number][b, h], self.gap[number][b, h] = last, gap

    @staticmethod
    def _noise(layer: int, heads: range, place_T: Tensor, S: int) -> Tensor:
        """Keyformer's, of seed 0, a pair at a time."""
        places = place_T.tolist()
        states = [[mixed((naive_state(0, layer, q) + j) & MASK) for j in places[-S:]] for q in heads]
        return torch.tensor(
            [[[naive_gumbel(state + i) for i in places] for state in row] for row in states],
            dtype=torch.float64,
        )

    def _evict(self, *, reading: bool) -> None:
        for b in range(len(self.valid_BT)):
            tokens_T = self.valid_BT[b, : self.held[0].shape[-1]].nonzero().flatten()
            if len(tokens_T):
                self._evict_one(b, tokens_T, reading=reading)

    def _evict_one(self, b: int, tokens_T: Tensor, *, reading: bool) -> None:
        """Decide about one sequence, of which the tokens `own` have come."""
        layers = [self._evidence(number, spec, b, tokens_T) for number, spec in enumerate(self.specs)]
        prompt = int(self.valid_BT[b, : self.prompt_tokens].sum())
        stock = Stock(
            held_BL=(tuple(int(layer.exists_BHT.sum()) for layer in layers),),
            lengths_B=(prompt if reading else len(tokens_T),),
            intact_BT=torch.stack([layer.exists_BHT.all(1) for layer in layers]).all(0),
        )
        valid_BT, pinned_BT = layers[0].valid_BT, None
        if self.pinned is not None:
            spans = self.pinned if isinstance(self.pinned[0][0], int) else self.pinned[b]
            whole = torch.ones(1, max(prompt, len(tokens_T)), dtype=torch.bool)
            pinned_BT = pinned_mask([spans], whole)[:, : len(tokens_T)]
        shapes = [shape_of(layer) for layer in layers]
        given = (self.policy, self.budget, valid_BT, shapes, pinned_BT)
        if all(plan_of(*given, stock=stock).covers_B):
            kept = [layer.exists_BHT for layer in layers]
        else:
            seeds = None if self.seeds is None else [self.seeds[b]]
            decisions = decide_layers(
                self.policy,
                layers,
                self.budget,
                scores=[self._score(layer, seeds) for layer in layers],
                pinned_BT=pinned_BT,
                stock=stock,
            )
            kept = [decision.keep_BHT for decision in decisions]
        for number, keep_BHT in enumerate(kept):
            self.held[number][b, :, tokens_T] = keep_BHT[0]

    def _evidence(self, number: int, spec: LayerSpec, b: int, tokens_T: Tensor) -> Evidence:
        """The evidence of one layer and one sequence, of all tokens that ever came."""
        seen = self.seen[spec.layer_idx]
        assert seen.keys is not None and seen.values is not None
        # Its own definition: it looks at all queries since the last moment. Others look at the last few, or
        # none.
        recent = self.policy.observed in ("expected_attention", "triattention")
        shown = tokens_T[tokens_T >= self.since] if recent else tokens_T
        return Evidence(
            layer_idx=spec.layer_idx,
            queries_BQSD=torch.cat(seen.queries, dim=2)[b : b + 1, :, shown],
            keys_BHTD=seen.keys[b : b + 1, :, tokens_T],
            values_BHTD=seen.values[b : b + 1, :, tokens_T],
            output_weight_QDE=spec.output_weight_QDE,
            scaling=seen.scaling,
            positions_BT=self.positions_BT[b : b + 1, tokens_T],
            valid_BT=torch.ones(1, len(tokens_T), dtype=torch.bool),
            hidden_BTE=torch.cat(seen.hidden, dim=1)[b : b + 1, tokens_T],
            stream_BTE=torch.cat(seen.stream, dim=1)[b : b + 1, tokens_T],
            sinks_Q=spec.sinks_Q,
            rotary=self.rotary,
            running=RunningStatistics(
                *(column[number][b : b + 1, :, tokens_T] for column in (self.mass, self.last, self.gap))
            ),
            held_BHT=self.held[number][b : b + 1, :, tokens_T],
            place_BT=torch.arange(len(tokens_T))[None],
        )

    def _score(self, layer: Evidence, seeds: Sequence[int] | None) -> Score:
        """The policy's score, over all tokens."""
        learned = None
        if self.policy.learned:
            learned = self.gates.score(replace(layer, held_BHT=None))
            values = learned.values_BHT
            learned = masked_score(values, layer.exists_BHT, learned.unit)
        return score_entries(self.policy, layer, learned=learned, seeds_B=seeds)

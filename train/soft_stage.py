"""Trains gates end to end: soft gates in the model's attention, and a loss on the model's output.

The same weights are teacher and student. A batch is read twice, as the model is and gated, and only the
hidden states of both are held; logits are made from them a few tokens at a time
(`retain.train.objectives.soft_losses`).

`check_loophole` refuses settings under which gates can do nothing: softmax does not see a constant added to
all logits, so gates that all close alike cost no loss and satisfy every capacity.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from retain.config import Count, NotNegative, Positive, PositiveShare, Whole
from retain.gates import GateInputs, GateSet, inputs_of
from retain.hf.model.decoder import base_model
from retain.hf.training.soft_attention import SoftGated
from retain.train.data.document import Batch, Document, Reading, collate
from retain.train.local_stage import PREPARED_ENTRIES
from retain.train.objectives import soft_losses
from retain.train.objectives.soft_threshold import SoftThreshold
from retain.train.settings import refuse, section, unknown
from retain.train.stage import Stage, joined
from retain.train.teacher import Frozen, View, walk

# Distances of the gated from the full model, and costs of what is open.
FIDELITY = ("kl_forward", "kl_reverse", "next_token", "hidden")
COST = ("capacity_head", "capacity_global", "closed", "admitted", "eviction_rate")
# Costs that know a decay, whose openness changes with every token.
AGEING = ("capacity_head", "capacity_global")
# Queries of each document at which the open entries of decays are counted.
CAPACITY_ROWS = 256
# Documents from which input statistics are made: of `PREPARED_ENTRIES` of a layer over all of them.
PREPARED_DOCUMENTS = 8


@section
class SoftSettings:
    """Settings of the end-to-end stage."""

    terms: dict[str, NotNegative] = field(default_factory=lambda: {"kl_forward": 1.0, "capacity_global": 1.0})
    """Name -> weight; of fidelity to the next token: `kl_forward` (KL(full || gated)), `kl_reverse`,
    `next_token`; or to the last state: `hidden`; of cost: `capacity_head`, `capacity_global` (entries open
    beyond a budget), `closed`, `eviction_rate` (distance of the open share from it), `admitted`."""
    protected: Whole = 32
    """Entries of the recent window that is not gated, in tokens."""
    sinks: Whole = 4
    """First tokens of a document that are not gated."""
    hard: Literal["none", "straight_through", "gumbel"] = "none"
    """`none` (soft gates), `straight_through`, or `gumbel` (drawn, then straight through)."""
    hard_temperature: Positive = 0.1
    """Of `gumbel`."""
    budget: Count | None = None
    """Entries of a head, a fixed number; null: `keep_to` of the tokens so far."""
    keep_from: PositiveShare = 1.0
    """Share of the tokens that may stay open, at the first step."""
    keep_to: PositiveShare = 0.25
    """The same from step `ramp_steps` on, and whenever documents are looked at."""
    ramp: Literal["ratio", "compression"] = "ratio"
    """What is linear in between: the `ratio`, or the `compression` 1 / ratio."""
    ramp_steps: Whole | None = None
    """Null: half of all steps."""
    checkpointing: bool = False
    """Layers are computed again for the gradient; saves memory, changes no number."""


def check_soft(settings: SoftSettings) -> None:
    """Raises ValueError with all terms that there are none of."""
    refuse(found=unknown(settings.terms, FIDELITY + COST, what="soft term", key="soft.terms"))


def check_loophole(settings: SoftSettings, gates: GateSet) -> None:
    """Raises ValueError with all settings under which gates can satisfy the loss without choosing anything
    (IndexMem calls it the no-op loophole), and all costs that do not know these gates."""
    wanted = {name for name, weight in settings.terms.items() if weight}
    strange = sorted(settings.terms.keys() & ({*COST} - {*AGEING}))
    refuse(
        (
            not gates.ages and settings.protected == 0 and settings.sinks == 0,
            "soft.protected=0 and soft.sinks=0 leave nothing ungated, and softmax does not see gates that "
            "all close alike: they would satisfy any budget and evict nothing. Protect a window (32), or "
            "sinks (4)",
        ),
        (
            not wanted & {*COST},
            f"soft.terms={settings.terms} never asks a gate to close, so that all would stay open: add "
            f"one of {', '.join(COST)}",
        ),
        (
            not wanted & {*FIDELITY},
            f"soft.terms={settings.terms} never asks for what the model says, so that all would close: "
            f"add one of {', '.join(FIDELITY)}",
        ),
        (
            gates.ages and (strange or settings.hard != "none"),
            f"soft.terms={settings.terms}, soft.hard={settings.hard}: gates of family {gates.family!r} say a "
            f"decay, whose openness changes with age; use {' or '.join(AGEING)}, and hard=none",
        ),
    )


def keep_ratio_at(step: int, settings: SoftSettings, steps: int) -> float:
    """Returns the share of the tokens that may stay open at a step (from 0): linear from `keep_from` to
    `keep_to` over `ramp_steps` (half of all), in the ratio or in the compression `1 / ratio` (DMS: 1 to 16
    over 510 steps)."""
    length = max(1, steps // 2) if settings.ramp_steps is None else settings.ramp_steps
    done = 1.0 if not length else min(1.0, step / length)
    if settings.ramp == "ratio":
        return settings.keep_from + done * (settings.keep_to - settings.keep_from)
    return 1.0 / (1 / settings.keep_from + done * (1 / settings.keep_to - 1 / settings.keep_from))


class EndToEnd(Stage):
    """Objective of the end-to-end stage.

    TRIM-KV (arXiv 2512.03324) is `decay` gates with the mean of the fidelity terms that are switched on, plus
    the capacity: `{kl_forward: 0.5, next_token: 0.5, capacity_head: 1}`, protected=0 and a budget; DBTrimKV
    (arXiv 2605.09649) `decay_shared` with `capacity_global`; WG-KV (arXiv 2512.17452) `{hidden: 1, admitted:
    lambda}`, protected=256; DMS (arXiv 2506.05345) `{kl_reverse: 1, closed: 1}`, hard=gumbel,
    ramp=compression, protected=512 (`kl_reverse` is what its code computes).

    Args:
        steps: of the whole run, for the ramp.
        seed: of the noise.

    Raises:
        ValueError: settings with the no-op loophole; gates that say no openness; a head that is not
            understood.
    """

    def __init__(self, gates: GateSet, frozen: Frozen, soft: SoftSettings, *, steps: int = 1, seed: int = 0):
        check_soft(soft)
        check_loophole(soft, gates)
        for layer in gates.layers:  # refused now, not in the first step
            gates[layer].log_gate(torch.zeros(1, gates[layer].H, 1))
        super().__init__(gates, ("loss", *soft.terms, "open", "keep"))
        self.frozen, self.soft = frozen, soft
        self.steps, self.seed = steps, seed
        self.base = base_model(frozen.model)
        self.gated = SoftGated(self.base, gates, protected=soft.protected)
        vocabulary = soft.terms.keys() & set(soft_losses.VOCABULARY)
        self.head = soft_losses.head_of(frozen.model) if vocabulary else None

    @torch.no_grad()
    def prepare_(self, documents: Sequence[Document]) -> None:
        """Sets every gate's input statistics, and opens it as its family's paper does; alike on every process
        for the same documents."""
        found: dict[int, list[GateInputs]] = {}
        documents = documents[:PREPARED_DOCUMENTS]
        share = max(1, PREPARED_ENTRIES // max(1, len(documents)))

        def see(views: list[View]) -> None:
            for view in views:
                gate, stride = self.gates[view.layer_idx], -(-view.document.num_seen // share)
                inputs = inputs_of(view.document, gate.to(view.document.keys_BHTD.device))
                # Evenly spread, where a document is longer than is needed.
                found.setdefault(view.layer_idx, []).append(inputs.entries(slice(None, None, stride)))

        for document in documents:
            walk(self.frozen, [Reading(document)], see, wanted=self.gates.inputs)
        devices = {self.gates[layer].device for layer in found}
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            torch.manual_seed(self.seed)  # drawn alike on every process
            for layer, parts in found.items():
                gate, inputs = self.gates[layer], joined(parts)
                assert inputs.valid_BT is not None
                zeros_H = torch.zeros(gate.H, device=inputs.valid_BT.device)
                gate.prepare_(inputs, inputs.valid_BT, zeros_H, zeros_H)
                gate.open_()

    def rows_of(self, documents: Sequence[Document], step: int, scale: float | None) -> list[dict[str, Any]]:
        """Returns the loss, every term, the open share and the budget (`keep`, as a share of the tokens) of
        each document. Hard decisions are drawn where there is a gradient; held-out documents are read at the
        final budget. ValueError: a document in which nothing is gated."""
        device = self.frozen.model.get_input_embeddings().weight.device
        batch = collate(documents, pad_id=self.frozen.pad_id, device=device)
        valid_BT, counted_BT = batch.valid_BT, counted_tokens(batch, self.soft)
        keep = keep_ratio_at(step, self.soft, self.steps)
        keys = None if scale is None else [(self.seed, step, key) for key in batch.keys]
        decisions = (self.soft.hard, self.soft.hard_temperature, valid_BT, keys)
        self.gated.to_log_gate = SoftThreshold(self.gates, *decisions)
        place_BT = (valid_BT.cumsum(-1) - 1).clamp_min(0)
        inputs: dict[str, Any] = {
            "input_ids": batch.input_ids_BT,
            "attention_mask": valid_BT.long(),
            "position_ids": place_BT,
            "use_cache": False,
        }
        again = self.soft.checkpointing and scale is not None
        with torch.set_grad_enabled(scale is not None), _checkpointed(self.base) if again else nullcontext():
            with torch.no_grad():
                full_BTE = self.base(**inputs).last_hidden_state
            output, log_gates = self.gated(**inputs, ungated_BT=valid_BT & (place_BT < self.soft.sinks))
            terms = self._fidelity(output.last_hidden_state, full_BTE, batch, counted_BT)
            terms |= self._cost(list(log_gates.values()), valid_BT, keep)
            weighted = [weight * terms[name] for name, weight in self.soft.terms.items() if weight]
            loss_B = torch.stack([part_B.to(weighted[0].device) for part_B in weighted]).sum(0)
            if scale is not None:
                (loss_B.sum() * scale).backward()
        terms["loss"], terms["keep"] = loss_B, torch.full_like(loss_B, keep)
        if self.soft.budget is not None:
            terms["keep"] = (self.soft.budget / valid_BT.sum(-1).to(loss_B)).clamp_max(1.0)
        values = torch.stack([terms[name].detach().double().cpu() for name in self.fields]).T.tolist()
        return [dict(zip(self.fields, row, strict=True)) for row in values]

    def _fidelity(
        self,
        gated_BTE: Float[Tensor, "B T E"],
        full_BTE: Float[Tensor, "B T E"],
        batch: Batch,
        counted_BT: Bool[Tensor, "B T"],
    ) -> dict[str, Float[Tensor, " B"]]:
        """Terms on what the model says, the mean of each document over its tokens that count."""
        wanted, counted_BT = self.soft.terms.keys() & {*FIDELITY}, counted_BT.to(gated_BTE.device)
        counts = counted_BT.sum(-1).tolist()
        gated_NE, full_NE = gated_BTE[counted_BT], full_BTE[counted_BT]
        next_BT = torch.full_like(batch.input_ids_BT, soft_losses.NO_TOKEN)
        next_BT[:, :-1] = batch.input_ids_BT[:, 1:]
        next_N = next_BT.to(gated_BTE.device)[counted_BT]
        each: dict[str, Tensor] = {}
        if self.head is not None:
            each |= soft_losses.vocabulary_terms(self.head, gated_NE, full_NE, next_N, wanted)
        if "hidden" in wanted:
            each["hidden"] = soft_losses.hidden_term(gated_NE, full_NE)
        known = {name: torch.ones_like(next_N, dtype=torch.bool) for name in each}
        if "next_token" in known:
            known["next_token"] = next_N != soft_losses.NO_TOKEN
        return {
            name: torch.stack(
                [
                    part.sum() / some.sum().clamp_min(1)
                    for part, some in zip(value_N.split(counts), known[name].split(counts), strict=True)
                ]
            )
            for name, value_N in each.items()
        }

    def _cost(
        self, log_gates: list[Float[Tensor, "B H T"]], valid_BT: Bool[Tensor, "B T"], keep: float
    ) -> dict[str, Float[Tensor, " B"]]:
        """Terms on how much is open, and the share of each document that is open to its last token."""
        soft, home = self.soft, log_gates[0].device
        valid_BT = valid_BT.to(home)
        rows_BR = soft_losses.rows_of(valid_BT, CAPACITY_ROWS if self.gates.ages else 0)
        protected, ages = soft.protected, self.gates.ages
        open_BXR = torch.cat(
            [
                soft_losses.open_entries(phi_BHT, valid_BT, rows_BR, protected=protected, ages=ages).to(home)
                for phi_BHT in log_gates
            ],
            dim=1,
        )
        seen_BR = (valid_BT.cumsum(-1) * valid_BT).gather(-1, rows_BR).to(open_BXR.dtype)
        limit_BR = keep * seen_BR if soft.budget is None else torch.full_like(seen_BR, soft.budget)
        made = {
            "capacity_head": lambda: soft_losses.capacity_term(open_BXR, seen_BR, limit_BR),
            "capacity_global": lambda: soft_losses.capacity_term(
                open_BXR.mean(1, keepdim=True), seen_BR, limit_BR
            ),
            # One-sided, so that more may be closed (DMS, over the whole batch; here each document is the same
            # in any batch), and two-sided (Attention-Gate, arXiv 2410.12876).
            "closed": lambda: ((1 - keep) - (1 - soft_losses.open_share(log_gates, valid_BT))).relu(),
            "eviction_rate": lambda: (soft_losses.open_share(log_gates, valid_BT) - keep).abs(),
            "admitted": lambda: soft_losses.admitted_term(log_gates, valid_BT, soft.protected),
        }
        found = {name: term() for name, term in made.items() if name in soft.terms}
        return found | {"open": open_BXR[..., -1].mean(1) / seen_BR[:, -1].clamp_min(1)}


def counted_tokens(batch: Batch, settings: SoftSettings) -> Bool[Tensor, "B T"]:
    """Tokens at which fidelity is measured: those that see a gated entry, which are the ones from `protected
    + sinks` on (nothing else can change). ValueError: a document has none."""
    place_BT = batch.valid_BT.cumsum(-1) - 1
    counted_BT = batch.valid_BT & (place_BT >= settings.protected + settings.sinks)
    if not bool(counted_BT.any(-1).all()):
        row = int((~counted_BT.any(-1)).nonzero()[0])
        raise ValueError(
            f"document {batch.keys[row]} has {int(batch.valid_BT[row].sum())} tokens, and "
            f"soft.protected={settings.protected} and soft.sinks={settings.sinks} cover all that its last "
            "one sees: use longer documents (data.min_tokens), or protect less."
        )
    return counted_BT


@contextmanager
def _checkpointed(base: Any) -> Iterator[None]:
    """Inside, decoder layers are computed again for the gradient. They alone are set to train, which
    transformers asks for; their parts are not, so that nothing drops out."""
    again = partial(checkpoint, use_reentrant=False)  # the kind that asks for no gradient of the embeddings
    for layer in base.layers:
        vars(layer).update(training=True, gradient_checkpointing=True, _gradient_checkpointing_func=again)
    try:
        yield
    finally:
        for layer in base.layers:
            vars(layer).update(training=False, gradient_checkpointing=False)

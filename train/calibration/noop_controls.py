"""Tests whether gates that were trained end to end do anything, on documents that they never saw.

Trained gates are compared with gates that are just as open but choose nothing (closed alike, shuffled among
the entries, drawn at random), under the loss that they were trained on; then by an eviction through the real
cache.

Softmax does not see a constant added to all logits, so that a soft stage can end with a small loss, a
satisfied capacity, and gates that say nothing (IndexMem, arXiv 2605.25475, saw it happen). Settings that
invite it are refused by `retain.train.soft_stage.check_loophole`; this looks at the result.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from retain.gates import Gate, GateSet
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.training.soft_attention import SoftGated
from retain.hf.version_names import CACHE
from retain.train.data.document import Document
from retain.train.objectives.case import keyed_generator
from retain.train.objectives.soft_losses import VOCABULARY
from retain.train.objectives.soft_threshold import SoftThreshold
from retain.train.rules import broken
from retain.train.soft_stage import BUDGETED, EndToEnd, SoftSettings
from retain.train.stage import HELD_OUT_STEP
from retain.train.teacher import Frozen

How = Literal["trained", "alike", "shuffled", "random"]
# Gates must lose less than this share of what a head's own numbers lose at others of its entries.
MARGIN = 0.9
# Above this openness, where nothing states a budget, gates have not begun to close.
OPEN_SHARE = 0.95
# Gates that are open by more than this times the budget have not met it.
OVER_BUDGET = 1.25
# Random evictions of a document that one by the gates is compared with.
DRAWS = 4
# First entries that no eviction takes, whatever the stage spared: without them every model breaks.
SINKS = 4
# Of a document without an appendix, the share at its end that is read after the eviction, and the most of it.
CONTINUATION, LONGEST = 0.25, 64


class Control:
    """`to_log_gate` of gates that choose nothing: made of what the trained ones say, so that about as much is
    open.

    Args:
        how: `trained` (as they are), `alike` (every entry of a head as open as its mean), `shuffled` (the
            numbers of a head dealt anew among its entries), `random` (every entry draws one of its layer's
            numbers, of whichever head).
        sinks: first entries, which are spared and take no part.
    """

    def __init__(self, soft_threshold: SoftThreshold, how: How, *, sinks: int, seed: int):
        self.soft_threshold, self.how, self.sinks, self.seed = soft_threshold, how, sinks, seed

    def __call__(self, output_BHT: Float[Tensor, "B H T"], gate: Gate) -> Float[Tensor, "B H T"]:
        log_gate_BHT = self.soft_threshold(output_BHT, gate)
        if self.how == "trained":
            return log_gate_BHT
        current = self.soft_threshold.current
        assert current is not None and bool(current.valid_BT.all()), "one document at a time, without padding"
        B, H, T = log_gate_BHT.shape
        own_BHN = log_gate_BHT[..., self.sinks :]
        key = (self.seed, current.keys[0], self.soft_threshold.layer_of[id(gate)])
        draws = keyed_generator(key)
        if self.how == "alike":
            other_BHN = own_BHN.exp().mean(-1, keepdim=True).log().expand_as(own_BHN)
        elif self.how == "shuffled":
            order = torch.rand(own_BHN.shape, generator=draws).argsort(-1)
            other_BHN = own_BHN.gather(-1, order.to(own_BHN.device))
        else:
            pick = torch.randint(own_BHN[0].numel(), own_BHN.shape, generator=draws)
            other_BHN = own_BHN.flatten(1)[:, pick[0].to(own_BHN.device)]
        return torch.cat([log_gate_BHT[..., : self.sinks], other_BHN], -1)


@torch.no_grad()
def noop_numbers(
    gates: GateSet, frozen: Frozen, document: Document, soft: SoftSettings, *, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Returns `soft` and `hard` of one document for `noop_summary`; `hard` is empty where its context fits
    into the budget."""
    term = _fidelity(soft)
    looking = replace(soft, terms={term: 1.0, "capacity_global": 1.0}, checkpointing=False, autocast=False)
    objective = EndToEnd(gates, frozen, looking, seed=seed)
    found: dict[str, float] = {}
    for how in get_args(How):
        control = Control(objective.soft_threshold, how, sinks=soft.sinks, seed=seed)
        gated = SoftGated(objective.base, gates, protected=soft.protected, to_log_gate=control)
        with closing(gated):
            objective.gated = gated
            row = objective.terms_of([document], HELD_OUT_STEP)
        found[how] = float(row[term][0])
        if how == "trained":
            found["open"] = float(row["open"][0])
    if _budgeted(soft):
        found["budget"] = _share(document.num_tokens, soft)
    share = found.get("budget", found["open"])
    return {"soft": found, "hard": _evicted(gates, frozen, document, share, soft, seed)}


def noop_summary(rows: Sequence[Mapping[str, Mapping[str, float]]], soft: SoftSettings) -> dict[str, Any]:
    """Says whether trained gates choose.

    Two comparisons, each a mean over the documents:

    - `soft`: KL(full || gated) a token (where that is no term of the stage, the error of the last hidden
      state) under the trained gates and under `Control`s of about the same openness. Gates that choose lose
      less than their own numbers at other entries (shuffled, random). Gates closed alike are reported, and
      prove nothing: what is a little closed everywhere may lose less than any choice;
    - `hard`: KL(full || evicted) a token of what follows a context, after the cache evicted it down to the
      budget: by the gates' scores, by recency, or at random (the mean over `DRAWS` draws of each document),
      with the same entries protected, 4 sinks at least (a budget below what is protected is raised to that
      and one). Gates that choose lose less than 0.9 of what random ones do, and less than recency. Where
      heads and layers shared a budget in training, they share it here (scope `model`). A stage whose terms
      state no budget (`admitted`) is judged at the share that its gates leave open.

    And they have closed: what is open to the last token is at most 1.25 times the budget, with what is
    protected (without a budget, at most 95 %).

    Returns:
        plain numbers for JSON: `soft` (trained, alike, shuffled, random, open, and budget where one is
        stated), `hard` (gate, recency, random, documents, and `wins`, the share of the draws that the gates
        beat), `useful` and `verdict`, a sentence or two.

    Raises:
        ValueError: no documents.
    """
    if not rows:
        raise ValueError("the no-op report looks at held-out documents, and there are none: hold some out.")
    means = {name: math.fsum(row["soft"][name] for row in rows) / len(rows) for name in rows[0]["soft"]}
    evicted = [row["hard"] for row in rows if row["hard"]]
    hard: dict[str, float] = {
        name: math.fsum(own[name] for own in evicted) / max(1, len(evicted))
        for name in ("gate", "recency", "random", "wins")
    }
    hard["documents"] = len(evicted)
    problems = _problems(means, hard)
    return {
        "term": _fidelity(soft),
        "soft": means,
        "hard": hard,
        "useful": not problems,
        "verdict": " ".join(problems) or _praise(means, hard),
    }


def _fidelity(soft: SoftSettings) -> str:
    """The term by which gates and controls are compared."""
    return "kl_forward" if soft.terms.keys() & set(VOCABULARY) else "hidden"


def _budgeted(soft: SoftSettings) -> bool:
    """True where a trained term states how much may stay open."""
    return any(weight for name, weight in soft.terms.items() if name in BUDGETED)


def _share(num_tokens: int, soft: SoftSettings) -> float:
    """The budget as a share of a document, and no less than what is open in any case."""
    budget = soft.keep_to * num_tokens if soft.budget is None else soft.budget
    return min(1.0, max(budget, soft.protected + soft.sinks) / num_tokens)


def _problems(means: dict[str, float], hard: dict[str, float]) -> list[str]:
    trained, opened, stated = means["trained"], means["open"], "budget" in means
    against = f", and the budget is {means['budget']:.0%}" if stated else ""
    return broken(
        (
            opened > (OVER_BUDGET * means["budget"] if stated else OPEN_SHARE),
            f"The gates are open ({opened:.0%} of the entries{against}): train longer, or weigh "
            f"{'the capacity' if stated else 'its cost'} more.",
        ),
        (
            not (trained < MARGIN * means["shuffled"] and trained < means["random"]),
            f"The gates do not choose: they lose {trained:.3g} a token, their own numbers dealt "
            f"anew {means['shuffled']:.3g}, and drawn at random {means['random']:.3g}. This is the no-op "
            "loophole: protect more, or set soft.anchor.",
        ),
        (
            hard["documents"]
            and not (hard["gate"] < MARGIN * hard["random"] and hard["gate"] < hard["recency"]),
            f"Evicting by the gates loses {hard['gate']:.3g} a token, at random {hard['random']:.3g} (they "
            f"beat {hard['wins']:.0%} of the draws), and all but the most recent {hard['recency']:.3g}: they "
            "must lose less than 0.9 of the one, and less than the other.",
        ),
    )


def _praise(means: dict[str, float], hard: dict[str, float]) -> str:
    evicted = "; no document is long enough for an eviction at this budget."
    if hard["documents"]:
        evicted = (
            f"; evicting by them loses {hard['gate']:.3g}, at random {hard['random']:.3g}, and all but the "
            f"most recent {hard['recency']:.3g}."
        )
    alike = (
        f" Closed alike they would lose {means['alike']:.3g}: gates this soft do not feel the budget, so "
        "judge them by evictions, or train with soft.hard."
    )
    return (
        f"The gates choose: they lose {means['trained']:.3g} a token, shuffled {means['shuffled']:.3g}, at "
        f"random {means['random']:.3g}{evicted}{alike if means['alike'] <= means['trained'] else ''}"
    )


def _evicted(
    gates: GateSet, frozen: Frozen, document: Document, share: float, soft: SoftSettings, seed: int
) -> dict[str, float]:
    """KL of the text behind the context, after an eviction by the gates and after those of the controls."""
    sinks = max(SINKS, soft.sinks)
    context, rest = _split(document)
    stated = soft.budget if _budgeted(soft) else None
    budget = max(stated or round(share * len(context)), soft.protected + sinks + 1)
    if budget >= len(context) or len(rest) < 1:
        return {}
    protection = {"sinks": sinks, "recent": soft.protected, "prefix_fraction": 0, "suffix_fraction": 0}
    joint = {} if soft.terms.get("capacity_head") else {"scope": "model"}
    device = frozen.model.get_input_embeddings().weight.device
    context_ids, rest_ids = (torch.tensor([ids], device=device) for ids in (context, rest))
    with attach(frozen.model):
        full = Cache(frozen.model, policy="full", keep_ratio=1.0)
        whole = _after(frozen.model, full, context_ids, rest_ids)
        lost = partial(_lost, frozen.model, context_ids, rest_ids, whole, tokens_per_head=budget)
        kept = {"protection": protection}
        own = lost("gate", gates=gates, **kept, **joint)
        recency = lost("recency", **kept)
        drawn = torch.randint(2**31 - 1, (DRAWS,), generator=keyed_generator((seed, document.key)))
        draws = [lost("random", seeds=[draw], **kept) for draw in drawn.tolist()]
    wins = sum(own < draw for draw in draws) / len(draws)
    return {"gate": own, "recency": recency, "random": math.fsum(draws) / len(draws), "wins": wins}


def _lost(
    model: Any, context_ids: Tensor, rest_ids: Tensor, whole: Tensor, policy: str, **given: Any
) -> float:
    """KL(full || evicted) a token of the rest."""
    log_q = _after(model, Cache(model, policy=policy, short="raise", **given), context_ids, rest_ids)
    return float(functional.kl_div(log_q, whole, log_target=True, reduction="batchmean"))


def _split(document: Document) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that are evicted from, and those that are read afterwards."""
    if document.appendix_ids:
        return document.context_ids, document.appendix_ids
    count = min(LONGEST, int(CONTINUATION * len(document.context_ids)))
    return document.context_ids[: len(document.context_ids) - count], document.context_ids[-count:]


def _after(model: Any, cache: Cache, context_ids: Tensor, rest_ids: Tensor) -> Tensor:
    """Log-probabilities at the tokens after the context, `[tokens, V]`."""
    cache.prefill(context_ids)
    logits = model(input_ids=rest_ids, **{CACHE: cache}).logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

"""Trains gates by reward: keep sets are drawn in proportion to the gates' scores, and what comes of them is
reinforced.

After Neural Garbage Collection (arXiv 2604.18002), which trains the language model itself on the outcome of
its own evictions. Here the model stays frozen, gates start from a distillation, and eviction happens once,
after the document. What was read of the paper is its abstract and reviews; the estimator (ordered samples of
Plackett and Luce, the other samples of a document as its baseline) is stated in
`retain.train.objectives.plackett_luce`.

A document is read once. From that cache several are forked, each is cut to a keep set of its own by the
policy's own protection, budget and selection, and the question and answer are read behind all of them in one
batch. The gradient goes through the log-probability of what was drawn, never through the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from retain.budget.largest_remainder import exact
from retain.budget.statement import Budget, Scope
from retain.config import Many, Positive, PositiveShare, Whole
from retain.evidence import Evidence, Score
from retain.gates import GateSet
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.intercept.chunked_feed_forward import token_wise_in_pieces
from retain.hf.model.decoder import base_model
from retain.hf.version_names import CACHE
from retain.policy import candidates_of, keep_masks, plan_of, shape_of
from retain.presets import Policy
from retain.protection import Protection
from retain.train.data.document import Document
from retain.train.objectives.case import keyed_generator
from retain.train.objectives.plackett_luce import against_the_others, gumbel_noise, log_probability
from retain.train.rules import refuse
from retain.train.stage import Stage
from retain.train.teacher import Frozen

# The smallest score whose logarithm is a logit: float32's smallest normal number.
SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class ReinforceSettings:
    """Settings of the stage `reinforce`.

    Args:
        reward: `match`: the share of a document's answers whose tokens all come out as they are (read after
            the right ones before them, which is what greedy decoding writes if all of them do);
            `divergence`: minus the mean KL(full || evicted) where these answers are predicted. Where nothing
            says which tokens are the answer (rows of `appendix_ids`), `divergence` is that of all of them.
        keep_ratios: budgets; each document of each step is given one of them.
        rollouts: keep sets that are drawn of a document.
        temperature: of the draw: logits are `log(score) / temperature`, and `score / temperature` of scores
            that may be negative (a decay's, an openness, a mass without a floor). The lower, the nearer the
            draw is to what the policy keeps without one.
        scope: which heads share a budget: as the policy that will use these gates.
        sinks: first entries, always kept.
        recent: last entries, always kept.
    """

    reward: Literal["match", "divergence"] = "divergence"
    keep_ratios: tuple[PositiveShare, ...] = (0.05, 0.1)
    rollouts: Many = 8
    temperature: Positive = 0.3
    scope: Scope = "model"
    sinks: Whole = 4
    recent: Whole = 8

    def policy(self) -> Policy:
        """The policy whose keep sets are drawn: a gate alone, behind this protection."""
        protection = Protection(
            sinks=self.sinks, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=self.recent
        )
        return Policy("reinforce", learned=True, scope=self.scope, protection=protection)


def check_reinforce(settings: ReinforceSettings) -> None:
    """Raises ValueError for settings with which nothing could be drawn or compared."""
    refuse(
        (settings.rollouts < 2, "reinforce.rollouts=1: the others of a document are its baseline; draw 2"),
        (not settings.keep_ratios, "reinforce.keep_ratios is empty: state at least one budget, such as 0.1"),
        (
            settings.sinks + settings.recent < 1,
            "reinforce.sinks=0 and reinforce.recent=0 protect nothing, and a head could be left empty: "
            "protect at least one entry",
        ),
    )


@dataclass(frozen=True)
class Drawn:
    """Keep sets of one document.

    Args:
        keeps: of each layer, K sets.
        log_probability_K: of the ordered samples, with their graph; a mean over the entries drawn.
    """

    keeps: list[Bool[Tensor, "K H T"]]
    log_probability_K: Float[Tensor, " K"]


class Reinforce(Stage):
    """Objective of the stage.

    With logits `z` of the scores (`ReinforceSettings.temperature`), K samples drawn at one budget, their
    rewards `r` and numbers `n` of entries drawn, the gradient of a document is that of

        -(1 / K) sum_k (r_k - mean_{k' != k} r_k') log p_k / n

    whose expectation is the gradient of the mean reward, over `n`. `loss` is minus the mean reward. Held-out
    documents are evicted from as the policy does it, without a draw.
    """

    def __init__(self, gates: GateSet, frozen: Frozen, settings: ReinforceSettings, *, seed: int = 0):
        check_reinforce(settings)
        if len({gates[layer].H for layer in gates.layers}) > 1:
            raise ValueError(
                "stage=reinforce draws from all layers at once, and those of this model have unlike numbers "
                "of KV heads: train with stage=local or end_to_end."
            )
        super().__init__(gates, ("loss", "reward", "spread", "keep_ratio"))
        self.frozen, self.settings, self.seed = frozen, settings, seed
        self.policy = settings.policy()

    def prepare_(self, documents: Sequence[Document]) -> None:
        """Nothing starts from data: the gates are distilled already."""

    def rows_of(
        self, documents: Sequence[Document], step: int, scale: float | None, *, baselines: bool = False
    ) -> list[dict[str, Any]]:
        """Returns the numbers of each document (`check_rewardable`); of held-out ones the reward at each
        budget, and with `baselines` that of the full cache."""
        rows = []
        for document in documents:
            with attach(self.frozen.model):
                rows.append(
                    self._look(document, baselines) if scale is None else self._step(document, step, scale)
                )
        for parameter in self.parameters() if scale is not None else ():
            if parameter.grad is None:  # alike on all processes, whatever each has read
                parameter.grad = torch.zeros_like(parameter)
        return rows

    def _step(self, document: Document, step: int, scale: float) -> dict[str, Any]:
        cache, evidence = self._read(document)
        key = (self.seed, step, document.key)
        ratios = self.settings.keep_ratios
        ratio = ratios[int(torch.randint(len(ratios), (), generator=keyed_generator((*key, 1))))]
        drawn = self.draw(evidence, ratio, key=key)
        reward_K = self._rewards(cache, document, drawn.keeps, self._full(cache, document))
        advantage_K = against_the_others(reward_K)
        (-(advantage_K * drawn.log_probability_K).mean() * scale).backward()
        reward = float(reward_K.mean())
        return {"loss": -reward, "reward": reward, "spread": float(reward_K.std()), "keep_ratio": ratio}

    def _look(self, document: Document, baselines: bool) -> dict[str, Any]:
        cache, evidence = self._read(document)
        full_1SV = self._full(cache, document)
        found = {}
        for ratio in self.settings.keep_ratios:
            keeps = self.draw(evidence, ratio, key=None).keeps
            found[f"reward_at_{ratio:g}"] = float(self._rewards(cache, document, keeps, full_1SV))
        reward = sum(found.values()) / len(found)
        if baselines:
            everything = [layer.exists_BHT for layer in evidence]
            found["reward_full"] = float(self._rewards(cache, document, everything, full_1SV))
        return {"loss": -reward, "reward": reward, **found}

    @torch.no_grad()
    def _read(self, document: Document) -> tuple[Cache, Sequence[Evidence]]:
        """A cache that has read a document and evicted nothing, and what its layers show."""
        device = self.frozen.model.get_input_embeddings().weight.device
        ids_BT = torch.tensor([document.context_ids], device=device)
        cache = Cache(self.frozen.model, policy=None, slack=0)
        base: Any = base_model(self.frozen.model)
        with token_wise_in_pieces(base.layers, self.frozen.chunk):
            cache.prefill(ids_BT, evict=False, hold_evidence=True, wanted=self.gates.inputs)
        assert cache.evidence is not None
        return cache, list(cache.evidence)

    def draw(self, evidence: Sequence[Evidence], ratio: float, *, key: tuple[int, ...] | None) -> Drawn:
        """Draws keep sets of one document, with their log-probability.

        Args:
            evidence: of all layers that evict, of one sequence.
            ratio: kept / seen.
            key: of the noise; None: one set, that of the scores themselves.
        """
        with torch.set_grad_enabled(key is not None):
            logits = [self._logits(layer) for layer in evidence]
        home = logits[0].device
        logits_LHT = torch.cat([one_1HT.to(home) for one_1HT in logits]).float()
        L, H, T = logits_LHT.shape
        K = 1 if key is None else self.settings.rollouts
        perturbed_KLHT = logits_LHT.detach().expand(K, L, H, T)
        if key is not None:
            perturbed_KLHT = perturbed_KLHT + gumbel_noise(key, (K, L, H, T)).to(home)
        valid_KT = evidence[0].valid_BT.expand(K, T)
        budget, shapes = Budget(keep_ratio=ratio), [shape_of(layer) for layer in evidence]
        plan = plan_of(self.policy, budget, valid_KT, shapes)
        exists_LHT = torch.cat([layer.exists_BHT.to(home) for layer in evidence])
        scored_KLHT = perturbed_KLHT.masked_fill(~exists_LHT, float("-inf"))
        scores = [
            candidates_of(plan, Score(scored_KHT.contiguous(), "rank"))
            for scored_KHT in scored_KLHT.unbind(1)
        ]
        keeps = keep_masks(plan, scores)
        keep_KLHT = torch.stack([keep_KHT.to(home) for keep_KHT in keeps], dim=1)
        candidates_KLHT = exists_LHT & ~plan.protected_BT.to(home)[:, None, None]
        drawn_KLHT = keep_KLHT & candidates_KLHT
        shape = {"model": (K, 1, L * H * T), "layer": (K, L, H * T), "head": (K, L * H, T)}[self.policy.scope]
        parts = (logits_LHT.expand(K, L, H, T), perturbed_KLHT, drawn_KLHT, candidates_KLHT)
        total_K = log_probability(*(part.reshape(shape) for part in parts))
        return Drawn(keeps, total_K / drawn_KLHT[0].sum().clamp_min(1))

    def _logits(self, layer: Evidence) -> Float[Tensor, "1 H T"]:
        """What the gates' scores are drawn in proportion to, as a logarithm; in the scores' own order."""
        values_1HT, gate = self.gates.values(layer), self.gates[layer.layer_idx]
        # A calibrated score is a risk; `values` has taken the exponential of a log-risk.
        if len(self.gates.calibrators) or (gate.unit != "rank" and not gate.signed):
            values_1HT = values_1HT.clamp_min(SMALLEST).log()
        return values_1HT / self.settings.temperature

    @torch.no_grad()
    def _rewards(
        self,
        cache: Cache,
        document: Document,
        keeps: Sequence[Bool[Tensor, "K H T"]],
        full_1SV: Float[Tensor, "1 S V"] | None,
    ) -> Float[Tensor, " K"]:
        """The reward of each keep set: its own fork of the cache is cut to it, and all are asked in one
        batch; `full_1SV` as `_full` gives it."""
        forks = [
            cache.fork().evict_with([keep_KHT[k : k + 1] for keep_KHT in keeps]) for k in range(len(keeps[0]))
        ]
        logits_KSV = self._behind(Cache.concat(forks, slack=len(document.appendix_ids)), document)
        if full_1SV is not None:
            log_q_KSV = logits_KSV.log_softmax(-1)
            log_p_KSV = full_1SV.expand_as(log_q_KSV)
            kl_KSV = functional.kl_div(log_q_KSV, log_p_KSV, reduction="none", log_target=True)
            return -kl_KSV.sum(-1).mean(-1)
        spans, right = predicted(document), []
        best_KS, place = logits_KSV.argmax(-1), 0
        for start, stop in spans:
            said_S = torch.tensor(document.appendix_ids[start + 1 : stop + 1], device=best_KS.device)
            right.append((best_KS[:, place : place + stop - start] == said_S).all(-1))
            place += stop - start
        return torch.stack(right).float().mean(0)

    @torch.no_grad()
    def _full(self, cache: Cache, document: Document) -> Float[Tensor, "1 S V"] | None:
        """Log-probabilities of the full cache where the answers are predicted; None: no reward asks."""
        if self.settings.reward != "divergence":
            return None
        return self._behind(cache.fork(), document).log_softmax(-1)

    def _behind(self, cache: Cache, document: Document) -> Float[Tensor, "K S V"]:
        """Logits of each sequence of a cache where the document's answers are predicted."""
        model = self.frozen.model
        device = model.get_input_embeddings().weight.device
        # The last token is only predicted.
        ids_S: Int[Tensor, " S"] = torch.tensor(document.appendix_ids[:-1], device=device)
        output = model(input_ids=ids_S.expand(cache.batch_size, -1), use_cache=True, **{CACHE: cache})
        places = [place for start, stop in predicted(document) for place in range(start, stop)]
        return output.logits[:, places].float()


def predicted(document: Document) -> list[tuple[int, int]]:
    """Where in the appendix each of its answers is predicted, a token before it stands; the appendix's first
    token is predicted before anything is evicted."""
    return [(max(start, 1) - 1, stop - 1) for start, stop in document.answer_spans if stop > 1]


def check_rewardable(document: Document, settings: ReinforceSettings, name: str) -> None:
    """Raises ValueError for a document that no reward or no draw can be made of; `name` is for messages."""
    least, smallest = settings.sinks + settings.recent, min(settings.keep_ratios)
    tokens = len(document.context_ids)
    refuse(
        (
            not predicted(document),
            f"{name} has {len(document.appendix_ids)} tokens behind it, and stage=reinforce rewards what "
            "the model says there: give rows of context, question and answer",
        ),
        (
            settings.reward == "match" and not document.answers,
            f"{name} does not say which of the tokens behind it are the answer (it was cut off, or the row "
            "has appendix_ids): give rows of context, question and answer, raise data.max_appendix_tokens, "
            "or set reinforce.reward=divergence",
        ),
        (
            exact(smallest) * tokens < least,
            f"{name} has {tokens} tokens, of which keep_ratio {smallest:g} leaves fewer than the {least} "
            "that reinforce.sinks and reinforce.recent protect: raise data.min_tokens or "
            "reinforce.keep_ratios, or protect fewer",
        ),
    )

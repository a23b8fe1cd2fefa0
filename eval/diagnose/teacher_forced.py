"""Reads one document with every cache: the full cache answers, and all others are shown its answers.

Reading is one forward on the cache, whether of one token or of many, so a full and an evicted cache differ
in nothing but what they hold. Every policy evicts from a fork of one prefill.
"""

import inspect
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retain.budget.statement import Budget
from retain.correction.merge import Merge
from retain.eval.config import FULL, Line
from retain.eval.diagnose.documents import Asked
from retain.eval.diagnose.measures import agreement, divergence, token_loss
from retain.eval.run import answers
from retain.eval.run.answers import Answer
from retain.eval.run.scoring import first_entries, score_lines
from retain.evidence import Evidence
from retain.hf.cache.cache import Cache
from retain.hf.model.identity import fingerprint
from retain.hf.version_names import CACHE
from retain.policy import Policy, decide_layers
from retain.presets import load_policy
from retain.process.provenance import code_state, environment, now
from retain.scores import Score


def policy_of(typed: str) -> Policy:
    """The policy of that name, changes behind commas, as in `snapkv,protection.recent=8`.

    Raises:
        ValueError: an unknown policy or setting, or a policy that keeps everything or holds
            entries in fewer bits.
    """
    name, *changes = typed.split(",")
    policy = replace(load_policy(name, changes), variants={})
    if policy.precision is not None:
        raise ValueError(
            f"policy {typed!r} has a precision, and policies are compared here at equal numbers of entries: "
            "take eval/compare.py, which compares at equal bytes."
        )
    if policy.keeps_all:
        raise ValueError(
            f"policy {typed!r} keeps everything, and the full cache is always measured: leave it out."
        )
    return policy


def refuse_without_gates(policies: Mapping[str, Policy], gates: Any) -> None:
    """Refuses policies that take a gate's score where there are no gates."""
    needy = [name for name, policy in policies.items() if policy.learned]
    if needy and gates is None:
        raise ValueError(f"{', '.join(needy)} takes a gate's score and there is none: pass gates (--gates).")


def made_by(given: Namespace, model: Any, started: str) -> dict[str, Any]:
    """A record's origin: the command's arguments, the model, the code and the machine; it ends now."""
    return {
        **vars(given),
        "text": None if given.text is None else Path(given.text).name,
        "model_sha": fingerprint(model)["sha256"],
        "code": code_state(Path(__file__).parent),
        "environment": environment(given.device, torch.get_num_threads()),
        "started": started,
        "finished": now(),
    }


def split(document: Asked, regime: str) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Splits a document into what the cache has seen when it evicts, and the turns that are read afterwards.

    With the question seen, its last token is read again, so that the answer's first token too comes from what
    was kept.

    Raises:
        ValueError: nothing is asked.
    """
    if not document.turns or not all(document.turns):
        raise ValueError(f"document {document.name!r} needs at least one turn, and no empty one.")
    if regime == "context_only":
        return document.context_ids, list(document.turns)
    first, *later = document.turns
    return (*document.context_ids, *first[:-1]), [first[-1:], *later]


def read_context(model: Any, tokens: Sequence[int], *, evidence: bool = False, gates: Any = None) -> Cache:
    """A cache that has read tokens and evicted nothing, with what gates look at as evidence if asked for."""
    wanted = () if gates is None else gates.inputs
    cache = Cache(model, policy=None, slack=0)
    return cache.prefill(ids_on(model, tokens), evict=False, hold_evidence=evidence, wanted=wanted)


def keep_sets(
    policies: Mapping[str, Policy],
    keep_ratios: Sequence[float],
    evidence: Sequence[Evidence],
    observed: Sequence[Evidence],
    learned: Mapping[str, Sequence[Score]],
    seed: Sequence[int],
) -> Iterator[tuple[str, float, list[Bool[Tensor, "B H T"]]]]:
    """Yields what each policy keeps of each layer at each keep_ratio, the full cache first.

    Args:
        evidence: of the entries that are evicted from, every layer.
        observed: that scores observe; it may be longer.
        learned: by policy, the scores that are handed to its pipeline.
        seed: whole numbers, for scores that draw.
    """
    yield FULL, 1.0, [layer.exists_BHT for layer in evidence]
    seeds = [int(np.random.SeedSequence([*seed]).generate_state(1)[0])]
    scores = score_lines(policies, [Line(name, name) for name in policies], observed, learned, seeds)
    for name, policy in policies.items():
        own = [first_entries(score, evidence[0].num_seen) for score in scores[name]]
        for ratio in keep_ratios:
            made = decide_layers(policy, evidence, Budget(keep_ratio=ratio), scores=own)
            yield name, ratio, [layer.keep_BHT for layer in made]


def correction_of(policies: Mapping[str, Policy], name: str) -> Merge | None:
    """How a line of `keep_sets` makes up for what goes; the full cache does not."""
    return None if name == FULL else policies[name].correction


@dataclass(frozen=True)
class TokensRead:
    """Predictions of a cache for `S` tokens, compared with those of the model without a cache of ours.

    Args:
        kl_S: KL(full || evicted), in nats.
        agree_S: whether the most likely token is the same.
        loss_S: negative log-probability of the token.
    """

    kl_S: Float[Tensor, " S"]
    agree_S: Bool[Tensor, " S"]
    loss_S: Float[Tensor, " S"]


def compare_logits(
    full_SV: Float[Tensor, "S V"], evicted_SV: Float[Tensor, "S V"], target_S: Int[Tensor, " S"]
) -> TokensRead:
    """Compares an evicted cache's logits with the full one's, at the places before `target_S`."""
    return TokensRead(
        kl_S=divergence(full_SV, evicted_SV),
        agree_S=agreement(full_SV, evicted_SV),
        loss_S=token_loss(evicted_SV, target_S),
    )


def respond(
    model: Any,
    cache: Cache,
    seen: Sequence[int],
    turns: Sequence[Sequence[int]],
    most: int,
    *,
    total: int | None = None,
) -> list[Answer]:
    """Greedy answers, turn by turn, from one cache, which goes on with its own words.

    Args:
        cache: evicted; it is used up.
        most: tokens of one answer, the end token counted.
        total: no further turn is asked once so many tokens were written.
    """
    ids, ends, given = [*seen], sorted(end_tokens(model)), list[Answer]()
    for turn in turns:
        if total is not None and sum(len(answer.generated) for answer in given) >= total:
            break
        ids += turn
        ids_1T = ids_on(model, ids)
        mask_1T = torch.ones_like(ids_1T)
        given += answers.respond(model, cache, ids_1T, mask_1T, new_tokens=most, end_ids=ends)
        ids += given[-1].generated
    return given


def transcript(
    turns: Sequence[Sequence[int]], given: Sequence[Answer], steps: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The conversation after the eviction, as all policies are shown it.

    Args:
        given: what the full cache answered to the first turns.
        steps: tokens of it that are measured, at most.

    Returns:
        tokens that are read; the places among them at which a token of an answer is predicted; those tokens.
        What comes after the last such place is not read.
    """
    tail: list[int] = []
    asks: list[int] = []
    for turn, answer in zip(turns, given, strict=False):
        tail += [*turn, *answer.generated]
        asks += range(len(tail) - len(answer.generated) - 1, len(tail) - 1)
    asks = asks[:steps]
    return tuple(tail[: asks[-1] + 1]), tuple(asks), tuple(tail[ask + 1] for ask in asks)


def read_on(model: Any, cache: Cache, tokens: Sequence[int]) -> Float[Tensor, "S V"]:
    """Reads tokens behind what a cache has seen; their logits, float32 on the CPU."""
    output = model(input_ids=ids_on(model, tokens), use_cache=True, **{CACHE: cache})
    return output.logits[0].float().cpu()


def read_plainly(model: Any, tokens: Sequence[int], last: int) -> Float[Tensor, "S V"]:
    """Logits of the last tokens of a text, with no cache at all, float32 on the CPU."""
    keep = {"logits_to_keep": last} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    return model(input_ids=ids_on(model, tokens), use_cache=False, **keep).logits[0, -last:].float().cpu()


def ids_on(model: Any, tokens: Sequence[int]) -> Int[Tensor, "1 S"]:
    """Tokens as a batch of one, on the model's device."""
    return torch.tensor([list(tokens)], dtype=torch.int64, device=model.get_input_embeddings().weight.device)


def end_tokens(model: Any) -> frozenset[int]:
    """Tokens that end an answer: of the generation config, else of the model's own."""
    found = model.generation_config.eos_token_id if model.generation_config is not None else None
    found = model.config.get_text_config().eos_token_id if found is None else found
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)

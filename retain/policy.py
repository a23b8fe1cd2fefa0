"""A policy: evidence -> scores -> fusion -> protection -> budget -> selection, in this order, on one screen.

In: the evidence of one layer, a budget, and a gate's score if the policy uses one. Out: what is kept. The
decision taken here is only the order of the stages; each stage is a file of its own. `score_entries` is
separate, so that a comparison scores once and selects at many budgets, and either score may be handed in, so
that controls run through the very same stages.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float32, Int
from torch import Tensor

from retain import config
from retain.budget import Budget, allocate_flat, allocate_uniform, budget_tokens
from retain.evidence import Evidence
from retain.fusion import FUSIONS, floor, fuse
from retain.protection import Protection, protected_mask
from retain.registry import lookup, suggest
from retain.scores import SCORES, Score, masked_score
from retain.selection import select


@dataclass(frozen=True)
class Policy:
    """What decides which entries stay. With no score at all, everything stays.

    Args:
        name: how it is called in reports.
        observed: score over queries already seen, a name in `retain.scores.SCORES`; None for none.
        observed_settings: settings of that score.
        learned: whether it takes a gate's score.
        fusion: how the two become one; None is `max` with both, and the one that there is with one.
        fusion_weight: of the learned side, for `log_linear` and `rank_blend`.
        floor: `mean` lifts each head to its mean where heads share a budget; None for no floor.
        protection: what is never evicted.
        scope: `head` gives each head the same budget, `layer` lets the heads of a layer share by score.
        paper: where it comes from.
    """

    name: str
    observed: str | None = None
    observed_settings: dict[str, Any] = field(default_factory=dict)
    learned: bool = False
    fusion: str | None = None
    fusion_weight: float = 0.5
    floor: str | None = None
    protection: Protection = Protection()
    scope: str = "head"
    paper: str = ""

    def __post_init__(self) -> None:
        problems = []
        if self.observed is not None and self.observed not in SCORES:
            hint = suggest(self.observed, SCORES)
            problems.append(f"unknown score {self.observed!r}{hint}, known: {', '.join(SCORES)}")
        elif self.observed_settings:
            known = () if self.observed is None else _settings(self.observed)
            problems += [
                f"score {self.observed!r} has no setting {key!r}{suggest(key, known)}, "
                f"known: {', '.join(known) or 'none'}"
                for key in self.observed_settings
                if key not in known
            ]
        if self.fusion is not None and self.fusion not in FUSIONS:
            hint = suggest(self.fusion, FUSIONS)
            problems.append(f"unknown fusion {self.fusion!r}{hint}, known: {', '.join(FUSIONS)}")
        if not 0 <= self.fusion_weight <= 1:
            problems.append(f"fusion_weight lies in 0..1, got {self.fusion_weight}")
        if self.floor not in (None, "mean"):
            problems.append(f"floor is 'mean' or null, got {self.floor!r}")
        if self.scope not in ("head", "layer"):
            problems.append(f"scope is 'head' or 'layer', got {self.scope!r}")
        if problems:
            raise ValueError(f"policy {self.name!r}: {'; '.join(problems)}.")


@dataclass(frozen=True)
class Decision:
    """What one layer keeps.

    Args:
        keep_BHT: True where kept.
        score_BHT: the score that ordered each head, float32, -inf on padding.
        protected_BT: True where protected.
    """

    keep_BHT: Bool[Tensor, "B H T"]
    score_BHT: Float32[Tensor, "B H T"]
    protected_BT: Bool[Tensor, "B T"]


def score_entries(
    policy: Policy,
    evidence: Evidence,
    *,
    learned: Score | None = None,
    observed: Score | None = None,
    seeds_B: Sequence[int] | Int[Tensor, " B"] | None = None,
) -> Score:
    """The policy's score of one layer, before the floor.

    Args:
        policy: which scores, and their fusion.
        evidence: the layer.
        learned: the gate's score; read only if the policy takes one.
        observed: stands in for the policy's own observed score.
        seeds_B: one integer a sequence, for scores that draw numbers.

    Raises:
        ValueError: if a score that the policy needs is missing, or the units do not fit its fusion.
    """
    if observed is None and policy.observed is not None:
        family = SCORES[policy.observed]
        seeds = {"seeds_B": seeds_B} if "seeds" in family.needs else {}
        observed = family.function(evidence, **seeds, **policy.observed_settings)
    if policy.learned and learned is None:
        raise ValueError(
            f"policy {policy.name!r} takes a gate's score and there is none: pass gates=folder or hub id."
        )
    learned = learned if policy.learned else None
    if observed is None and learned is None:
        return masked_score(torch.zeros_like(evidence.keys_BHTD[..., 0]), evidence.valid_BT, "rank")
    how = policy.fusion or ("learned" if observed is None else "observed" if learned is None else "max")
    return fuse(observed, learned, how, weight=policy.fusion_weight)


def decide(
    policy: Policy,
    evidence: Evidence,
    budget: Budget,
    *,
    learned: Score | None = None,
    observed: Score | None = None,
    score: Score | None = None,
    seeds_B: Sequence[int] | Int[Tensor, " B"] | None = None,
) -> Decision:
    """Which entries of one layer stay.

    Args:
        policy: the stages' settings.
        evidence: the layer.
        budget: what may be kept of this layer (`retain.budget.layer_budget` makes it from a model's bytes); a
            policy without scores keeps everything whatever the budget.
        learned: the gate's score.
        observed: stands in for the policy's own observed score (controls).
        score: a finished score from `score_entries`; then nothing is scored or fused here.
        seeds_B: one integer a sequence, for scores that draw numbers.

    Returns:
        the keep set, exactly as large as the budget says.

    Raises:
        ValueError: if the budget cannot hold what is protected, or a score is missing.
    """
    valid_BT = evidence.valid_BT
    keeps_all = not policy.learned and all(source is None for source in (policy.observed, observed, score))
    if score is None:
        score = score_entries(policy, evidence, learned=learned, observed=observed, seeds_B=seeds_B)
    score_BHT = score.values_BHT
    if keeps_all:
        return Decision(valid_BT[:, None].expand(score_BHT.shape), score_BHT, valid_BT)

    per_head_B, total_B = budget_tokens(budget, valid_BT, evidence.num_heads, entry_bytes(evidence))
    protected_BT = protected_mask(policy.protection, valid_BT, per_head_B)
    protected_BHT = protected_BT[:, None].expand(score_BHT.shape)
    if (budget.scope or policy.scope) == "head":
        budget_BH = allocate_uniform(total_B, valid_BT.sum(-1, keepdim=True).expand(score_BHT.shape[:2]))
    else:
        budget_BH = allocate_flat(floor(score, policy.floor).values_BHT, protected_BHT, total_B)
    return Decision(select(score_BHT, protected_BHT, budget_BH), score_BHT, protected_BT)


# The short public name: `from retain.policy import score`.
score = score_entries


def entry_bytes(evidence: Evidence) -> int:
    """Bytes of one cached key and value of this layer."""
    keys, values = evidence.keys_BHTD, evidence.values_BHTD
    return keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size()


@dataclass(frozen=True)
class Preset:
    """A policy that ships with the project.

    Args:
        name: what `load_policy` takes.
        unit: unit of its score under that score's default settings.
        needs: what it reads: `window`, `all_queries`, `seeds`, `gates`, ...
        paper: where it comes from.
    """

    name: str
    unit: str
    needs: frozenset[str]
    paper: str


def policies() -> list[Preset]:
    """Every preset, by name.

    Example:
        >>> from retain.policy import policies
        >>> [preset.name for preset in policies() if "gates" in preset.needs]
        ['fused', 'gate']
    """
    presets = []
    for name in sorted(_preset_files()):
        policy = load_policy(name)
        needs = SCORES[policy.observed].needs if policy.observed else frozenset()
        unit = SCORES[policy.observed].unit if policy.observed else "risk" if policy.learned else "rank"
        unit = "rank" if policy.fusion == "rank_blend" else unit
        presets.append(
            Preset(policy.name, unit, needs | ({"gates"} if policy.learned else frozenset()), policy.paper)
        )
    return presets


def load_policy(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Policy:
    """A policy by its preset name or from a YAML file.

    Args:
        name_or_path: a preset (`fused`), or a path that ends in `.yaml`.
        overrides: `key.sub=value`, read as YAML.

    Raises:
        ValueError: unknown preset, or everything that is wrong in the file, at once.
        FileNotFoundError: no such file.

    Example:
        >>> from retain.policy import load_policy
        >>> load_policy("snapkv", ["protection.recent=16"]).protection.recent
        16
    """
    text = str(name_or_path)
    if not text.endswith((".yaml", ".yml")):
        name_or_path = lookup(text, _preset_files(), what="policy")
    return config.load(name_or_path, Policy, overrides)


def _preset_files() -> dict[str, Path]:
    """Presets by name: beside this file in an installed package, in `configs/policy` of a checkout."""
    here = Path(__file__).parent
    folder = here / "policies" if (here / "policies").is_dir() else here.parent / "configs" / "policy"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _settings(name: str) -> tuple[str, ...]:
    """Names of a score's settings: its keyword arguments, without the seeds that the caller passes."""
    return tuple(
        key
        for key in inspect.signature(SCORES[name].function).parameters
        if key not in ("evidence", "seeds_B")
    )

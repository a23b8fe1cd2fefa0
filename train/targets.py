"""What the gates are asked to predict: the logarithm of future risk, on the entries where it is defined.

In: the evidence of one layer over `[context; appendix]`. Out: risk `[B, H, T]` over the context's entries and
which of them count. The one decision taken here: which queries stand for the future (the context's own,
at the distance from which an entry can have been evicted; the question and answer appended after it; or
both). What risk *is* is said in one place only, `retain/future.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.evidence import Evidence
from retain.future import future_risk
from retain.scores import value_norm_l1
from retain.train.data import Batch
from retain.train.losses import keyed_generator, top_overlap


@dataclass(frozen=True)
class TargetSettings:
    """Which future the gates learn.

    Args:
        sources: `own` (the context's later tokens), `appendix` (question and answer), or both.
        horizon: distance in tokens from which an own query counts; the recent window that is protected at
            inference.
        floor: added to the risk before the logarithm, as a share of the head's mean risk; below it all risks
            are alike.
        chunk: queries at a time; bounds the memory, changes no number. None: as many as are quick, in bounded
            memory.
    """

    sources: tuple[Literal["own", "appendix"], ...] = ("own", "appendix")
    horizon: int = 32
    floor: float = 2e-3
    chunk: int | None = None


def check_targets(settings: TargetSettings) -> None:
    """Refuse settings that mean nothing.

    Raises:
        ValueError: with all of them.
    """
    problems = []
    if not settings.sources:
        problems.append("target.sources is empty: name own, appendix, or both")
    if settings.horizon < 1 or (settings.chunk is not None and settings.chunk < 1):
        problems.append(
            f"target.horizon={settings.horizon} and target.chunk={settings.chunk} must be at least 1"
        )
    if settings.floor <= 0:
        problems.append(
            f"target.floor={settings.floor} must be positive: the logarithm of a risk of 0 is not finite"
        )
    if problems:
        raise ValueError("; ".join(problems) + ".")


def layer_target(
    evidence: Evidence, batch: Batch, settings: TargetSettings
) -> tuple[Float[Tensor, "B H T"], Bool[Tensor, "B H T"]]:
    """Future risk of one layer's context entries.

    The boundary between context and appendix lies elsewhere in every row of a left-padded batch, so rows are
    taken one at a time; the result is as wide as the longest reach of a context.

    Returns:
        risk, 0 where it is not defined; and whether some query of the chosen sources can reach the entry.
    """
    ends = [evidence.num_seen - int(length) for length in batch.appendix_length_B]
    B, H = evidence.keys_BHTD.shape[:2]
    risk_BHT = torch.zeros((B, H, max(ends)), device=evidence.keys_BHTD.device)
    reached_BHT = torch.zeros(risk_BHT.shape, dtype=torch.bool, device=risk_BHT.device)
    for row, end in enumerate(ends):
        sources = [source for source in settings.sources if source != "appendix" or end < evidence.num_seen]
        if not sources:
            continue
        risk_BHT[row, :, :end], reached_BHT[row, :, :end] = (
            part[0]
            for part in future_risk(
                evidence.select_batch(slice(row, row + 1)),
                document_tokens=end,
                horizon=settings.horizon,
                sources=sources,
                chunk=settings.chunk,
            )
        )
    return risk_BHT, reached_BHT


def log_risk(risk_BHT: Float[Tensor, "B H T"], floor_H: Float[Tensor, " H"]) -> Float[Tensor, "B H T"]:
    """`log(risk + floor)`, the floor per head."""
    return (risk_BHT + floor_H[:, None]).log()


def baseline_overlaps(
    evidences: Sequence[Evidence], batch: Batch, settings: TargetSettings, seed: int
) -> dict[str, float]:
    """Overlap with the target's top fifth that costs no training, summed over the documents, mean over
    layers.

    `overlap_random` (chance), `overlap_recency` (later is better), `overlap_value_norm` (`||v W_O||_1` alone,
    largest of the group).
    """
    sums: dict[str, float] = {}
    for evidence in evidences:
        risk_BHT, reached_BHT = layer_target(evidence, batch, settings)
        B, H, T = risk_BHT.shape
        draws = [keyed_generator((seed, key, evidence.layer_idx)) for key in batch.keys]
        norm_BQT = value_norm_l1(evidence.values_BHTD[:, :, :T], evidence.output_weight_QDE)
        scores = {
            "overlap_random": torch.stack([torch.rand(H, T, generator=draw) for draw in draws]).to(
                risk_BHT.device
            ),
            "overlap_recency": torch.arange(T, device=risk_BHT.device).float().expand(B, H, T),
            "overlap_value_norm": norm_BQT.unflatten(1, (H, -1)).amax(2),
        }
        for name, score_BHT in scores.items():
            overlap = float(top_overlap(score_BHT, risk_BHT, reached_BHT).sum())
            sums[name] = sums.get(name, 0.0) + overlap / len(evidences)
    return sums

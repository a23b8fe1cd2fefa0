"""Precision as a stage: after selection, what stays may be held in fewer bits, or keys in fewer channels.

A `Precision` says in how many bits entries are held, and which of them stay as they are: the last ones of a
row (KIVI), all that the policy keeps, while what it would evict stays in few bits (MiKV), or the best of what
is kept, while the rest goes (ARKV). `full_masks` chooses the best by the policy's own score. `balance_of` and
`channels_of` look at the queries of the observation window.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from retain.budget.largest_remainder import largest_remainder
from retain.budget.shares import Candidates
from retain.config import Range, Whole, check_fields
from retain.evidence import Evidence
from retain.kernels.codes import SCALES, bytes_wide

# Largest and smallest factor that a channel is balanced by.
MOST_BALANCE = 1e4


@dataclass(frozen=True)
class Precision:
    """Settings.

    Args:
        bits: of a code; None: numbers stay as they are (and only channels go).
        keys: whether a scale of keys is of one `channel` over `group` entries (KIVI, arXiv 2402.02750), or of
            one entry over `group` channels (`token`: MiKV, arXiv 2402.18096). Values have scales of one entry
            over `group` channels each.
        group: entries, or channels, that share a scale, at most D channels; `half`: half of the head's
            channels (MiKV: rotary embeddings turn channels of one half with those of the other).
        rest: whether what the policy would evict stays, in so many bits, and what it keeps stays as it is
            (MiKV). A budget in entries then says how many stay as they are.
        recent: last entries of a row that stay as they are, where nothing else says which. While decoding,
            new entries are quantised once `group` of them (with `half`: `recent`) lie before these.
        full: share of the entries kept which stay as they are, the best by the policy's score, protected ones
            first (`full_masks`); 0: none but the recent.
        full_layers: `uniform`: each layer has the same share of full entries; `preference`: layers share them
            by the weight that the score gives the layer (ARKV, arXiv 2603.08727, with CAKE's score).
        balance: whether keys are multiplied, channel by channel, before they are quantised, and queries
            divided by the same (MiKV, `balance_of`).
        channels: share of a key's channels that are held (ThinK, arXiv 2407.21018, `channels_of`), in (0, 1].
        channel_heads: `equal`: each head holds as many channels; `layer`: the heads of a layer share them by
            score, so that each has a width of its own.
    """

    bits: Literal[8, 4, 2] | None = None
    keys: Literal["channel", "token"] = "channel"
    group: Annotated[int, Range(least=1)] | Literal["half"] = 32
    rest: bool = False
    recent: Whole = 32
    full: Annotated[float, Range(least=0, most=1)] = 0.0
    full_layers: Literal["uniform", "preference"] = "uniform"
    balance: bool = False
    channels: Annotated[float, Range(least=0, most=1)] = 1.0
    channel_heads: Literal["equal", "layer"] = "equal"

    def __post_init__(self) -> None:
        check_fields(self, "precision")
        if self.bits is None and self.channels == 1:
            raise ValueError(
                "precision: nothing is made smaller: state bits (8, 4 or 2), or channels (a share below 1), "
                "or take precision null."
            )
        if self.channels == 0:
            raise ValueError("precision: channels is the share of a key's channels that stay, above 0.")
        if self.full == 1:
            raise ValueError("precision: full 1 leaves nothing to quantise: take precision null.")
        if self.rest and (self.bits is None or self.full):
            raise ValueError(
                "precision: rest holds what would be evicted in few bits, and what is kept as it is: "
                "state bits, and no full."
            )
        if self.group == "half" and self.keys == "channel":
            raise ValueError("precision: group 'half' is of channels, and keys by channel group entries.")
        if self.balance and self.bits is None:
            raise ValueError("precision: balance is read where keys are quantised: state bits too.")
        if self.channel_heads != "equal" and self.channels == 1:
            raise ValueError("precision: channel_heads shares channels, and channels is 1: state a share.")
        if self.full_layers != "uniform" and not self.full:
            raise ValueError("precision: full_layers shares full entries, and full is 0: state a share.")

    @property
    def looks(self) -> bool:
        """Whether queries say how keys are held."""
        return self.balance or self.channels < 1

    @property
    def packs_what_came(self) -> bool:
        """Whether all but the last entries are packed, whatever any score says."""
        return not self.rest and not self.full

    @property
    def shares_scales(self) -> bool:
        """Whether several entries share the scales of their keys."""
        return self.bits is not None and self.keys == "channel"

    @property
    def every(self) -> int:
        """Decoded tokens between two packings."""
        return self.group if isinstance(self.group, int) else max(1, self.recent)

    def span(self, width: int) -> int:
        """Channels of an entry, of so many, that share a scale."""
        return max(1, width // 2) if self.group == "half" else min(self.group, width)

    def width(self, head_dim: int) -> int:
        """Channels that a head's keys have in the mean: half a channel is one."""
        return max(1, math.floor(Fraction(str(self.channels)) * head_dim + Fraction(1, 2)))

    def cost(self, head_dim: int, value_dim: int, element_size: int) -> tuple[Fraction, Fraction]:
        """Bytes of an entry that is packed, or of one that is kept, in the mean; and bytes of a head beside
        its entries, at most.

        Codes, scales, groups and tables count. A group of entries may not be full, for which every head pays
        one group; and its recent entries are as they were.

        Args:
            head_dim, value_dim: D and V.
            element_size: bytes of a number as it was.
        """
        D, V, scale = self.width(head_dim), value_dim, 2 * SCALES.itemsize
        whole = Fraction((head_dim + V) * element_size)

        def pieces(each: int) -> Fraction:
            """So many channels each, of keys: where heads have other widths than the mean, at most."""
            return Fraction(D + (each - 1 if self.channel_heads == "layer" else -D % each), each)

        head = Fraction(0)
        if self.bits is None:
            packed = Fraction((D + V) * element_size)
        else:
            packed = pieces(8 // self.bits) + bytes_wide(V, self.bits) + scale * -(-V // self.span(V))
            if self.keys == "channel":
                packed += 4 + Fraction(scale * D, int(self.group))
                head += scale * D
            else:
                packed += scale * pieces(self.span(D))
        head += 2 * D if self.channels < 1 else 0
        head += 4 * head_dim if self.balance else 0
        if self.rest:
            return packed, head
        if self.full:
            return self._share * whole + (1 - self._share) * packed, head
        return packed, head + self.recent * max(whole - packed, Fraction(0))

    @property
    def _share(self) -> Fraction:
        return Fraction(str(self.full))


def full_masks(
    precision: Precision,
    keeps: Sequence[Bool[Tensor, "B _ _"]],
    ranked: Sequence[Float32[Tensor, "B _ _"]],
    first: Sequence[Bool[Tensor, "B _ _"]],
    weights: Sequence[Sequence[Fraction] | None],
) -> list[Bool[Tensor, "B _ _"]]:
    """Choose which of the entries kept stay as they are, in each layer.

    Where each layer has the same share (`uniform`), `floor(full * n_l)` of the `n_l` entries that it keeps
    stay. By `preference` `floor(full * sum_l n_l)` stay in all, of which layer l has `w_l n_l / sum w n`, at
    most n_l, where w_l is the weight that the score gives it. A head has its part of these by how much it
    keeps; both are rounded by largest remainder. Each head's best stay: guaranteed entries first, then by
    score, of equal scores the later.

    Args:
        keeps: what is kept.
        ranked: scores, of each layer.
        first: entries that come first, such as protected ones.
        weights: of each layer, one a sequence; None: 1. Read by `preference` alone.
    """
    fulls = [torch.zeros_like(keep_BHT) for keep_BHT in keeps]
    counts_LBH = [keep_BHT.sum(-1).tolist() for keep_BHT in keeps]
    for row in range(keeps[0].shape[0]):
        counts = [sum(own[row]) for own in counts_LBH]
        totals = [math.floor(precision._share * count) for count in counts]
        if precision.full_layers == "preference":
            shares = [
                count * (Fraction(1) if own is None else own[row])
                for count, own in zip(counts, weights, strict=True)
            ]
            shares = shares if any(shares) else [Fraction(count) for count in counts]
            totals = largest_remainder(math.floor(precision._share * sum(counts)), shares, counts)
        for layer, own in enumerate(totals):
            heads = counts_LBH[layer][row]
            of_heads = largest_remainder(own, [Fraction(count) for count in heads], heads)
            _choose_(fulls[layer][row], keeps[layer][row], ranked[layer][row], first[layer][row], of_heads)
    return fulls


def fulls_of(
    precision: Precision, candidates: Sequence[Candidates], keeps: Sequence[Bool[Tensor, "B _ _"]]
) -> list[Bool[Tensor, "B _ _"]]:
    """`full_masks`, by what was decided from."""
    return full_masks(
        precision,
        keeps,
        [own.score_BHT for own in candidates],
        [own.kept_BHT for own in candidates],
        [own.preference_B for own in candidates],
    )


def _choose_(
    full_HT: Tensor, keep_HT: Tensor, score_HT: Tensor, first_HT: Tensor, counts: Sequence[int]
) -> None:
    """Mark the best of each head."""
    T = keep_HT.shape[1]
    tiers_HT = torch.where(keep_HT, first_HT.long(), -1)
    # Sorted by one key after another, the last one first: place, score, tier.
    order_HT = torch.arange(T - 1, -1, -1, device=keep_HT.device).expand_as(keep_HT)
    for key_HT in (score_HT, tiers_HT):
        moved = key_HT.to(keep_HT.device).gather(1, order_HT).argsort(dim=1, descending=True, stable=True)
        order_HT = order_HT.gather(1, moved)
    best_HT = torch.arange(T, device=keep_HT.device) < torch.tensor(counts, device=keep_HT.device)[:, None]
    full_HT.scatter_(1, order_HT, best_HT)


def balance_of(evidence: Evidence) -> Float32[Tensor, "R D"]:
    """Factors by which keys are multiplied before they are quantised: `b_c = sqrt(max|q_c| / max|k_c|)`.

    Over all entries and all queries that the evidence shows, of the query heads of a KV head together, after
    RoPE. Keys times b and queries divided by it are equally large in each channel, so that no channel of
    outliers sets the steps of the others. A channel in which either is zero has 1; factors are within 1e-4
    and 1e4.

    No Token Left Behind (MiKV), arXiv 2402.18096, eq. 2, as read in two reimplementations that quote it.
    """
    keys_BHTD, queries_BQSD = evidence.keys_BHTD.float().abs(), evidence.queries_BQSD.float().abs()
    B, H, _, D = keys_BHTD.shape
    most_keys = keys_BHTD.masked_fill(~evidence.exists_BHT[..., None], 0).amax(2).flatten(0, 1)
    shown = queries_BQSD.masked_fill(~evidence.asks_BS[:, None, :, None], 0)
    most_queries = shown.reshape(B * H, -1, D).amax(1)
    factor_RD = (most_queries / most_keys).sqrt().clamp(1 / MOST_BALANCE, MOST_BALANCE)
    return torch.where((most_keys > 0) & (most_queries > 0), factor_RD, 1.0)


def channels_of(
    evidence: Evidence, precision: Precision, keep_BHT: Bool[Tensor, "B H T"], window: int = 32
) -> Bool[Tensor, "R D"]:
    """Channels of each row's keys that are held.

    The score of channel c is `|| Q[:, c] K[:, c]^T ||_F = ||Q[:, c]||_2 ||K[:, c]||_2`, over the last
    `window` queries that are shown (of a KV head's query heads together) and all entries kept. The released
    code takes means of squares, which ranks alike.

    ThinK: Thinner Key Cache by Query-Driven Pruning, arXiv 2407.21018, eq. 5.

    Args:
        evidence: of the layer.
        precision: how many: of each head `width(D)`, or of the heads of a layer together H times that, the
            best of the layer, and at least one of each.
        keep_BHT: entries kept.
        window: queries.
    """
    keep_BHT = keep_BHT.to(evidence.keys_BHTD.device) & evidence.exists_BHT
    keys_BHTD = evidence.keys_BHTD.float().masked_fill(~keep_BHT[..., None], 0)
    queries_BQSD = evidence.queries_BQSD.float().masked_fill(~evidence.asks_BS[:, None, :, None], 0)
    B, H, _, D = keys_BHTD.shape
    of_queries = queries_BQSD[:, :, -window:].reshape(B, H, -1, D).square().sum(2).sqrt()
    score_BHD = of_queries * keys_BHTD.square().sum(2).sqrt()
    width = precision.width(D)
    if precision.channel_heads == "equal":
        held_BHD = torch.zeros_like(score_BHD, dtype=torch.bool)
        held_BHD.scatter_(2, score_BHD.topk(width, dim=2).indices, True)
    else:
        best = score_BHD.argmax(2, keepdim=True)
        first_BHD = score_BHD.scatter(2, best, float("inf"))
        chosen = first_BHD.flatten(1).topk(H * width, dim=1).indices
        held_BHD = torch.zeros(B, H * D, dtype=torch.bool, device=score_BHD.device)
        held_BHD = held_BHD.scatter_(1, chosen, True).view(B, H, D)
    return held_BHD.flatten(0, 1)

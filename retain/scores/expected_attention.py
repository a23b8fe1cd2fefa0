"""Expected attention: scores entries by attention of future queries, distributed like those seen so far.

The queries held are turned back to before RoPE, summarised as a Gaussian per query head, and turned by the
mean rotation of the positions to come; a Gaussian's expected exponential has a closed form. The unit is
`mass`.

The sequence's first entries (`sinks`) are left out of the statistics and of the softmax, as in the released
press, and get the best score of their head, where the press gives one more than the layer's best.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from retain.attention.rotary import turn
from retain.config import Many, Whole
from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family
from retain.scores.value_norm import value_norms
from retain.scores.window import group_heads

# Floats of one product that may exist at once: 64 MiB in float32.
FLOATS_AT_ONCE = 2**24


@family(
    "mass",
    needs=("queries", "rotary"),
    where={("value_norm", "output"): {"needs": ("queries", "rotary", "output_weight")}},
    paper="Expected Attention: Estimating Attention from Future Queries Distribution, arXiv 2510.00636",
)
def expected_attention(
    evidence: Evidence,
    *,
    future: Many = 512,
    sinks: Whole = 4,
    value_norm: Literal["plain", "output"] = "plain",
) -> Score:
    """Expected attention of the next `future` positions, weighted by the value's norm.

    1. per query head, `mean` and `cov` (over N, not N - 1) of the queries before RoPE, over the queries held
       except those of the first `sinks` entries;
    2. `mean' = R mean`, `cov' = R cov R^T`, with `R` the mean of the rotations at the `future` positions
       after the sequence's last;
    3. `z_i = scaling * k_i . mean' + scaling^2 / 2 * k_i . cov' k_i`,
       which is the logarithm of `E[exp(scaling * k_i . q)]` for a Gaussian q; and what is added to the
       entry's logits;
    4. `a = softmax_i(z)` over the entries after the sinks; with the layer's sink logit among them, if it
       has one (`evidence.sinks_Q`), which takes its share and pays for nothing;
    5. `score[i] = mean_{q in group(h)} a_q[i] * N_q[i]`, where N is `||v_i||_2` (`plain`, released) or
       `||v_i W_O^q||_2` (`output`, paper).

    A cap on logits has no closed form and is refused.

    Defaults are those of its authors' released press.

    Args:
        evidence: the layer, with `rotary`. The more queries it holds the better; all of them is the
            published method, and at a later eviction those since the last are what is left of it.
        future: positions to come.
        sinks: entries at the beginning of a sequence that are left out.
        value_norm: which N.

    Returns:
        score in `mass`.

    Raises:
        ValueError: capped logits, or no query after the sinks.
    """
    if evidence.soft_cap is not None:
        raise ValueError(
            f"expected_attention is a closed form of logits without a cap, and layer {evidence.layer_idx} "
            f"caps them at {evidence.soft_cap} (soft_cap): use a score that reads attention, such as snapkv."
        )
    valid_BT, T, S = evidence.valid_BT, evidence.num_seen, evidence.num_queries
    place_BT = evidence.places_BT
    counted_BT = valid_BT & (place_BT >= sinks)
    asked_BS = evidence.asks_BS & counted_BT[:, T - S :]
    number_B = asked_BS.sum(-1)
    for row, number in enumerate(number_B.tolist()):
        if number == 0:
            raise ValueError(
                f"sequence {row} of {len(number_B)} has {int(valid_BT[row].sum())} tokens, of which the last "
                f"{S} queries are held and the first {sinks} are left out as sinks: no query is left to "
                "learn from. Pass fewer sinks, or keep this sequence whole."
            )
    mean_BQD, cov_BQDD = _future_queries(evidence, asked_BS, future)

    H, scaling = evidence.num_heads, evidence.scaling
    keys_BHTD = evidence.keys_BHTD.to(mean_BQD.dtype)
    logits_BHGT = group_heads(mean_BQD, H) @ keys_BHTD.transpose(-1, -2) * scaling
    logits_BHGT = logits_BHGT + quadratic(keys_BHTD, group_heads(cov_BQDD, H)) * (scaling**2 / 2)
    if evidence.log_weight_BHT is not None:
        logits_BHGT = logits_BHGT + evidence.log_weight_BHT[:, :, None]
    rivals_BHT = evidence.exists_BHT & counted_BT[:, None]
    logits_BHGT = logits_BHGT.masked_fill(~rivals_BHT[:, :, None], float("-inf"))
    if evidence.sinks_Q is not None:
        sink_BHG1 = evidence.sinks_Q.to(logits_BHGT.dtype).view(H, -1, 1).expand(*logits_BHGT.shape[:3], 1)
        logits_BHGT = torch.cat([logits_BHGT, sink_BHG1], dim=-1)
    # Where a head holds nothing, a softmax over nothing is NaN, and is masked too.
    attention_BHGT = torch.softmax(logits_BHGT, dim=-1)[..., :T].masked_fill(~rivals_BHT[:, :, None], 0.0)

    if value_norm == "plain":
        score_BHT = attention_BHGT.mean(2) * evidence.values_BHTD.to(mean_BQD.dtype).norm(dim=-1)
    else:
        score_BHT = (attention_BHGT * group_heads(value_norms(evidence, p=2), H)).mean(2)
    best_BH1 = score_BHT.masked_fill(~rivals_BHT, 0.0).amax(-1, keepdim=True)
    score_BHT = torch.where(counted_BT[:, None], score_BHT, best_BH1)
    return masked_score(score_BHT, evidence.exists_BHT, "mass")


def quadratic(
    rows_BHTD: Float[Tensor, "B H T D"],
    forms_BHGDD: Float[Tensor, "B H G D D"],
) -> Float[Tensor, "B H G T"]:
    """`x_i . M_g x_i` for every row x and every form M of its head, a chunk of rows at a time."""
    B, H, T, D = rows_BHTD.shape
    G = forms_BHGDD.shape[2]
    chunk = max(1, FLOATS_AT_ONCE // max(1, B * H * G * D))
    parts = []
    for start in range(0, T, chunk):
        rows = rows_BHTD[:, :, None, start : start + chunk]
        parts.append(((rows @ forms_BHGDD) * rows).sum(-1))
    return torch.cat(parts, dim=-1)


def _future_queries(evidence: Evidence, asked_BS: Tensor, future: int) -> tuple[Tensor, Tensor]:
    """Mean `[B, Q, D]` and covariance `[B, Q, D, D]` of the queries to come."""
    assert evidence.rotary is not None
    S, left_out = evidence.num_queries, ~asked_BS[:, None, :, None]
    queries_BQSD = evidence.rotary.unrotate(evidence.queries_BQSD, evidence.positions_BT[:, -S:])
    number_B11 = asked_BS.sum(-1)[:, None, None]
    mean_BQD = queries_BQSD.masked_fill(left_out, 0.0).sum(2) / number_B11

    ahead_F = torch.arange(1, future + 1, device=evidence.positions_BT.device)
    tables = evidence.rotary.tables(evidence.positions_BT[:, -1:] + ahead_F)
    cos_B1R, sin_B1R = (table.mean(1, keepdim=True).to(mean_BQD.dtype) for table in tables)
    turned_BQD = turn(mean_BQD, cos_B1R, sin_B1R)
    centred = (queries_BQSD - mean_BQD[:, :, None]).masked_fill(left_out, 0.0)
    cov_BQDD = centred.transpose(-1, -2) @ centred / number_B11[..., None]
    cos, sin = cos_B1R[:, None], sin_B1R[:, None]
    # cov R^T turns the rows of cov; R times that turns its columns.
    return turned_BQD, turn(turn(cov_BQDD, cos, sin).transpose(-1, -2), cos, sin)

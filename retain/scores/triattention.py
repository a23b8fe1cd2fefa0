"""TriAttention: scores keys by what the centre of a head's queries will pay them at positions to come.

Before RoPE the queries of a head lie close to one centre, which changes little with the text. With it the
attention logit is a trigonometric series of the distance; where queries scatter, the key's length counts.
"""

import re
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from retain.attention.rotary import Rotary, turn
from retain.config import Many
from retain.evidence import Evidence, Score, masked_score
from retain.scores.family import family
from retain.scores.window import group_heads

_PARTS = ("q_mean_real", "q_mean_imag", "q_abs_mean")
_STEP = (
    "make them for this model with scripts/calibrate.py of github.com/WeianMao/triattention, or leave "
    "centres out"
)


@family(
    "rank",
    needs=("queries", "rotary"),
    paper="TriAttention: Efficient Long Reasoning with Trigonometric KV Compression, arXiv 2604.04921",
    reads=("keys",),
    where={("centres", str): {"needs": ("rotary",)}},  # a file has them
)
def triattention(
    evidence: Evidence,
    *,
    centres: str | None = None,
    furthest: Many = 65536,
) -> Score:
    """Score by the series at distances to come, and by the key's length where queries scatter.

    In pairs f of dimensions that RoPE turns together, as complex numbers before RoPE: with `c_f = E[q_f]` and
    `m_f = E[|q_f|]` of a query head, n the position after the last, and w_f the frequencies,
    `s_q[i, d] = sum_f |c_f| |k_f| cos(w_f (n + d - p_i) + arg c_f - arg k_f) + sum_f (m_f - |c_f|) |k_f|`,
    the mean over `d = 1, 2, 4, ... <= furthest`; dimensions that RoPE leaves alone add the product of their
    means. Less the mean of the head's entries, over their deviation, the largest of the group counts.

    As in its released code (github.com/WeianMao/triattention, each head of each layer by itself), which keeps
    all of the prompt and scores generated tokens.

    Its file of statistics is a mapping: `metadata`, of which `rope_style` is read, and `stats`, where
    `layer07_head03` has `q_mean_real`, `q_mean_imag` (of `c`) and `q_abs_mean` (`m`), `[D / 2]` each. Its
    script measures queries before a norm of queries (Qwen3), and larger by YaRN's factor, which the division
    by the deviation takes off again.

    Args:
        evidence: the layer, with `rotary`; its queries are read where there is no file.
        centres: a `.pt` file of statistics, as the released code publishes them for its models and writes
            them for others (`scripts/calibrate.py` there); None: centres of the queries that the evidence
            holds (at a later eviction those since the last).
        furthest: largest distance to come.

    Returns:
        score in `rank`.

    Raises:
        ValueError: a sequence without queries, or a file of another format or another model.
        FileNotFoundError: no such file.
    """
    rotary = evidence.rotary
    assert rotary is not None
    keys_BHTD = evidence.keys_BHTD.to(torch.promote_types(evidence.keys_BHTD.dtype, torch.float32))
    if centres is None:
        centre_BQD, length_BQF = centres_of(evidence)
    else:
        heads, turned = evidence.queries_BQSD.shape[1], 2 * len(rotary.inverse_frequencies_F)
        stored_Q3F = stored_centres(centres, evidence.layer_idx, heads, turned).to(keys_BHTD)
        stored_BQ3F = stored_Q3F.expand(len(keys_BHTD), -1, -1, -1)
        centre_BQD, length_BQF = stored_BQ3F[:, :, :2].flatten(2), stored_BQ3F[:, :, 2]
    # Turned by where the query will be, the centre's product with a key as cached is the series.
    distances = 2 ** torch.arange(furthest.bit_length(), device=keys_BHTD.device)
    ahead_BN = evidence.positions_BT[:, -1:] + 1 + distances
    cos_B1NR, sin_B1NR = (table[:, None].to(keys_BHTD) for table in rotary.tables(ahead_BN))
    turned_BQND = turn(centre_BQD[:, :, None].expand(-1, -1, len(distances), -1), cos_B1NR, sin_B1NR)
    turned_BHGD = group_heads(turned_BQND.mean(2), evidence.num_heads)
    series_BHGT = turned_BHGD @ keys_BHTD.transpose(-1, -2)
    scatter_BQF = length_BQF - pair_lengths(centre_BQD, rotary)
    scatter_BHGF = group_heads(scatter_BQF, evidence.num_heads) * rotary.scaling
    values_BHGT = series_BHGT + scatter_BHGF @ pair_lengths(keys_BHTD, rotary).transpose(-1, -2)
    values_BHGT = _standardised(values_BHGT, evidence.exists_BHT[:, :, None])
    return masked_score(values_BHGT.amax(2), evidence.exists_BHT, "rank")


def centres_of(evidence: Evidence) -> tuple[Float[Tensor, "B Q D"], Float[Tensor, "B Q F"]]:
    """Mean of the queries before RoPE, and mean length of each of their pairs.

    Raises:
        ValueError: a sequence has no query.
    """
    rotary, S = evidence.rotary, evidence.num_queries
    assert rotary is not None
    asked_B1S1 = evidence.asks_BS[:, None, :, None]
    number_B11 = asked_B1S1.sum(2)
    if not bool((number_B11 > 0).all()):
        raise ValueError(
            "triattention takes centres of the queries, and a sequence has none: name a file of centres, or "
            "record queries."
        )
    plain_BQSD = rotary.unrotate(evidence.queries_BQSD, evidence.positions_BT[:, evidence.num_seen - S :])
    plain_BQSD = plain_BQSD.masked_fill(~asked_B1S1, 0.0)
    lengths_BQSF = pair_lengths(plain_BQSD, rotary)
    return plain_BQSD.sum(2) / number_B11, lengths_BQSF.sum(2) / number_B11


def pair_lengths(x: Float[Tensor, "*rows D"], rotary: Rotary) -> Float[Tensor, "*rows F"]:
    """Length of each pair of dimensions that RoPE turns together."""
    F = len(rotary.inverse_frequencies_F)
    return torch.hypot(x[..., :F], x[..., F : 2 * F])


def _standardised(values_BHGT: Tensor, exists_BH1T: Tensor) -> Tensor:
    """Less the mean over the entries that exist, over their deviation (over N)."""
    count = exists_BH1T.sum(-1, keepdim=True).clamp_min(1)
    mean = values_BHGT.masked_fill(~exists_BH1T, 0.0).sum(-1, keepdim=True) / count
    centred = values_BHGT - mean
    variance = centred.masked_fill(~exists_BH1T, 0.0).square().sum(-1, keepdim=True) / count
    return centred / variance.sqrt().clamp_min(1e-6)


def stored_centres(path: str, idx: int, heads: int, width: int) -> Float[Tensor, "Q 3 F"]:
    """Real and imaginary part of `c`, and `m`, of a layer in a file.

    Args:
        width: dimensions of a head that RoPE turns.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not of the published format, or of a model of another shape.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"query centres {path!r} do not exist: {_STEP}.")
    found_Q3F = _read(path).get(idx)
    shape = None if found_Q3F is None else tuple(found_Q3F.shape)
    if found_Q3F is None or shape != (heads, 3, width // 2):
        raise ValueError(
            f"query centres {path!r} hold {shape} for layer {idx}, wanted {(heads, 3, width // 2)} (query "
            f"heads, 3, half a head's width): {_STEP}."
        )
    return found_Q3F


@cache
def _read(path: str) -> dict[int, Float[Tensor, "Q 3 F"]]:
    """Layer -> real and imaginary part of `c` and `m`, of every query head."""
    found: dict[int, dict[int, Tensor]] = {}
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        if (style := stored["metadata"].get("rope_style", "half")) != "half":
            raise ValueError(f"rope_style is {style!r}, and 'half' is read")
        for name, parts in stored["stats"].items():
            layer, head = map(int, re.findall(r"\d+", name))
            found.setdefault(layer, {})[head] = torch.stack([parts[part].float() for part in _PARTS])
        made = {idx: torch.stack([heads[head] for head in range(len(heads))]) for idx, heads in found.items()}
        if any(layer.ndim != 3 or not bool(layer.isfinite().all()) for layer in made.values()):
            raise ValueError("they are not finite numbers, one for each pair of dimensions")
    except Exception as error:  # the unpickler raises whatever a broken file leads it to
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"query centres {path!r} could not be read as TriAttention's statistics ({type(error).__name__}: "
            f"{reason}): {_STEP}."
        ) from None
    return made

"""FASA: the pairs of channels that find a head's important tokens predict them, and only those are read.

RoPE turns channels in pairs, each with a frequency. In a few pairs the product of query and key ranks tokens
as the whole head does (*contextual agreement*); which they are is measured once a model
(`retain.eval.diagnose.dominant_pairs`). The product over these *dominant* pairs chooses tokens, and attention
over the chosen ones is exact.

FASA: Frequency-Aware Sparse Attention, arXiv 2602.03152; code github.com/AMAP-ML/FASA-ICLR2026. The paper's
text beyond its abstract could not be read: formulas are those of the code and of a summary of the paper. What
differs:

- *Pairs.* RoPE of Llama and its relatives turns channel f with channel `f + R/2`. The code slices
  neighbouring channels, `2f` and `2f + 1`, of such models, which RoPE does not turn together. Here pairs are
  RoPE's.
- *Query heads.* The code repeats KV heads: each query head has dominant pairs and tokens of its own. Here a
  KV head has the pairs that agree best in the mean over its group, and the group chooses tokens together
  (`Reading.group`), so that a KV head is read once.
- The code reads layer 0 whole, forces no sinks and no recent tokens, and takes 16 of 64 pairs. Here the token
  itself is always read.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.head_tables import row_of


def dominant_channels(path: str, layer_idx: int, num_heads: int, pairs: int, width: int) -> Tensor:
    """Channels `[H, 2 * pairs]` of a layer's dominant pairs, as int64 on the CPU.

    Args:
        path: the table: of each KV head the agreement of each RoPE pair, head after head.
        pairs: how many are taken; of equal ones the lower frequency index.
        width: RoPE pairs of a head.
    """
    row = row_of("dominant_pairs", path, layer_idx, num_heads * width)
    agreement_HF = torch.tensor(row, dtype=torch.float64).view(num_heads, width)
    pairs_Hn = agreement_HF.sort(dim=-1, descending=True, stable=True).indices[:, :pairs].sort(-1).values
    return torch.cat([pairs_Hn, pairs_Hn + width], dim=-1)


def pair_scores(
    queries_RGD: Float[Tensor, "R G D"], keys_RTc: Float[Tensor, "R T c"], channels_Rc: Int[Tensor, "R c"]
) -> Float[Tensor, "R G T"]:
    """`s[g, t] = sum over dominant pairs f of q_g[f] k_t[f] + q_g[f + F] k_t[f + F]`.

    Args:
        queries_RGD: the query heads of each row, after RoPE.
        keys_RTc: the dominant channels of every key.
        channels_Rc: which they are.
    """
    index = channels_Rc[:, None].expand(-1, queries_RGD.shape[1], -1)
    return queries_RGD.gather(2, index) @ keys_RTc.transpose(1, 2).to(queries_RGD.dtype)

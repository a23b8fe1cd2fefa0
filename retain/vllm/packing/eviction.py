"""Shows the entries of one prompt to a policy, and packs those that it keeps.

Until then an entry lies where the engine wrote it: that of token `t` in the page of its head in the request's
block `t // page`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from retain.budget.statement import Budget
from retain.evidence import Evidence
from retain.vllm.packing.pages import PageStore


@dataclass(frozen=True)
class Arrival:
    """A request that is evicted from when the last token of its prompt has been computed.

    All of it follows from the request's length and budget, so that scheduler and workers agree: what stays of
    its `length // page` full pages a head is packed into its first `kept` blocks, and the others are free.

    Args:
        request_id: its id.
        length: tokens of its prompt.
        kept: pages a head, in the mean, that stay of its full ones.
        budget: what it may keep.
        seed: of the draw.
    """

    request_id: str
    length: int
    kept: int
    budget: Budget
    seed: int


def with_tokens(
    layer: Evidence, keys_BHTD: Float[Tensor, "B H T D"], values_BHTD: Float[Tensor, "B H T D"], **seen: Any
) -> Evidence:
    """Evidence of a layer's tokens, B = 1; fields that no method reads stay empty.

    Args:
        layer: the same without tokens.
        keys_BHTD, values_BHTD: of the tokens.
        **seen: further fields.
    """
    T, device = keys_BHTD.shape[2], keys_BHTD.device
    positions_BT = torch.arange(T, device=device)[None]
    seen |= {"positions_BT": positions_BT, "valid_BT": torch.ones_like(positions_BT, dtype=torch.bool)}
    return replace(layer, keys_BHTD=keys_BHTD, values_BHTD=values_BHTD, **seen)


@torch.no_grad()
def pack_(
    pages: PageStore, blocks_B: Int64[Tensor, " blocks"], kept: int, keeps: Sequence[Bool[Tensor, "H T"]]
) -> Int32[Tensor, " starts"]:
    """Pack what stays of a prompt's full pages into the first of its blocks.

    Args:
        pages: of all layers.
        blocks_B: of the prompt, in order.
        kept: pages a head, in the mean, that stay.
        keeps: which entries of the prompt each layer keeps.

    Returns:
        starts of the heads among the packed pages (`retain.vllm.packing.tables`).
    """
    layout, page, full = pages.layout, pages.layout.page, keeps[0].shape[1] // pages.layout.page
    counts, entries = [], []
    for layer, keep_HT in enumerate(keeps):
        full_HT = keep_HT[:, : full * page].to(blocks_B.device)
        counts.append(full_HT.sum(-1))
        numbers_N = pages.numbers(layer, blocks_B[:full]).flatten()
        entries.append([part.flatten(0, 1)[full_HT.flatten()] for part in pages.read(numbers_N)])
    counts_P = torch.cat(counts)
    assert not (counts_P % page).any(), "heads keep whole pages"
    assert int(counts_P.sum()) == kept * layout.per_block * page, "as many entries as the scheduler expects"
    order_N = torch.arange(kept * layout.per_block, device=blocks_B.device)
    target_N = layout.number(blocks_B[order_N // layout.per_block], order_N % layout.per_block)
    keys, values = (torch.cat(parts).unflatten(0, (-1, page)) for parts in zip(*entries, strict=True))
    pages.put_(target_N, keys, values)
    return torch.nn.functional.pad((counts_P // page).cumsum(0), (1, 0)).int()

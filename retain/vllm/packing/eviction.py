"""One eviction: shows what a prompt holds to the policy, and packs what stays.

Until then an entry lies where the engine wrote it: that of token `t` in the page of its head in the request's
block `t // page`. Side by side with a page's keys and values lies what the gates noted of its entries when
they came.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from retain.gates.base import GateSet
from retain.vllm.packing.decide import Layer, Shown, decide
from retain.vllm.packing.pages import PageStore
from retain.vllm.packing.progress import Arrival
from retain.vllm.packing.tables import packed_entries, page_numbers
from retain.vllm.settings import Rules


class Memory:
    """Pages, and what lies beside each of their entries.

    Args:
        pages: the engine's.
        notes: whether gates note anything.
    """

    def __init__(self, pages: PageStore, *, notes: bool):
        self.pages, self.layout = pages, pages.layout
        shape, device = (len(pages.pages), pages.layout.page), pages.pages.device
        self.noted_PE = torch.zeros(shape, device=device) if notes else None

    def note_(
        self, layer: Int[Tensor, ""], slots_N: Int64[Tensor, " N"], noted_NH: Float[Tensor, "N H"]
    ) -> None:
        """Note numbers of a layer's tokens.

        Args:
            layer: its place in the allocation.
            slots_N: `block * page + place in the block` of each token.
        """
        assert self.noted_PE is not None
        heads_H = torch.arange(self.layout.num_heads, device=slots_N.device)
        pages_NH = page_numbers(self.layout, slots_N[:, None] // self.layout.page, layer, heads_H)
        self.noted_PE[pages_NH, (slots_N % self.layout.page)[:, None]] = noted_NH


@torch.no_grad()
def evict(
    rules: Rules,
    layers: Sequence[Layer],
    memory: Memory,
    blocks_B: Int64[Tensor, " blocks"],
    window_LQSD: Float[Tensor, "L Q S D"] | None,
    asked: Arrival,
    gates: GateSet | None = None,
) -> tuple[Int[Tensor, " P"], list[Bool[Tensor, "H T"]]]:
    """Decide which entries of a prompt stay, and pack them.

    Args:
        rules: the policy.
        layers: those that evict.
        memory: their pages.
        blocks_B: of the prompt, in order.
        window_LQSD: its last queries; None where the policy observes none.
        asked: the request.
        gates: of a learned policy.

    Returns:
        starts of the heads among the packed pages (`retain.vllm.packing.tables`), and which entries of the
        prompt each layer keeps.
    """
    layout, pages, device = memory.layout, memory.pages, blocks_B.device
    tokens_T = torch.arange(asked.length, device=device)
    entries_HT = (tokens_T % layout.page).expand(layout.num_heads, -1)
    heads_H1 = torch.arange(layout.num_heads, device=device)[:, None]

    def pages_of(place: int) -> Int64[Tensor, "H T"]:
        layer = torch.tensor(pages.places[place], device=device)
        return page_numbers(layout, blocks_B[tokens_T // layout.page], layer, heads_H1)

    def show(place: int) -> Shown:
        pages_HT = pages_of(place)
        keys, values = (
            one_ND.view(1, *pages_HT.shape, -1)
            for one_ND in pages.read(pages_HT.flatten(), entries_HT.flatten())
        )
        noted = None if memory.noted_PE is None else memory.noted_PE[pages_HT, entries_HT][None]
        return Shown(keys, values, None if window_LQSD is None else window_LQSD[place][None], noted)

    keeps = decide(rules, layers, show, asked=asked, gates=gates)
    counts, sources = [], []
    for place, keep_HT in enumerate(keeps):
        full_HT = keep_HT[:, : asked.length // layout.page * layout.page]
        heads_N, tokens_N = full_HT.nonzero(as_tuple=True)
        counts.append(full_HT.sum(-1))
        sources.append((pages_of(place)[heads_N, tokens_N], tokens_N % layout.page))
    counts_P = torch.cat(counts)
    total = int(counts_P.sum())
    assert not (counts_P % layout.page).any(), "heads keep whole pages"
    assert total == asked.kept * layout.per_block * layout.page, "what stays is what was announced"
    source = tuple(torch.cat(parts) for parts in zip(*sources, strict=True))
    target = packed_entries(layout, blocks_B[: asked.kept], total)
    pages.put_(*target, *pages.read(*source))
    if memory.noted_PE is not None:
        memory.noted_PE[target] = memory.noted_PE[source]
    starts_P = torch.zeros(len(counts_P) + 1, dtype=torch.int32, device=device)
    starts_P[1:] = (counts_P // layout.page).cumsum(0)
    return starts_P, keeps

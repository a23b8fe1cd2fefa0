"""One eviction: shows what a prompt holds to the policy, decides, and packs what stays.

Until then an entry lies where the engine wrote it: that of token `t` in the page of its head in the request's
block `t // page`. Side by side with a page's keys and values lies what the gates noted of its entries when
they came. The stages of the decision are those of `retain.policy`; layers are shown one by one, so that one
layer's copy of its keys and values exists at a time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.evidence import Evidence
from retain.gates.base import GateSet
from retain.policy import candidates_of, score_entries
from retain.vllm.packing.pages import PageStore
from retain.vllm.packing.progress import Arrival
from retain.vllm.packing.tables import packed_pages, page_numbers
from retain.vllm.packing.whole_pages import keep_pages
from retain.vllm.settings import Rules


@dataclass(frozen=True)
class Layer:
    """What is known of a layer, whatever the prompt.

    Args:
        layer_idx: number in the model.
        num_queries: query heads here.
        scaling: of the logits.
        soft_cap: on the logits.
        output_weight_QDE: output projection; None where no score reads it.
        first_head: number of the first KV head here, of `all_heads` in the model (tensor parallelism).
        all_heads: KV heads of the layer in the model.
        rotary: of its queries and keys; None if it is not understood.
    """

    layer_idx: int
    num_queries: int
    scaling: float
    soft_cap: float | None = None
    output_weight_QDE: Float[Tensor, "Q D E"] | None = None
    first_head: int = 0
    all_heads: int = 1
    rotary: Rotary | None = None

    def evidence(self, keys_BHTD: Float[Tensor, "B H T D"], **seen: Any) -> Evidence:
        """What is shown of the layer's tokens; B = 1.

        Args:
            keys_BHTD: of the tokens.
            **seen: further fields of the evidence. Those that it has to have, and nobody looks at, are empty.
        """
        B, _, T, D = keys_BHTD.shape
        fields: dict[str, Any] = {
            "queries_BQSD": keys_BHTD.new_zeros(B, self.num_queries, 0, D),
            "values_BHTD": keys_BHTD,
            "output_weight_QDE": self.output_weight_QDE,
            "positions_BT": torch.arange(T, device=keys_BHTD.device)[None],
            "valid_BT": torch.ones(B, T, dtype=torch.bool, device=keys_BHTD.device),
            **{
                name: getattr(self, name)
                for name in ("layer_idx", "scaling", "soft_cap", "rotary", "first_head")
            },
        } | seen
        if fields["output_weight_QDE"] is None:
            width = 1 if seen.get("hidden_BTE") is None else seen["hidden_BTE"].shape[-1]
            one = keys_BHTD.new_zeros(1, 1, 1)
            fields["output_weight_QDE"] = one.expand(fields["queries_BQSD"].shape[1], D, width)
        return Evidence(keys_BHTD=keys_BHTD, **fields)


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

    def page_numbers(self, place: int, blocks_B: Int64[Tensor, " blocks"]) -> Int64[Tensor, "H blocks"]:
        """Pages of a layer (its place among those that evict) in some blocks."""
        layer = torch.tensor(self.pages.places[place], device=blocks_B.device)
        heads_H1 = torch.arange(self.layout.num_heads, device=blocks_B.device)[:, None]
        return page_numbers(self.layout, blocks_B, layer, heads_H1)

    def note_(self, place: int, slots_N: Int64[Tensor, " N"], noted_NH: Float[Tensor, "N H"]) -> None:
        """Note numbers of a layer's tokens.

        Args:
            place: of the layer.
            slots_N: `block * page + place in the block` of each token.
        """
        assert self.noted_PE is not None
        pages_NH = self.page_numbers(place, slots_N // self.layout.page).T
        self.noted_PE[pages_NH, (slots_N % self.layout.page)[:, None]] = noted_NH

    def show(self, place: int, blocks_B: Int64[Tensor, " blocks"], length: int) -> dict[str, Any]:
        """Keys, values and notes of a prompt's layer, as fields of its evidence."""
        pages_HB = self.page_numbers(place, blocks_B)
        keys, values = (
            own.view(1, self.layout.num_heads, -1, self.pages.head_dim)[:, :, :length]
            for own in self.pages.read(pages_HB.flatten())
        )
        noted = None if self.noted_PE is None else self.noted_PE[pages_HB].flatten(1)[None, :, :length]
        return {"keys_BHTD": keys, "values_BHTD": values, "learned_BHT": noted}


@torch.no_grad()
def decide(
    rules: Rules, shown: Iterable[Evidence], asked: Arrival, gates: GateSet | None = None
) -> list[Bool[Tensor, "H T"]]:
    """Keep masks of a prompt, of all layers.

    Args:
        rules: the policy.
        shown: what each layer holds, in order.
        asked: the request.
        gates: of a learned policy.

    Raises:
        ValueError: the budget cannot hold what is protected, or a score is NaN.
    """
    scores = []
    for evidence in shown:
        learned = gates.score(evidence) if gates is not None else None
        scores.append(score_entries(rules.policy, evidence, learned=learned, seeds_B=[asked.seed]))
    plan = rules.plan(asked.length, asked.budget)
    keeps = keep_pages(plan, [candidates_of(plan, score) for score in scores], rules.page)
    return [keep_BHT[0] for keep_BHT in keeps]


def last_entries(rules: Rules, asked: Arrival) -> list[Bool[Tensor, "H T"]]:
    """Keep masks of as many pages, of the last entries of every head, which need no score.

    They stand in where a request's own scores are not finite: blocks that were announced to be free have to
    be, and one request may not stop an engine.
    """
    first = (asked.length // rules.page - asked.kept) * rules.page
    return [(torch.arange(asked.length) >= first).expand(heads, -1) for heads in rules.heads_L]


@torch.no_grad()
def pack_(
    memory: Memory, blocks_B: Int64[Tensor, " blocks"], kept: int, keeps: Sequence[Bool[Tensor, "H T"]]
) -> Int[Tensor, " P"]:
    """Pack what stays of a prompt's full pages into the first of its blocks.

    Args:
        memory: of its layers.
        blocks_B: of the prompt, in order.
        kept: pages a head, in the mean, that stay.
        keeps: which entries of the prompt each layer keeps.

    Returns:
        starts of the heads among the packed pages (`retain.vllm.packing.tables`).
    """
    layout, device = memory.layout, blocks_B.device
    page, T = layout.page, keeps[0].shape[1]
    counts, entries = [], list[list[Any]]()
    for place, keep_HT in enumerate(keeps):
        full_HT = keep_HT[:, : T // page * page].to(device)
        shown = memory.show(place, blocks_B[: T // page], full_HT.shape[1])
        counts.append(full_HT.sum(-1))
        entries.append([None if own is None else own[0][full_HT] for own in shown.values()])
    counts_P = torch.cat(counts)
    assert not (counts_P % page).any(), "heads keep whole pages"
    assert int(counts_P.sum()) == kept * layout.per_block * page, "what stays is what was announced"
    order_N = torch.arange(kept * layout.per_block, device=device)
    target_N = packed_pages(layout, order_N, blocks_B[order_N // layout.per_block])
    keys, values, noted = zip(*entries, strict=True)
    memory.pages.put_(target_N, *(torch.cat(own).unflatten(0, (-1, page)) for own in (keys, values)))
    if memory.noted_PE is not None:
        memory.noted_PE[target_N] = torch.cat(noted).view(-1, page)
    starts_P = torch.zeros(len(counts_P) + 1, dtype=torch.int32, device=device)
    starts_P[1:] = (counts_P // page).cumsum(0)
    return starts_P

"""One eviction: shows what a prompt holds to the policy, decides, and packs what stays.

Until then an entry lies where the engine wrote it: that of token `t` in the page of its head in the request's
block `t // page`. The stages of the decision are those of `retain.policy`; layers are shown one by one, so
that one layer's copy of its keys and values exists at a time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.evidence import Evidence
from retain.gates.base import GateSet
from retain.policy import candidates_of, score_entries
from retain.vllm.packing.pages import PageStore
from retain.vllm.packing.progress import Arrival
from retain.vllm.packing.tables import packed_pages
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
        """What is shown of the layer's tokens, B = 1; fields that nobody looks at are empty."""
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


@torch.no_grad()
def decide(
    rules: Rules, shown: Iterable[Evidence], asked: Arrival, gates: GateSet | None = None
) -> list[Bool[Tensor, "H T"]]:
    """Keep masks of a prompt, of all layers, from what each of them shows.

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
    pages: PageStore, blocks_B: Int64[Tensor, " blocks"], kept: int, keeps: Sequence[Bool[Tensor, "H T"]]
) -> Int32[Tensor, " P"]:
    """Pack what stays of a prompt's full pages into the first of its blocks.

    Args:
        pages: of all layers.
        blocks_B: of the prompt, in order.
        kept: pages a head, in the mean, that stay.
        keeps: which entries of the prompt each layer keeps.

    Returns:
        starts of the heads among the packed pages (`retain.vllm.packing.tables`).
    """
    layout, page, T = pages.layout, pages.layout.page, keeps[0].shape[1]
    counts, entries = [], []
    for place, keep_HT in enumerate(keeps):
        full_HT = keep_HT[:, : T // page * page].to(blocks_B.device)
        counts.append(full_HT.sum(-1))
        numbers_HB = pages.numbers(place, blocks_B[: T // page])
        entries.append([own.flatten(0, 1)[full_HT.flatten()] for own in pages.read(numbers_HB.flatten())])
    counts_P = torch.cat(counts)
    assert not (counts_P % page).any(), "heads keep whole pages"
    assert int(counts_P.sum()) == kept * layout.per_block * page, "what stays is what was announced"
    order_N = torch.arange(kept * layout.per_block, device=blocks_B.device)
    target_N = packed_pages(layout, order_N, blocks_B[order_N // layout.per_block])
    keys, values = (torch.cat(own).unflatten(0, (-1, page)) for own in zip(*entries, strict=True))
    pages.put_(target_N, keys, values)
    return torch.nn.functional.pad((counts_P // page).cumsum(0), (1, 0)).int()

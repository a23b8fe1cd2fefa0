"""Simulates corrections of what stays behind the same selection, before any of them is built into a cache.

    python -m retain.eval.studies.corrections --gates runs/gates-seed0 --seed 0 --out rows.jsonl
    python -m retain.eval.studies.corrections --report rows.jsonl [rows.jsonl ...]
    python -m retain.eval.studies.corrections --report results/merge/items.jsonl --pairs "A 0.02=B 0.05"

Each item's context is read once. For each selection (`fused`, the oracle under its budget) and ratio, every
correction answers from a dense cache whose evicted entries are masked, whose other keys and values it may
have replaced, and whose logits have a bias for each entry of each head. What a bias costs is not counted
here: this asks whether a correction is worth its column.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AttentionInterface, DynamicCache

from retain.eval.config import CompareConfig, Line, lines_of, suite_of
from retain.eval.run.answers import Answer, alike, cut
from retain.eval.run.caches import Batch, Prefill, SingleEviction
from retain.eval.run.evaluated_model import load_evaluated, plan
from retain.eval.stats.paired_result import adjust, compare_paired
from retain.eval.tasks.suite import Suite
from retain.hf.version_names import CACHE
from retain.process.command import command
from retain.scores import observed_risk

NAME = "retain_corrected"
JOINT = ("scope=model", "protection.prefix_fraction=0", "protection.suffix_fraction=0")
LEAST = ("protection.minimum=0", "protection.recent=8")


@dataclass
class Rows:
    """One layer's rows (sequence, KV head) before an eviction; R of them.

    Args:
        plain_RTD: keys before RoPE.
        observed_RT: risk that the last 8 queries saw.
    """

    keys_RTD: Float[Tensor, "R T D"]
    plain_RTD: Float[Tensor, "R T D"]
    values_RTV: Float[Tensor, "R T V"]
    exists_RT: Bool[Tensor, "R T"]
    ids_RT: Int[Tensor, "R T"]
    observed_RT: Float[Tensor, "R T"]


@dataclass
class Cut:
    """The same, with what stays.

    Args:
        ranked_RT: what stays with a larger score than everything that goes: it was not drawn.
        learned_RT: score that ranks.
    """

    rows: Rows
    keep_RT: Bool[Tensor, "R T"]
    ranked_RT: Bool[Tensor, "R T"]
    learned_RT: Float[Tensor, "R T"]
    found: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def kept_RK(self) -> Int[Tensor, "R K"]:
        """Columns that stay, filled up with T."""
        T = self.keep_RT.shape[1]
        place_RT = torch.arange(T).masked_fill(~self.keep_RT, T)
        return place_RT.sort(-1).values[:, : int(self.keep_RT.sum(-1).max())]

    def like(self, name: str) -> Float[Tensor, "R T K"]:
        """Similarity of every entry to those that stay; -2 to what fills up."""
        if name not in self.found:
            self.found[name] = self._like(name).masked_fill(
                (self.kept_RK == self.keep_RT.shape[1])[:, None], -2.0
            )
        return self.found[name]

    def _like(self, name: str) -> Float[Tensor, "R T K"]:
        rows, at_RK = self.rows, self.kept_RK.clamp_max(self.keep_RT.shape[1] - 1)
        if name == "same token":  # less a little by distance, so that the nearest is taken
            place_T = torch.arange(rows.ids_RT.shape[1])
            far_RTK = (place_T[:, None] - at_RK[:, None]).abs() / (10 * len(place_T))
            same_RTK = rows.ids_RT[:, :, None] == rows.ids_RT.gather(1, at_RK)[:, None]
            return torch.where(same_RTK, 1 - far_RTK, -1.0)
        side = {"keys": rows.keys_RTD, "before RoPE": rows.plain_RTD, "values": rows.values_RTV}[name]
        unit_RTD = normalize(side, dim=-1)
        return unit_RTD @ unit_RTD.gather(1, at_RK[..., None].expand(-1, -1, unit_RTD.shape[-1])).mT

    def barred(self, targets: str) -> Bool[Tensor, "R K"]:
        """Kept entries that nothing is merged into."""
        at_RK = self.kept_RK.clamp_max(self.keep_RT.shape[1] - 1)
        ranked_RK = self.ranked_RT.gather(1, at_RK)
        last_RK = at_RK - self.keep_RT.shape[1]
        first_RK = at_RK + self.rows.exists_RT.sum(-1, keepdim=True) - self.keep_RT.shape[1]
        return {
            "all": torch.zeros_like(ranked_RK),
            "ranked": ~ranked_RK,
            "drawn": ranked_RK,
            "but the last 8": last_RK >= -8,
            "but the last 32": last_RK >= -32,
            "but the first 4 and last 8": (last_RK >= -8) | (first_RK < 4),
        }[targets]


# Keys, values, and logit bias of every entry; of what goes they do not matter.
Corrected = tuple[Tensor, Tensor, Tensor]
Correction = Callable[[Cut], Corrected]


def none(cut: Cut) -> Corrected:
    """What stays, as it was."""
    return cut.rows.keys_RTD, cut.rows.values_RTV, torch.zeros(cut.keep_RT.shape)


def merge(
    threshold: float,
    similarity: str = "keys",
    *,
    targets: str = "all",
    count: bool = False,
    keys: bool = False,
    weight: str = "count",
    values_too: bool = False,
) -> Correction:
    """The weighted mean of a kept entry and of those evicted ones whose most similar kept entry it is.

    Args:
        threshold: least similarity.
        targets: what others may be merged into (`Cut.barred`).
        count: the logarithm of what an entry stands for is its logit bias.
        keys: they become means too.
        weight: `count`: each counts 1; `observed` risk, or the larger of that and the `learned` one.
        values_too: values must be as similar.
    """

    def corrected(cut: Cut) -> Corrected:
        like_RTK = cut.like(similarity)
        if values_too:
            like_RTK = torch.minimum(like_RTK, cut.like("values"))
        like_RTK = like_RTK.masked_fill(cut.barred(targets)[:, None], -2.0)
        best_RT, place_RT = like_RTK.max(-1)
        to_RT = cut.kept_RK.clamp_max(cut.keep_RT.shape[1] - 1).gather(1, place_RT)
        goes_RT = cut.rows.exists_RT & ~cut.keep_RT & (best_RT >= threshold)
        own_RT = torch.ones(goes_RT.shape)
        if weight != "count":
            own_RT = cut.rows.observed_RT.clamp_min(1e-12)
        if weight == "both":
            own_RT = torch.maximum(own_RT, cut.learned_RT)
        sum_RT = own_RT.scatter_add(1, to_RT, goes_RT * own_RT)

        def mean(x: Tensor) -> Tensor:
            added = x * (goes_RT * own_RT)[..., None]
            return (x * own_RT[..., None]).scatter_add(1, to_RT[..., None].expand_as(x), added) / sum_RT[
                ..., None
            ]

        number_RT = torch.ones(goes_RT.shape).scatter_add(1, to_RT, goes_RT.float())
        bias_RT = number_RT.log() if count else torch.zeros(goes_RT.shape)
        return mean(cut.rows.keys_RTD) if keys else cut.rows.keys_RTD, mean(cut.rows.values_RTV), bias_RT

    return corrected


SPARED = "but the last 8"
CORRECTIONS: dict[str, Correction] = {
    "none": none,
    **{f"into any, {at:g}": merge(at) for at in (-1.0, 0.5, 0.7, 0.8, 0.9)},
    **{f"into any, {at:g}, count": merge(at, count=True) for at in (0.7, 0.8)},
    "before RoPE, 0.8": merge(0.8, "before RoPE"),
    "values alike too, 0.5": merge(0.5, values_too=True),
    "into drawn, 0.8": merge(0.8, targets="drawn"),
    "into ranked, 0.8": merge(0.8, targets="ranked"),
    "same token": merge(0.5, "same token"),
    "same token, count": merge(0.5, "same token", count=True),
    "keys too, 0.8": merge(0.8, keys=True),
    f"{SPARED}, 0.8": merge(0.8, targets=SPARED),
    "but the last 32, 0.8": merge(0.8, targets="but the last 32"),
    "but the last 32, 0.8, count": merge(0.8, targets="but the last 32", count=True),
    **{f"spared, {at:g}": merge(at, targets="but the first 4 and last 8") for at in (0.7, 0.8)},
    **{
        f"spared, {at:g}, count": merge(at, targets="but the first 4 and last 8", count=True)
        for at in (0.7, 0.8)
    },
    **{f"by observed risk, {at:g}": merge(at, weight="observed") for at in (0.5, 0.7, 0.8)},
    "by observed risk, 0.8, count": merge(0.8, weight="observed", count=True),
    "by observed risk, but the last 32, 0.8": merge(0.8, weight="observed", targets="but the last 32"),
    "by observed risk, but the last 32, 0.8, count": merge(
        0.8, weight="observed", targets="but the last 32", count=True
    ),
    "by the larger risk, 0.8": merge(0.8, weight="both"),
}
OF_ORACLE = ("none", "but the last 32, 0.8, count", "spared, 0.8", "spared, 0.8, count")


# Bias of each layer's entries, where a query head of its group asks: set before each forward.
BIAS: list[Tensor] = []


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """Attention with a bias for each entry of each KV head; new tokens see those before them."""
    bias_BHT = BIAS[module.layer_idx]
    B, H, total, D = key.shape
    S, past = query.shape[2], bias_BHT.shape[2]
    new = torch.full((S, total - past), float("-inf")).triu(total - past - S + 1)
    extra = torch.cat(
        [bias_BHT[:, :, None].expand(-1, -1, S, -1), new.expand(B, H, S, -1)], dim=-1
    ).repeat_interleave(query.shape[1] // H, dim=1)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=extra, scale=given["scaling"], enable_gqa=True
    )
    return out.transpose(1, 2), None


def answer(
    model: Any,
    layers: Sequence[Corrected],
    num_seen: int,
    ids_NT: Int[Tensor, "N T"],
    mask_NT: Int[Tensor, "N T"],
    new_tokens: int,
    end_ids: Sequence[int],
) -> list[Answer]:
    """Greedy answers from corrected layers, whose rows are `[N H]`."""
    cache, heads = DynamicCache(), model.config.num_key_value_heads
    BIAS[:] = []
    for number, (keys, values, bias) in enumerate(layers):
        cache.update(keys.unflatten(0, (-1, heads)), values.unflatten(0, (-1, heads)), number)
        BIAS.append(bias.unflatten(0, (-1, heads)))
    positions_NT = mask_NT.cumsum(-1) - 1
    ids, positions = ids_NT[:, num_seen:], positions_NT[:, num_seen:]
    made: list[Tensor] = []
    for _ in range(new_tokens):
        logits = model(input_ids=ids, position_ids=positions, **{CACHE: cache}).logits
        ids, positions = logits[:, -1].argmax(-1, keepdim=True), positions[:, -1:] + 1
        made.append(ids)
        if end_ids and torch.isin(torch.cat(made, 1), torch.tensor(list(end_ids))).any(-1).all():
            break
    return [cut(tokens, end_ids) for tokens in torch.cat(made, 1).tolist()]


def rows_of(step: SingleEviction) -> list[Rows]:
    """The rows of every layer behind an eviction step."""
    found = []
    for layer, evidence in zip(step.base.state.ragged, step.evidence, strict=True):
        keys, values = layer.dense()
        B, H, T, _ = keys.shape
        assert evidence.rotary is not None and evidence.token_ids_BT is not None
        plain = evidence.rotary.unrotate(keys, evidence.positions_BT)
        observed_BHT = observed_risk(evidence, window=8).values_BHT.nan_to_num(0, 0, 0)
        exists_BHT = evidence.valid_BT[:, None].expand(B, H, T)
        ids_BHT = evidence.token_ids_BT[:, None].expand(B, H, T)
        found.append(
            Rows(
                keys.flatten(0, 1),
                plain.flatten(0, 1),
                values.flatten(0, 1),
                exists_BHT.flatten(0, 1),
                ids_BHT.flatten(0, 1),
                observed_BHT.flatten(0, 1),
            )
        )
    return found


def cuts_of(rows: Sequence[Rows], step: SingleEviction, line: Line, ratio: float) -> list[Cut]:
    """What a line keeps of each layer, and which of it has a larger score than everything that goes."""
    keep, scores = step.keeps(line, ratio), step.scores[line.name]
    highest_B = torch.stack(
        [
            score.values_BHT.masked_fill(own | ~layer.valid_BT[:, None], float("-inf")).flatten(1).amax(-1)
            for own, score, layer in zip(keep, scores, step.evidence, strict=True)
        ]
    ).amax(0)
    found = []
    for layer, own, score in zip(rows, keep, scores, strict=True):
        ranked_BHT = own & (score.values_BHT > highest_B[:, None, None])
        learned_BHT = score.values_BHT.clamp_min(0).nan_to_num(0, 0, 0)
        found.append(Cut(layer, own.flatten(0, 1), ranked_BHT.flatten(0, 1), learned_BHT.flatten(0, 1)))
    return found


def measure(config: CompareConfig, suite: Suite, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of every item, regime, ratio, selection and correction."""
    (seed,) = config.seeds
    evaluated, model = load_evaluated(config, suite, seed), suite.load_model(seed).eval()
    AttentionInterface.register(NAME, attention)
    model.config._attn_implementation = NAME
    for unit in plan(config, suite):
        items = {
            index: suite.item(unit.task, seed, index, config.context_tokens)
            for index in range(unit.start, unit.stop)
        }
        for group in alike(items):
            batch = Batch(config, suite, evaluated, unit, group)
            prefill = Prefill(batch)
            steps = [(regime, step) for regime in config.regimes for step in prefill.evictions(regime)]
            for regime, step in steps:
                rows = rows_of(step)
                # The oracle's own protection does not fit the smallest ratios.
                lines = [line for line in lines_of(config, regime) if line.name != "oracle"]
                for ratio, line in product(config.keep_ratios, lines):
                    own = [name for name in names if line.policy != "oracle" or name in OF_ORACLE]
                    cuts = cuts_of(rows, step, line, ratio)
                    cell = {"regime": regime, "keep_ratio": ratio, "selection": line.name}
                    for row in answered(batch, model, step, cuts, own):
                        yield cell | row


def answered(
    batch: Batch, model: Any, step: SingleEviction, cuts: Sequence[Cut], names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Rows of one selection, all corrections in one batch."""
    made: list[Corrected] = []
    for layer in cuts:
        each = [CORRECTIONS[name](layer) for name in names]
        each = [
            (keys, values, bias.masked_fill(~layer.keep_RT, float("-inf"))) for keys, values, bias in each
        ]
        keys, values, biases = (torch.cat(sides) for sides in zip(*each, strict=True))
        made.append((keys, values, biases))
    num_seen, unit = cuts[0].keep_RT.shape[1], batch.unit
    for question in step.questions:
        ids_BT, mask_BT = (own.repeat(len(names), 1) for own in batch.ids(question))
        new = batch.first.asked[question].generate
        answers = answer(model, made, num_seen, ids_BT, mask_BT, new, batch.first.end_ids)
        for (name, (index, item)), got in zip(product(names, batch.items.items()), answers, strict=True):
            exact = float(item.asked[question].score(got.tokens)[0]) if got.tokens else 0.0
            yield {
                "seed": unit.seed,
                "task": unit.task,
                "family": batch.suite.tasks[unit.task].family,
                "item": index,
                "question": question,
                "correction": name,
                "tokens": got.tokens,
                "exact": exact,
            }


def lines_and_budgets(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of a comparison as those of this study: what is compared is a line at a budget, on a family of
    tasks and on all."""
    for row in rows:
        named = {"keep_ratio": 0, "correction": f"{row['policy']} {row['budget']:g}"}
        for family in (row["family"], "all"):
            yield {**row, **named, "selection": family}


def report(rows: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[str, str]]) -> str:
    """Differences of pairs of corrections, paired by item, over all tasks; one Holm family."""
    scores: dict[tuple[Any, ...], dict[tuple[Any, ...], list[float]]] = {}
    if any("policy" in row for row in rows):
        rows = [*lines_and_budgets(rows)]
    for row in rows:
        place = row["regime"], row["keep_ratio"], row["selection"]
        item = row["task"], row["seed"], row["item"]
        scores.setdefault((*place, row["correction"]), {}).setdefault(item, []).append(row["exact"])
    results = {}
    for place in sorted({own[:3] for own in scores}):
        for pair in pairs:
            if all((*place, name) in scores for name in pair):
                ours, theirs = (scores[*place, name] for name in pair)
                means = [[100 * float(np.mean(side[item])) for item in ours] for side in (ours, theirs)]
                strata = [item[0] for item in ours]
                results[*place, *pair] = compare_paired(*means, strata=strata, margin=2.0)
    lines = []
    for (regime, ratio, selection, one, other), result in adjust(results).items():
        between = f"[{result.interval.low:+.1f}, {result.interval.high:+.1f}]"
        lines.append(
            f"| {regime} {ratio:g} | {selection} | {one} | {other} | {result.mean_policy:.1f} | "
            f"{result.mean_baseline:.1f} | {result.estimate:+.1f} {between} | {result.verdict} |"
        )
    return "\n".join(lines)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Simulates, or reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", nargs="+", help="files of rows")
    parser.add_argument("--pairs", nargs="+", default=[], help="ONE=OTHER: what is compared")
    parser.add_argument("--corrections", nargs="+", default=[*CORRECTIONS], choices=[*CORRECTIONS])
    parser.add_argument("--gates", help="folder of gates, {seed} in it is replaced")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--items", type=int, default=32, help="a task")
    parser.add_argument("--first-item", type=int, default=8000)
    parser.add_argument("--keep-ratios", type=float, nargs="+", default=[0.02, 0.05, 0.1])
    parser.add_argument("--regimes", nargs="+", default=["context_only"])
    parser.add_argument("--out", help="file of rows")
    given = parser.parse_args(arguments)
    if given.report:
        lines = [line for path in given.report for line in Path(path).read_text().splitlines()]
        names = [pair.split("=") for pair in given.pairs] or [(name, "none") for name in [*CORRECTIONS][1:]]
        print(report([json.loads(line) for line in lines], [(one, other) for one, other in names]))
        return 0
    config = CompareConfig(
        run="corrections",
        seeds=(given.seed,),
        items_per_task=given.items,
        first_item=given.first_item,
        gates=given.gates,
        keep_ratios=tuple(given.keep_ratios),
        regimes=tuple(given.regimes),
        policies=("fused", "oracle"),
        protections={"joint": (*JOINT, *LEAST)},
        under={"joint": ("oracle",)},
    )
    with Path(given.out).open("w") as file, torch.no_grad():
        for row in measure(config, suite_of(config), given.corrections):
            file.write(json.dumps(row) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

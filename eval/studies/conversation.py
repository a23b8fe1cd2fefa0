"""Asks at the end of long conversations, in one cache of a fixed size, for what was said first.

    python -m retain.eval.studies.conversation [--turns 100] [--conversations 20] [--tokens-per-head 128] ...

A conversation states facts, asks for recent ones (the reference model answers), and has the model write on;
all of it is read turn by turn into one `retain.Cache` in the regime `chunked+decode`. After some turns, the
last among them, a fork of the cache is asked for the fact that the first turn stated. A table is printed; the
`report()` after every turn goes to JSON.

Every policy runs twice, with the first turn pinned and without, and nothing else differs: the same sinks and
recent window, and no other prefix. So what a policy remembers by itself stands beside what protection
remembers for it. The model may not say the first fact's words on the way, since that would state it anew; no
conversation depends on which others are in its batch.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from retain.eval.run.results_store import tokens_sha
from retain.eval.stats.significance import paired_interval
from retain.eval.studies.dialogue import KINDS, SINKS, TURN_TOKENS, Conversation, write_conversation
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach, cache_in
from retain.hf.model.decoder import base_model
from retain.hf.model.gates import load_gates
from retain.hf.version_names import CACHE
from retain.presets import load_policy
from retain.process.command import command
from retain.process.extras import require
from retain.process.provenance import code_state, environment, now, write_json
from retain.reference import SEEDS, load_model
from retain.reference.tokenizer import EOS_ID

POLICIES = ("recency", "random", "snapkv", "h2o", "keydiff")
FULL = "full"
# Last entries that every policy protects, beside the first `SINKS`.
RECENT = 32
# Units that a budget may bound.
UNITS = ("head", "layer", "sequence")
# Reported after every turn, and expected not to grow.
COLUMNS = ("bytes_held", "bytes_allocated")


@dataclass(frozen=True)
class Setting:
    """Settings of a study.

    Args:
        turns: Of a conversation.
        conversations: For each model seed.
        tokens_per_head: The budget.
        every: Tokens between evictions while the model writes.
        written: Tokens that it writes at a time.
        batch: Conversations in one cache.
        probes: Turns after which the first fact is asked for, besides at the end.
        seeds: Of the reference models.
        policies: Presets; each runs with the first turn pinned and without.
        gates: Folder of trained gates, `{seed}` for the model's, for policies that learn.
    """

    turns: int = 100
    conversations: int = 20
    tokens_per_head: int = 128
    every: int = 16
    written: int = 20
    batch: int = 20
    probes: tuple[int, ...] = (10, 25, 50)
    seeds: tuple[int, ...] = SEEDS
    policies: tuple[str, ...] = POLICIES
    gates: str | None = None

    def __post_init__(self) -> None:
        least = {
            **{"turns": 2, "conversations": 1, "every": 1, "written": 1, "batch": 1},
            "tokens_per_head": SINKS + RECENT + TURN_TOKENS,
        }
        problems = [
            f"{name} is a whole number of at least {low}, got {getattr(self, name)}"
            for name, low in least.items()
            if getattr(self, name) < low
        ]
        problems += [
            f"seed {seed} is no reference model: take {', '.join(map(str, SEEDS))}"
            for seed in self.seeds
            if seed not in SEEDS
        ]
        if problems:
            raise ValueError(f"conversation: {'; '.join(problems)}.")


@dataclass(frozen=True)
class Played:
    """Conversations in one cache, under one policy.

    Args:
        policy: preset, or `full`.
        pinned: whether the first turn was.
        seed: of the reference model.
        indices: of the conversations.
        found: by number of turns: whether the first fact was answered after them, in each conversation.
        fact_held: of each conversation, the share of (layer, KV head) pairs that hold both words of the first
            fact at the end.
        answered: of each conversation, the share of questions for recent facts that were answered on the way.
        tokens: that a conversation had in the end, answers and all.
        most_held: most entries that a KV head, a layer and all layers of a sequence held after any forward.
        shape: layers that evict, and KV heads of each.
        seen, held, bytes_held, bytes_allocated: of `report()` after every turn, over all conversations.
        evictions: moments so far at which something went, after every turn.
        tokens_sha: of each conversation, of all that was said in it, by both sides.
        seconds: of wall time.
    """

    policy: str
    pinned: bool
    seed: int
    indices: tuple[int, ...]
    found: dict[int, tuple[bool, ...]]
    fact_held: tuple[float, ...]
    answered: tuple[float, ...]
    tokens: int
    most_held: dict[str, int]
    shape: tuple[int, int]
    seen: tuple[int, ...]
    held: tuple[int, ...]
    bytes_held: tuple[int, ...]
    bytes_allocated: tuple[int, ...]
    evictions: tuple[int, ...]
    tokens_sha: tuple[str, ...]
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.policy}, pinned" if self.pinned else self.policy


@torch.no_grad()
def play(
    model: Any, conversations: Sequence[Conversation], cache: Cache, *, written: int, probes: Sequence[int]
) -> dict[str, Any]:
    """Read a batch of conversations, whose turns are equally long, into one empty cache of an attached model,
    turn by turn; after each of the `probes` a fork is asked for the first facts.

    Returns:
        Measurements, as `Played` has them.
    """
    started, reports, evictions, found, right = time.perf_counter(), [], [], {}, []
    values = [conversation.value for conversation in conversations]
    unsaid = LogitsProcessorList([Unsaid([(own.key, own.value) for own in conversations])])
    ids_BT = torch.zeros(len(conversations), 0, dtype=torch.int64)
    with _watched(model, cache) as most_held:
        for number, turns in enumerate(zip(*(own.turns for own in conversations), strict=True), 1):
            ids_BT = _join(ids_BT, [turn.ids for turn in turns])
            kind = turns[0].kind
            if kind == "state":
                unread_BT = ids_BT[:, cache.num_seen :]
                base_model(model)(input_ids=unread_BT, use_cache=True, **{CACHE: cache})
            elif kind == "write":
                ids_BT = _generate(
                    model, cache, ids_BT, written, min_new_tokens=written, logits_processor=unsaid
                )
            else:  # an answer is one word, and the user's side ends it
                ids_BT = _generate(model, cache, ids_BT, 1, logits_processor=unsaid)
                right.append(
                    [turn.answer == said for turn, said in zip(turns, ids_BT[:, -1].tolist(), strict=True)]
                )
                ids_BT = _join(ids_BT, [[EOS_ID]] * len(turns))
            reports.append(cache.report().total)
            evictions.append(cache.evictions)
            if number in probes:
                asked_BT = _join(ids_BT, [own.question for own in conversations])
                said = _generate(model, cache.fork(), asked_BT, 1)[:, -1].tolist()
                found[number] = tuple(a == b for a, b in zip(said, values, strict=True))
    return {
        "found": found,
        "fact_held": tuple(_held_share(cache, row, own) for row, own in enumerate(conversations)),
        "answered": tuple(np.mean(right, axis=0).tolist()) if right else (),
        "tokens": cache.num_seen,
        "most_held": {unit: max(own[unit] for own in most_held) for unit in UNITS},
        "shape": (len(cache.state.specs), cache.state.specs[0].num_kv_heads),
        "seen": tuple(row.entries_seen for row in reports),
        "held": tuple(row.entries_held for row in reports),
        "bytes_held": tuple(row.bytes_held for row in reports),
        "bytes_allocated": tuple(row.bytes_allocated for row in reports),
        "evictions": tuple(evictions),
        "tokens_sha": tuple(tokens_sha(said) for said in ids_BT.tolist()),
        "seconds": round(time.perf_counter() - started, 2),
    }


class Unsaid(LogitsProcessor):
    """Keeps some words from being generated, others in each sequence."""

    def __init__(self, words: Sequence[Sequence[int]]):
        self.words_BW = torch.tensor([list(own) for own in words])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, self.words_BW.to(scores.device), -torch.inf)


def _join(ids_BT: torch.Tensor, more: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.cat([ids_BT, torch.tensor([list(ids) for ids in more])], dim=1)


def _generate(model: Any, cache: Cache, ids_BT: torch.Tensor, count: int, **settings: Any) -> torch.Tensor:
    """Token ids with the model's greedy continuation; tokens that the cache has not seen are read first."""
    return model.generate(
        input_ids=ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        **{CACHE: cache},
        max_new_tokens=count,
        do_sample=False,
        **settings,
    )


@contextmanager
def _watched(model: Any, cache: Cache) -> Iterator[list[dict[str, int]]]:
    """The most entries that a head, a layer and all layers of a sequence hold, after every forward."""
    held: list[dict[str, int]] = []

    def note(module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if cache_in(kwargs) is cache:
            held_BLH = cache.budgets().held_BLH
            most = (held_BLH.max(), held_BLH.sum(-1).max(), held_BLH.sum((-2, -1)).max())
            held.append({unit: int(value) for unit, value in zip(UNITS, most, strict=True)})

    hook = base_model(model).register_forward_hook(note, with_kwargs=True)
    try:
        yield held
    finally:
        hook.remove()


def _held_share(cache: Cache, row: int, conversation: Conversation) -> float:
    """Share of (layer, KV head) pairs that hold both words of the first fact."""
    first = conversation.turns[0].ids
    places = {first.index(conversation.key), first.index(conversation.value)}
    rows = [
        layer.store.row(row, head)[2].tolist() if layer.store is not None else range(cache.num_seen)
        for layer, spec in zip(cache.state.ragged, cache.state.specs, strict=True)
        for head in range(spec.num_kv_heads)
    ]
    return sum(places <= set(positions) for positions in rows) / len(rows)


def make_cache(
    model: Any, policy: str, *, pinned: bool, setting: Setting, indices: Sequence[int], gates: Any = None
) -> Cache:
    """An empty cache for conversations; all policies protect the same, but for the first turn."""
    if policy == FULL:
        return Cache(model, policy=None)
    return Cache(
        model,
        policy=policy,
        tokens_per_head=setting.tokens_per_head,
        regime="chunked+decode",
        every=setting.every,
        protection={"sinks": SINKS, "prefix_fraction": 0.0, "suffix_fraction": 0.0, "recent": RECENT},
        pinned=[(0, TURN_TOKENS)] if pinned else None,
        seeds=list(indices),
        gates=gates if load_policy(policy).learned else None,
        capacity=None,
        short="raise",
    )


def run(setting: Setting, say: Callable[[str], None] = lambda line: None) -> list[Played]:
    """Play every conversation under every policy, and under the full cache; `say` gets a line for each.

    Raises:
        ValueError: A policy does not fit; before anything is read.
    """
    require("eval", "scipy", what="a table of conversations with its intervals")
    played = []
    probes = (*(probe for probe in setting.probes if probe < setting.turns), setting.turns)
    arms = [(FULL, False), *((policy, pinned) for policy in setting.policies for pinned in (True, False))]
    for seed in setting.seeds:
        model = load_model(seed)
        gates = None if setting.gates is None else load_gates(setting.gates.format(seed=seed), model)
        for start in range(0, setting.conversations, setting.batch):
            indices = range(start, min(start + setting.batch, setting.conversations))
            conversations = [write_conversation(seed, index, setting.turns) for index in indices]
            caches = [
                make_cache(model, policy, pinned=pinned, setting=setting, indices=indices, gates=gates)
                for policy, pinned in arms
            ]
            with attach(model):
                for (policy, pinned), cache in zip(arms, caches, strict=True):
                    row = play(model, conversations, cache, written=setting.written, probes=probes)
                    played.append(Played(policy, pinned, seed, tuple(indices), **row))
                    which = f"seed {seed}, conversations {indices[0]}..{indices[-1]}"
                    say(f"{which}, {played[-1].name}: {row['seconds']} s")
    return played


def summarise(setting: Setting, played: Sequence[Played]) -> list[dict[str, Any]]:
    """One row a policy: shares over all conversations and seeds, and the memory of one conversation."""
    rows = []
    for name in dict.fromkeys(one.name for one in played):
        own = [one for one in played if one.name == name]
        found = {number: [hit for one in own for hit in one.found[number]] for number in own[0].found}
        last = [
            [hit for one in own if one.seed == seed for hit in one.found[setting.turns]]
            for seed in setting.seeds
        ]
        answered = [share for one in own for share in one.answered]
        half = setting.turns // 2  # of this the ranges of bytes are shown
        rows.append(
            {
                "policy": name,
                "found": {number: sum(hits) for number, hits in found.items()},
                "conversations": len(found[setting.turns]),
                "found_by_seed": [sum(hits) for hits in last],
                "fact_held": float(np.mean([share for one in own for share in one.fact_held])),
                "answered": float(np.mean(answered)) if answered else None,
                "most_held": {unit: max(one.most_held[unit] for one in own) for unit in UNITS},
                **{column: _range(own, column, half) for column in COLUMNS},
                "evictions": max(one.evictions[-1] for one in own),
            }
        )
    return rows


def differences(setting: Setting, played: Sequence[Played]) -> list[dict[str, Any]]:
    """Effect of pinning the first turn, for each policy: points of exact match at the end, paired."""
    rows = []
    for policy in setting.policies:
        strata = []
        for seed in setting.seeds:
            hits = {
                pinned: [
                    float(hit)
                    for one in played
                    if (one.policy, one.pinned, one.seed) == (policy, pinned, seed)
                    for hit in one.found[setting.turns]
                ]
                for pinned in (True, False)
            }
            strata.append(np.array(hits[True]) - np.array(hits[False]))
        same = len(np.unique(np.concatenate(strata))) == 1
        rows.append({"policy": policy, "same": same, **asdict(paired_interval(strata))})
    return rows


def unit_of(policy: str) -> str:
    """The smallest of `UNITS` that a policy's budget bounds: a head, if each has the same; a layer, whose
    heads share; or all layers of a sequence."""
    own = load_policy(policy)
    # Classes, importances and quotas give heads of all layers budgets of their own.
    if own.allocation.layers != "uniform" or own.allocation.states_heads:
        return "sequence"
    return {"head": "head", "layer": "layer"}.get(own.scope, "sequence")


def cycles_of(one: Played, column: str) -> list[int]:
    """The most of a column in each cycle of `KINDS`, from the first full cycle since something was evicted:
    before, a cache still fills; within a cycle, turns differ by what is read and written in them."""
    evicted = next((number for number, count in enumerate(one.evictions) if count), len(one.evictions))
    first = -(-evicted // len(KINDS)) * len(KINDS)
    values = getattr(one, column)
    starts = range(first, len(values) - len(KINDS) + 1, len(KINDS))
    return [max(values[start : start + len(KINDS)]) for start in starts]


def problems_of(setting: Setting, played: Sequence[Played]) -> list[str]:
    """Places where memory was not as stated.

    After a forward nothing that a budget bounds (`unit_of`) holds more than it and what may have come since
    the last eviction. Of the full cycles of turns since evictions began, none of the second half leaves more
    held, or allocated, than some cycle of the first.
    """
    found = []
    for one in played:
        if one.policy == FULL:
            continue
        unit, (layers, heads) = unit_of(one.policy), one.shape
        rows = {"head": 1, "layer": heads, "sequence": layers * heads}[unit]
        bound, held = rows * (setting.tokens_per_head + setting.every - 1), one.most_held[unit]
        if held > bound:
            found.append(f"{one.name}, seed {one.seed}: a {unit} held {held:,} entries, above {bound:,}")
        for column in COLUMNS:
            cycles = cycles_of(one, column)
            half = (len(cycles) + 1) // 2
            if len(cycles) > 1 and max(cycles[half:]) > max(cycles[:half]):
                found.append(f"{one.name}, seed {one.seed}: {column} grew to {max(cycles[half:]):,}")
    return found


def memory_line(played: Sequence[Played], problems: Sequence[str]) -> str:
    """Findings on memory, in words."""
    if problems:
        return "\n".join(problems)
    short = {one.name for one in played if one.policy != FULL and len(cycles_of(one, "bytes_held")) < 2}
    constant = (
        "constant" if not short else f"too short to judge whether it is constant ({'; '.join(sorted(short))})"
    )
    return f"Memory: within its bound after every forward; {constant}."


def _range(own: Sequence[Played], column: str, start: int) -> list[float]:
    """Least and most bytes of a conversation after a turn, from some turn on."""
    values = [value / len(one.indices) for one in own for value in getattr(one, column)[start:]]
    return [min(values), max(values)]


def table(rows: Sequence[dict[str, Any]], pinning: Sequence[dict[str, Any]]) -> str:
    """The table as it is printed."""
    probes = [f"turn {number}" for number in rows[0]["found"]]
    cells = [["policy", *probes, "by seed", "fact held", "recent", "most held", "KiB held", "KiB allocated"]]
    for row in rows:
        ranges = ([f"{value / 1024:,.0f}" for value in row[name]] for name in COLUMNS)
        cells.append(
            [
                row["policy"],
                *(f"{found}/{row['conversations']}" for found in row["found"].values()),
                " ".join(map(str, row["found_by_seed"])),
                f"{row['fact_held']:.0%}",
                "" if row["answered"] is None else f"{row['answered']:.1%}",
                f"{row['most_held']['head']:,}",
                *map("..".join, ranges),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([line[0].ljust(widths[0]), *(map(str.rjust, line[1:], widths[1:]))]) for line in cells]
    lines += ["", *_pinning_lines(pinning)]
    return "\n".join(lines) + "\n"


def _pinning_lines(pinning: Sequence[dict[str, Any]]) -> list[str]:
    """Effect of pinning, in words; an interval only where something varies within a seed."""
    about = [f"paired over n = {pinning[0]['num_items']} conversations"]
    if any(row["method"] != "constant" for row in pinning):
        about += [f"{pinning[0]['level']:.0%} intervals: Student's t within each seed"]
    lines = [
        "What pinning the first turn changes at the end, in points of exact match",
        f"({'; '.join([*about, 'conditional on these seeds'])}):",
    ]
    for row in pinning:
        shown = f"{100 * row['estimate']:+.1f}"
        if row["same"]:
            shown += f" (the same in all {row['num_items']})"
        elif row["method"] == "constant":
            shown += " (the same in all of a seed)"
        else:
            shown += f" [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]"
        lines.append(f"  {row['policy']:<20} {shown}")
    return lines


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run, print the table and what memory did."""
    default = Setting()
    parser = argparse.ArgumentParser(
        description="Read conversations turn by turn into caches of a fixed size, and ask for what the first "
        "turn said."
    )
    numbers = {
        "turns": "of a conversation",
        "conversations": "for each model seed",
        "tokens_per_head": "the budget",
        "every": "tokens between evictions while the model writes",
        "written": "tokens that the model writes at a time",
        "batch": "conversations in one cache",
    }
    for name, meaning in numbers.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=getattr(default, name), help=meaning)
    parser.add_argument("--seed", type=int, nargs="+", default=default.seeds, help="of the reference models")
    parser.add_argument("--policies", nargs="+", default=default.policies, help="presets")
    parser.add_argument(
        "--gates", help="folder of trained gates, e.g. runs/gates-seed{seed}, for policies that take gates"
    )
    parser.add_argument("--json", type=Path, help="where every turn's report is written")
    given = parser.parse_args(arguments)
    typed = sys.argv[1:] if arguments is None else arguments
    setting = Setting(
        **{name: getattr(given, name) for name in numbers},
        seeds=tuple(given.seed),
        policies=tuple(given.policies),
        gates=given.gates,
    )
    played = run(setting, lambda line: print(line, file=sys.stderr, flush=True))
    rows, pinning = summarise(setting, played), differences(setting, played)
    problems = problems_of(setting, played)
    print(f"{setting.turns} turns, {played[0].tokens:,} tokens; {setting.tokens_per_head} entries a head")
    print(table(rows, pinning))
    print(memory_line(played, problems))
    if given.json is not None:
        record = {
            "command": shlex.join(["python", "-m", "retain.eval.studies.conversation", *typed]),
            "made": now(),
            "code": code_state(Path(__file__).parent),
            "environment": environment("cpu", torch.get_num_threads()),
            "setting": asdict(setting),
            "rows": rows,
            "pinning": pinning,
            "problems": problems,
            "played": [asdict(one) for one in played],
        }
        given.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(given.json, record)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares a cache for each episode of a context (EpiCache, `retain.hf.episodes`) with one cache of as many
bytes.

    python -m retain.eval.studies.episodes [--contexts 20] [--tokens 1024] [--tokens-per-head 128] ...

A context of the reference suite states facts, each of which is asked for on a fork. Arms, all read block by
block with the same first entries protected, and nothing evicted once the context was read:

- one cache of `--tokens-per-head`, by each of the `--policies`;
- `episodes`: caches that share these (`budget="together"`), a question routed to the nearest centroid;
- `episodes, told`: the same caches, a question routed to the episode whose segments state its fact, which is
  what a perfect routing would give;
- `episodes, each`: each cache of `--tokens-per-head` (the paper's accounting), so `--episodes` times the
  bytes;
- `episodes, random`: as `episodes`, with random vectors for embeddings of segments and questions.

The contexts have no topics, and the embedding is the mean of input embeddings, so routing has only a fact's
own words to go by. This shows what sharing a memory costs, and no more about conversations.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retain.eval.stats.significance import paired_interval
from retain.hf.cache.cache import Cache
from retain.hf.cache.changes import stop_evicting
from retain.hf.episodes.episodes import Embed, Episodes
from retain.hf.intercept.attach import attach
from retain.hf.version_names import CACHE
from retain.process.command import command
from retain.process.extras import require
from retain.reference import SEEDS, load_model
from retain.reference.documents import Content, Question, Writer

FULL, SHARED = "full", "episodes"
PROTECTION = {"sinks": 4, "prefix_fraction": 0.0, "suffix_fraction": 0.0}
# Streams of the generator, apart from those of `retain.eval.tasks.reference_basic` and the dialogues.
_STREAM = 17


@dataclass(frozen=True)
class Setting:
    """Settings of the study.

    Args:
        contexts: For each model seed.
        tokens: Of a context.
        facts: That it states, each asked for once.
        tokens_per_head: The budget of all caches together; of each in `episodes, each`.
        episodes: Caches of one context.
        segment: Tokens of a segment.
        medoids: Segments of a patched prompt.
        chunk: Tokens of a block.
        seeds: Of the reference models.
        policies: Of the arms with one cache.
    """

    contexts: int = 20
    tokens: int = 1024
    facts: int = 8
    tokens_per_head: int = 128
    episodes: int = 4
    segment: int = 32
    medoids: int = 1
    chunk: int = 256
    seeds: tuple[int, ...] = SEEDS
    policies: tuple[str, ...] = ("snapkv", "snapkv:patched", "random")


@dataclass(frozen=True)
class Asked:
    """A context's questions under one arm.

    Args:
        arm: its name.
        seed: of the model.
        found: of each question, whether it was answered.
        routed: of each question, whether its episode is the one whose segments state the fact; None with one
            cache.
        bytes_held: of all caches of the context, before a question.
    """

    arm: str
    seed: int
    found: tuple[bool, ...]
    routed: tuple[bool, ...] | None
    bytes_held: int


def write_context(seed: int, index: int, setting: Setting) -> tuple[Tensor, list[Question], list[int]]:
    """Token ids `[1, T]`, the questions, and where each one's key stands; the same arguments give the same.

    Raises:
        ValueError: the facts do not fit.
    """
    own = int(np.random.SeedSequence([_STREAM, seed, index]).generate_state(1)[0])
    writer = Writer("eval", own)
    words = writer.draw(2 * setting.facts)
    facts = list(zip(words[::2], words[1::2], strict=True))
    ids, _, _ = writer.weave(writer.groups(Content(facts), 0), setting.tokens, words, ())
    places = [ids.tolist().index(key) for key, _ in facts]
    return torch.as_tensor(ids).long()[None], [writer.ask_get(*fact) for fact in facts], places


def random_embedding(seed: int, width: int = 16) -> Embed:
    """A control: vectors that say nothing of a text."""
    draw = torch.Generator().manual_seed(seed)
    return lambda texts: torch.randn(len(texts), width, generator=draw)


def ask(model: Any, context_ids: Tensor, question: Question, cache: Cache) -> bool:
    """Whether the model answers rightly on this cache, which goes on."""
    ids = torch.cat([context_ids, torch.tensor([question.ids])], dim=1)
    said = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=question.generate,
        do_sample=False,
        **{CACHE: cache},
    )
    return question.score(said[0, ids.shape[1] :].tolist())[0] == 1.0


def of_one_cache(model: Any, setting: Setting, seed: int, index: int) -> list[Asked]:
    """The full cache and the arms with one cache, on one context."""
    context_ids, questions, _ = write_context(seed, index, setting)
    rows = []
    for arm in (FULL, *setting.policies):
        if arm == FULL:
            cache = Cache(model, None).prefill(context_ids)
        else:
            # What the episodes share goes down to whole entries of each.
            tokens_per_head = setting.tokens_per_head // setting.episodes * setting.episodes
            cache = Cache(
                model,
                arm,
                tokens_per_head=tokens_per_head,
                regime="chunked",
                short="raise",
                seeds=[index],
                protection=PROTECTION,
            )
            cache.prefill(context_ids, chunk_size=setting.chunk)
            stop_evicting(cache.state)
        found = tuple(ask(model, context_ids, question, cache.fork()) for question in questions)
        rows.append(Asked(arm, seed, found, None, cache.bytes_held()))
    return rows


def of_episodes(model: Any, setting: Setting, seed: int, index: int) -> list[Asked]:
    """The arms with a cache for each episode, on one context."""
    context_ids, questions, places = write_context(seed, index, setting)

    def read(budget: str, embed: Embed | None = None) -> Episodes:
        return Episodes.read(
            model,
            context_ids,
            tokens_per_head=setting.tokens_per_head,
            budget=budget,
            num_episodes=setting.episodes,
            segments=setting.segment,
            medoids=setting.medoids,
            embed=embed,
            chunk_size=setting.chunk,
            protection=PROTECTION,
        )

    def played(arm: str, made: Episodes, told: bool = False) -> Asked:
        found, routed = [], []
        for question, place in zip(questions, places, strict=True):
            home = next(
                number
                for number, episode in enumerate(made.episodes)
                if place // setting.segment in episode.segments
            )
            chosen = home if told else made.nearest(torch.tensor([question.ids]))
            routed.append(chosen == home)
            found.append(ask(model, context_ids, question, made.episodes[chosen].cache.fork()))
        return Asked(arm, seed, tuple(found), tuple(routed), made.bytes_held())

    shared = read("together")
    return [
        played(SHARED, shared),
        played(f"{SHARED}, told", shared, told=True),
        played(f"{SHARED}, each", read("each")),
        played(f"{SHARED}, random", read("together", random_embedding(index))),
    ]


def run(setting: Setting, say: Callable[[str], None] = lambda line: None) -> list[Asked]:
    """Every arm on every context; `say` gets a line for each context."""
    require("eval", "scipy", what="a table with its intervals")
    rows = []
    for seed in setting.seeds:
        model = load_model(seed)
        with attach(model):
            for index in range(setting.contexts):
                rows += of_one_cache(model, setting, seed, index) + of_episodes(model, setting, seed, index)
                say(f"seed {seed}, context {index}")
    return rows


def table(setting: Setting, rows: Sequence[Asked]) -> str:
    """A line an arm: questions answered, the paired difference to `episodes` in points over contexts,
    questions that were routed to the fact's episode, and bytes held."""

    def by_seed(arm: str) -> list[np.ndarray]:
        return [
            np.array([100 * np.mean(row.found) for row in rows if (row.arm, row.seed) == (arm, seed)])
            for seed in setting.seeds
        ]

    lines = [f"{'arm':<18} {'found':>11} {f'{SHARED} - it':>22} {'routed':>8} {'bytes held':>12}"]
    for arm in dict.fromkeys(row.arm for row in rows):
        own = [row for row in rows if row.arm == arm]
        found = [hit for row in own for hit in row.found]
        routed = [hit for row in own for hit in row.routed or ()]
        pairs = [a - b for a, b in zip(by_seed(SHARED), by_seed(arm), strict=True)]
        shown = ""
        if arm != SHARED:
            made = paired_interval(pairs)
            shown = f"{made.estimate:+.1f} [{made.low:+.1f}, {made.high:+.1f}]"
        share = f"{np.mean(routed):.0%}" if routed else "-"
        size = np.mean([row.bytes_held for row in own])
        lines.append(f"{arm:<18} {sum(found):>5}/{len(found):<5} {shown:>22} {share:>8} {size:>12,.0f}")
    return "\n".join(lines)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run, print the table."""
    default = Setting()
    parser = argparse.ArgumentParser(
        description="Compare a cache for each episode with one cache of as many bytes."
    )
    numbers = {
        "contexts": "for each model seed",
        "tokens": "of a context",
        "facts": "that it states, each asked for once",
        "tokens_per_head": "the budget of all caches together",
        "episodes": "caches of one context",
        "segment": "tokens of a segment",
        "medoids": "segments of a patched prompt",
        "chunk": "tokens of a block",
    }
    for name, meaning in numbers.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=getattr(default, name), help=meaning)
    parser.add_argument("--seed", type=int, nargs="+", default=default.seeds, help="of the reference models")
    parser.add_argument("--policies", nargs="+", default=default.policies, help="of one cache")
    given = parser.parse_args(arguments)
    setting = Setting(
        **{name: getattr(given, name) for name in numbers},
        seeds=tuple(given.seed),
        policies=tuple(given.policies),
    )
    rows = run(setting, lambda line: print(line, file=sys.stderr, flush=True))
    print(
        f"{setting.tokens} tokens, {setting.facts} facts; {setting.tokens_per_head} entries a head in "
        f"{setting.episodes} caches together (in each: `{SHARED}, each`); segments of {setting.segment}, "
        f"{setting.medoids} in a patched prompt; 95 % intervals over contexts, in points"
    )
    print(table(setting, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures gamma: what reading one held entry costs a decoded token, in prefilled tokens.

    python -m retain.eval.speed --what gamma [--model random|reference|PATH|HUB_ID] [--tokens 4096]
    [--device cpu|cuda] [--output RUN/gamma.json]

With prefill-time equivalents a comparison's table can say what an answer cost on this machine:

    PTE = prefilled tokens + gamma * (entries held before each decoded token, their sum)
    gamma = ((t_long - t_short) / (n_long - n_short)) / (prefill time / prefilled tokens)

`t` is the time of a decoded token and `n` the entries held (over all layers that evict and their KV heads),
both of a full cache behind a short and a long prompt, in the same round; the prefill is the long one's. The
part of a decoded token's time that does not depend on what is held, reading the weights, is in neither term,
and scoring and evicting are not either.

After Su et al., "Beyond Accuracy: Unveiling Inefficiency Patterns in Tool-Integrated Reasoning" (arXiv
2604.05404). Only its abstract and summaries were read, which derive gamma from the hardware's operational
intensity: its own formula is unverified. Here gamma is measured, and entries are counted as they are held.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from retain.eval.speed.caches import FULL, RANDOM, Bench
from retain.eval.speed.serving import model_of
from retain.hf.intercept.attach import attach
from retain.hf.model.decoder import describe
from retain.hf.model.random_llama import LlamaSettings
from retain.process.benchmark import Benchmark, Column, grid, heading
from retain.process.timing import interleave, quiet, spread

# The short prompt's share of the long one.
SHORT = 0.25


@dataclass(frozen=True, kw_only=True)
class GammaSettings(LlamaSettings):
    """The model, the prompts and the clock."""

    model: Annotated[str, "random, reference (of this seed), or a folder or hub id"] = RANDOM
    tokens: Annotated[int, "length of the long prompt; the short one has a quarter"] = 4096
    steps: Annotated[int, "tokens decoded behind each"] = 16
    rounds: Annotated[int, "rounds measured"] = 7
    warmup: Annotated[int, "rounds before them that are not counted"] = 1

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.tokens < 8:
            yield f"tokens is at least 8, got {self.tokens}"

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the short and the long prompt."""
        return int(SHORT * self.tokens), self.tokens


def measure(settings: GammaSettings) -> dict[str, Any]:
    """Times a prefill and decoding behind two prompts, and gives gamma.

    Raises:
        ValueError: a model that cannot be.
        RuntimeError: there is no room for a prompt, or a decoded token takes no longer behind the longer one
            in a fifth of the rounds.
    """
    model = model_of(settings, settings.model, settings.tokens, settings.steps)
    bench = Bench(model, "", 1, settings.tokens + settings.steps, settings.device, settings.seed)
    heads = sum(spec.num_kv_heads for spec in describe(model))
    with attach(model), quiet(settings.threads, settings.device):
        works = (bench.workload(length, steps=settings.steps) for length in settings.lengths)
        short, long = caches = [bench.cut(FULL, 1.0, work) for work in works]
        interleave(caches, rounds=settings.rounds, warmup=settings.warmup)
    if failed := short.failed or long.failed:
        raise RuntimeError(f"benchmark: a prompt could not be read: {failed}: take fewer --tokens.")
    entries = heads * (settings.lengths[1] - settings.lengths[0])
    pairs = zip(short.times("token_ms"), long.times("token_ms"), strict=True)
    entry_ms = [(above - below) / entries for below, above in pairs]
    token_ms = [taken / settings.tokens for taken in long.times("prefill_ms")]
    gamma = spread([entry / token for entry, token in zip(entry_ms, token_ms, strict=True)])
    assert gamma is not None
    if gamma["p20"] <= 0:
        raise RuntimeError(
            f"benchmark: in a fifth of the rounds a token behind {settings.lengths[1]:,} tokens was decoded "
            f"as fast as behind {settings.lengths[0]:,}, so gamma cannot be told from noise: take more "
            "--tokens, --steps or --rounds, on a machine that does nothing else."
        )
    return {
        "model": settings.model,
        "kv_heads": heads,
        "gamma": gamma,
        "entry_ns": spread([1e6 * taken for taken in entry_ms]),
        "prefill_token_us": spread([1e3 * taken for taken in token_ms]),
        "token_ms": {name: spread(one.times("token_ms")) for name, one in zip(LENGTHS, caches, strict=True)},
    }


LENGTHS = ("short", "long")
COLUMNS = (
    Column("", "name"),
    *(Column(title, key, ".3e") for title, key in (("20 %", "p20"), ("median", "median"), ("80 %", "p80"))),
)


def table(record: dict[str, Any], settings: GammaSettings) -> list[str]:
    """A record as the lines that are printed and kept."""
    named = {
        "gamma, prefilled tokens an entry": record["gamma"],
        "an entry read, ns": record["entry_ns"],
        "a token prefilled, us": record["prefill_token_us"],
        **{f"a token decoded, {name} prompt, ms": record["token_ms"][name] for name in LENGTHS},
    }
    return [
        *heading(
            record,
            "gamma: an entry read by a decoded token, in prefilled tokens",
            f"model: {record['model']}, {record['kv_heads']} KV heads over its layers that evict, "
            f"{settings.dtype}; prompts of {settings.lengths[0]:,} and {settings.lengths[1]:,} tokens, "
            f"{settings.steps} decoded behind them, {settings.rounds} rounds",
        ),
        *grid(COLUMNS, [{"name": name, **own} for name, own in named.items()]),
    ]


BENCHMARK = Benchmark("retain.eval.speed", "gamma", GammaSettings, measure, table)

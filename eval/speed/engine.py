"""Times an engine of vLLM that evicts beside vLLM's full cache, with equal pools.

    python -m retain.eval.speed --what engine [--model random|reference] [--policy fused]
    [--gates random|PATH] [--lengths 1024,2048] [--keep-ratios 0.1,0.2,0.4] [--requests 20] [--at-once 4]

(`--what serving` times `retain.Cache`, one prompt after another.) A load is a number of requests that come at
once, each a prompt of so many random tokens and an answer of so many. The pool of both engines has the blocks
that `at_once` such requests need with a full cache. Both live in processes of their own and serve the same
loads in turn: each load of the evicting engine stands beside one of plain vLLM, before and behind it
alternately, and a ratio is the median of those neighbours'. `off` is the evicting engine told to leave all
requests alone.

Prefix caching is off, since every round sends the same prompts; scheduling is synchronous, and graphs are not
compiled. A random model has the cost of a trained one of its shape, and says nothing of quality.
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from retain.eval.run.engine import Engine, Opening
from retain.eval.speed import engine_side
from retain.eval.speed.caches import RANDOM, numbers
from retain.eval.speed.engine_side import EVICTION, STAGES, Load
from retain.gates.artifact import save_gates
from retain.hf.model.decoder import describe
from retain.hf.model.gates import new_gates
from retain.hf.model.identity import fingerprint
from retain.hf.model.named import load_named_model
from retain.hf.model.random_llama import LlamaSettings, random_llama
from retain.presets import load_policy
from retain.process.benchmark import Benchmark, Column, grid, heading
from retain.process.extras import require
from retain.process.timing import Case, Times, interleave, spread

PLAIN, OFF, REFERENCE = "plain", "off", "reference"
# Positions of the random model: the longest prompt that it is timed with, and its answer.
POSITIONS = 16_384
# Loads of each case that are clocked stage by stage, behind all others.
CLOCKED_LOADS = 2
# Quantities of a load (`engine_side.life`), and those of which a ratio is of interest.
QUANTITIES = ("tokens_per_s", "ttft_s", "wall_s", "steps", "step_ms", "at_once", "most_at_once")
HELD = ("held_a_request", "most_held", "preempted")
RATIOS = ("tokens_per_s", "ttft_s", "wall_s", "steps", "step_ms", "at_once", "most_at_once", "held_a_request")


@dataclass(frozen=True, kw_only=True)
class EngineSettings(LlamaSettings):
    """The model, the load, the pool and the clock."""

    width: Annotated[int, "width of its hidden state"] = 256
    heads: Annotated[int, "query heads, of width `width / heads`"] = 4
    intermediate: Annotated[int, "width of the feed-forward part"] = 688
    model: Annotated[str, "random, or reference (of this seed)"] = RANDOM
    policy: Annotated[str, "that evicts"] = "fused"
    gates: Annotated[str, "folder, or random (linear, untrained: right in time alone)"] = RANDOM
    lengths: Annotated[str, "tokens of a prompt, separated by commas"] = "1024,2048"
    keep_ratios: Annotated[str, "kept / seen, separated by commas"] = "0.1,0.2,0.4"
    requests: Annotated[int, "that come at once"] = 20
    new_tokens: Annotated[int, "that each generates"] = 128
    at_once: Annotated[int, "requests that the pool holds with a full cache"] = 4
    page: Annotated[int, "entries of a block"] = 32
    batched: Annotated[int, "most tokens of a step"] = 2048
    rounds: Annotated[int, "loads measured of each case"] = 3
    threads: Annotated[int, "CPU threads of an engine"] = 1

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for name, kind in (("keep_ratios", float), ("lengths", int)):
            found = numbers(getattr(self, name), kind)
            if not found or min(found) <= 0:
                yield f"{name} are numbers above 0, separated by commas, got {getattr(self, name)!r}"
        if self.model not in (RANDOM, REFERENCE):
            yield f"model is {RANDOM} or {REFERENCE}, got {self.model!r}"

    def blocks(self, length: int) -> int:
        """Blocks of the pool, beside the one that an engine keeps for itself."""
        return self.at_once * -(-(length + self.new_tokens) // self.page)


@dataclass(eq=False, kw_only=True)
class Loaded(Case):
    """A way of serving a load.

    Args:
        name: `plain`, `off`, or a policy.
        keep_ratio: kept / seen.
        engine: that serves it.
        load: that it serves.
        stages: of loads that were clocked: times by stage.
    """

    name: str
    keep_ratio: float
    engine: Engine
    load: Load
    stages: list[Times] = field(default_factory=list)

    def run(self) -> Times:
        found: Times = self.engine.call(engine_side.life, self.load)
        return found


def measure(settings: EngineSettings) -> dict[str, Any]:
    """Times all loads.

    Raises:
        ValueError: vLLM is not there, or refuses the model, the policy or the pool.
    """
    require("vllm", "vllm", what="the benchmark of engines")
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folders, about = write_model(settings, Path(made))
        for length in numbers(settings.lengths, int):
            rows += rows_of(settings, length, folders, about)
    return {"model": about, "rows": rows}


def write_model(settings: EngineSettings, folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Writes the model, and gates of it, where engines can load them.

    Returns:
        their folders, and what the model is.
    """
    if settings.model == RANDOM:
        model: Any = random_llama(settings, POSITIONS)
    else:
        model = load_named_model(f"{REFERENCE}:{settings.seed}", dtype=settings.dtype)
    longest = max(numbers(settings.lengths, int)) + settings.new_tokens
    most = model.config.max_position_embeddings
    if longest > most:
        raise ValueError(
            f"benchmark: a prompt and its answer have {longest} tokens, and model {settings.model!r} has "
            f"{most} positions: take shorter ones."
        )
    model.save_pretrained(folder / "model")
    found = {"model": str(folder / "model")}
    if load_policy(settings.policy).learned:
        found["gates"] = settings.gates
        if settings.gates == RANDOM:
            gates = new_gates(model, "linear", seed=settings.seed)
            save_gates(gates, folder / "gates", fingerprint=fingerprint(model))
            found["gates"] = str(folder / "gates")
    config = model.config
    about = {
        "name": settings.model,
        "kind": type(model).__name__,
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "parameters": model.num_parameters(),
        "vocabulary": config.vocab_size,
        "token_bytes": sum(
            spec.num_kv_heads * spec.entry_width * model.dtype.itemsize for spec in describe(model)
        ),
    }
    return found, about


def rows_of(
    settings: EngineSettings, length: int, folders: Mapping[str, str], about: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Times loads of one length, on the model in a folder, and on what `write_model` says of it."""
    how = {
        "dtype": settings.dtype,
        "block_size": settings.page,
        # One block is the engine's own. The bytes have only to be enough for them.
        "num_gpu_blocks_override": settings.blocks(length) + 1,
        "kv_cache_memory_bytes": (settings.blocks(length) + 1) * settings.page * about["token_bytes"],
        "max_model_len": length + settings.new_tokens,
        "max_num_seqs": settings.requests,
        "max_num_batched_tokens": settings.batched,
        "model_impl": "auto" if settings.model == RANDOM else "transformers",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
    }
    ratios = numbers(settings.keep_ratios, float)
    retain = {"policy": settings.policy, "keep_ratio": ratios[0]}
    retain |= {"gates": folders["gates"]} if "gates" in folders else {}
    engines = [Engine(Opening(folders["model"], own, how)) for own in (None, retain)]
    try:
        generator = torch.Generator().manual_seed(settings.seed)
        prompts = torch.randint(4, 1024, (settings.requests, length), generator=generator).tolist()
        load = partial(Load, prompts, settings.new_tokens)
        plain = Loaded(name=PLAIN, keep_ratio=1.0, engine=engines[0], load=load({}))
        own = {
            (OFF, 1.0): {"retain.off": True},
            **{(settings.policy, ratio): {"retain.keep_ratio": ratio} for ratio in ratios},
        }
        cases = [
            Loaded(name=name, keep_ratio=ratio, engine=engines[1], load=load(extra), beside=plain)
            for (name, ratio), extra in own.items()
        ]
        for case in (plain, *cases):
            case.engine.call(engine_side.life, Load(prompts[:1], 2, case.load.extra))
        interleave([plain, *cases], rounds=settings.rounds, warmup=0)
        for case in [*cases[1:]] * CLOCKED_LOADS:
            clocked = Load(prompts, settings.new_tokens, case.load.extra, clocks=True)
            case.stages.append(case.engine.call(engine_side.life, clocked))
        return [row_of(settings, length, one) for one in (plain, *cases)]
    finally:
        for engine in engines:
            engine.close()


def row_of(settings: EngineSettings, length: int, one: Loaded) -> dict[str, Any]:
    """The row of one case at one length."""
    row: dict[str, Any] = {
        "length": length,
        "policy": one.name,
        "keep_ratio": one.keep_ratio,
        "pool_blocks": settings.blocks(length),
        **{name: spread(one.times(name)) for name in (*QUANTITIES, *HELD)},
    }
    if one.beside is not None:
        row |= {f"{name}_over_plain": spread(one.over(one.beside, name)) for name in RATIOS}
    if one.stages:
        wall = [1e3 * times["wall_s"] for times in one.stages]
        for stage in STAGES:
            taken = [times[f"{stage}_ms"] for times in one.stages]
            row[f"{stage}_share"] = spread([ms / all_ms for ms, all_ms in zip(taken, wall, strict=True)])
        tokens, steps = settings.requests * length, [times["steps"] for times in one.stages]
        row["eviction_us_per_token"] = spread(
            [1e3 * times[f"{EVICTION}_ms"] / tokens for times in one.stages]
        )
        row["tables_ms_per_step"] = spread(
            [
                (times["tables_ms"] + times["scheduling_ms"] + times["rows_ms"]) / count
                for times, count in zip(one.stages, steps, strict=True)
            ]
        )
    return row


COLUMNS = (
    *(Column("policy", "policy"), Column("keep", "keep_ratio", "g")),
    *(Column("at once", "most_at_once", ".0f"), Column("/ plain", "most_at_once_over_plain", ".2f")),
    *(Column("mean", "at_once", ".1f"), Column("/ plain", "at_once_over_plain", ".2f")),
    *(Column("steps", "steps", ".0f"), Column("/ plain", "steps_over_plain", ".2f")),
    *(Column("tokens/s", "tokens_per_s", ",.0f"), Column("/ plain", "tokens_per_s_over_plain", wide=True)),
    *(Column("first token s", "ttft_s", ".2f"), Column("/ plain", "ttft_s_over_plain", wide=True)),
    Column("preempted", "preempted", ".0f"),
    *(Column("blocks each", "held_a_request", ".1f"), Column("/ plain", "held_a_request_over_plain", ".2f")),
    *(Column("step ms", "step_ms", ".1f"), Column("/ plain", "step_ms_over_plain", ".2f")),
)
CLOCKED = (
    *(Column("policy", "policy"), Column("keep", "keep_ratio", "g")),
    *(Column(stage, f"{stage}_share", ".1%") for stage in STAGES),
    Column("eviction us/token", "eviction_us_per_token", ".1f"),
    Column("tables ms/step", "tables_ms_per_step", ".2f"),
)


def table(record: dict[str, Any], settings: EngineSettings) -> list[str]:
    """A record as the lines that are printed and kept."""
    model, lines = record["model"], []
    for length in dict.fromkeys(row["length"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["length"] == length]
        lines += [f"prompts of {length:,} tokens, a pool of {rows[0]['pool_blocks']} blocks"]
        lines += [*grid(COLUMNS, rows), ""]
        lines += [*grid(CLOCKED, [row for row in rows if f"{EVICTION}_share" in row]), ""]
    return [
        *heading(
            record,
            "engine: vLLM with eviction beside vLLM's full cache, equal pools",
            f"model: {model['name']} ({model['kind']}), {model['layers']} layers, width {model['width']}, "
            f"{model['heads']} query and {model['kv_heads']} KV heads, {model['parameters'] / 1e6:,.1f} "
            f"million parameters, {settings.dtype}",
            f"{settings.requests} requests at once, {settings.new_tokens} tokens each; a pool for "
            f"{settings.at_once} of them with a full cache, blocks of {settings.page}; at most "
            f"{settings.batched} tokens a step; {settings.rounds} loads of each, each beside one of plain",
        ),
        *lines,
        "median (20 % .. 80 %) over loads; / plain: median of neighbours' ratios. at once: most requests "
        "that ran; mean: over steps.",
        "first token: median over requests, waiting included. blocks each: held / running, over all steps.",
        "the second table: shares of loads that were clocked stage by stage (`engine_side`); the rest is "
        "vLLM and the model.",
    ]


BENCHMARK = Benchmark("retain.eval.speed", "engine", EngineSettings, measure, table)

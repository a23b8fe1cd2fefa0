"""Compares the entries that caches keep with golden ones: of every policy twice, of every family of gates.

A cell is a model, a policy (`gate@linear`: with that family of gates) and when it evicts. Two documents of
different lengths are read as one left-padded batch in float64, their questions behind them, then fixed tokens
one by one where it evicts while decoding; what the cache holds at the end is the cell. Nothing is generated,
so a cell depends on evictions alone.

`kept.jsonl` has one line a cell: entries held by (document, layer, KV head), and the positions, as bits
`[document, layer, head, position]`, packed, deflated and in base64. A new cell is a line with its name alone
until `python -m tests.golden.make kept` fills it in.

Kept entries may differ between machines at ties within rounding (RoPE and norms are float32 in every model).
So a cell that differs is run again under weights with relative noise of `NOISE`: an entry that such noise
moves too is a tie, and every other entry that differs is a failure.
"""

import base64
import functools
import json
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import retain
from retain.attention.head_weights import format_weights
from retain.eval.head_weights import importance_weights
from retain.hf.version_names import CACHE
from retain.models.named import load_named_model
from retain.presets import Policy
from tests.tiny import tiny_model

FOLDER = Path(__file__).parent
FILE = FOLDER / "kept.jsonl"
# model -> which documents it reads, what share of them is kept, tokens of a chunk.
MODELS = {"reference": ("reference", 0.25, 96), "llama": ("tiny", 0.4, 64), "qwen3": ("tiny", 0.4, 64)}
# The first two evict behind the prefill, with the question unknown or known.
WHEN = ("unknown", "known", "chunk", "decode", "prefill+decode")
# Tokens between evictions while decoding; two of the ten tokens come after the last eviction.
EVERY = 4
SEEDS = (3, 4)
# Relative noise of weights, of the size of a few float32 roundings, and how often it is drawn.
NOISE, DRAWS = 1e-6, 4
# More cells than this that differ are no ties.
MOST_TIES = 10


def cells() -> dict[str, dict[str, Any]]:
    """The golden lines by cell."""
    lines = map(json.loads, FILE.read_text().splitlines())
    return {line["cell"]: line for line in lines}


@functools.cache
def documents(kind: str) -> dict[str, Tensor]:
    """Left-padded contexts with their mask, questions and the tokens behind them, `[2, tokens]` each."""
    rows = json.loads((FOLDER / "documents.json").read_text())[kind]
    width = max(len(row["context_ids"]) for row in rows)
    pads = [width - len(row["context_ids"]) for row in rows]
    ids = [[0] * pad + row["context_ids"] for pad, row in zip(pads, rows, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in pads]
    names = ("question_ids", "next_ids")
    others = {name: torch.tensor([row[name] for row in rows]) for name in names}
    return {"context_ids": torch.tensor(ids), "mask": torch.tensor(mask), **others}


@functools.cache
def model_and_gates(name: str, family: str) -> tuple[Any, Any]:
    """A model in float64 and untrained gates for it."""
    reference = name == "reference"
    model = (
        load_named_model("reference:0", dtype="float64")
        if reference
        else tiny_model(name, dtype=torch.float64)
    )
    return model, retain.new_gates(model, family, seed=0).double()


def jittered(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy with noise on its weights: what another machine's rounding does."""
    module, draw = deepcopy(module), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
            weight.mul_(1 + NOISE * noise.to(weight.dtype))
    return module


def run(cell: str, jitter: int = 0) -> np.ndarray:
    """Positions that the cache of a cell holds in the end, `[document, layer, head, position]`; `jitter`
    above 0 draws noise on the weights of model and gates."""
    name, policy_name, when = cell.split("/")
    policy_name, _, family = policy_name.partition("@")
    kind, keep_ratio, chunk = MODELS[name]
    given = documents(kind)
    model, gates = model_and_gates(name, family or "mlp")
    if jitter:
        model, gates = jittered(model, jitter), jittered(gates, jitter)
    once = when in ("unknown", "known")
    with _with_weights(retain.load_policy(policy_name), model) as policy, retain.attach(model):
        cache = retain.Cache(
            model,
            policy,
            keep_ratio=keep_ratio,
            when="prefill" if once else when,
            every=EVERY,
            gates=gates if policy.learned else None,
            seeds=SEEDS,
            short="raise",
        )
        ids, mask = given["context_ids"], given["mask"]
        if when not in ("unknown", "chunk"):
            ids = torch.cat([ids, given["question_ids"]], 1)
            mask = pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        cache.prefill(ids, mask, chunk_size=chunk if when == "chunk" else None)
        behind: Sequence[Tensor] = [] if once else given["next_ids"].split(1, 1)
        for new_ids in [given["question_ids"]] if when == "chunk" else behind:
            mask = pad(mask, (0, new_ids.shape[1]), value=1)
            positions = (mask.cumsum(-1) - 1)[:, -new_ids.shape[1] :]
            with torch.no_grad():
                model(input_ids=new_ids, attention_mask=mask, position_ids=positions, **{CACHE: cache})
    held = [layer.store.flat()[2:] for layer in cache.state.ragged]
    heads, width = model.config.num_key_value_heads, 1 + max(int(positions.max()) for positions, _ in held)
    bits = np.zeros((len(SEEDS), len(held), heads, width), dtype=bool)
    for layer, (positions_N, rows_N) in enumerate(held):
        bits[rows_N // heads, layer, rows_N % heads, positions_N] = True
        assert bits[:, layer].sum() == len(positions_N), f"{cell}: a position is held twice"
    return bits


@contextmanager
def _with_weights(policy: Policy, model: Any) -> Iterator[Policy]:
    """The policy, and while it is needed the file of weights that it reads: retrieval and streaming heads
    take turns, and every third query head finds no needles."""
    if policy.weights is None:
        yield policy
        return
    config = model.config
    layers, heads = range(config.num_hidden_layers), config.num_key_value_heads
    if policy.name.startswith("duoattention"):
        weights = torch.tensor([[(layer + head) % 2.0 for head in range(heads)] for layer in layers])
    else:
        queries = range(config.num_attention_heads)
        found = [[((layer + head) % 3) / 2 for head in queries] for layer in layers]
        weights = importance_weights(torch.tensor(found, dtype=torch.float64), heads, 1.5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heads.json"
        path.write_text(format_weights(dict(zip(layers, weights.tolist(), strict=True))))
        yield replace(policy, allocation=replace(policy.allocation, weights=str(path)))


def encode(cell: str, bits: np.ndarray) -> dict[str, Any]:
    """The line of a cell."""
    packed = base64.b64encode(zlib.compress(np.packbits(bits).tobytes(), 9)).decode()
    return {"cell": cell, "counts": bits.sum(-1).tolist(), "width": bits.shape[-1], "kept": packed}


def decode(line: dict[str, Any]) -> np.ndarray:
    """The bits of a line."""
    shape = (*np.shape(line["counts"]), line["width"])
    packed = np.frombuffer(zlib.decompress(base64.b64decode(line["kept"])), dtype=np.uint8)
    return np.unpackbits(packed, count=int(np.prod(shape))).reshape(shape).astype(bool)


def moved(one: np.ndarray, two: np.ndarray) -> set[tuple[int, ...]]:
    """(document, layer, head, position) of every entry that only one of two keeps."""
    width = max(one.shape[-1], two.shape[-1])
    one, two = (np.pad(cell, [(0, 0)] * 3 + [(0, width - cell.shape[-1])]) for cell in (one, two))
    return {tuple(map(int, place)) for place in np.argwhere(one != two)}


def make() -> None:
    """Write the lines of the cells that the golden file names."""
    FILE.write_text("".join(json.dumps(encode(cell, run(cell))) + "\n" for cell in cells()))


def check(names: Sequence[str], *, say: Callable[[str], None] = print) -> list[str]:
    """Differences from the golden file, one text a cell.

    Args:
        names: which cells are compared.
        say: called with the text of a cell that differs at ties within rounding alone, which is no failure.
    """
    golden, wrong, num_ties = cells(), [], 0
    for cell in names:
        found, wanted = run(cell), decode(golden[cell])
        if found.shape[:-1] != wanted.shape[:-1]:
            wrong.append(f"{cell}: other layers or heads, {found.shape[:-1]}")
        elif different := moved(found, wanted):
            shown = ", ".join(map(str, sorted(different)[:4])) + (", ..." if len(different) > 4 else "")
            text = f"{cell}: {len(different)} entries differ, (document, layer, head, position): {shown}"
            noisy = (moved(run(cell, jitter), found) for jitter in range(1, DRAWS + 1))
            num_ties += 1
            if num_ties <= MOST_TIES and different <= set().union(*noisy):
                say(f"{text}: ties within rounding")
            else:
                wrong.append(text)
    return wrong

"""Compares the entries that every policy keeps in every regime with golden ones.

A cell is a model, a policy and a regime. Two documents of different lengths are read as one left-padded batch
in float64, their questions behind them, then fixed tokens one by one where the regime decodes; what the cache
holds at the end is the cell. Nothing is generated, so a cell depends on evictions alone.

`kept.jsonl` has one line a cell: entries held by (document, layer, KV head), and the positions, as bits
`[document, layer, head, position]`, packed, deflated and in base64.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import retain
from retain.eval.diagnose.head_weights import importance_weights
from retain.head_weights import format_weights
from retain.hf.version_names import CACHE
from retain.presets import Policy
from tests.golden import reach
from tests.tiny import tiny_model

FOLDER = Path(__file__).parent
FILE = FOLDER / "kept.jsonl"
# model -> which documents it reads, what share of them is kept, tokens of a chunk.
MODELS = {"reference": ("reference", 0.25, 96), "llama": ("tiny", 0.4, 64), "qwen3": ("tiny", 0.4, 64)}
REGIMES = ("context_only", "query_aware", "chunked", "decode", "prefill+decode")
# Tokens between evictions while decoding; two of the ten tokens come after the last eviction.
EVERY = 4
SEEDS = (3, 4)
# Relative noise of weights, of the size of a few float32 roundings, and how often it is drawn.
NOISE, DRAWS = 1e-6, 4
# More cells than this that differ are no ties.
MOST_TIES = 30

# Positions by layer, then by row: document, then KV head.
Positions = list[list[list[int]]]


@dataclass(frozen=True)
class Cell:
    """One cell of the grid."""

    model: str
    policy: str
    regime: str

    def __str__(self) -> str:
        return f"{self.model}/{self.policy}/{self.regime}"


@functools.cache
def policy_names() -> list[str]:
    """Every preset that evicts, and every variant of one as `preset:variant`; not that which keeps everything
    in few bits."""
    return [
        name
        for preset in retain.policies()
        if preset.name != "kivi"
        for name in (preset.name, *(f"{preset.name}:{own}" for own in preset.variants))
    ]


def grid() -> list[Cell]:
    """Every model, policy and regime."""
    return [Cell(*own) for own in ((m, p, r) for m in MODELS for p in policy_names() for r in REGIMES)]


def sample() -> list[Cell]:
    """The default policy in every regime, and every policy once: regimes take turns, and each sixth policy of
    a regime is on the reference model."""
    tiny = [name for name in MODELS if name != "reference"]
    cells = [Cell(tiny[0], "fused", regime) for regime in REGIMES]
    for number, policy in enumerate(policy_names()):
        turn, place = divmod(number, len(REGIMES))
        model = "reference" if turn % 6 == 0 else tiny[turn % len(tiny)]
        cells.append(Cell(model, policy, REGIMES[place]))
    return cells


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
def model_and_gates(name: str, jitter: int = 0) -> tuple[Any, Any]:
    """A model in float64 and untrained gates for it; `jitter` above 0 draws noise on both."""
    if jitter:
        return tuple(reach.jittered(deepcopy(own), jitter, NOISE) for own in model_and_gates(name))
    model = reach.load_reference(0) if name == "reference" else tiny_model(name, dtype=torch.float64)
    return model, retain.new_gates(model, "mlp", seed=0).double()


def run(cell: Cell, jitter: int = 0) -> Positions:
    """What the cache of a cell holds in the end."""
    kind, keep_ratio, chunk = MODELS[cell.model]
    given = documents(kind)
    model, gates = model_and_gates(cell.model, jitter)
    policy = retain.load_policy(cell.policy)
    once = cell.regime in ("context_only", "query_aware")
    with _with_weights(policy, model) as policy, retain.attach(model):
        cache = retain.Cache(
            model,
            policy,
            keep_ratio=keep_ratio,
            regime="prefill" if once else cell.regime,
            every=EVERY,
            gates=gates if policy.learned else None,
            seeds=SEEDS,
            short="raise",
        )
        ids, mask = given["context_ids"], given["mask"]
        if cell.regime not in ("context_only", "chunked"):
            ids = torch.cat([ids, given["question_ids"]], 1)
            mask = pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        cache.prefill(ids, mask, chunk_size=chunk if cell.regime == "chunked" else None)
        behind = (
            []
            if once
            else [given["question_ids"]]
            if cell.regime == "chunked"
            else given["next_ids"].split(1, 1)
        )
        for new_ids in behind:
            mask = pad(mask, (0, new_ids.shape[1]), value=1)
            positions = (mask.cumsum(-1) - 1)[:, -new_ids.shape[1] :]
            with torch.no_grad():
                model(input_ids=new_ids, attention_mask=mask, position_ids=positions, **{CACHE: cache})
    return reach.held_positions(cache)


@contextmanager
def _with_weights(policy: Policy, model: Any) -> Iterator[Policy]:
    """The policy, and while it is needed the file of weights that it reads: retrieval and streaming heads
    take turns, and every third query head finds no needles."""
    if policy.allocation.weights is None:
        yield policy
        return
    config = model.config
    layers, heads = range(config.num_hidden_layers), config.num_key_value_heads
    if policy.name.startswith("duoattention"):
        weights = torch.tensor([[(layer + head) % 2 for head in range(heads)] for layer in layers])
    else:
        queries = range(config.num_attention_heads)
        found = [[((layer + head) % 3) / 2 for head in queries] for layer in layers]
        weights = importance_weights(torch.tensor(found, dtype=torch.float64), heads, 1.5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heads.json"
        path.write_text(format_weights(dict(zip(layers, weights.tolist(), strict=True))))
        yield replace(policy, allocation=replace(policy.allocation, weights=str(path)))


def encode(cell: Cell, kept: Positions) -> dict[str, Any]:
    """The line of a cell."""
    heads = len(kept[0]) // len(SEEDS)
    assert all(len(rows) == heads * len(SEEDS) for rows in kept), "layers differ in their heads"
    width = 1 + max(place for rows in kept for row in rows for place in row)
    bits = np.zeros((len(SEEDS), len(kept), heads, width), dtype=bool)
    for layer, rows in enumerate(kept):
        for row, places in enumerate(rows):
            assert places == sorted(set(places)), f"{cell}: positions of a row are in order, none twice"
            bits[row // heads, layer, row % heads, places] = True
    packed = base64.b64encode(zlib.compress(np.packbits(bits).tobytes(), 9)).decode()
    return {"cell": str(cell), "counts": bits.sum(-1).tolist(), "width": width, "kept": packed}


def decode(line: dict[str, Any]) -> np.ndarray:
    """The bits `[document, layer, head, position]` of a line."""
    shape = (*np.shape(line["counts"]), line["width"])
    packed = np.frombuffer(zlib.decompress(base64.b64decode(line["kept"])), dtype=np.uint8)
    return np.unpackbits(packed, count=int(np.prod(shape))).reshape(shape).astype(bool)


def _moved(one: dict[str, Any], two: dict[str, Any]) -> set[tuple[int, ...]]:
    """(document, layer, head, position) of every entry that only one of two lines keeps."""
    bits = [decode(line) for line in (one, two)]
    width = max(own.shape[-1] for own in bits)
    bits = [np.pad(own, [(0, 0)] * 3 + [(0, width - own.shape[-1])]) for own in bits]
    return {tuple(map(int, place)) for place in np.argwhere(bits[0] != bits[1])}


def read() -> dict[str, dict[str, Any]]:
    """The golden lines by cell."""
    lines = map(json.loads, FILE.read_text().splitlines())
    return {line["cell"]: line for line in lines}


def make() -> None:
    """Write the golden file."""
    FILE.write_text("".join(json.dumps(encode(cell, run(cell))) + "\n" for cell in grid()))


def check(cells: Sequence[Cell], *, say: Callable[[str], None] = print) -> list[str]:
    """What differs from the golden file, one text a cell.

    Args:
        cells: which are compared.
        say: called with the text of a cell that differs at ties within rounding alone, which is no failure.
    """
    golden, wrong, differing = read(), [], []
    for cell in cells:
        if (wanted := golden.get(str(cell))) is None:
            wrong.append(f"{cell}: there is no golden line of it")
            continue
        line = encode(cell, run(cell))
        if np.shape(line["counts"]) != np.shape(wanted["counts"]):
            wrong.append(f"{cell}: other layers or heads, {np.shape(line['counts'])}")
        elif moved := _moved(line, wanted):
            differing.append((cell, line, moved))
    for cell, line, moved in differing:
        shown = ", ".join(map(str, sorted(moved)[:4])) + (", ..." if len(moved) > 4 else "")
        text = f"{cell}: {len(moved)} entries differ, (document, layer, head, position): {shown}"
        if len(differing) <= MOST_TIES and moved <= _ties(cell, line):
            say(f"{text}: ties within rounding")
        else:
            wrong.append(text)
    return wrong


def _ties(cell: Cell, line: dict[str, Any]) -> set[tuple[int, ...]]:
    """Entries of a cell that noise of the size of rounding moves."""
    moved = (_moved(encode(cell, run(cell, jitter)), line) for jitter in range(1, DRAWS + 1))
    return set().union(*moved)


def unmatched() -> list[str]:
    """Golden cells that the grid has no more, and cells of the grid that have no golden line."""
    return [
        f"{name}: only in one of grid and golden file" for name in sorted({*map(str, grid())} ^ {*read()})
    ]

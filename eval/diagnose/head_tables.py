"""Tables of a model's heads and layers, measured, for policies that read them.

    python -m retain.eval.diagnose.head_tables --model reference:0 --output heads.tsv
    python -m retain.eval.diagnose.head_tables --table head_importance --model reference:0 --output heads.tsv

It writes a tab-separated table, one row a layer (`retain.head_tables`): `head_classes` (DuoAttention),
`head_importance` (HeadKV), `retrieval_heads` and `layer_errors` (CompressKV).

Head classes *measure attention*. DuoAttention (arXiv 2410.10819) *optimises* a gate of each head, so that the
model's output on synthetic passkeys survives when gated heads stream; it needs gradients and a training run.
A head that looks far back without any effect on the output is a retrieval head here and none there. The other
tables are measured on items with needles (`retain.eval.diagnose.head_importance`,
`retain.eval.diagnose.layer_errors`).
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from tqdm import tqdm

from retain.attention.chunked import attention_chunks
from retain.eval.diagnose import documents
from retain.eval.diagnose.head_importance import MEASURES, measure_head_importance
from retain.eval.diagnose.layer_errors import measure_layer_errors
from retain.eval.tasks.suite import Item
from retain.eval.tasks.suites import load_suite
from retain.head_tables import TABLES, format_table, read_table
from retain.hf.intercept.observe import observe
from retain.hf.model.decoder import describe
from retain.hf.model.named import reference_seed
from retain.process.command import command
from retain.process.provenance import write_text
from retain.reference.documents import Document

SINKS, RECENT = 4, 32
# How importance is measured for each table of query heads.
MEASURED_BY = {"head_importance": "retrieval_reasoning", "retrieval_heads": "semantic"}
APPENDIX = "\n{question}\n{answer}"
Encode = Callable[[str, bool], list[int]]  # (text, with the tokenizer's own special tokens) -> ids


@torch.no_grad()
def measure_head_classes(
    model: Any, documents: Iterable[Document], *, sinks: int = SINKS, recent: int = RECENT, chunk: int = 128
) -> Float64[Tensor, "L H"]:
    """Share of each head's attention that a streaming head could not pay.

    `share[l, h] = mean_documents mean_j max_{q in group(h)} sum_{sinks <= i <= j - recent} a_qj[i]`, over the
    queries j of what comes after the context (question and answer); where nothing does, over those of the
    context that are further than `sinks + recent` from its beginning, for which a streaming head has lost
    something.

    Args:
        documents: contexts with what came after them; every document counts the same.
        sinks: first entries that a streaming head holds.
        recent: last entries that it holds, the query's own included; at least 1.
        chunk: queries at a time; changes memory, not the result.

    Returns:
        shares in [0, 1], one row for each layer that evicts.

    Raises:
        ValueError: if there are no documents, one is no longer than what a streaming head holds, or layers
            have unlike numbers of KV heads.
    """
    if sinks < 0 or recent < 1:
        raise ValueError(
            f"a streaming head holds sinks >= 0 and recent >= 1 entries; got sinks={sinks}, recent={recent}."
        )
    shares: list[Tensor] = []
    for number, document in enumerate(documents):
        ids = [*document.context_ids, *document.appendix_ids]
        if len(ids) <= sinks + recent:
            raise ValueError(
                f"document {number} has {len(ids)} tokens, and a streaming head holds {sinks} + {recent} "
                "of them: nothing is far. Pass longer documents, or fewer sinks and recent entries."
            )
        first = len(document.context_ids) if document.appendix_ids else sinks + recent
        rows = []
        for evidence in observe(model, torch.tensor([ids], device=model.device)):
            far_H = torch.zeros(evidence.num_heads, dtype=torch.float64)
            for start, probs_BQsK in attention_chunks(evidence, chunk, first=first):
                entry_K = torch.arange(probs_BQsK.shape[3], device=probs_BQsK.device)
                own_s1 = torch.arange(start, start + probs_BQsK.shape[2], device=probs_BQsK.device)[:, None]
                held_sK = (entry_K < sinks) | (entry_K > own_s1 - recent)
                far_Qs = probs_BQsK[0].masked_fill(held_sK, 0.0).sum(-1)
                far_H += far_Qs.unflatten(0, (len(far_H), -1)).amax(1).sum(-1).double().cpu()
            rows.append(far_H / (len(ids) - first))
        if len({len(row) for row in rows}) > 1:
            raise ValueError(
                f"layers have {', '.join(str(len(row)) for row in rows)} KV heads, and a table of head "
                "classes has as many in every row: state budgets another way than by head classes."
            )
        shares.append(torch.stack(rows))
    if not shares:
        raise ValueError("head classes are measured on documents, and there are none: pass at least one.")
    return sum(shares[1:], shares[0]) / len(shares)


def rank_heads(shares_LH: Float[Tensor, "L H"]) -> Float64[Tensor, "L H"]:
    """Places of all heads in order of their shares, scaled to 0..1, so that a threshold says how many of the
    heads are retrieval heads: 0.5 half of them (of an odd number, the larger half).

    Args:
        shares_LH: of `measure_head_classes`; of equal shares the later head has the higher place.
    """
    count = shares_LH.numel()
    if count == 1:
        return torch.ones(shares_LH.shape, dtype=torch.float64)
    order = shares_LH.flatten().argsort(stable=True).cpu()
    return (order.argsort().double() / (count - 1)).view(shares_LH.shape)


def write_head_classes(
    shares_LH: Float[Tensor, "L H"], path: str | Path, layers: Sequence[int] | None = None
) -> tuple[Path, Path]:
    """Writes the table that a policy reads, and beside it, with `.shares` before its suffix, the shares that
    it was made from.

    Args:
        layers: index in the model of each row's layer; None: they are the first ones.

    Returns:
        both paths.
    """
    path = Path(path)
    raw, layers = path.with_name(f"{path.stem}.shares{path.suffix}"), layers or range(len(shares_LH))
    write_table((shares_LH, layers), raw)
    return write_table((rank_heads(shares_LH), layers), path), raw


def write_table(measured: tuple[Float[Tensor, "L C"], Sequence[int]], path: str | Path) -> Path:
    """Writes a table: numbers in 0..1, and the index in the model of each row's layer."""
    (table_LC, layers), path = measured, Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, format_table(table_LC.tolist(), layers))
    return path


def measure_table(
    kind: str,
    model: Any,
    items: Iterable[Item],
    *,
    measure: str | None = None,
    retrieval_heads: str | Path | None = None,
) -> tuple[Float64[Tensor, "L C"], list[int]]:
    """Measures a table on items with needles.

    Args:
        kind: of `retain.head_tables.TABLES`, `head_classes` apart.
        measure: of query heads, a name in `MEASURES`; None: the table's own.
        retrieval_heads: the table by which layers are evicted from, for `layer_errors`.

    Raises:
        ValueError: as the measures say.
    """
    if kind != "layer_errors":
        return measure_head_importance(model, items, measure or MEASURED_BY[kind])
    rows = read_table("retrieval_heads", str(retrieval_heads)).rows
    return measure_layer_errors(model, items, rows)


def read_documents(path: str | Path, encode: Encode, context_tokens: int) -> Iterator[Document]:
    """Documents of a JSONL file: rows of `text`, or of `context`, `question` and `answer`; contexts are cut
    to `context_tokens`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is no such row.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"documents file {str(path)!r} does not exist: pass --jsonl, one row a line.")
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}.") from None
            fields = row if isinstance(row, dict) else {}
            if isinstance(fields.get("text"), str):
                text, appendix = fields["text"], ""
            elif {"context", "question", "answer"} <= fields.keys():
                text, appendix = str(fields["context"]), APPENDIX.format(**fields)
            else:
                got = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
                raise ValueError(
                    f"{path}, line {number} holds {got}; wanted 'text', or 'context', 'question' and "
                    "'answer'."
                )
            context_ids = tuple(encode(text, True)[:context_tokens])
            yield Document(context_ids, tuple(encode(appendix, False)) if appendix else ())


def load(name: str, jsonl: str | None, count: int, context_tokens: int) -> tuple[Any, Iterable[Document]]:
    """A model, and at most `count` documents for it: of a JSONL file, or without one of the reference suite.

    Raises:
        ValueError: a hub model without documents, or a model that cannot be loaded.
        FileNotFoundError: no such file of documents.
    """
    seed = reference_seed(name)
    if seed is None and jsonl is None:
        raise ValueError(
            f"documents for {name!r} are read from a file: pass --jsonl, rows of 'text', or of 'context', "
            "'question' and 'answer'."
        )
    model, tokenizer = documents.load(name)
    if seed is not None and jsonl is None:
        return model, load_suite("reference").documents(seed, count, context_tokens)

    def encode(text: str, special: bool) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])

    return model, islice(read_documents(str(jsonl), encode, context_tokens), count)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, writes, and shows the table."""
    parser = argparse.ArgumentParser(
        description="Measure a table of a model's heads or layers, which a policy reads: by default head "
        "classes (DuoAttention's layout; its gates are optimised, this is measured attention)."
    )
    parser.add_argument("--table", choices=tuple(TABLES), default="head_classes", help="what is measured")
    parser.add_argument("--model", required=True, help="reference:0, or a hub id or folder")
    parser.add_argument("--output", required=True, help="the table, e.g. heads.tsv")
    parser.add_argument("--context-tokens", type=int, default=1000, help="tokens of a context")
    parser.add_argument("--documents", type=int, default=64, help="documents or items: how many at most")
    classes = parser.add_argument_group("head_classes")
    classes.add_argument("--jsonl", help="documents: rows of 'text', or of 'context', 'question', 'answer'")
    classes.add_argument("--sinks", type=int, help=f"first entries that a streaming head holds ({SINKS})")
    classes.add_argument("--recent", type=int, help=f"last entries that it holds ({RECENT})")
    others = parser.add_argument_group("the other tables, which are measured on needles in prose")
    others.add_argument("--measure", choices=tuple(MEASURES), help="another measure of query heads")
    others.add_argument("--device", help="of a hub model, e.g. cuda:0 (default cpu)")
    others.add_argument("--retrieval-heads", help="layer_errors: the table by which layers are evicted from")
    given = parser.parse_args(arguments)
    only = (
        ("measure", "retrieval_heads", "device")
        if given.table == "head_classes"
        else ("jsonl", "sinks", "recent")
    )
    if strange := [f"--{name.replace('_', '-')}" for name in only if getattr(given, name) is not None]:
        raise ValueError(f"{', '.join(strange)}: not read for --table {given.table}; leave it out.")
    if given.table == "head_classes":
        return _head_classes(given)
    if (given.table == "layer_errors") != (given.retrieval_heads is not None):
        raise ValueError("--table layer_errors wants --retrieval-heads, a measured table; no other does.")
    if given.measure is not None and given.table not in MEASURED_BY:
        raise ValueError(f"--measure {given.measure} is of query heads, and --table {given.table} has none.")
    if given.retrieval_heads is not None:
        read_table("retrieval_heads", given.retrieval_heads)  # refused before the model is loaded
    seed = reference_seed(given.model)
    if seed is not None and given.device is not None:
        raise ValueError(f"--device {given.device}: a reference model runs on the CPU; leave it out.")
    placed = {} if given.device is None else {"device": given.device}
    suite = load_suite("reference" if seed is not None else "text", model=given.model, **placed)
    model = suite.load_model(seed or 0)
    found = suite.probes(seed or 0, given.documents, given.context_tokens)
    shown = iter(tqdm(found, total=given.documents, desc="items", unit="item"))
    options = {"measure": given.measure, "retrieval_heads": given.retrieval_heads}
    measured = measure_table(given.table, model, shown, **options)
    path = write_table(measured, given.output)
    own = MEASURES.get(given.measure or MEASURED_BY.get(given.table, ""))
    how = "" if own is None else f" ({own.about}; {own.paper})"
    scaled = ", the largest 1"
    print(f"{TABLES[given.table].what[:1].upper()}{TABLES[given.table].what[1:]}{how}{scaled}, by layer:")
    _show(measured[0], measured[1])
    print(f"Table: {path}\nPass {TABLES[given.table].stated}.")
    return 0


def _head_classes(given: argparse.Namespace) -> int:
    """Measures head classes, on documents."""
    model, found = load(given.model, given.jsonl, given.documents, given.context_tokens)
    shown = iter(tqdm(found, total=given.documents, desc="documents", unit="document"))
    sinks = SINKS if given.sinks is None else given.sinks
    recent = RECENT if given.recent is None else given.recent
    shares_LH = measure_head_classes(model, shown, sinks=sinks, recent=recent)
    layers = [spec.layer_idx for spec in describe(model)]
    path, raw = write_head_classes(shares_LH, given.output, layers)
    print(f"Attention beyond {sinks} first and {recent} last entries, by layer and KV head:")
    _show(shares_LH, layers)
    print(f"Measured attention; DuoAttention optimises its gates instead.\nTable: {path}\nShares: {raw}")
    return 0


def _show(table_LC: Tensor, layers: Sequence[int]) -> None:
    """Prints a table."""
    for idx, row in zip(layers, table_LC.tolist(), strict=True):
        print(f"  {idx:3}  " + "  ".join(f"{cell:.3f}" for cell in row))


if __name__ == "__main__":
    sys.exit(main())

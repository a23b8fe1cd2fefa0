"""LongBench, the English and code tasks, with their official prompts, cuts and scorers.

After Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding" (arXiv
2308.14508) and THUDM/LongBench: its `config/dataset2prompt.json` (character for character, typos included),
`config/dataset2maxlen.json`, `pred.py` and `eval.py`. `longbench.json` holds prompt, metric and most tokens
of each data set.

The context ends where the official prompt's document ends; everything after it (the repeated instruction, the
question, "Answer:") is the question. So a score that sees the context alone learns no more of the question
than the document holds. kvpress (`hub:Xnhyacinth/LongBench`) puts the repeated instruction before that place,
uses a chat template everywhere, allows 20 tokens more, and cuts long contexts on the right; its numbers are
another measurement. The Chinese tasks, LongBench-E and LongBench v2 are asked through lm-evaluation-harness.
"""

import json
import zipfile
from pathlib import Path
from typing import Any

from retain.eval.tasks.files import Table, read_file
from retain.eval.tasks.row import Row, Source
from retain.process.registry import lookup

TASKS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def longbench(
    tokenizer: Any,
    *,
    context_tokens: int,
    seed: int,
    first_item: int,
    items: int | None,
    dataset: str,
    path: str | None = None,
) -> list[Row]:
    """Rows of one data set, the same for every seed.

    Args:
        tokenizer: Of the model; a fast one.
        context_tokens: Most tokens of the whole prompt; officially 3,500, 7,500, 15,500 or 31,500, by model.
        seed: Not needed.
        first_item, items: Number of the first row, and how many; None: all.
        dataset: One of `TASKS`.
        path: The JSON lines, the folder that holds them, or the released data.zip; None: the hub's zip.

    Raises:
        ValueError: Rows that cannot be had, or a prompt that cannot be cut.
    """
    del seed
    card = lookup(dataset, TASKS, what="data set of LongBench")
    opening, closing = card["prompt"].split("{context}")
    table = _table(dataset, path)
    rows = []
    for number in range(first_item, len(table) if items is None else min(len(table), first_item + items)):
        columns = table[number]
        question = closing.replace("{input}", columns["input"])
        context, question, lost = cut_middle(
            opening + columns["context"], question, context_tokens, tokenizer
        )
        labels = {"words": columns["length"], "cut_tokens": lost, "classes": columns["all_classes"] or ()}
        rows.append(
            Row(
                task="longbench",
                context=context,
                question=question,
                answers=tuple(columns["answers"]),
                max_new_tokens=card["max_new_tokens"],
                metric=card["metric"],
                item=number,
                extra={**card["extra"], **labels},
            )
        )
    return rows


def _table(name: str, path: str | None) -> Table:
    """Rows of one data set from its file, its folder or the zip."""
    try:
        if path is None:
            from huggingface_hub import hf_hub_download

            path = hf_hub_download("THUDM/LongBench", "data.zip", repo_type="dataset")
        place: Any = Path(path).expanduser()
        if place.is_dir():
            place = place / f"{name}.jsonl"
        elif place.suffix == ".zip":
            place = zipfile.Path(place, f"data/{name}.jsonl")
        return read_file(place)
    except (OSError, ValueError, KeyError) as error:  # no network is an OSError
        raise ValueError(
            f"LongBench's {name} could not be had: {error} Fetch data.zip of the hub's data set "
            "THUDM/LongBench elsewhere, and name it or its folder: path=..."
        ) from error


def cut_middle(context: str, question: str, most: int, tokenizer: Any) -> tuple[str, str, int]:
    """Shorten a prompt in two parts to `most` tokens by removing its middle.

    Of more tokens (with those that the tokenizer puts before a text), the first `most // 2` and the last
    `most // 2` are kept, as `pred.py` does. They are cut out of the text by where each token lies in it, so
    that the rest is not changed by a decoding. A question longer than its half loses its beginning, as
    there; context and question stay apart where they were, so that a score never sees the question with the
    context.

    Returns:
        (context, question, number of tokens cut).

    Raises:
        ValueError: `most` is below 2, or the tokenizer does not say where its tokens lie.
    """
    if not tokenizer.is_fast:
        raise ValueError("prompts are cut by where tokens lie in the text, which needs a fast tokenizer.")
    prompt, half = context + question, most // 2
    places = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    if len(places) <= most:
        return context, question, 0
    if half < 1:
        raise ValueError(
            f"a prompt of {len(places)} tokens has no two ends in {most}: give more (context_tokens)."
        )
    seam, first, last = len(context), places[half - 1][1], places[-half][0]
    return (
        prompt[: min(seam, first)] + prompt[last:seam],
        prompt[seam : max(seam, first)] + prompt[max(seam, last) :],
        len(places) - 2 * half,
    )


SOURCES: dict[str, Source] = {
    f"longbench/{name}": Source(card["about"], longbench, {"dataset": name}) for name, card in TASKS.items()
}

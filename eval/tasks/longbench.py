"""LongBench and LongBench-E: 21 data sets with their official prompts, truncation, stop rules and scorers.

After Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding" (arXiv
2308.14508) and THUDM/LongBench: its `config/dataset2prompt.json`, `config/dataset2maxlen.json`, `pred.py` and
`eval.py`.

The context ends where the official prompt's document ends; everything after it (the repeated instruction, the
question, "Answer:") is the question. So a score that sees the context alone learns no more of the question
than the document holds. kvpress puts the repeated instruction before that seam, uses a chat template
everywhere, allows 20 tokens more, and cuts long contexts on the right; its numbers are another measurement.
"""

from collections.abc import Callable, Mapping
from typing import Any

from retain.eval.tasks.hub_rows import RowSource, load_rows, row_at
from retain.eval.tasks.longbench_prompts import PROMPTS
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.registry import lookup

COLUMNS = ("input", "context", "answers", "length", "all_classes", "_id")
# Upper ends of LongBench-E's bins, by the column `length`.
BINS = ((4000, "0-4k"), (8000, "4-8k"))

# In LongBench-E too.
EVEN = (
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa"),
    *("samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)


def longbench(
    asking: Asking,
    *,
    dataset: str,
    even: bool = False,
    max_tokens: int | None = None,
    path: str | None = None,
    revision: str | None = None,
) -> TextItem:
    """Write one item of one data set.

    Args:
        asking: Which item; `context_tokens` is the most tokens of the whole prompt.
        dataset: One of `PROMPTS`.
        even: Whether it is LongBench-E's, whose lengths are evenly spread.
        max_tokens: The most tokens of the whole prompt, if fewer: officially 3,500, 7,500, 15,500 or 31,500,
            by model.
        path: Folder, zip or file on this machine, in the official layout.
        revision: Of the hub's repository.

    Raises:
        ValueError: an unknown data set, rows that cannot be had, or a prompt that cannot be cut at all.
    """
    source = longbench_source(dataset, even=even, path=path, revision=revision)
    row = row_at(load_rows(source, COLUMNS), asking.index, source)
    opening, closing = PROMPTS[dataset].split("{context}")
    question = closing.replace("{input}", row["input"])
    most = asking.context_tokens if max_tokens is None else min(max_tokens, asking.context_tokens)
    context, question, cut = cut_middle(opening + row["context"], question, most, asking)
    length = float(row["length"])
    return TextItem(
        context=context,
        questions=(
            TextQuestion(
                question=question,
                references=_texts(row["answers"], source, asking.index),
                scoring={"all_classes": tuple(row["all_classes"] or ())},
            ),
        ),
        about={"id": str(row["_id"]), "length": length, "bin": length_bin(length), **cut},
    )


def longbench_size(
    *,
    dataset: str,
    even: bool = False,
    max_tokens: int | None = None,
    path: str | None = None,
    revision: str | None = None,
) -> int:
    """Number of items of a data set."""
    return len(load_rows(longbench_source(dataset, even=even, path=path, revision=revision), COLUMNS))


def longbench_source(dataset: str, *, even: bool, path: str | None, revision: str | None) -> RowSource:
    """Location of a data set's rows: the official zip on the hub, or a folder of its files.

    Raises:
        ValueError: no such data set, or none in LongBench-E.
    """
    lookup(dataset, {name: name for name in (EVEN if even else PROMPTS)}, what="LongBench data set")
    name = f"{dataset}_e" if even else dataset
    return RowSource(
        names=(name, f"data/{name}"), hub="THUDM/LongBench", file="data.zip", revision=revision, path=path
    )


def _texts(answers: Any, source: RowSource, index: int) -> tuple[str, ...]:
    # A text is a sequence of texts too, each of one letter.
    if isinstance(answers, str):
        raise ValueError(
            f"the column answers of {source}, row {index}, is to be a list, but is {answers!r:.60}."
        )
    return tuple(answers)


def length_bin(length: float) -> str:
    """LongBench-E's bin of a length: "0-4k", "4-8k" or "8k+", the lower end included."""
    return next((name for end, name in BINS if length < end), "8k+")


def cut_middle(
    context: str, question: str, most: int, asking: Asking
) -> tuple[str, str, Mapping[str, float]]:
    """Shorten a prompt in two parts to a length by removing its middle.

    Of the prompt's `n > most` tokens (with those that the tokenizer puts before a text), the first
    `most // 2` and the last `most // 2` are kept, as `pred.py` does. They are cut out of the text by where
    each token lies in it, so that what is kept is not changed by a decoding.

    A question longer than its half loses its own beginning, as there. The seam stays where it is if anything
    behind it is left of the head (a short context before a long question), so that a score never sees the
    question with the context; it is the cut itself if the cut goes across it.

    Args:
        context: All before the seam.
        question: All behind it.
        most: Tokens of context and question together.
        asking: Whose tokenizer.

    Returns:
        (context, question, what was cut: `cut_tokens` of the prompt, `cut_question_tokens` of them behind the
        seam).

    Raises:
        ValueError: a text must be cut to fewer than two tokens, or with a tokenizer that does not say where
            its tokens lie.
    """
    whole = {"cut_tokens": 0.0, "cut_question_tokens": 0.0}
    prompt = context + question
    if asking.tokenizer is None:
        if asking.measure(prompt) > most:
            raise ValueError(f"a prompt is to be cut to {most} tokens, which needs the model's tokenizer.")
        return context, question, whole
    if not asking.tokenizer.is_fast:
        raise ValueError("prompts are cut by where tokens lie in the text, which needs a fast tokenizer.")
    places = asking.tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    if len(places) <= most:
        return context, question, whole
    half = most // 2
    if half < 1:
        raise ValueError(
            f"a prompt of {len(places)} tokens has no two ends in {most}: give more (context_tokens)."
        )
    seam, first, last = len(context), places[half - 1][1], places[-half][0]
    lost = places[half:-half]
    cut = {
        "cut_tokens": float(len(lost)),
        "cut_question_tokens": float(sum(stop > seam for _, stop in lost)),
    }
    return (
        prompt[: min(seam, first)] + prompt[last:seam],
        prompt[seam : max(seam, first)] + prompt[max(seam, last) :],
        cut,
    )


GENERATORS: Mapping[str, Callable[..., TextItem]] = {"longbench": longbench}
SIZES: Mapping[str, Callable[..., int]] = {"longbench": longbench_size}

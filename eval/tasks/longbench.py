"""LongBench, LongBench-E and LongBench v2 with their official prompts, truncation, stop rules and scorers.

After Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding" (arXiv
2308.14508) and THUDM/LongBench: its `config/dataset2prompt.json`, `config/dataset2maxlen.json`, `pred.py` and
`eval.py`; and "LongBench v2: Towards Deeper Understanding and Reasoning on Realistic Long-context Multitasks"
(arXiv 2412.15204), `prompts/0shot.txt`, `pred.py`: 503 questions with four choices, without a chain of
thought, answered greedily, where the released code samples at temperature 0.1.

The context ends where the official prompt's document ends; everything after it (the repeated instruction, the
question, "Answer:") is the question. So a score that sees the context alone learns no more of the question
than the document holds. kvpress puts the repeated instruction before that seam, uses a chat template
everywhere, allows 20 tokens more, and cuts long contexts on the right; its numbers are another measurement.
"""

from collections.abc import Mapping

from retain.eval.tasks.hub_rows import Row, RowSource, RowTask
from retain.eval.tasks.longbench_prompts import PROMPTS
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.registry import lookup

# Upper ends of LongBench-E's bins, by the column `length`.
BINS = ((4000, "0-4k"), (8000, "4-8k"))

# In LongBench-E too.
EVEN = (
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa"),
    *("samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
CHOICES = ("A", "B", "C", "D")
_V2_OPENING = "Please read the following text and answer the question below.\n\n<text>\n"
_V2_CLOSING = (
    "\n</text>\n\nWhat is the correct answer to this question: {question}\nChoices:\n{choices}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)


def _source(*, dataset: str, even: bool = False, max_tokens: int | None = None) -> RowSource:
    lookup(dataset, dict.fromkeys(EVEN if even else PROMPTS), what="LongBench data set")
    name = f"{dataset}_e" if even else dataset
    return RowSource(
        names=(name, f"data/{name}"),
        hub="THUDM/LongBench",
        columns=("input", "context", "answers", "length", "all_classes", "_id"),
        file="data.zip",
    )


def _write(
    asking: Asking, row: Row, *, dataset: str, even: bool = False, max_tokens: int | None = None
) -> TextItem:
    """Write one item of one data set.

    Args:
        asking: Which item; `context_tokens` is the most tokens of the whole prompt.
        row: Of the data set.
        dataset: One of `PROMPTS`.
        even: Whether it is LongBench-E's, whose lengths are evenly spread.
        max_tokens: As `cut_middle` takes it; officially 3,500, 7,500, 15,500 or 31,500, by model.
    """
    # A text is a sequence of texts too, each of one letter.
    if isinstance(row["answers"], str):
        raise ValueError(
            f"the column answers of LongBench's {dataset}, row {asking.index}, is to be a list, but is "
            f"{row['answers']!r:.60}."
        )
    opening, closing = PROMPTS[dataset].split("{context}")
    question = closing.replace("{input}", row["input"])
    context, question, cut = cut_middle(opening + row["context"], question, max_tokens, asking)
    scoring = {"all_classes": tuple(row["all_classes"] or ())}
    length = float(row["length"])
    return TextItem(
        context=context,
        questions=(TextQuestion(question, tuple(row["answers"]), scoring=scoring),),
        about={"id": str(row["_id"]), "length": length, "bin": length_bin(length), **cut},
    )


def _source_v2(max_tokens: int | None = None) -> RowSource:
    return RowSource(
        names=("data", "longbench_v2", "train"),
        hub="THUDM/LongBench-v2",
        columns=(
            *("_id", "domain", "sub_domain", "difficulty", "length", "question", "answer", "context"),
            *(f"choice_{letter}" for letter in CHOICES),
        ),
        file="data.json",
    )


def _write_v2(asking: Asking, row: Row, *, max_tokens: int | None = None) -> TextItem:
    """Write one item; `max_tokens` is the most tokens of the whole prompt, 120,000 officially."""
    choices = "\n".join(f"({letter}) {row[f'choice_{letter}'].strip()}" for letter in CHOICES)
    question = _V2_CLOSING.format(question=row["question"].strip(), choices=choices)
    context, question, cut = cut_middle(_V2_OPENING + row["context"].strip(), question, max_tokens, asking)
    about = {name: str(row[name]) for name in ("domain", "sub_domain", "difficulty", "length")}
    return TextItem(
        context=context,
        questions=(TextQuestion(question, (row["answer"].strip(),)),),
        about={"id": str(row["_id"]), **about, **cut},
    )


def length_bin(length: float) -> str:
    """LongBench-E's bin of a length: "0-4k", "4-8k" or "8k+", the lower end included."""
    return next((name for end, name in BINS if length < end), "8k+")


def cut_middle(
    context: str, question: str, max_tokens: int | None, asking: Asking
) -> tuple[str, str, Mapping[str, float]]:
    """Shorten a prompt in two parts to a length by removing its middle.

    Of the prompt's `n > most` tokens (with those that the tokenizer puts before a text), the first
    `most // 2` and the last `most // 2` are kept, as `pred.py` does. They are cut out of the text by where
    each token lies in it, so that the rest is not changed by a decoding.

    A question longer than its half loses its own beginning, as there. The seam stays where it is if anything
    behind it is left of the head (a short context before a long question), so that a score never sees the
    question with the context; it is the cut itself if the cut goes across it.

    Args:
        context: All before the seam.
        question: All behind it.
        max_tokens: Most tokens of context and question together, if fewer than the asking's.
        asking: Whose tokenizer.

    Returns:
        (context, question, the cut: `cut_tokens` of the prompt, `cut_question_tokens` of them behind the
        seam).

    Raises:
        ValueError: A text must be cut to fewer than two tokens, or with a tokenizer that does not say where
            its tokens lie.
    """
    most = asking.context_tokens if max_tokens is None else min(max_tokens, asking.context_tokens)
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
    cut = {"cut_tokens": float(len(lost)), "cut_question_tokens": float(sum(stop > seam for _, stop in lost))}
    return (
        prompt[: min(seam, first)] + prompt[last:seam],
        prompt[seam : max(seam, first)] + prompt[max(seam, last) :],
        cut,
    )


longbench = RowTask(_source, _write)
longbench_v2 = RowTask(_source_v2, _write_v2)
GENERATORS = {"longbench": longbench, "longbench_v2": longbench_v2}

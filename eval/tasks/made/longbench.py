"""LongBench and LongBench-E, the English and code tasks, with their official prompts, cuts and scorers.

After Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding" (arXiv
2308.14508) and THUDM/LongBench: its `config/dataset2prompt.json` (character for character, typos included),
`config/dataset2maxlen.json`, `pred.py` and `eval.py`.

The context ends where the official prompt's document ends; everything after it (the repeated instruction, the
question, "Answer:") is the question. So a score that sees the context alone learns no more of the question
than the document holds. kvpress (`hub:Xnhyacinth/LongBench`) puts the repeated instruction before that place,
uses a chat template everywhere, allows 20 tokens more, and cuts long contexts on the right; its numbers are
another measurement. The Chinese tasks, and LongBench v2, are asked through lm-evaluation-harness.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retain.eval.tasks.made.files import need, read_table
from retain.eval.tasks.row import Request, Row, Source
from retain.process.extras import require

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any "
    "other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based on the "
    "given passages. Only give me the answer and do not output any other words.\n\nQuestion: {input}\n"
    "Answer:"
)

PROMPTS: Mapping[str, str] = {
    "narrativeqa": (
        "You are given a story, which can be either a novel or a movie script, and a question. Answer "
        "the question asconcisely as you can, using a single phrase if possible. Do not provide any "
        "explanation.\n\nStory: {context}\n\nNow, answer the question based on the story asconcisely as "
        "you can, using a single phrase if possible. Do not provide any explanation.\n\nQuestion: "
        "{input}\n\nAnswer:"
    ),
    "qasper": (
        "You are given a scientific article and a question. Answer the question as concisely as you can, "
        "using a single phrase or sentence if possible. If the question cannot be answered based on the "
        'information in the article, write "unanswerable". If the question is a yes/no question, answer '
        '"yes", "no", or "unanswerable". Do not provide any explanation.\n\nArticle: {context}\n\n '
        "Answer the question based on the above article as concisely as you can, using a single phrase "
        "or sentence if possible. If the question cannot be answered based on the information in the "
        'article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or '
        '"unanswerable". Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:'
    ),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question "
        "based on the above text, only give me the answer and do not output any other words.\n\n"
        "Question: {input}\nAnswer:"
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "gov_report": (
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:"
    ),
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or instruction. Answer the "
        "query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the "
        "above meeting transcript in one or more sentences.\n\nQuery: {input}\nAnswer:"
    ),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:"
    ),
    "trec": (
        "Please determine the type of the question below. Here are some examples of questions.\n\n"
        "{context}\n{input}"
    ),
    "triviaqa": (
        "Answer the question based on the given passage. Only give me the answer and do not output any "
        "other words. The following are some examples.\n\n{context}\n\n{input}"
    ),
    "samsum": (
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}"
    ),
    "passage_count": (
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please "
        "carefully read these paragraphs and determine how many unique paragraphs there are after "
        "removing duplicates. In other words, how many non-repeating paragraphs are there in total?\n\n"
        "{context}\n\nPlease enter the final count of unique paragraphs after removing duplicates. The "
        "output format should only contain the number, such as 1, 2, 3, and so on.\n\nThe final answer "
        "is: "
    ),
    "passage_retrieval_en": (
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph "
        "the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter "
        "the number of the paragraph that the abstract is from. The answer format must be like "
        '"Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: '
    ),
    "lcc": "Please complete the code given below. \n{context}Next line of code:\n",
    "repobench-p": "Please complete the code given below. \n{context}{input}Next line of code:\n",
}

_ONE_LINE = {"chat": False, "first_line": True}
# Of each data set: what is asked, metric, most tokens of an answer, and how it is answered.
TASKS: Mapping[str, tuple[str, str, int, dict[str, Any]]] = {
    "narrativeqa": ("a question on a book or a film script", "qa_f1", 128, {}),
    "qasper": ("a question on a scientific article", "qa_f1", 128, {}),
    "multifieldqa_en": ("a question on one long text of some field", "qa_f1", 64, {}),
    "hotpotqa": ("a question over two of several passages", "qa_f1", 32, {}),
    "2wikimqa": ("a question over two to five passages of Wikipedia", "qa_f1", 32, {}),
    "musique": ("a question over up to four of several passages", "qa_f1", 32, {}),
    "gov_report": ("a summary of a report by a government agency", "rouge_l", 512, {}),
    "qmsum": ("a summary of what a meeting said of something", "rouge_l", 512, {}),
    "multi_news": ("a summary of several news passages", "rouge_l", 512, {}),
    "trec": ("the type of a question, after examples", "classification", 64, _ONE_LINE),
    "triviaqa": ("a question on a passage, after examples", "qa_f1", 32, _ONE_LINE),
    "samsum": ("a summary of a dialogue, after examples", "rouge_l", 128, {**_ONE_LINE, "stop": ("\n",)}),
    "passage_count": ("how many different paragraphs there are", "count", 32, {}),
    "passage_retrieval_en": ("which of 30 paragraphs an abstract is from", "retrieval", 32, {}),
    "lcc": ("the next line of code of a file", "code_similarity", 64, {"chat": False}),
    "repobench-p": ("the next line of code, given a repository", "code_similarity", 64, {"chat": False}),
}
# Not in LongBench-E.
ONLY_PLAIN = ("narrativeqa", "musique", "qmsum")


def longbench(
    tokenizer: Any,
    *,
    context_tokens: int,
    seed: int,
    first_item: int,
    items: int | None,
    dataset: str,
    even: bool = False,
    path: str | None = None,
    revision: str | None = None,
    max_tokens: int | None = None,
) -> list[Row]:
    """Rows of one data set.

    Args:
        tokenizer: Of the model; a fast one.
        context_tokens: Most tokens of the whole prompt.
        seed: Not needed; the rows are always the same.
        first_item: Number of the first row.
        items: How many; None: all.
        dataset: One of `TASKS`.
        even: Whether it is LongBench-E's, whose lengths are evenly spread.
        path: The JSON lines, the folder that holds them, or the released data.zip; None: the hub's zip.
        revision: Of the hub's repository.
        max_tokens: Most tokens of the whole prompt, if fewer than `context_tokens`; officially 3,500, 7,500,
            15,500 or 31,500, by model.

    Raises:
        ValueError: Rows that cannot be had or lack a column, or a prompt that cannot be cut.
    """
    del seed
    opening, closing = PROMPTS[dataset].split("{context}")
    _, metric, max_new_tokens, answered = TASKS[dataset]
    most = context_tokens if max_tokens is None else min(max_tokens, context_tokens)
    table = _table(f"{dataset}_e" if even else dataset, path, revision)
    rows = []
    for number in range(first_item, len(table) if items is None else min(len(table), first_item + items)):
        columns = table[number]
        need(columns, ("input", "context", "answers", "length", "_id"), f"row {number} of LongBench {dataset}")
        if isinstance(columns["answers"], str):  # a text is a sequence of texts, too
            raise ValueError(f"the column answers of LongBench {dataset}, row {number}, is no list.")
        question = closing.replace("{input}", columns["input"])
        context, question, lost = cut_middle(opening + columns["context"], question, most, tokenizer)
        labels = {"id": str(columns["_id"]), "words": columns["length"], "cut_tokens": lost}
        classes = {"classes": tuple(columns["all_classes"])} if columns.get("all_classes") else {}
        rows.append(
            Row(
                task="longbench",
                context=context,
                question=question,
                answers=tuple(columns["answers"]),
                max_new_tokens=max_new_tokens,
                metric=metric,
                item=number,
                extra={**answered, **labels, **classes},
            )
        )
    return rows


def _table(name: str, path: str | None, revision: str | None) -> Any:
    if path is None:
        require("eval", "huggingface_hub", what="LongBench")
        from huggingface_hub import hf_hub_download

        try:
            path = hf_hub_download("THUDM/LongBench", "data.zip", repo_type="dataset", revision=revision)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"LongBench could not be had from the hub: {type(error).__name__}: {error} Fetch its data.zip "
                "elsewhere, and name it: path=FILE."
            ) from error
    place = Path(path).expanduser()
    return read_table(place / f"{name}.jsonl" if place.is_dir() else place, member=f"data/{name}.jsonl")


def cut_middle(context: str, question: str, most: int, tokenizer: Any) -> tuple[str, str, int]:
    """Shorten a prompt in two parts to a length by removing its middle.

    Of the prompt's `n > most` tokens (with those that the tokenizer puts before a text), the first
    `most // 2` and the last `most // 2` are kept, as `pred.py` does. They are cut out of the text by where
    each token lies in it, so that the rest is not changed by a decoding.

    A question longer than its half loses its own beginning, as there. Context and question stay apart where
    they were if anything behind that place is left of the first half (a short context before a long
    question), so that a score never sees the question with the context.

    Returns:
        (context, question, number of tokens cut).

    Raises:
        ValueError: A text must be cut to fewer than two tokens, or with a tokenizer that does not say where
            its tokens lie.
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
    f"{group}/{name}": Source(about, longbench, {"dataset": name, "even": group == "longbench_e"})
    for group in ("longbench", "longbench_e")
    for name, (about, *_) in TASKS.items()
    if group == "longbench" or name not in ONLY_PLAIN
}

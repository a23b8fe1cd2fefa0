"""LongProc: procedures that are written out at length, for eviction while decoding.

After Ye et al., "LongProc: Benchmarking Long-Context Language Models on Long Procedural Generation" (arXiv
2501.05414) and princeton-pli/LongProc: `data/` and `longproc/longproc_data.py`. Two of its six tasks: a route
through a graph of cities, and the search for an expression that gives a number. Data and accuracy are the
official ones; the prompts are ours, without the worked examples of the official ones, so numbers are not
comparable with published ones.

Left out: `html_to_tsv` (a row names a page in another file), `pseudo_to_code` (its score runs C++),
`tom_tracking` and `travel_planning` (their scores compare with traces that worked examples teach).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from retain.eval.tasks.hub_rows import Row, RowSource, RowTask
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.registry import lookup

SIZES = ("0.5k", "2k", "8k")
_ROUTE = (
    "\n\nEach city has one connection, in one direction. Follow the connections from {start} to {end} and "
    "write the route, one connection a line, and nothing else, in this form:\n<Route>\nFrom CITY, take a "
    "TRANSIT to CITY.\n...\n</Route>\n"
)
_COUNTDOWN = (
    "Reach the target with all four numbers, each used once, and +, -, *, /. No intermediate result is "
    "negative, has decimals, or is above 2000. Search step by step: pick two of the numbers, try an "
    "operation, put the result with the numbers left, and go back where a branch fails. End with the three "
    "equations, one a line, in this form:\n<Solution>\n8 + 2 = 10\n10 * 3 = 30\n30 - 6 = 24\n</Solution>\n\n"
    "Numbers: {numbers}\nTarget: {target}"
)


def _route(row: Row) -> TextItem:
    start, end = row["question_repr"]
    question = TextQuestion(
        _ROUTE.format(start=start, end=end),
        (row["answer_nl"].strip(),),
        answer=f"<Route>\n{row['answer_nl'].strip()}\n</Route>",
    )
    steps = float(len(row["answer_nl"].strip().split("\n")))
    return TextItem(row["context_nl"].strip(), (question,), about={"steps": steps})


def _countdown(row: Row) -> TextItem:
    numbers, target = tuple(map(int, row["nums"])), str(row["target"])
    question = TextQuestion(
        "\n\n",
        (target,),
        scoring={"numbers": numbers},
        answer="<Solution>\n" + "\n".join(row["solution"]) + "\n</Solution>",
    )
    return TextItem(_COUNTDOWN.format(numbers=list(numbers), target=target), (question,))


@dataclass(frozen=True)
class _Procedure:
    columns: tuple[str, ...]
    write: Callable[[Row], TextItem]


PROCEDURES: Mapping[str, _Procedure] = {
    "path_traversal": _Procedure(("context_nl", "question_repr", "answer_nl"), _route),
    "countdown": _Procedure(("nums", "target", "solution"), _countdown),
}


def _source(*, procedure: str, size: str) -> RowSource:
    own = lookup(procedure, PROCEDURES, what="task of LongProc")
    lookup(size, dict.fromkeys(SIZES), what="size of LongProc")
    name = f"{procedure}_{size}"
    return RowSource(
        names=(name, f"{procedure}/{name}", f"data/{procedure}/{name}"),
        hub="princeton-nlp/LongProc",
        columns=own.columns,
        file=f"data/{procedure}/{name}.json",
    )


def _write(asking: Asking, row: Row, *, procedure: str, size: str) -> TextItem:
    """Write one problem.

    Args:
        asking: Which item. A problem is never cut: `context_tokens` is not used.
        row: Of the data set.
        procedure: One of `PROCEDURES`.
        size: Most tokens of an answer, of `SIZES`.
    """
    return PROCEDURES[procedure].write(row)


longproc = RowTask(_source, _write)
GENERATORS = {"longproc": longproc}

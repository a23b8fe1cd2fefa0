"""Scores answers that are written step by step, each step on the ones before.

A right answer has a line `Step 3: ...` for each step. Steps are matched by number, not by place, so a
missing step costs itself alone; of a step written twice the first counts, so that endless repetition gains
nothing.
"""

import re
from collections.abc import Sequence
from typing import Any

# Blanks before a step are those of its own line, or a text of line breaks would be read once for each; and a
# number of more than 100 digits is no step's (Python refuses to read one of more than 4300).
_STEP = re.compile(r"^(?:[^\S\n]|[*#>-])*step\s+(\d{1,100})[\s*]*:(.*)$", re.IGNORECASE | re.MULTILINE)


def written_steps(prediction: str) -> dict[int, str]:
    """Texts behind `Step <number>:` on a line, by number.

    Blanks, a final stop, and the marks that chat puts around it do not matter: `**Step 3:** 7`,
    `- Step 3: B = **7**.`, `### Step 3: 7`.
    """
    found: dict[int, str] = {}
    for number, text in _STEP.findall(prediction):
        found.setdefault(int(number), _plain(text))
    return found


def steps(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Half for the final state, half for the share of right steps.

    `(1[step n is right] + (1/n) sum_i 1[step i is right]) / 2`, n steps; 1 exactly when all are right. Of
    several right answers, the lines come one after another.
    """
    wanted = [_plain(text) for right in references for _, text in _STEP.findall(right)]
    if not wanted:
        raise ValueError(
            f"a score of steps needs references with lines `Step 1: ...`, got {list(references)[:2]}."
        )
    written = written_steps(prediction)
    right = [written.get(number) == text for number, text in enumerate(wanted, 1)]
    return (right[-1] + sum(right) / len(right)) / 2


def _plain(text: str) -> str:
    return " ".join(text.replace("*", "").split()).removesuffix(".")


METRICS = (steps,)

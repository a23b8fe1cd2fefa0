r"""Scores whether a worked solution ends in the right answer: a number, or the content of a box.

Scores are 1 or 0. GSM8K's number behind "####" (arXiv 2110.14168), `\boxed{...}` of MATH (arXiv 2103.03874)
and AIME.

Two answers are equal if they are one text after a few rewritings, all listed in `plain_mathematics`, or two
spellings of one rational number. Without computer algebra `x+1` and `1+x` differ, so the score is a lower
bound of a grader's, and no parser has to be trusted. More than `MOST_DIGITS` digits are no number: a model
that repeats itself writes them, and no right answer has so many.
"""

import re
from fractions import Fraction

from retain.eval.metrics.overlap import best

_MARKED = re.compile(r"####\s*(.+)")
# A minus may be the hyphen or U+2212, which models write in prose.
_NUMBER = re.compile(r"[-\u2212]?\$?(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)")
_BOXED = re.compile(r"\\(boxed|fbox)(?![A-Za-z])\s*")
# Content of a box without braces: the rest of its line, up to the formula's end or the next box.
_UNBRACED = re.compile(r"(?:(?!\\(?:boxed|fbox))[^$\n])*")
# \{ and \} are signs to print, not braces.
_BRACE = re.compile(r"(?<!\\)[{}]")
_THOUSANDS = re.compile(r"[+-]?\s*\d{1,3}(?:,\d{3})+(?:\.\d*)?")
# Python itself refuses to read whole numbers of more than 4300 digits.
MOST_DIGITS = 100
# Rewritings of `plain_mathematics` by one pattern each, in its order.
_REWRITINGS = (
    (r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3}(?!\d))", ""),
    # A row's end, two backslashes, is no spacing command, whatever follows it.
    (r"(\\\\)|\\[!,;:> ]|\\q?quad\b|~", r"\1 "),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree\b|\\?%", ""),
    (r"(?<=[\d}])\s*\\(?:text|mbox|mathrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?\s*$", ""),
    (r"(?<=\S)\\text\s*\{\s[^{}]*\}\s*$", ""),
    (r"\\(?:text|textbf|mbox|mathrm|operatorname)\s*\{([^{}]*)\}", r"\1"),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\frac(?:\s+([A-Za-z\d])|(\d))", r"\\frac{\1\2}"),
    (r"(\\frac\s*\{[^{}]*\})\s*([A-Za-z\d])", r"\1{\2}"),
    (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
)


@best
def gsm8k(prediction: str, reference: str) -> float:
    """Whether the number behind "####", or without that mark the last number, is right ("18" is "18.00").

    A right answer is a solution or its number alone. As in lm-evaluation-harness commas do not count,
    wherever they stand between digits: "12,34" is 1234. Read more kindly than there: other decimals of one
    number, "#### $18", a minus that is U+2212.

    Raises:
        ValueError: A right answer has no number.
    """
    return _same_number(prediction, reference, strict=False)


@best
def gsm8k_strict(prediction: str, reference: str) -> float:
    """`gsm8k`, where a solution without "####" is wrong."""
    return _same_number(prediction, reference, strict=True)


def _same_number(prediction: str, reference: str, *, strict: bool) -> float:
    wanted = _number(reference)
    if wanted is None:
        raise ValueError(
            f"a right answer of gsm8k has a number, but got {reference!r:.100}: take the data set's own rows."
        )
    return float(_number(prediction, strict=strict) == wanted)


def _number(text: str, *, strict: bool = False) -> Fraction | None:
    """The number behind the first "####"; without one, unless `strict`, the last number of the text."""
    marked = _MARKED.search(text)
    found = [] if marked is None else _NUMBER.findall(marked[1])
    if not strict:
        found += reversed(_NUMBER.findall(text))
    return next((value for value in map(_value, found) if value is not None), None)


def boxed_answers(text: str) -> list[str | None]:
    r"""Content of every box of a text, braces balanced; None of one that is never closed.

    A box is `\boxed`, or in a text without that `\fbox`. Without braces (`\boxed 5`) it holds the rest of its
    line, up to a dollar sign or the next box. MATH's `last_boxed_only_string`, read more kindly: content
    without braces ends with its line, too; a box with braces may come behind one without; there may be a
    space before the brace; and `\{` and `\}` are no braces.

    Examples:
        >>> boxed_answers(r"so \boxed{\frac{1}{2}}.")
        ['\\frac{1}{2}']
    """
    found = list(_BOXED.finditer(text))
    found = [box for box in found if box.group(1) == "boxed"] or found
    begun: list[int] = []
    ends: dict[int, int] = {}
    # One walk for all boxes: a model that repeats itself opens thousands and closes none.
    for brace in _BRACE.finditer(text) if found else ():
        if brace.group() == "{":
            begun.append(brace.end())
        elif begun:
            ends[begun.pop()] = brace.start()
    held: list[str | None] = []
    for box in found:
        start = box.end()
        if text[start : start + 1] != "{":
            rest = _UNBRACED.match(text, start)
            held.append(rest.group().strip() if rest is not None else None)
        else:
            held.append(text[start + 1 : ends[start + 1]].strip() if start + 1 in ends else None)
    return held


def _last_boxed(text: str) -> str | None:
    return next(iter(boxed_answers(text)[-1:]), None)


def _reference(reference: str) -> str:
    """Content of the last box of a right answer that is a worked solution; else the answer itself."""
    held = _last_boxed(reference)
    return reference.strip() if held is None else held


@best
def mathematics(prediction: str, reference: str) -> float:
    r"""Whether the last `\boxed{...}` equals a right answer, in the sense of `same_mathematics`.

    Formulas that are written in another order are different answers, and a solution that boxes nothing is
    wrong: a lower bound of the accuracy that a grader would find.
    """
    last = _last_boxed(prediction)
    return float(last is not None and same_mathematics(last, _reference(reference)))


def same_mathematics(one: str, other: str) -> bool:
    r"""Whether two answers are one text, blanks aside or after `plain_mathematics`, or two spellings of one
    rational number.

    Answers that MATH's `is_equiv` finds equal, short of its accidents, are equal here; by accident it equates
    `\\` and `\`, and a text with its part before `\text{ `. Equal here alone are: other spellings of a
    rational number than `0.5` and `1/2`, thousands with and without commas, `x =` before any value, a full
    stop at the end, U+2212 and `-`, spacing commands, `$`, `\text{x}` and `x`, and units that begin without a
    blank.
    """
    if "".join(one.split()) == "".join(other.split()):
        return True
    one, other = plain_mathematics(one), plain_mathematics(other)
    rational = _rational(one)
    return one == other or (rational is not None and rational == _rational(other))


def plain_mathematics(text: str) -> str:
    r"""An answer in LaTeX without notation that does not change its value.

    In this order: U+2212 becomes a minus; dollar signs, `\left`, `\right` go, and `{,}` and `,\!` between
    thousands; so do spacing commands (a row's end `\\` is none), degrees, percent signs, and units or words
    in `\text{...}` behind a number, or behind anything where they begin with a blank; `\text{x}` becomes
    `x`; `\dfrac` and `\tfrac` become `\frac`; `\frac12`, `\frac a2` and `\sqrt3` get their braces; `x =`
    before a value and a full stop at the end go; commas between thousands go if the whole answer is one
    number, so that `(1,234)` stays a pair; `a/b` of whole numbers becomes a fraction; all spaces go.
    """
    plain = text.strip().replace("\u2212", "-")
    for dropped in ("\\$", "$", "\\left", "\\right"):
        plain = plain.replace(dropped, "")
    for pattern, replacement in _REWRITINGS:
        plain = re.sub(pattern, replacement, plain)
    plain = re.sub(r"^\s*[a-zA-Z]\s*=(?!=)", "", plain.strip()).strip().rstrip(".")
    if _THOUSANDS.fullmatch(plain):
        plain = plain.replace(",", "")
    plain = re.sub(r"^(-?)(\d+)\s*/\s*(\d+)$", r"\1\\frac{\2}{\3}", plain)
    return "".join(plain.split())


@best
def aime(prediction: str, reference: str) -> float:
    r"""Whether the last `\boxed{...}` holds the right whole number.

    A text that boxes nothing is right where that number is all of it, or all between its first and last
    dollar sign. As in lm-evaluation-harness, but leading zeros do not count ("073" is 73), nor does anything
    that `plain_mathematics` takes away.

    Raises:
        ValueError: A right answer is no number.
    """
    last: str | None = prediction
    if _BOXED.search(prediction):
        last = _last_boxed(prediction)
    elif (first := prediction.find("$")) < (final := prediction.rfind("$")):
        last = prediction[first + 1 : final]
    wanted = _rational(plain_mathematics(_reference(reference)))
    if wanted is None:
        raise ValueError(f"a right answer of AIME is a whole number, but got {reference!r}.")
    return float(last is not None and _rational(plain_mathematics(last)) == wanted)


def _rational(plain: str) -> Fraction | None:
    fraction = re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}", plain)
    if fraction is not None:
        above, below = _value(fraction.group(2)), _value(fraction.group(3))
        if above is None or not below:
            return None
        return -above / below if fraction.group(1) else above / below
    return _value(plain) if re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)", plain) else None


def _value(found: str) -> Fraction | None:
    """Value of a decimal number, ignoring commas, dollar sign and form of the minus; None with too many
    digits."""
    if sum(map(str.isdigit, found)) > MOST_DIGITS:
        return None
    return Fraction(found.replace(",", "").replace("$", "").replace("\u2212", "-"))


METRICS = (aime, gsm8k, gsm8k_strict, mathematics)

"""Writes tasks with long answers in which every step rests on earlier ones, for eviction while decoding.

A short prompt, and an answer of lines `Step 1: ...` to `Step n: ...`, for the regimes `decode` and
`prefill+decode`. GSM8K, MATH-500 and AIME (`mathematics`) are the counterparts for large models. Names and
tasks are ours.

- `running`: a sum; the next operation stands in the prompt, the sum so far in the answer's last line.
- `registers`: a line writes one of a few registers, and the next that reads it may come much later, so its
  value is found far back in the *answer*.
- `rule`: a rule that makes each number from the one before; the prompt is needed only for the rule.

Each step is scored alone (`retain.eval.metrics.steps`); the final state is half the score.
"""

import random
from collections.abc import Sequence

from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion

# Rules that are looked at until one does not go round in a circle.
_TRIES = 20000
REGISTERS = ("A", "B", "C", "D", "E", "F")


def chain_running(asking: Asking, *, steps: int = 24, largest: int = 9) -> TextItem:
    """Write a running sum: the total after each of `steps` additions and subtractions of up to `largest`.

    Raises:
        ValueError: no step, or a prompt that is longer than `context_tokens`.
    """
    draw = _draw("running", asking, steps, largest)

    def one(count: int) -> tuple[list[str], list[str]]:
        total = draw.randint(20, 60)
        prompt, lines = [f"Start with {total}."], []
        for number in range(1, count + 1):
            by = draw.randint(1, largest)
            add = draw.random() < 0.5 or total < by
            prompt.append(f"{number}. {'add' if add else 'subtract'} {by}")
            total += by if add else -by
            lines.append(f"{total}")
        return prompt, lines

    return _item(
        asking,
        "Follow the list of operations. After each one, write the number that you have then.",
        one(3),
        one(steps),
        kind="running",
    )


def chain_registers(asking: Asking, *, steps: int = 24, registers: int = 4, modulus: int = 10) -> TextItem:
    """Write registers that are computed from each other: the value of the written one after each operation.

    Args:
        asking: Which item.
        steps: Operations, each of which is one line of the answer.
        registers: How many there are, 2 to 6.
        modulus: Values are kept below it, 2 or more.

    Raises:
        ValueError: numbers out of range, or a prompt that is longer than `context_tokens`.
    """
    if not 2 <= registers <= len(REGISTERS) or modulus < 2:
        raise ValueError(
            f"chain_registers: registers is 2 to {len(REGISTERS)} and modulus 2 or more, got {registers} and "
            f"{modulus}."
        )
    draw = _draw("registers", asking, steps, registers, modulus)
    names = REGISTERS[:registers]

    def one(count: int) -> tuple[list[str], list[str]]:
        held = {name: draw.randrange(modulus) for name in names}
        prompt, lines = [" ".join(f"{name} = {value}." for name, value in held.items())], []
        for number in range(1, count + 1):
            written = draw.choice(names)
            read = draw.choice([name for name in names if name != written])
            by = draw.randint(1, modulus - 1)
            prompt.append(f"{number}. set {written} to {read} + {by}")
            held[written] = (held[read] + by) % modulus
            lines.append(f"{written} = {held[written]}")
        return prompt, lines

    return _item(
        asking,
        f"Follow the list of operations on registers. A result of {modulus} or more loses {modulus}. After "
        "each operation, write what the register holds then.",
        one(3),
        one(steps),
        kind="registers",
    )


def chain_rule(asking: Asking, *, steps: int = 32, modulus: int = 100) -> TextItem:
    """Write a rule that is applied to its own result again and again.

    An even number becomes its half plus a constant, an odd number is added another, modulo `modulus`. No
    number comes twice, in the worked example and the answer together, so no step can be copied.

    Args:
        asking: Which item.
        steps: Applications, each of which is one line of the answer.
        modulus: Numbers are kept below it, 20 or more.

    Raises:
        ValueError: numbers out of range, or a prompt that is longer than `context_tokens`.
    """
    if modulus < 20:
        raise ValueError(f"chain_rule: modulus is 20 or more, got {modulus}.")
    draw = _draw("rule", asking, steps, modulus)
    for _ in range(_TRIES):
        half, plus = draw.randrange(modulus // 4, modulus // 2), draw.randrange(modulus // 4, modulus // 2)
        path = _applied(draw.randrange(modulus), steps, half, plus, modulus)
        # A path that meets itself goes round for ever, and could be copied from the answer.
        if len({*path}) < len(path):
            continue
        others = [_applied(number, 3, half, plus, modulus) for number in range(modulus)]
        examples = [other for other in others if len({*path, *other}) == len(path) + len(other)]
        if examples:
            example = draw.choice(examples)
            break
    else:
        raise ValueError(
            f"chain_rule: no rule below {modulus} was found that makes {steps} different numbers "
            "and an example without any of them: ask for fewer steps, or a larger modulus."
        )

    def one(path: Sequence[int]) -> tuple[list[str], list[str]]:
        return [f"Start with {path[0]}. Apply the rule {len(path) - 1} times."], [*map(str, path[1:])]

    return _item(
        asking,
        f"Apply a rule again and again: an even number becomes half of it plus {half}, an odd number is "
        f"added {plus}; a result of {modulus} or more loses {modulus}. Write the number after each step.",
        one(example),
        one(path),
        kind="rule",
    )


def _applied(number: int, times: int, half: int, plus: int, modulus: int) -> list[int]:
    path = [number]
    for _ in range(times):
        number = (number // 2 + half if number % 2 == 0 else number + plus) % modulus
        path.append(number)
    return path


def _draw(task: str, asking: Asking, steps: int, *settings: object) -> random.Random:
    if steps < 1:
        raise ValueError(f"chain_{task}: steps is 1 or more, got {steps}.")
    return random.Random(f"chain_{task} {steps} {settings} {asking.seed} {asking.index}")


def _item(
    asking: Asking,
    instruction: str,
    example: tuple[Sequence[str], Sequence[str]],
    asked: tuple[Sequence[str], Sequence[str]],
    *,
    kind: str,
) -> TextItem:
    """Join instruction, worked example and task, cut where the answer begins."""
    shown, answer = (
        "\n".join(f"Step {number}: {line}" for number, line in enumerate(lines, 1))
        for _, lines in (example, asked)
    )
    steps = len(asked[1])
    context = "\n".join(
        (instruction, "", "Example:", *example[0], "Answer:", shown, "", "Now yours:", *asked[0])
    )
    needed = asking.measure(context)
    if needed > asking.context_tokens:
        raise ValueError(
            f"chain_{kind} with {steps} steps has a prompt of {needed} tokens, more than "
            f"context_tokens={asking.context_tokens}: ask for a longer context, or for fewer steps."
        )
    about: dict[str, str | float] = {"kind": kind, "steps": float(steps)}
    return TextItem(context=context, questions=(TextQuestion("\nAnswer:\n", (answer,), about=about),))


GENERATORS = {"chain_running": chain_running, "chain_registers": chain_registers, "chain_rule": chain_rule}

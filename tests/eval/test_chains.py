"""Chains: each step is computed again here, from the prompt's text alone; and how steps are scored."""

import re
import time

import pytest

from retain.eval.metrics.steps import steps, written_steps
from retain.eval.tasks.chains import chain_registers, chain_rule, chain_running
from tests.eval.asked_in_text import asking, check_scored, made, measure, tokenizer
from tests.refused import refused


@pytest.mark.parametrize("name", ["registers", "rule", "running"])
def test_an_item_is_scored_in_the_form_of_chat_too(name):
    item = made(f"chains/{name}")
    (asked,) = check_scored(f"chains/{name}", item).asked
    # The answer is long, and the prompt short.
    assert len(asked.gold_ids) > 0.5 * measure(item.context)
    assert asked.question_ids[-1:] != asked.gold_ids[:1] and "Example:" in item.context
    said = re.sub(r"(.*?):(.*)\n?", r"**\1:**\2\n\n", item.questions[0].references[0])
    ids = tokenizer()(f"Sure, step by step:\n\n{said}\n\nDone.", add_special_tokens=False)["input_ids"]
    assert asked.score(ids) == (1.0, 1.0)


def _asked(item):
    return item.context.rpartition("Now yours:\n")[2], written_steps(item.questions[0].references[0])


@pytest.mark.parametrize("index", range(4))
def test_running(index):
    told, answer = _asked(made("chains/running", index=index))
    total = int(re.findall(r"Start with (\d+)", told)[0])
    for number, verb, by in re.findall(r"(\d+)\. (add|subtract) (\d+)", told):
        total += int(by) if verb == "add" else -int(by)
        assert answer[int(number)] == str(total) and total >= 0
    assert len(answer) == 24


@pytest.mark.parametrize("index", range(4))
def test_registers(index):
    told, answer = _asked(made("chains/registers", index=index))
    held = {name: int(value) for name, value in re.findall(r"([A-F]) = (\d+)\.", told)}
    for number, into, of, by in re.findall(r"(\d+)\. set (\w) to (\w) \+ (\d+)", told):
        assert into != of
        held[into] = (held[of] + int(by)) % 10
        assert answer[int(number)] == f"{into} = {held[into]}"
    assert len(answer) == 24 and len(held) == 4


@pytest.mark.parametrize("index", range(4))
def test_rule_never_meets_itself(index):
    item = made("chains/rule", index=index)
    told, answer = _asked(item)
    number, path = int(re.findall(r"Start with (\d+)", told)[0]), []
    half, plus = map(int, re.findall(r"half of it plus (\d+), an odd number is added (\d+)", item.context)[0])
    for step in range(1, 33):
        number = number // 2 + half if number % 2 == 0 else number + plus
        number -= 100 if number >= 100 else 0
        path.append(number)
        assert answer[step] == str(number)
    assert len({*path}) == len(path) == len(answer)


@pytest.mark.parametrize("steps", [3, 32, 45])
def test_the_example_of_a_rule_shows_no_step_of_the_answer(steps):
    for index in range(20):
        item = chain_rule(asking(index=index), steps=steps)
        example = item.context.partition("Example:\n")[2].partition("\n\n")[0]
        starts = re.findall(r"Start with (\d+)", item.context)
        shown = [starts[0], *written_steps(example).values()]
        path = [starts[1], *written_steps(item.questions[0].references[0]).values()]
        assert len(shown) == 4 and len(path) == steps + 1
        assert not {*shown} & {*path} and len({*shown}) == 4


@pytest.mark.parametrize(
    "line",
    [
        *("Step 1: B = 4", "**Step 1:** B = 4", "**Step 1: B = 4**", "**Step 1**: B = 4."),
        *("- Step 1: B = 4", "### Step 1: B = 4", "> * **STEP 1:** B = **4**.", "  step  1 :  B =  4  "),
        "- **Step 1:** **B = 4.**",
    ],
)
def test_a_step_is_read_in_chat(line):
    assert written_steps(f"Sure!\n\n{line}\n\nDone.") == {1: "B = 4"}
    assert written_steps(f"a {line}") == {}


@pytest.mark.parametrize("text", ["*" * 100_000, "#\n" * 50_000, "Step 1" + "* " * 50_000, "- " * 50_000])
def test_marks_without_end_are_read_once(text):
    begun = time.process_time()
    assert steps(f"{text}x\nStep 1: 4", ["Step 1: 4"]) == 1.0
    assert time.process_time() - begun < 2


def test_scores_of_steps():
    right = ["Step 1: 4\nStep 2: B = 5\nStep 3: 6"]
    assert (steps(right[0], right), steps("", right)) == (1, 0)
    # Of two right steps of three, one the last; numbers count, not places; blanks and a final stop do not.
    said = "So\n step 3:  6.\nSTEP 1: 7\nStep 2: B =  5\nStep 2: 9\nStep 4: 1"
    assert steps(said, right) == pytest.approx((1 + 2 / 3) / 2)
    # Written twice, the first counts.
    assert steps("Step 1: 4\nStep 1: 3", right) == pytest.approx(1 / 6)
    refused("references with lines `Step 1", steps, "Step 1: 4", ["4"])


def test_wrong_settings():
    refused("chain_running: steps is 1 or more, got 0", chain_running, asking(), steps=0)
    refused("registers is 2 to 6 and modulus 2 or more, got 7 and 10", chain_registers, asking(), registers=7)
    refused("no rule below 20 was found that makes 40 different", chain_rule, asking(), steps=40, modulus=20)
    refused("modulus is 20 or more", chain_rule, asking(), modulus=2)
    refused("has a prompt of .* more than context_tokens=50", chain_running, asking(context_tokens=50))

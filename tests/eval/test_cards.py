"""Cards of tasks in text: what every one says, and that its command names what there is."""

import inspect
import shlex
from pathlib import Path

import pytest

from retain.config import load
from retain.eval.config import CompareConfig
from retain.eval.metrics.scorers import METRICS
from retain.eval.tasks.hub_rows import RowTask
from retain.eval.tasks.text_suite import CARDS, cards, chosen, generators, sizes, text_suite

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {
    "chains": 3,
    "longbench": 21,
    "longbench_e": 13,
    "longbench_v2": 1,
    "longmemeval": 3,
    "mathematics": 4,
    "multi_turn": 8,
    "niah": 2,
    "ruler": 10,
    "ruler_like": 5,
}
READ_FROM_A_DATA_SET = ("longbench", "longmemeval", "mathematics", "ruler/qa")


def test_every_card_is_counted() -> None:
    found = [name.partition("/")[0] for name in cards()]
    assert {group: found.count(group) for group in dict.fromkeys(found)} == GROUPS
    assert (
        len(chosen(())) == sum(GROUPS.values()) and len(chosen(("ruler", "niah/grid"))) == GROUPS["ruler"] + 1
    )


@pytest.mark.parametrize("name", sorted(cards()))
def test_a_card_opens_with_what_it_is_what_it_needs_and_a_command_that_works(name: str) -> None:
    lines = (CARDS / f"{name}.yaml").read_text().splitlines()
    assert (
        lines[0].startswith("# ") and lines[1].startswith("# Needs: ") and lines[2].startswith("# Command: ")
    )
    words = shlex.split(lines[2].removeprefix("# Command: "))
    assert words[:3] == ["python", "eval/compare.py", "--config"] and (ROOT / words[1]).is_file()
    config = load(ROOT / words[3], CompareConfig, words[4:])
    assert name in chosen(config.tasks) and config.suite == "text"
    card, generator = cards()[name], generators()[cards()[name].generator]
    assert card.metric in METRICS and card.version >= 1
    assert len(card.source) > 10 and len(card.licence) > 2 and card.max_new_tokens > 0
    if isinstance(generator, RowTask):
        inspect.signature(generator.write).bind(None, None, **card.settings)
    else:
        inspect.signature(generator).bind(None, **card.settings)
    assert (card.generator in sizes()) == name.startswith(READ_FROM_A_DATA_SET)


def test_what_has_another_haystack_is_never_called_ruler() -> None:
    like = {name: card for name, card in cards().items() if card.provenance == "ruler-like"}
    assert len(like) == 5 and {name.partition("/")[0] for name in like} == {"ruler_like"}
    suite = text_suite(model="reference:0", tasks=tuple(like))
    said = {task.provenance for task in suite.tasks.values()}
    assert said == {"ruler-like (haystack=gen-prose)"}
    name = next(iter(like))
    other = text_suite(model="reference:0", tasks=(name,), changes={name: {"haystack": "python"}})
    assert other.tasks[name].provenance == "ruler-like (haystack=python)"

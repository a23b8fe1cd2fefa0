"""Cards of tasks in text: what every one says, that its command works, and that its items fit it."""

import inspect
import re
import shlex

import pytest

from retain.config import load
from retain.eval.config import CompareConfig
from retain.eval.tasks.hub_rows import RowTask
from retain.eval.tasks.longbench import EVEN
from retain.eval.tasks.text_suite import CARDS, cards, chosen, generators, sizes, text_suite
from retain.gone import hint_of
from tests.eval.asked_in_text import check_own, check_scored, measure
from tests.launch import ROOT
from tests.refused import refused

# Metric, tokens of an answer, chat template, first line only: LongBench/eval.py, config/, pred.py.
LONGBENCH = {
    ("qa_f1", 128, True, False): ("narrativeqa", "qasper"),
    ("qa_f1", 64, True, False): ("multifieldqa_en",),
    ("qa_f1", 32, True, False): ("hotpotqa", "2wikimqa", "musique"),
    ("qa_f1", 32, False, True): ("triviaqa",),
    ("qa_f1_zh", 64, True, False): ("multifieldqa_zh",),
    ("rouge_l", 512, True, False): ("gov_report", "qmsum", "multi_news"),
    ("rouge_l", 128, False, True): ("samsum",),
    ("rouge_l_zh", 512, True, False): ("vcsum",),
    ("rouge_l_zh", 128, True, False): ("dureader",),
    ("classification", 64, False, True): ("trec", "lsht"),
    ("count", 32, True, False): ("passage_count",),
    ("retrieval", 32, True, False): ("passage_retrieval_en",),
    ("retrieval_zh", 32, True, False): ("passage_retrieval_zh",),
    ("code_similarity", 64, False, False): ("lcc", "repobench-p"),
}
OFFICIAL = {name: said for said, names in LONGBENCH.items() for name in names}
# By how a name begins: metric, tokens of an answer, version.
OTHERS = {
    **{"longbench_v2/": ("multiple_choice", 128, 1), "ruler/synthqa": ("ruler_part", 32, 1)},
    **{"niah/": ("ruler_all", 16, 1), "ruler/vt": ("ruler_all", 30, 2), "ruler/cwe": ("ruler_all", 120, 1)},
    **{"ruler/fwe": ("ruler_all", 50, 1), "ruler/niah": ("ruler_all", 128, 1)},
    **{"ruler_like/niah": ("ruler_all", 128, 1), "ruler/qa": ("ruler_part", 32, 1)},
    # MInference/scbench/eval_utils.py and compute_scores.py
    **{"scbench/kv": ("verbatim", 150, 1), "scbench/prefix_suffix": ("verbatim", 150, 1)},
    **{"scbench/vt": ("ruler_all", 30, 1), "scbench/qa_eng": ("ruler_part", 40, 1)},
    **{"scbench/qa_chn": ("qa_f1_characters", 40, 1), "scbench/choice_eng": ("chosen_option", 40, 1)},
    **{"scbench/many_shot": ("ruler_part", 10, 1), "scbench/mf": ("first_number", 5, 1)},
    "scbench/summary": ("rouge_lsum", 200, 1),
}
# Tokens of an answer that is more than a word.
FACTS = {"number": 16, "number_of_four": 16, "password": 16, "number_of_values": 28, "number_of_queries": 28}
FACTS |= {"codes": 10, "quote": 10}
PROVENANCE = {"ruler": "official", "ruler_like": "ruler-like", "longbench_v2": "official"}
PROVENANCE |= {"scbench": "official data"}
READ_FROM_A_DATA_SET = ("longbench", "ruler/qa", "scbench")
GENERATED = [name for name in cards() if not name.startswith(READ_FROM_A_DATA_SET)]


def test_every_card_says_what_it_is() -> None:
    assert len(cards()) == 84
    for name, card in cards().items():
        group, _, dataset = name.partition("/")
        if group in ("longbench", "longbench_e"):
            said = (card.metric, card.max_new_tokens, card.chat, card.first_line)
            assert said == OFFICIAL[dataset] and (card.provenance, card.version) == ("official", 1)
            assert card.settings == {"dataset": dataset} | ({"even": True} if group == "longbench_e" else {})
        else:
            wanted = ("ruler_all", FACTS.get(dataset, 8), 1)
            if group != "facts":
                (wanted,) = [said for start, said in OTHERS.items() if name.startswith(start)]
            assert (card.metric, card.max_new_tokens, card.version) == wanted
            made = "ruler/synthqa" in name or group not in PROVENANCE
            assert card.provenance == ("synthetic" if made else PROVENANCE[group])
            assert card.chat and not card.first_line
        assert card.stop == (("\n",) if dataset == "samsum" else ())
        assert len(card.source) > 10 and len(card.licence) > 2
    assert {*chosen(("longbench",))} == {f"longbench/{name}" for name in OFFICIAL}
    assert {*chosen(("longbench_e",))} == {f"longbench_e/{name}" for name in EVEN}
    assert chosen(()) == tuple(cards()) and len(chosen(("ruler", "niah/grid"))) == 11


@pytest.mark.parametrize("name", sorted(cards()))
def test_a_card_opens_with_what_it_is_what_it_needs_and_a_command_that_works(name: str) -> None:
    lines = (CARDS / f"{name}.yaml").read_text().splitlines()
    assert [lines[0][:2], lines[1][:9], lines[2][:11]] == ["# ", "# Needs: ", "# Command: "]
    words = shlex.split(lines[2].removeprefix("# Command: "))
    assert words[:3] == ["python", "eval/compare.py", "--config"] and (ROOT / words[1]).is_file()
    config = load(ROOT / words[3], CompareConfig, words[4:])
    assert name in chosen(config.tasks) and config.suite == "text"
    card, generator = cards()[name], generators()[cards()[name].generator]
    write = generator.write if isinstance(generator, RowTask) else generator
    inspect.signature(write).bind(*[None] * (1 + isinstance(generator, RowTask)), **card.settings)
    assert (card.generator in sizes()) == name.startswith(READ_FROM_A_DATA_SET)


@pytest.mark.parametrize("name", GENERATED)
def test_an_item_is_its_own_fits_the_context_and_is_scored(name: str) -> None:
    item = check_own(name)
    ruler = name.startswith("ruler") and "synthqa" not in name
    assert (930 if ruler else 0) < measure(item.context) <= 1000
    check_scored(name, item)


def test_every_card_says_what_its_names_and_columns_were_checked_against() -> None:
    for name, card in cards().items():
        if not name.startswith(READ_FROM_A_DATA_SET):
            assert card.checked == "no data set is read", name
            continue
        # A file of a public repository, or the word.
        files = re.findall(r"\b[\w-]+/[\w-]+ [\w/-]+\.(?:py|md|yaml)\b", card.checked)
        assert files or card.checked == "unverified", name
        assert "checked" in (CARDS / f"{name}.yaml").read_text(), "a default says nothing"


def test_what_has_another_haystack_is_never_called_ruler() -> None:
    like = {name: card for name, card in cards().items() if card.provenance == "ruler-like"}
    # What stands in for the essays is said in the card, not left to a default.
    assert all(
        "gen-prose" in card.source and card.settings["haystack"] == "gen-prose" for card in like.values()
    )
    suite = text_suite(model="reference:0", tasks=tuple(like))
    assert {task.provenance for task in suite.tasks.values()} == {"ruler-like (haystack=gen-prose)"}
    name = next(iter(like))
    other = text_suite(model="reference:0", tasks=(name,), changes={name: {"haystack": "python"}})
    assert other.tasks[name].provenance == "ruler-like (haystack=python)"


def test_a_benchmark_that_went_is_refused_with_where_to_ask_it() -> None:
    said = "unknown task or group '{}' .gone since 2026-11-29: use lm-eval's tasks of that name"
    for name in ("longproc", "infinitebench/passkey", "longproc/countdown_0.5k"):
        refused(said.format(name), chosen, [name])
    assert hint_of("snapkv/longproc") == ""

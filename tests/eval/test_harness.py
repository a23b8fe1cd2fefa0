"""`retain` in lm-evaluation-harness: answers are those of an evicting cache, or there are none."""

import functools
import json
import logging
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import retain
from retain.hf.model.identity import identity_of
from retain.hf.version_names import CACHE
from retain.reference import load_tokenizer
from tests.refused import refused
from tests.tiny import tiny_model

# lm_eval is somebody else's code: its imports (and what its SQLite wrapper leaves open) warn.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

GREEDY = {"until": ["<never>"], "max_gen_toks": 6, "do_sample": False}
PROMPTS = [
    "def add(first, second):\n    return first + second\n\nclass Table:\n    pass\n" + "what?",
    "import os\nfor name in os.listdir('.'):\n    print(name)\n" * 3
    + "# question: which names are printed here?",
    "x = 1\ny = 2\nprint(x, y)\nassert x < y\nraise ValueError('no')\n" * 2 + "# question: y",
]
# Of a model that no token means anything to: eviction must change what it says, or equality shows nothing.
ROOM = {"protection.minimum": 1, "protection.sinks": 2, "protection.recent": 4, "observed_settings.window": 4}
SHARED = ("protection.minimum", "protection.sinks", "protection.recent")
BY_HAND = {"observed_settings": {"window": 4}, "protection": {"minimum": 1, "sinks": 2, "recent": 4}}


@pytest.fixture(scope="module", autouse=True)
def harness() -> Any:
    from retain.eval.harness import model as harness

    return harness


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model and its tokenizer, on disk."""
    root = tmp_path_factory.mktemp("model")
    model = tiny_model("qwen3", vocab_size=3072, max_position_embeddings=512, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(root)
    load_tokenizer().save_pretrained(root)
    return str(root)


@pytest.fixture(scope="module")
def make(harness: Any, folder: str) -> Any:
    """`RetainLM` on the tiny model."""

    def made(**given: Any) -> Any:
        return harness.RetainLM(folder, device="cpu", **{"policy": "snapkv", **ROOM, **given})

    return made


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def instances(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, 0) for given in arguments]


def answers_of(lm: Any, prompts: list[str] = PROMPTS, **how: Any) -> list[str]:
    asked = instances("generate_until", [(text, {**GREEDY, **how}) for text in prompts])
    return lm.generate_until(asked, disable_tqdm=True)


def test_stored_answers_are_refused(make: Any) -> None:
    refused("keys that do not know the policy", make(keep_ratio=0.5).set_cache_hook, None)


@pytest.mark.parametrize(
    "given",
    [
        {"keep_ratio": 0.3},
        {"tokens_per_head": 12, "when": "prefill+decode", "every": 3},
        {"tokens_per_head": 12, "when": "decode", "every": 2},
    ],
    ids=["prefill", "prefill+decode", "decode"],
)
def test_a_left_padded_batch_answers_like_its_prompts_alone(make: Any, given: dict[str, Any]) -> None:
    alone, batch = make(**given, batch_size=1), make(**given, batch_size=3)
    answers = answers_of(alone)
    assert answers_of(batch) == answers
    assert batch.evicted == alone.evicted
    full = answers_of(make(keep_ratio=1.0))
    assert answers != full


def test_random_keeps_the_same_in_any_batch_and_order(harness: Any, folder: str) -> None:
    given = {"policy": "random", "keep_ratio": 0.3, **{name: ROOM[name] for name in SHARED}}

    def made(**more: Any) -> Any:
        return harness.RetainLM(folder, device="cpu", **given, **more)

    answers = answers_of(made())
    turned = answers_of(made(batch_size=2), PROMPTS[::-1])
    assert turned[::-1] == answers
    assert answers_of(made(seeds=1)) != answers


def test_an_answer_is_that_of_a_cache_by_hand(make: Any) -> None:
    lm = make(keep_ratio=0.3)
    for prompt in PROMPTS:
        ids = lm.tokenizer(prompt, return_tensors="pt").input_ids
        cache = retain.Cache(lm.model, "snapkv", keep_ratio=0.3, **BY_HAND)
        output = lm.model.generate(ids, **{CACHE: cache}, max_new_tokens=6, do_sample=False)
        wanted = lm.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        assert answers_of(lm, [prompt]) == [wanted]


@pytest.mark.always
def test_keeping_all_answers_like_hf(make: Any, folder: str) -> None:
    from lm_eval.models.huggingface import HFLM

    plain = answers_of(HFLM(folder, device="cpu", batch_size=2))
    lm = make(keep_ratio=1.0, batch_size=2)
    assert answers_of(lm) == plain
    info = lm.get_model_info()["retain"]
    assert info["warning"] is None
    # Answers depend on the output head too, and so does what they are recorded under.
    assert info["model"].items() >= identity_of(lm.model, head=True).items()


def test_a_prompt_that_does_not_fit_is_not_cut(make: Any) -> None:
    with pytest.raises(ValueError, match=r"its answer may take 6.*Pass max_length=\d+ "):
        answers_of(make(keep_ratio=0.5, max_length=40))


def test_a_budget_below_what_is_protected_is_found_before_the_longest_is_read(make: Any) -> None:
    lm = make(keep_ratio=0.3, **{"protection.recent": 16})
    lm._model_generate = None  # nothing may be generated
    refused(r"the shortest prompt has \d+ tokens", answers_of, lm)


def test_a_run_that_evicts_nothing_says_so(make: Any) -> None:
    lm = make(tokens_per_head=400)
    answers_of(lm)
    with pytest.warns(UserWarning, match="nothing was evicted from any of 3 sequences"):
        assert "full cache" in lm.get_model_info()["retain"]["warning"]


def test_log_likelihoods_are_refused(make: Any) -> None:
    asked = instances("loglikelihood", [("a context", " a continuation")])
    for ask in (make(keep_ratio=0.5).loglikelihood, make(keep_ratio=0.5).loglikelihood_rolling):
        refused("asks for log-likelihoods, which lm-eval computes without .*retain diagnose", ask, asked)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"keep_ration": 0.5}, "did you mean 'keep_ratio'"),
        ({"keep_ratio": 0.5, "protecton.recent": 8}, "did you mean 'protection'"),
        ({"keep_ratio": 0.5, "some.thing": 8}, "unknown model_args 'some.thing'"),
        ({}, "budget"),
        ({"keep_ratio": 0.5, "policy": "gate"}, "gates"),
        ({"keep_ratio": 0.5, "protection": {"recnt": 8}}, "protection.recnt"),
        ({"keep_ratio": 0.5, "when": "chunk"}, "retain compare"),
        ({"keep_ratio": 0.5, "context_marker": "#"}, r"'context_marker' \(removed; now: retain compare"),
        ({"keep_ratio": 0.5, "truncation": True}, "would cut"),
    ],
)
def test_bad_model_args_are_refused_before_anything_runs(
    harness: Any, folder: str, given: dict[str, Any], match: str
) -> None:
    refused(match, harness.RetainLM, folder, device="cpu", **{"policy": "snapkv", **given})


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import lm_eval.tasks

    from retain.eval.cli import main

    page = (Path(__file__).resolve().parents[2] / "docs" / "lm_eval.md").read_text()
    blocks = re.findall(r"(?:^    .*\n)+", page, flags=re.MULTILINE)
    rows, task, *commands = [textwrap.dedent(block) for block in blocks]
    (tmp_path / "rows.json").write_text(rows)
    (tmp_path / "recall.yaml").write_text(task)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    # lm-eval reads the YAMLs of all its own tasks first, which takes it longer than the rest of this file.
    quick = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", quick)
    (command,) = commands
    program, *arguments = shlex.split(command)
    assert program == "retain" and main(arguments) == 0
    (path,) = (tmp_path / "results").rglob("results_*.json")
    info = json.loads(path.read_text())["config"]["retain"]
    assert (info["policy"]["name"], info["question"]) == ("recency", "known")
    assert (info["budget"], info["when"]) == ({"keep_ratio": 0.5}, "prefill")
    assert info["policy"]["protection"]["minimum"] == 2
    counts = info["evicted"]
    # Half of each prompt, and the tokens that were written behind it.
    assert counts["sequences"] == 2 and 0.5 < counts["keep_ratio_achieved"] < 0.8
    assert counts["bytes_held"] * counts["entries_seen"] == counts["bytes_full"] * counts["entries_held"]

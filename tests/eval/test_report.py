"""The report of a fixed items file: cells, intervals and verdicts that can be worked out by hand."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from retain.eval.config import asks_shipped
from retain.eval.report.render import section, write_report
from retain.eval.report.run import Run
from retain.eval.report.tables import comparison_table
from retain.eval.run.results_store import ITEMS
from retain.eval.stats.comparisons import can_reach, fewest_items, is_judged, judge
from retain.eval.stats.summary import (
    Cell,
    best_heuristic,
    best_of,
    compare,
    gather,
    heuristics,
    learned_against_each,
)
from tests.eval.made_rows import make_row
from tests.eval.stub import TASKS

OPTIONS = {"margin": 2.0, "resamples": 1000}
# Of ten items, how many are right: (regime, policy, keep_ratio) -> copy, pair, odd.
RIGHT = {
    ("context_only", "full", 1.0): (10, 10, 10),
    ("context_only", "random", 0.2): (1, 0, 0),
    ("context_only", "recency", 0.2): (1, 1, 0),
    ("context_only", "token_identity", 0.2): (6, 2, 0),
    ("context_only", "snapkv", 0.2): (3, 1, 8),
    ("context_only", "defensive", 0.2): (2, 3, 0),
    ("context_only", "gate", 0.2): (9, 9, 5),
    ("context_only", "fused", 0.2): (10, 9, 5),
    ("query_aware", "full", 1.0): (10, 10, 10),
    ("query_aware", "snapkv", 0.2): (9, 8, 9),
    ("query_aware", "gate", 0.2): (8, 8, 5),
    ("query_aware", "fused", 0.2): (9, 8, 9),
}


def rows():
    """As earlier runs wrote them."""
    for (regime, policy, ratio), counts in RIGHT.items():
        for (name, task), right in zip(TASKS.items(), counts, strict=True):
            for item in range(10):
                row = make_row(regime, policy, ratio, name, task.family, item % 2, item, item < right)
                old = {
                    key: value
                    for key, value in row.items()
                    if key not in ("unit", "budget", "question", "score")
                }
                more = {"partial": 1.0 if item < right else 0.5, "bytes_held": 512 * row["kept_entries"]}
                yield old | more | {"bytes_full": 512_000}


@pytest.fixture(scope="module")
def scores():
    return gather(rows(), list(TASKS))


def manifest(clean=True, commits=("a" * 40,)):
    return {
        "config": {
            "run": "fixed",
            "seeds": [0, 1],
            "suite": "stub",
            "context_tokens": 100,
            "control_documents": 20,
            "margin_points": 2.0,
            "resamples": 1000,
        },
        "identity_sha": "0123456789abcdef",
        "code_states": [{"commit": commit, "clean": clean} for commit in commits],
        "environment": {
            **{"python": "3.11.7", "device": "cpu", "processor": "a processor"},
            "versions": {"torch": "2"},
        },
    }


def write_run(folder, lines, known=None):
    """A folder with these rows, and its report."""
    (folder / ITEMS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return write_report(Run(folder, known or manifest(), TASKS))


@pytest.fixture(scope="module")
def fixed(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("fixed"), rows())


def test_means_are_macro_and_in_points(scores):
    cell = Cell("context_only", "snapkv", 0.2)
    assert scores.mean(cell, ["copy", "pair"]) == 20.0
    assert scores.mean(cell, ["copy", "pair", "odd"]) == pytest.approx(40.0)
    # Items 0..9 alternate between the seeds: items 0 and 2 of three right ones are seed 0's.
    assert scores.seed_means(cell, ["copy"]) == {0: 40.0, 1: 20.0}


def test_the_best_heuristic_is_chosen_for_each_family(scores):
    # snapkv has (30 + 10) / 2, defensive (20 + 30) / 2; on the held-out task it is the other way round.
    assert best_heuristic(scores, "context_only", 0.2, "seen") == "defensive"
    assert best_heuristic(scores, "context_only", 0.2, "held-out") == "snapkv"
    assert best_heuristic(scores, "query_aware", 0.2, "seen") == "snapkv"
    assert best_heuristic(scores, "query_aware", 0.4, "seen") is None
    seen_only = gather(row for row in rows() if row["family"] == "seen")
    assert best_heuristic(seen_only, "context_only", 0.2, "held-out") is None
    # One rule for whatever policies: the first of equals, none that was not measured or not scored.
    assert best_of(scores, ["snapkv", "defensive", "h2o"], "context_only", 0.2, "seen") == "defensive"
    assert best_of(scores, ["h2o"], "context_only", 0.2, "seen") is None
    unscored = {cell: own for cell, own in scores.judged.items() if cell.policy != "defensive"}
    assert best_heuristic(replace(scores, judged=unscored), "context_only", 0.2, "seen") == "snapkv"
    made = judge(scores, **OPTIONS)
    pairs = {
        (one.policy, one.place.family): one.baseline for one in made if one.place.regime == "context_only"
    }
    assert pairs["gate", "seen"] == pairs["snapkv", "seen"] == "defensive"
    assert pairs["gate", "held-out"] == pairs["defensive", "held-out"] == "snapkv"
    assert ("defensive", "seen") not in pairs and ("snapkv", "held-out") not in pairs


def test_a_difference_by_hand(scores):
    pair = Cell("context_only", "gate", 0.2), Cell("context_only", "snapkv", 0.2)
    made = compare(scores, *pair, "seen", **OPTIONS)
    # copy: 9 - 3 of 10 items, pair: 9 - 1: (60 + 80) / 2 points.
    assert made.interval.estimate == pytest.approx(70.0)
    assert (made.interval.num_items, made.interval.num_nonzero, made.verdict) == (20, 14, "better")
    assert compare(scores, *pair, "held-out", **OPTIONS).interval.estimate == pytest.approx(-30.0)
    fused, snapkv = Cell("query_aware", "fused", 0.2), Cell("query_aware", "snapkv", 0.2)
    assert compare(scores, fused, snapkv, "seen", **OPTIONS).verdict == "identical"
    made = compare(scores, pair[1], Cell("context_only", "full", 1.0), "seen", **OPTIONS)
    assert (made.verdict, made.budget) == ("worse", 0.2)


def test_every_learned_policy_meets_every_other_once():
    """By what rows say: a variant by another name too; head classes are measured, and learn nothing."""
    by_name = learned_against_each(gather(rows(), list(TASKS)), **OPTIONS)
    pairs = {(one.policy, one.baseline) for one in by_name if one.regime == "context_only"}
    others = {"full", "random", "recency", "token_identity", "snapkv", "defensive"}
    assert pairs == {(own, other) for own in ("gate", "fused") for other in others} | {("fused", "gate")}
    made = [{**row, "trained": row["policy"] in ("gate", "fused")} for row in rows()]
    like = [row for row in made if (row["policy"], row["regime"]) == ("gate", "context_only")]
    mine = [{**row, "policy": "mine", "gates": "0" * 12, "trained": True} for row in like]
    both = [{**row, "policy": "mine+both", "gates": "0" * 12, "trained": True} for row in like]
    classes = [{**row, "policy": "classes", "trained": True} for row in like]
    scores = gather([*made, *mine, *both, *classes], list(TASKS))
    assert scores.learned == ["gate", "fused", "mine", "mine+both"]
    assert scores.trained == {"gate", "fused", "mine", "mine+both", "classes"}
    compared = learned_against_each(scores, **OPTIONS)
    here = [one for one in compared if (one.regime, one.family) == ("context_only", "seen")]
    pairs = [(one.policy, one.baseline) for one in here]
    wanted = {(own, other) for own in scores.learned for other in others | {"classes"}}
    wanted |= {(b, a) for a, b in itertools.combinations(scores.learned, 2)}
    assert len(pairs) == len(wanted) and {*pairs} == wanted
    left = learned_against_each(scores, **OPTIONS, leave_out=["mine"])
    assert not {"mine", "mine+both"} & {name for one in left for name in (one.policy, one.baseline)}
    # Another protection than its own.
    bare = gather([*made, *[{**row, "policy": "gate+none"} for row in like]], list(TASKS))
    assert bare.learned == ["gate", "fused", "gate+none"]


@pytest.mark.parametrize(
    ("suite", "model", "shipped"),
    [
        ("reference", None, True),  # as earlier versions wrote it
        ("reference", "reference:0", True),
        ("reference_more", "reference:1", True),
        ("text", "reference:0", True),
        ("reference", "runs/large-seed{seed}", False),
        ("reference_more", "reference", False),  # a folder of that name
        ("text", "owner/name", False),
        ("text", None, False),
        ("stub", "reference:0", False),
    ],
)
def test_only_shipped_models_are_said_to_be_small(suite, model, shipped):
    assert asks_shipped({"suite": suite} | ({"model": model} if model else {})) == shipped


def test_both_files_give_the_same_word(tmp_path):
    """Every policy at every place, judged or not: `report.md` and `report.html` say the same."""
    made = list(many_rows())
    ahead = [{**row, "policy": "snapkv_max", "exact": 1.0} for row in made if row["policy"] == "snapkv"]
    text = section(write_run(tmp_path, [*made, *ahead]), "Against the best heuristic")
    in_report = {}
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith(("| regime", "| ---")):
            regime, budget, policy, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            in_report[policy, regime, budget, "seen"] = cells[1]
            in_report[policy, regime, budget, "held-out"] = cells[3]
    table = comparison_table(Run(tmp_path, manifest(), TASKS).judged)
    cells = ([cell.text for cell in row[:6]] for row in table.rows)
    on_page = {(policy, regime, budget, family): word for regime, budget, family, policy, _, word in cells}
    assert {place: word for place, word in in_report.items() if word} == on_page
    words = set(on_page.values())
    assert {"better", "identical", "below the best heuristic", "above the best heuristic"} <= words
    for (policy, *_), word in on_page.items():
        assert is_judged(policy) != word.endswith("the best heuristic") or word == "identical"


def test_heuristics_are_not_judged_against_the_best_of_them():
    """Twelve that are all alike, where chance decides: the best is far above the worst."""
    assert {"snapkv", "lava", "random", "streaming_llm"} <= set(heuristics())
    # Weights of their heads are measured on questions and answers.
    weighed = {"duoattention", "headkv"}
    assert not {"full", "gate", "fused", "token_identity", "oracle", *weighed} & set(heuristics())
    rng, made = np.random.default_rng(0), []
    for policy in ("full", "gate", *heuristics()[:12]):
        for item in range(60):
            first = next(rows())
            right = 1.0 if policy in ("full", "gate") else float(rng.random() < 0.5)
            made.append({**first, "policy": policy, "item": item, "exact": right})
            made[-1]["keep_ratio"] = 1.0 if policy == "full" else 0.2
    judged = judge(gather(made), **OPTIONS)
    verdicts = {one.policy: one.result.verdict for one in judged if is_judged(one.policy)}
    assert verdicts == {"full": "better", "gate": "better"}
    others = [one for one in judged if not is_judged(one.policy)]
    assert len(others) == 11 and {one.result.verdict for one in others} == {"unjudged"}
    assert all(one.result.holm_p is None and one.detectable is None for one in others)
    assert {one.family_size for one in judged if is_judged(one.policy)} == {2}
    assert is_judged("oracle") and is_judged("duoattention") and is_judged("fused+both")
    assert not is_judged("snapkv") and not is_judged("snapkv_max")


@pytest.mark.parametrize("said", [{"trained": True}, {"gate_bytes": 4096}])
def test_variants_of_gates_are_judged_and_never_the_best_heuristic(said):
    """What a policy is follows from its rows, not its name; rows of earlier runs know its bytes alone."""
    made = list(many_rows())
    judged_rows = [{**row, **said} for row in made if row["policy"] in ("gate", "fused")]
    plain = [row for row in made if row["policy"] not in ("gate", "fused")]
    ahead = [{**row, "policy": "mine", "exact": 1.0, **said} for row in made if row["policy"] == "snapkv"]
    bare = [{**row, "policy": "snapkv_max"} for row in made if row["policy"] == "snapkv"]
    scores = gather([*plain, *judged_rows, *ahead, *bare], list(TASKS))
    assert scores.trained == {"gate", "fused", "mine"}
    before = judge(gather(made, list(TASKS)), **OPTIONS)
    now = judge(scores, **OPTIONS)
    sizes = {one.place.regime: one.family_size for one in before if one.family_size}
    places = {one.place for one in now if one.policy == "mine"}
    for one in now:
        if one.policy == "mine":
            more = sum(place.regime == one.place.regime for place in places)
            assert one.result.verdict != "unjudged" and one.family_size == sizes[one.place.regime] + more
        assert one.policy != "snapkv_max" or one.family_size == 0
        assert one.baseline not in ("mine", "gate", "fused")
    assert len(places) > 2
    assert is_judged("mine", {"mine"}) and not is_judged("mine") and not is_judged("mine", {"other"})
    # Not even one that bears a heuristic's name.
    named = gather([{**row, **said} if row["policy"] == "snapkv" else row for row in made], list(TASKS))
    assert best_heuristic(named, "context_only", 0.2, "held-out") != "snapkv"


def test_too_few_items_for_a_family_are_called_that():
    # 2 / 2^n < 0.05 / 18 from n = 10 on: 2 / 1024 = 0.00195 < 0.00278 < 2 / 512.
    assert [n for n in range(1, 20) if can_reach(n, 18)][0] == 10
    assert fewest_items(18) == math.ceil(math.log2(2 * 18 / 0.05)) + 1 == 11
    few = [row for row in rows() if row["item"] < 5 and row["regime"] == "context_only"]
    judged = judge(gather(few), **OPTIONS)
    own = next(one for one in judged if (one.policy, one.place.family) == ("gate", "held-out"))
    assert (own.result.verdict, own.detectable, own.family_size) == ("identical", None, 8)
    own = next(one for one in judged if (one.policy, one.place.family) == ("token_identity", "held-out"))
    assert (own.result.verdict, own.detectable) == ("inconclusive", None)
    assert (own.result.interval.num_nonzero, can_reach(5, own.family_size)) == (5, False)


def test_seeds_of_an_item_that_all_answer_are_one_cluster():
    fixed = {name: replace(task, seeded=False) for name, task in TASKS.items()}
    twice = [{**row, "seed": seed} for row in rows() for seed in (0, 1)]
    once, apart, together = gather(rows(), TASKS), gather(twice, TASKS), gather(twice, fixed)
    pair = Cell("context_only", "gate", 0.2), Cell("context_only", "snapkv", 0.2)
    results = [compare(own, *pair, "seen", **OPTIONS).result for own in (once, apart, together)]
    assert [one.num_clusters for one in results] == [20, 40, 20]
    assert results[2].interval == results[0].interval != results[1].interval
    assert (apart.num_items(["copy"]), together.num_items(["copy"])) == (20, 10)
    assert together.mean(pair[0], ["copy", "pair"]) == 90.0
    # An item's answers are averaged: right under one seed of two is half right.
    split = [{**row, "exact": float(row["seed"])} if row["policy"] == "gate" else row for row in twice]
    made = gather(split, fixed)
    assert made.strata(pair[0], ["copy"])[0].tolist() == [50.0] * 10
    assert made.seed_means(pair[0], ["copy"]) == {0: 0.0, 1: 100.0}


def test_a_task_of_one_item_has_no_interval_in_the_report(tmp_path):
    own = [row for row in rows() if row["task"] != "odd" or row["item"] == 0]
    text = write_run(tmp_path, own).read_text()
    assert "-100.0 no interval | below the best heuristic |" in text
    text = text.split("## What does not tell policies apart")[0]
    assert "inf" not in text.replace("information", "") and "nan" not in text.lower()
    made = comparison_table(Run(tmp_path, manifest(), TASKS).judged)
    words = {cell.text for row in made.rows for cell in row}
    assert not {"inf", "-inf", "+inf", "nan"} & words


def test_the_report_says_it(fixed):
    text = fixed.read_text()
    assert fixed.with_name("scores.png").stat().st_size > 10_000
    assert "| 1 | full | 100.0 | 100.0 | **100.0** ±0.0 | 100.0 | **100.0** ±0.0 | 100.0 |" in text
    assert "| 0.2 | snapkv | 30.0 | 10.0 | **20.0** ±17.9 | 80.0 | **80.0** ±26.1 | 70.0 |" in text
    best = "context_only 0.2: defensive / snapkv; query_aware 0.2: snapkv / snapkv."
    assert f"Best heuristic, seen / held-out: {best}" in text
    same = "+0.0 [+0.0, +0.0] | identical"
    assert f"| query_aware | 0.2 | fused | minus snapkv: {same} | minus snapkv: {same} |" in text
    assert f"| query_aware | 0.2 | fused | snapkv | {same} | {same} |" in text
    assert "| context_only | 0.2 | defensive |  |  | minus snapkv: -80.0 [" in text
    assert "fitted, for each seed, on 20 documents of 100 tokens (2,000 tokens)" in text
    assert "| context_only | 0.2 | gate | 200.0 | 100.0 | 20.00 | 0.2000 to 0.2000 |" in text
    assert "Scratch" not in text and "Mixed code" not in text
    glance = section(fixed, "At a glance")
    assert "mean over tasks: seen / held-out (2 seen and 1 held-out)" in glance
    assert "| policy | context_only 0.2 | query_aware 0.2 |" in glance
    assert "| full | 100.0 / 100.0 | 100.0 / 100.0 |" in glance
    # (30 + 10) / 2 and 80; (90 + 80) / 2 and 90.
    assert "| snapkv | 20.0 / 80.0 | 85.0 / 90.0 |" in glance
    assert "| defensive | 25.0 / 0.0 |  |" in glance  # not measured in the other regime


def test_runs_that_cannot_be_trusted_say_so(tmp_path):
    text = write_run(tmp_path, rows(), manifest(clean=False, commits=("a" * 40, "b" * 40))).read_text()
    assert "**Scratch:**" in text and "**Mixed code:**" in text and "`bbbbbbbbbbbb` (tree not clean)" in text


def test_unfinished_rows_are_not_reported():
    cut = [row for row in rows() if (row["policy"], row["task"], row["item"]) != ("gate", "pair", 3)]
    with pytest.raises(
        ValueError, match="9 items of task 'pair' where another cell has 10: the run is unfinished"
    ):
        gather(cut)
    with pytest.raises(ValueError, match="no rows to report"):
        gather([])


def many_rows():
    """Policies: those of `RIGHT`, and more of the presets; every item three times, so that a family
    of many can bear what they show."""
    of = {"adakv": "gate", "snapkv_bare": "defensive", "adakv_paper": "gate", "lava": "random"}
    of |= {"cake": "recency", "criticalkv": "snapkv", "snapkv_pool7": "snapkv"}
    of |= {"adakv_pool7": "gate", "cake_pool7": "recency", "ada_criticalkv": "fused"}
    for once in rows():
        for copy in range(3):
            row = {**once, "item": once["item"] + 10 * copy}
            yield row
            for name, model in of.items():
                if row["policy"] == model and row["regime"] == "context_only":
                    yield {**row, "policy": name}


def test_a_report_of_many_policies_is_a_ranking(tmp_path):
    made = manifest()
    made["config"]["variants"] = {"adakv_paper": [], "snapkv_bare": []}
    path = write_run(tmp_path, many_rows(), made)
    text = path.read_text()
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("scores.png", "ranking.png"))
    assert section(path, "Ranking") == "![ranking of policies](ranking.png)"
    # The first picture has lines: of policies that the sentences name, and of controls.
    drawn = Run(tmp_path, made, TASKS).drawn
    assert {"full", "fused", "token_identity"} <= {*drawn} and "random" not in drawn
    assert text.index("![score against budget]") < text.index("Seeds 0, 1")
    glance = section(path, "At a glance")
    assert "by regime and budget, best first" in glance
    names = [line.split(" | ")[0][2:] for line in glance.splitlines() if line.startswith("| ")][2:]
    assert names[0] == "full" and names.index("gate") < names.index("snapkv") < names.index("random")
    learned = section(path, "Learned policies against each policy")
    assert "| gate | adakv |" in learned and "adakv_paper" not in learned and "snapkv_bare" not in learned


def test_nulls_and_what_tells_nothing_are_listed(tmp_path):
    lines = [{**row, "question": 0, "null": row["policy"] == "random" and row["item"] == 4} for row in rows()]
    for line in lines:
        if line["task"] == "odd":
            line["exact"] = 1.0
    path = write_run(tmp_path, lines)
    nulls = section(path, "Nulls")
    assert "3 answers were empty and count as 0" in nulls
    assert "| context_only | random | 0.2 | copy | 0/4/0 |" in nulls
    unclear = section(path, "What does not tell policies apart")
    assert "| context_only | 0.2 | odd | 100.0 | best and worst differ by 0.0" in unclear
    assert "| context_only | 0.2 | copy |" not in unclear
    assert "A test bed" not in path.read_text()
    reference = manifest()
    reference["config"]["suite"] = "reference"
    path = write_run(tmp_path, [{**line, "null": False} for line in lines], reference)
    assert "A test bed" in path.read_text() and "No answer was empty." in section(path, "Nulls")

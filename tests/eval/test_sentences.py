"""The sentences that a report opens with: who wins where, by which difference, and what is not decided."""

import json

import pytest

from retain.eval.report.render import write_report
from retain.eval.report.run import Run
from retain.eval.report.sentences import sentences
from retain.eval.run.results_store import ITEMS, MANIFEST
from retain.eval.stats.comparisons import judge
from retain.eval.stats.summary import gather, learned_against_each
from tests.eval.made_rows import make_row
from tests.eval.made_run import make_manifest

FULL = {("full", 1.0): 38}


def rows_of(right, *, regime="context_only", tasks=(("copy", "seen"),), items=40, **more):
    """Rows of cells of which the first so many of 40 items are right; others are right elsewhere: (from,
    to)."""
    made = []
    for (policy, budget), hit in right.items():
        first, last = hit if isinstance(hit, tuple) else (0, hit)
        for task, family in tasks:
            for item in range(items):
                row = make_row(regime, policy, budget, task, family, item % 2, item, first <= item < last)
                made.append(row | more)
    return made


def said_of(rows, *, margin=2.0, **how):
    scores, options = gather(rows), {"margin": margin, "resamples": 300}
    left = how.get("variants", ())
    each = learned_against_each(scores, **options, leave_out=left)
    return [one.plain for one in sentences(scores, judge(scores, **options), each, **how)]


def one_of(right, **how):
    kept = {name: how.pop(name) for name in ("margin", "variants", "controls", "speed") if name in how}
    (said,) = said_of(rows_of(right, **how), **kept)
    return said


def test_a_winner_with_its_differences_its_distance_from_the_full_cache_and_its_costs():
    right = FULL | {("snapkv", 0.1): 2, ("recency", 0.1): 1, ("gate", 0.1): 36, ("oracle", 0.1): 38}
    right |= {("snapkv", 0.2): 6, ("recency", 0.2): 9, ("gate", 0.2): 38, ("oracle", 0.2): 40}
    rows = [row | ({"gate_bytes": 2048} if row["policy"] == "gate" else {}) for row in rows_of(right)]
    (said,) = said_of(rows)
    start = "context_only: gate wins at every budget: better than the best baseline (snapkv or recency) by "
    assert said.startswith(f"{start}+72.5 [")
    assert (
        "] at 0.2 to +85.0 [" in said
        and "] at 0.1" in said
        and "Against the full cache inconclusive at 0.1 (-5.0 [" in said
    )
    assert (
        "identical at 0.2." in said
        and "It holds 10.0 to 20.0 % of the full cache's bytes and 2 KiB of gates." in said
    )
    assert ". Time not measured. " in said and "oracle" not in said and "undecided" not in said


def test_time_is_that_of_the_policy_ahead():
    def timed(policy, ratio, first, **more):
        spread = {"ttft_over_plain": {"median": first}, "token_over_plain": {"median": 0.5}}
        return {"policy": policy, "keep_ratio": ratio, "batch": 1, "failed": ""} | spread | more

    right = FULL | {("snapkv", 0.1): 2, ("gate", 0.1): 36}
    rows = [timed("snapkv", 0.1, 1.5), timed("gate", 0.2, 1.25), timed("gate", 0.1, 9.0, failed="memory")]
    said = one_of(right, speed={"rows": rows})
    assert "Time of gate over a plain cache's: 1.25 to the first token, 0.50 a token (" in said
    assert "Time not measured." in one_of(right, speed={"rows": rows[:1]})


def test_what_is_not_decided_is_undecided_and_never_the_same():
    said = one_of(FULL | {("snapkv", 0.1): 20, ("gate", 0.1): 23})
    assert said.startswith("context_only: undecided: at 0.1 gate minus the best baseline (snapkv) is +7.5 [")
    assert "wins" not in said and "equivalent" not in said


def test_equivalent_and_identical_have_no_winner():
    said = one_of(FULL | {("snapkv", 0.1): 20, ("gate", 0.1): 21}, margin=25.0)
    assert said.startswith(
        "context_only: no winner at 0.1: gate is equivalent to the best baseline (snapkv), ±25:"
    )
    said = one_of(FULL | {("snapkv", 0.1): 20, ("gate", 0.1): 20})
    assert "no winner at 0.1: gate is identical to the best baseline (snapkv), item by item" in said


def test_different_winners_by_budget_and_by_family():
    right = FULL | {("snapkv", 0.1): 2, ("gate", 0.1): 30, ("snapkv", 0.4): 36, ("gate", 0.4): 10}
    said = one_of(right)
    assert "gate wins at 0.1: better than the best baseline (snapkv) by +70.0 [" in said
    assert ". snapkv wins at 0.4: gate, the best learned policy, is worse by -65.0 [" in said
    seen, held = rows_of(right), rows_of({**right, ("gate", 0.4): 40}, tasks=(("quote", "held-out"),))
    (said,) = said_of([*seen, *held])
    assert "gate wins at 0.1 (seen) and 0.1 (held-out): better" in said or "gate wins at 0.1: better" in said
    assert "wins at 0.4 (seen)" in said


def test_of_learned_policies_alike_one_leads_and_the_others_are_named():
    right = FULL | {("snapkv", 0.1): 2, ("gate", 0.1): 35, ("fused", 0.1): 36}
    right |= {("snapkv", 0.2): 2, ("gate", 0.2): 36, ("fused", 0.2): 35}
    right |= {("snapkv", 0.4): 2, ("gate", 0.4): 12, ("fused", 0.4): 37}
    said = one_of(right)
    assert "fused wins at every budget" in said and "gate wins" not in said
    assert "Not shown to be better than gate at 0.1, 0.2." in said


def test_a_policy_that_is_better_than_the_leader_wins():
    """Under another protection it is no baseline; the learned policies were compared with it all the same."""
    right = FULL | {("snapkv", 0.1): 2, ("gate", 0.1): 15, ("snapkv+none", 0.1): 38}
    said = one_of(right)
    assert said.startswith(
        "context_only: snapkv+none wins at 0.1: gate, the best learned policy, is worse by"
    )


def test_variants_and_controls_do_not_win_over_a_preset():
    right = FULL | {("snapkv", 0.1): 2, ("gate", 0.1): 30, ("mine", 0.1): 36, ("untrained", 0.1): 38}
    rows = [
        row | {"gates": "f" * 12 * (row["policy"] in ("gate", "mine", "untrained"))} for row in rows_of(right)
    ]
    rows = [row | {"trained": bool(row["gates"])} for row in rows]
    (said,) = said_of(rows, variants=("mine", "untrained"), controls=("untrained",))
    assert "gate wins at 0.1" in said and "Higher, but not compared: mine at 0.1." in said
    assert "untrained" not in said
    # Alone it is the policy that the run is about.
    (said,) = said_of([row for row in rows if row["policy"] != "gate"], variants=("mine", "untrained"),
                      controls=("untrained",))  # fmt: skip
    assert "mine wins at 0.1" in said and "untrained" not in said


def test_without_learned_policies_or_baselines_nothing_is_decided():
    right = FULL | {("snapkv", 0.1): 2, ("recency", 0.1): 30}
    said = one_of(right)
    assert said.startswith(
        "context_only: undecided: training-free policies are not judged against the best of"
    )
    assert (
        "the highest mean has recency at 0.1" in said
        and "Against the full cache worse at 0.1 (-20.0 [" in said
    )
    said = one_of(FULL | {("gate", 0.1): 10, ("fused", 0.1): 30, ("oracle", 0.1): 38})
    start = "undecided: no training-free baseline was measured; the highest mean has fused at 0.1."
    assert start in said and "oracle" not in said
    assert "undecided: gate was measured alone." in one_of(FULL | {("gate", 0.1): 10})
    assert "undecided: snapkv was measured alone" in one_of(FULL | {("snapkv", 0.1): 10})
    assert one_of(FULL) == "context_only: undecided: nothing but the full cache was measured, 95.0 %."
    said = one_of(FULL | {("oracle", 0.1): 38})
    assert said == "context_only: undecided: nothing but controls and the full cache was measured, 95.0 %."
    # Without a full cache nothing is said of it.
    assert "full cache worse" not in one_of({("snapkv", 0.1): 2, ("gate", 0.1): 30})


def test_cells_that_failed_are_named():
    right = FULL | {("snapkv", 0.1): 2, ("gate", 0.1): 30, ("snapkv", 0.2): 5, ("recency", 0.1): 1}
    rows = [
        row | {"question": 0, "null": row["policy"] == "gate" and row["item"] > 36} for row in rows_of(right)
    ]
    (said,) = said_of(rows)
    assert "gate wins at 0.1: better" in said and "the highest mean has snapkv at 0.2" in said
    assert ", and 3 of its answers were empty and count as 0. " in said
    assert said.endswith(". No answers of gate at 0.2, recency at 0.2.")


def test_one_item_has_no_interval_and_budgets_in_tokens_say_so():
    said = one_of({("full", 1.0): 1, ("snapkv", 128.0): 0, ("gate", 128.0): 1}, items=1)
    assert "undecided: at 128 tokens gate minus the best baseline (snapkv) is +100.0 no interval" in said


def written(folder, rows, **config):
    folder.mkdir()
    (folder / ITEMS).write_text("".join(json.dumps(row | {"unit_rows": 0}) + "\n" for row in rows))
    manifest = make_manifest()
    manifest["config"] |= config
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("only", [False, True])
def test_the_first_screen_comes_first(tmp_path, only):
    right = FULL if only else FULL | {("snapkv", 0.1): 2, ("gate", 0.1): 30}
    rows = [*rows_of(right, items=6), *rows_of(right, items=6, regime="query_aware")]
    folder = written(tmp_path / "run", rows)
    run = Run.read(folder)
    text = write_report(run).read_text()
    lines = [f"- {one.text}" for one in run.sentences]
    assert len(lines) == 2
    assert text.split("\n\n")[1:3] == ["\n".join(lines), "![score against budget](scores.png)"]
    page = folder.joinpath("report.html").read_text()
    places = [
        page.index(part) for part in ('class="first"', "<strong>context_only</strong>", 'id="fig-scores"')
    ]
    assert places == sorted(places) and places[-1] < page.index("<nav") < page.index('id="verdicts"')

"""Scores of a comparison: each distinct one once, and an oracle that knows what really comes."""

import itertools

import pytest
import torch

from retain.eval.config import find_policy
from retain.eval.run import caches, scoring
from retain.eval.run.answers import read_back
from retain.eval.run.baselines import largest, oracle
from retain.eval.run.caches import SingleEviction
from retain.eval.run.evaluated_model import Unit, load_evaluated
from retain.eval.run.runner import run_unit
from retain.eval.run.scoring import first_entries
from retain.hf.intercept.observe import observe
from retain.policy import score_entries
from retain.scores import Score
from tests.eval.stub import MORE_STUB, STUB, TASKS, stub_config, stub_item


def test_policies_with_one_score_score_once(stub_gates, monkeypatch):
    made = []

    def count(policy, layer, **options):
        made.append(policy.name)
        return score_entries(policy, layer, **options)

    monkeypatch.setattr(scoring, "score_entries", count)
    variants = {
        "bare": ("snapkv", "protection.sinks=0"),
        "other": ("snapkv", "observed_settings.aggregate=max"),
        "gate_bare": ("gate", "protection.sinks=0"),
    }
    shared = ("snapkv", "adakv", "pyramidkv", "bare")
    names = (*shared, "other", "gate", "gate_bare", "token_identity", "oracle", "fused", "random")
    config = stub_config(stub_gates, policies=names, variants=variants)
    evaluated = load_evaluated(config, MORE_STUB, 0)
    run_unit(config, MORE_STUB, evaluated, Unit(0, "turns", 0, 1))
    layers = evaluated.model.config.num_hidden_layers
    alone = ("snapkv", "other", "gate", "token_identity", "fused", "random")
    # Of a regime once; the oracle's for each of its steps, since the questions differ.
    assert sorted(made) == sorted([*alone, *alone, *["oracle"] * 3] * layers)


@pytest.mark.parametrize("regime", ["context_only", "query_aware"])
def test_the_oracle_looks_at_every_question_that_is_asked_of_what_is_left(stub_gates, monkeypatch, regime):
    config = stub_config(stub_gates, policies=("oracle",), regimes=(regime,), keep_ratios=(0.45,))
    evaluated = load_evaluated(config, MORE_STUB, 0)
    known, keeps = [], SingleEviction.keeps

    def watched(self, line, budget):
        known.append((self.evidence[0].num_seen, self.questions, self.scores["oracle"]))
        return keeps(self, line, budget)

    monkeypatch.setattr(SingleEviction, "keeps", watched)
    run_unit(config, MORE_STUB, evaluated, Unit(0, "turns", 0, 2))
    items = [stub_item("turns", 0, index, 100) for index in range(2)]

    def future(question, num_seen):
        rows = [
            [*item.context_ids, *item.asked[question].question_ids, *item.asked[question].gold_ids[:1]]
            for item in items
        ]
        return oracle(observe(evaluated.model, torch.tensor(rows)), num_seen)

    steps = {"context_only": [(100, (0, 1, 2))], "query_aware": [(102, (0,)), (100, (1, 2))]}[regime]
    assert [own[:2] for own in known] == steps
    for num_seen, questions, scores in known:
        parts = [future(question, num_seen) for question in questions]
        for layer, score in enumerate(scores):
            values = torch.stack([own[layer].values_BHT for own in parts])
            assert torch.allclose(score.values_BHT, values.amax(0), rtol=1e-4)
            assert len(questions) == 1 or not torch.allclose(score.values_BHT, values[0], rtol=1e-2)


@pytest.mark.parametrize(("task", "generate", "size"), [("copy", 3, 2), ("pair", 2, 1), ("odd", 1, 0)])
@pytest.mark.parametrize("regime", ["context_only", "query_aware"])
def test_the_oracle_sees_the_queries_that_generation_makes_and_no_other(
    stub_gates, monkeypatch, task, generate, size, regime
):
    item = stub_item(task, 0, 0, 100)
    assert (item.generate, len(item.gold_ids)) == (generate, generate + 1)
    assert read_back(item) == item.gold_ids[:size]
    seen = []

    def watched(teacher, num_seen):
        seen.append((teacher[0].num_seen, num_seen))
        return oracle(teacher, num_seen)

    monkeypatch.setattr(caches, "oracle", watched)
    config = stub_config(stub_gates, policies=("oracle",), regimes=(regime,))
    run_unit(config, STUB, load_evaluated(config, STUB, 0), Unit(0, task, 0, 1))
    # Real queries: the prompt's tokens after the eviction, and each generated token but the last.
    behind = 0 if regime == "context_only" else len(item.question_ids) - 1
    assert seen == [(100 + len(item.question_ids) + generate - 1, 100 + behind)]


def test_no_question_no_future():
    with pytest.raises(ValueError, match="an oracle that is asked nothing"):
        largest([])


def test_controls_share_the_gates_protection_and_scope(tmp_path):
    config = stub_config(tmp_path, protections={"joint": ("scope=model", "protection.recent=8")})
    for name, kind in itertools.product(("token_identity", "oracle"), ("preset", "joint")):
        gate, control = find_policy(config, "gate", kind), find_policy(config, name, kind)
        assert (control.protection, control.scope, control.learned) == (gate.protection, gate.scope, True)
        assert control.scope == ("model" if kind == "joint" else "head") and control.draw is None
        # Nothing but the control's own score orders entries.
        assert (control.observed, control.fusion, control.floor) == (None, "learned", None)


def test_a_score_is_cut_with_all_that_it_says():
    values_BHT = torch.arange(10.0).view(1, 1, 10)
    weight_B = torch.tensor([7.0], dtype=torch.float64)
    cut = first_entries(Score(values_BHT, "mass", values_BHT + 100, 3, weight_B, draw_BHT=-values_BHT), 8)
    assert cut.values_BHT.tolist() == [[list(range(8))]]
    assert cut.first_BHT.tolist() == [[[100.0 + i for i in range(8)]]]
    assert cut.draw_BHT.tolist() == [[[-float(i) for i in range(8)]]]
    # Of the window's three entries, 7, 8 and 9, one is left.
    assert cut.window == 1 and cut.layer_weight_B.tolist() == [7.0]
    assert first_entries(cut, 6).window == 0
    plain = first_entries(Score(values_BHT, "rank"), 8)
    assert (plain.first_BHT, plain.draw_BHT, plain.window, plain.layer_weight_B) == (None, None, 0, None)


def test_a_variant_differs_from_its_preset_in_what_it_changes(stub_gates):
    variants = {"early": ("recency", "observed=random"), "same": ("recency", "protection.sinks=4")}
    names = ("random", "recency", "early", "same")
    config = stub_config(stub_gates, policies=names, variants=variants, keep_ratios=(0.45,))
    evaluated = load_evaluated(config, STUB, 0)
    rows = [row for task in TASKS for row in run_unit(config, STUB, evaluated, Unit(0, task, 0, 2)).rows]
    answers = {name: [row.tokens for row in rows if row.policy == name] for name in names}
    assert answers["same"] == answers["recency"] != answers["random"] == answers["early"]

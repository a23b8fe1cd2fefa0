"""The stage `reinforce`: its draws, their probability, its rewards and its gradient, against plain loops."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import retain
from retain.hf.intercept.attach import attach
from retain.hf.intercept.observe import observe
from retain.train.distill import distill
from retain.train.objectives.plackett_luce import against_the_others, gumbel_noise, log_probability
from retain.train.recipe import check, one_by_one
from retain.train.reinforce_stage import Reinforce, ReinforceSettings, check_rewardable
from retain.train.run.checkpoint import read_log
from tests.hf.regime_runs import held_by
from tests.train.made import document, frozen_of
from tests.train.runs import TWO_PROCESSES, killed_at, python, same_gates, written

RATIO = 0.4
Make = Callable[..., Any]


def stage_of(family: str = "mlp", **settings: Any) -> Reinforce:
    frozen = frozen_of("qwen3", num_hidden_layers=2)
    settings = {"rollouts": 3, "keep_ratios": (RATIO,), "sinks": 2, "recent": 3} | settings
    gates = retain.new_gates(frozen.model, family, seed=0, **({"F": 8} if family == "mlp" else {}))
    return Reinforce(gates, frozen, ReinforceSettings(**settings), seed=5)


def evidence_of(stage: Reinforce, length: int = 40):
    return observe(
        stage.frozen.model, torch.tensor([document(length).context_ids]), wanted=stage.gates.inputs
    )


def naive_log_probability(logits: list[float], order: list[int], drawn: int) -> float:
    """Of drawing the first `drawn` of `order` one after another, each in proportion to `exp(logit)`."""
    total, left = 0.0, list(order)
    for entry in order[:drawn]:
        total += logits[entry] - math.log(sum(math.exp(logits[other]) for other in left))
        left.remove(entry)
    return total


def test_log_probability_is_that_of_drawing_one_after_another() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_KgN = 3 * torch.randn(2, 3, 7, generator=generator)
    perturbed_KgN = logits_KgN + gumbel_noise((1,), logits_KgN.shape)
    candidates_KgN = torch.rand(2, 3, 7, generator=generator) < 0.8
    drawn_KgN = torch.zeros_like(candidates_KgN)
    wanted = []
    for k in range(2):
        total = 0.0
        for x in range(3):
            own = candidates_KgN[k, x].nonzero()[:, 0].tolist()
            order = sorted(own, key=lambda n, k=k, x=x: -float(perturbed_KgN[k, x, n]))
            count = min(1 + x, len(order))
            drawn_KgN[k, x, order[:count]] = True
            total += naive_log_probability(logits_KgN[k, x].tolist(), order, count)
        wanted.append(total)
    got_K = log_probability(logits_KgN, perturbed_KgN, drawn_KgN, candidates_KgN)
    torch.testing.assert_close(got_K, torch.tensor(wanted))


def test_the_probabilities_of_all_orders_sum_to_one_and_are_how_often_they_are_drawn() -> None:
    logits_N, drawn = torch.tensor([0.5, -1.0, 1.5, 0.0]), 2
    orders = list(itertools.permutations(range(4), drawn))
    chances = {}
    for order in orders:
        rest = [n for n in range(4) if n not in order]
        chances[order] = math.exp(naive_log_probability(logits_N.tolist(), [*order, *rest], drawn))
    assert sum(chances.values()) == pytest.approx(1)
    draws = 40_000
    perturbed_KN = logits_N + gumbel_noise((3, 4), (draws, 4))
    first_K2 = perturbed_KN.topk(drawn, dim=-1).indices
    code_K = first_K2[:, 0] * 4 + first_K2[:, 1]
    for order, chance in chances.items():
        found = float((code_K == order[0] * 4 + order[1]).float().mean())
        assert abs(found - chance) < 5 * math.sqrt(chance * (1 - chance) / draws), order


def test_noise_depends_on_its_key_alone() -> None:
    one = gumbel_noise((1, 2), (3, 5))
    torch.rand(7)
    assert torch.equal(one, gumbel_noise((1, 2), (3, 5)))
    assert not torch.equal(one, gumbel_noise((1, 3), (3, 5)))


def test_the_baseline_is_the_mean_of_the_others() -> None:
    reward = [1.0, 0.0, 0.5, -2.0]
    wanted = [own - (sum(reward) - own) / 3 for own in reward]
    assert against_the_others(torch.tensor(reward)).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
@pytest.mark.parametrize(
    ("family", "ratio"), [("mlp", RATIO), ("decay", RATIO), ("qkv", 0.8), ("admission", 0.8)]
)
def test_without_noise_the_keep_set_is_that_of_the_policy_in_a_cache(
    scope: str, family: str, ratio: float
) -> None:
    stage = stage_of(family, scope=scope)
    model, ids = stage.frozen.model, torch.tensor([document(40).context_ids])
    drawn = stage.draw(evidence_of(stage), ratio, key=None)
    with attach(model):
        cache = retain.Cache(model, stage.policy, keep_ratio=ratio, gates=stage.gates, short="raise")
        cache.prefill(ids)
    held = held_by(cache, torch.ones_like(ids))
    assert all(torch.equal(one, keep) for one, keep in zip(held, drawn.keeps, strict=True))


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_draws_are_exact_hold_what_is_protected_and_differ(scope: str) -> None:
    stage = stage_of(scope=scope)
    evidence = evidence_of(stage)
    drawn = stage.draw(evidence, RATIO, key=(1,))
    keep_KLHT = torch.stack(drawn.keeps, dim=1)
    assert keep_KLHT[..., :2].all() and keep_KLHT[..., -3:].all()
    assert (keep_KLHT.flatten(1).sum(-1) == round(RATIO * 40 * 2 * 2)).all()
    if scope == "head":
        assert (keep_KLHT.sum(-1) == RATIO * 40).all()
    assert not torch.equal(keep_KLHT[0], keep_KLHT[1])
    again = stage.draw(evidence, RATIO, key=(1,))
    assert all(torch.equal(one, other) for one, other in zip(drawn.keeps, again.keeps, strict=True))


def test_rewards_are_those_of_caches_that_are_asked_alone() -> None:
    stage, own = stage_of(), document(40, appendix=6)
    model = stage.frozen.model
    with attach(model), torch.no_grad():
        cache, evidence = stage._read(own)
        drawn = stage.draw(evidence, RATIO, key=(1,))
        got_K = stage._rewards(cache, own, drawn.keeps, stage._full(cache, own))
        ids = torch.tensor([own.context_ids + own.appendix_ids])
        full_SV = model(ids, use_cache=False).logits[0, 40:-1].log_softmax(-1)
        for k, reward in enumerate(got_K.tolist()):
            alone = retain.Cache(model, policy=None)
            alone.prefill(ids[:, :40], evict=False)
            alone.evict_with([keep_KHT[k : k + 1] for keep_KHT in drawn.keeps])
            logits_SV = model(ids[:, 40:-1], past_key_values=alone).logits[0].log_softmax(-1)
            wanted = sum(
                float(p.exp() * (p - q))
                for p_V, q_V in zip(full_SV, logits_SV, strict=True)
                for p, q in zip(p_V, q_V, strict=True)
            )
            assert reward == pytest.approx(-wanted / 5, rel=1e-3, abs=1e-5)


def test_a_match_is_an_answer_that_comes_out_whole() -> None:
    stage, own = stage_of(reward="match"), document(40, appendix=9)
    model = stage.frozen.model
    with attach(model):
        cache, evidence = stage._read(own)
    # The full cache says what is read of the first answer, and of the second all but its last token.
    ids = [own.appendix_ids[0]]
    for place in range(8):
        with torch.no_grad():
            logits = model(torch.tensor([[*own.context_ids, *ids]]), use_cache=False).logits[0, -1]
        best = int(logits.argmax())
        ids.append(best if place != 6 else (best + 1) % 90 + 2)
    asked = type(own)(own.context_ids, tuple(ids), answers=((1, 4), (5, 8)))
    everything = [layer.exists_BHT for layer in evidence]
    with attach(model):
        assert stage._rewards(cache, asked, everything, None).tolist() == [0.5]
        whole = type(own)(
            own.context_ids, tuple(ids[:7])
        )  # no answers are named: all that is predicted is one
        assert stage._rewards(cache, whole, everything, None).tolist() == [1.0]


def test_the_gradient_is_that_of_the_plain_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, own = stage_of(temperature=0.7), document(40, appendix=6)
    reward_K = torch.tensor([1.0, -0.5, 0.25])
    monkeypatch.setattr(stage, "_rewards", lambda *_: reward_K)
    (row,) = stage.rows_of([own], 3, 0.5)
    assert row["loss"] == pytest.approx(-0.25) and row["keep_ratio"] == RATIO
    got = [parameter.grad.clone() for parameter in stage.parameters()]
    stage.gates.zero_grad()
    evidence = evidence_of(stage)
    keeps = stage.draw(evidence, RATIO, key=(5, 3, own.key)).keeps
    noise = gumbel_noise((5, 3, own.key), (3, 2, 2, 40)).double()
    logits = torch.cat([stage.gates.values(layer).double().log() / 0.7 for layer in evidence])
    loss = torch.zeros((), dtype=torch.float64)
    entries = [(layer, head, t) for layer in range(2) for head in range(2) for t in range(2, 37)]
    for k in range(3):
        order = sorted(entries, key=lambda e, k=k: -float(logits[e].detach() + noise[k][e]))
        count = sum(int(keeps[layer][k, head, t]) for layer, head, t in entries)
        assert {e for e in entries if keeps[e[0]][k, e[1], e[2]]} == {*order[:count]}
        chosen = torch.stack([logits[e] for e in order])
        log_p = sum(chosen[r] - torch.logsumexp(chosen[r:], 0) for r in range(count))
        others = (reward_K.sum() - reward_K[k]) / 2
        loss = loss - float(reward_K[k] - others) * log_p / count / 3
    (0.5 * loss).backward()
    for one, parameter in zip(got, stage.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-3, atol=1e-6)


def test_gates_learn_to_keep_what_is_rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward for entries of even places in the middle: more and more of them are kept."""
    stage = stage_of(rollouts=16, temperature=1.0)
    own = document(40, appendix=4)
    wanted_T = torch.zeros(40)
    wanted_T[2:37:2] = 1.0

    def rewards(_cache, _document, keeps, _full):
        return torch.stack([(keep_KHT * wanted_T).flatten(1).sum(-1) for keep_KHT in keeps]).sum(0) / 40

    monkeypatch.setattr(stage, "_rewards", rewards)
    optimiser = torch.optim.Adam(stage.parameters(), lr=0.02)
    before = stage.look([own])[0]["reward"]
    for step in range(30):
        optimiser.zero_grad()
        stage.accumulate_([own], step, 1.0)
        optimiser.step()
    assert stage.look([own])[0]["reward"] > 1.2 * before


def first_stage(make_config: Make, tmp_path: Path, **changes: Any) -> Path:
    return distill(make_config(output=str(tmp_path / "first"), **changes))


def second(make_config: Make, first: Path, output: Path, recent: int = 8, **changes: Any) -> Any:
    section = {"rollouts": 2, "keep_ratios": [0.5, 0.6], "sinks": 2, "recent": recent}
    none = {"kind": "none", "curve": False, "fusion_weights": False, "quotas": False}
    return make_config(
        stage="reinforce",
        initial=str(first),
        output=str(output),
        reinforce=section,
        calibration=none,
        **{"target.sources": {"appendix": 1.0}, "training.steps": 4, "training.checkpoint_every": 2},
        **changes,
    )


def test_a_run_starts_from_a_distilled_gate_and_resumes_to_the_same_numbers(
    make_config: Make, tmp_path: Path
) -> None:
    first = first_stage(make_config, tmp_path, **{"training.steps": 2})
    whole = distill(second(make_config, first, tmp_path / "whole"))
    steps = [record for record in read_log(whole) if "grad_norm" in record]
    assert len(steps) == 4 and all(record["grad_norm"] > 0 for record in steps)
    looks = [record["held_out"] for record in read_log(whole) if "held_out" in record]
    assert {"reward_at_0.5", "reward_at_0.6", "reward_full"} <= looks[0].keys()
    assert looks[0]["reward_full"] == pytest.approx(0, abs=1e-5)
    killed = second(make_config, first, tmp_path / "killed")
    with killed_at(3):
        distill(killed)
    assert read_log(distill(killed)) == read_log(whole)
    assert same_gates(whole, Path(killed.output))

    before, after = map(retain.load_gates, (first, whole))
    assert after.metadata["stage"] == "reinforce" and after.metadata["protected_window"] == 8
    assert after.metadata["reinforce"]["rollouts"] == 2 and after.unit == before.unit == "risk"
    assert len(before.calibrators) == len(after.calibrators) == 2
    kept = before.calibrators.state_dict()
    assert all(torch.equal(kept[name], own) for name, own in after.calibrators.state_dict().items())
    assert not all(map(torch.equal, before.gates.parameters(), after.gates.parameters()))


def test_two_processes_reinforce_together_and_equal_one(make_config: Make, tmp_path: Path) -> None:
    first = first_stage(make_config, tmp_path, **{"training.steps": 2})
    alone = distill(second(make_config, first, tmp_path / "alone"))
    together = second(make_config, first, tmp_path / "together")
    python(
        *(*TWO_PROCESSES, "train/distill.py", "--config", written(together, tmp_path / "c.yaml")),
        ACCELERATE_USE_CPU="true",
    )
    one, other = (
        [record["loss"] for record in read_log(folder) if "grad_norm" in record]
        for folder in (alone, Path(together.output))
    )
    assert one == pytest.approx(other, rel=1e-4)
    one, other = (retain.load_gates(folder).state_dict() for folder in (alone, together.output))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial": None}, "goes on from gates that were distilled.*set initial"),
        ({"target.sources": {"own": 1.0, "appendix": 1.0}}, r"set target\.sources=\{appendix: 1\.0\}"),
        ({"calibration.curve": True}, "keeps the curves of `initial`.*calibration.curve=false"),
        ({"reinforce.rollouts": 1}, "reinforce.rollouts=1: the others"),
        ({"reinforce.keep_ratios": []}, "reinforce.keep_ratios is empty"),
        ({"reinforce.sinks": 0, "reinforce.recent": 0}, "a head could be left empty"),
    ],
)
def test_what_is_refused(make_config: Make, tmp_path: Path, changes: dict, message: str) -> None:
    made = {"stage": "reinforce", "initial": "somewhere", "target.sources": {"appendix": 1.0}}
    with pytest.raises(ValueError, match=message):
        check(make_config(**(made | changes)), 1)


@pytest.mark.parametrize(
    ("own", "settings", "message"),
    [
        (document(300, appendix=1), {}, "doc has 1 tokens behind it, and stage=reinforce rewards"),
        (document(300, appendix=6), {"reward": "match"}, "doc does not say which of the tokens behind it"),
        (document(200, appendix=6), {}, r"doc has 200 tokens, of which keep_ratio 0\.05 .* data\.min_tokens"),
    ],
)
def test_documents_that_nothing_can_be_drawn_of_are_refused_by_name(
    own, settings: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_rewardable(own, ReinforceSettings(**settings), "doc")
    check_rewardable(document(240, appendix=6), ReinforceSettings(), "doc")


def test_gates_that_judge_older_entries_alone_keep_their_window(make_config: Make, tmp_path: Path) -> None:
    first = first_stage(make_config, tmp_path, **{"training.steps": 1})
    config = second(make_config, first, tmp_path / "second", recent=4)
    with pytest.raises(ValueError, match=r"at least 8 tokens old: set reinforce\.recent=8 or more"):
        distill(config)


def test_every_document_is_forwards_of_its_own(make_config: Make) -> None:
    frozen = frozen_of("qwen3", num_hidden_layers=2)
    assert frozen.forward_of == "row" and not one_by_one(make_config(), frozen)
    assert all(one_by_one(make_config(stage=stage), frozen) for stage in ("reinforce", "lookahead"))

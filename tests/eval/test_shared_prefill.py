"""One prefill for many cells: padding, several questions, answers that end, needles, budgets, protections."""

import weakref
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from retain.budget.statement import Budget
from retain.eval.config import find_policy
from retain.eval.run import shared_prefill
from retain.eval.run.answers import (
    Answer,
    alike,
    cut,
    needle_share,
    needle_tokens,
    padded,
    read_back,
    respond,
)
from retain.eval.run.baselines import largest, oracle
from retain.eval.run.by_cache import run_by_cache
from retain.eval.run.evaluated_model import Unit, load_subject, naming
from retain.eval.run.runner import items_in, run_unit
from retain.eval.run.shared_prefill import observed_tokens, run_shared, seen_tokens, stages_of
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.intercept.observe import observe
from retain.policy import Policy, decide_layers, score_entries
from tests.eval.stub import MORE_STUB, STUB, save_stub_gates, spoken, stub_config, stub_item
from tests.tiny import VOCAB, tiny_model

BARE = ("protection.sinks=0", "protection.prefix_fraction=0", "protection.suffix_fraction=0")
EVERY = ("random", "token_identity", "snapkv", "defensivekv", "gate", "oracle")


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gated")
    save_stub_gates(folder)
    return folder


@pytest.mark.parametrize("regime", ["context_only", "query_aware"])
def test_padded_rows_equal_those_read_one_by_one(gated, regime):
    config = stub_config(
        gated, policies=EVERY, regimes=(regime,), keep_ratios=(0.6,), items_per_task=3, batch_items=3
    )
    subject = load_subject(config, MORE_STUB, 0)
    together = run_unit(config, MORE_STUB, subject, Unit(0, "ragged", 0, 3)).rows
    apart = [
        row
        for index in range(3)
        for row in run_unit(config, MORE_STUB, subject, Unit(0, "ragged", index, index + 1)).rows
    ]
    plain = [replace(row, unit="", unit_rows=0) for row in together]
    assert plain == [replace(row, unit="", unit_rows=0) for row in apart]
    assert {row.seen_entries for row in together} == {
        6 * (length + (3 if regime == "query_aware" else 0)) for length in (100, 83, 66)
    }
    assert len({row.tokens for row in together}) > 3
    shares = {row.needles_kept for row in together}
    assert None not in shares and len(shares) > 3
    assert all(row.needles_kept == 1.0 for row in together if row.policy == "full")


def test_items_are_read_together_where_their_tails_are_alike():
    items = {index: stub_item("ragged", 0, index, 100) for index in range(3)}
    assert [[*group] for group in alike(items)] == [[0, 1, 2]]
    items[1] = stub_item("odd", 0, 1, 100)
    items[7] = replace(items[0], end_ids=(3,))
    assert [[*group] for group in alike(items)] == [[0, 2], [1], [7]]
    ids, mask = padded([(1, 2, 3), (4,)])
    assert (ids.tolist(), mask.tolist()) == ([[1, 2, 3], [0, 0, 4]], [[1, 1, 1], [0, 0, 1]])


@pytest.mark.parametrize("regime", ["context_only", "query_aware"])
def test_every_question_is_asked_of_the_same_evicted_context(gated, regime):
    config = stub_config(gated, policies=("snapkv",), regimes=(regime,), keep_ratios=(0.45,))
    subject = load_subject(config, MORE_STUB, 0)
    rows = run_unit(config, MORE_STUB, subject, Unit(0, "turns", 0, 2)).rows
    assert [(row.item, row.question, row.policy) for row in rows] == [
        (item, question, policy)
        for item in range(2)
        for question in range(3)
        for policy in ("full", "snapkv")
    ]
    item = stub_item("turns", 0, 0, 100)
    assert [row.about for row in rows[:2]] == [{"turn": 0.0}] * 2
    behind = 2 if regime == "query_aware" else 0
    assert [row.seen_entries for row in rows[:6:2]] == [6 * (100 + behind), 600, 600]
    for row in rows[2:6]:
        # Of later questions: the context alone, evicted by what was seen when entries went.
        whole = (*item.context_ids, *item.asked[row.question].question_ids)
        cache = Cache(subject.model, policy=None)
        if row.policy == "full":
            cache.prefill(torch.tensor([item.context_ids]))
        elif regime == "context_only":
            cache = Cache(subject.model, find_policy(config, "snapkv"), keep_ratio=0.45)
            cache.prefill(torch.tensor([item.context_ids]))
        else:
            continue
        made = subject.model.generate(
            torch.tensor([whole]), past_key_values=cache, max_new_tokens=2, do_sample=False
        )
        assert tuple(made[0, len(whole) :].tolist()) == row.tokens
    assert len({row.tokens for row in rows}) > 3


def test_entries_go_again_for_questions_that_follow_an_observed_one():
    item = stub_item("turns", 0, 0, 100)
    assert stages_of(item, "context_only") == [(100, (0, 1, 2))]
    assert stages_of(item, "query_aware") == [(102, (0,)), (100, (1, 2))]
    assert stages_of(stub_item("copy", 0, 0, 100), "query_aware") == [(102, (0,))]


def test_answers_end_where_they_like_in_a_batch_as_alone(gated):
    config = stub_config(
        gated, policies=("random", "snapkv"), keep_ratios=(0.45,), items_per_task=6, batch_items=6
    )
    subject = load_subject(config, MORE_STUB, 0)
    rows = run_unit(config, MORE_STUB, subject, Unit(0, "open", 0, 6)).rows
    for row in rows:
        item = stub_item("open", 0, row.item, 100)
        assert not {*row.tokens} & {*item.end_ids}
        assert row.num_generated == len(row.tokens) <= 6
        assert row.ended == (row.num_generated < 6) and row.num_prompt == 105
        assert row.null == (not row.tokens) and row.text == spoken(row.tokens)
        assert (row.exact, row.partial) == ((0.0, 0.0) if row.null else item.score(row.tokens))
        assert row.score == row.partial  # what the task is judged by
        read = 5 if row.regime == "context_only" else 1
        read += max(0, row.num_generated + row.ended - 1)
        assert row.peak_entries == row.kept_entries + 6 * read
    assert len({row.num_generated for row in rows}) > 2 and {row.ended for row in rows} == {True, False}
    assert any(row.null for row in rows)
    alone = run_unit(config, MORE_STUB, subject, Unit(0, "open", 4, 5)).rows
    assert [row.tokens for row in alone] == [row.tokens for row in rows if row.item == 4]


def test_an_answer_is_what_comes_before_the_first_end():
    assert cut([5, 7, 9, 7], (9, 7)) == Answer((5,), ended=True)
    assert cut([5, 7], ()) == Answer((5, 7)) and cut([9], (9,)) == Answer((), ended=True)
    assert [Answer((1, 2), ended).num_read for ended in (False, True)] == [1, 2]
    assert Answer((), True).num_read == 0


def test_budgets_in_tokens_and_protections_are_axes_of_the_grid(gated):
    config = stub_config(
        gated,
        policies=("random", "snapkv", "oracle"),
        keep_ratios=(0.45,),
        tokens_per_head=(40,),
        protections={"none": BARE, "wide": ("protection.suffix_tokens=35",)},
        regimes=("context_only",),
    )
    subject = load_subject(config, STUB, 0)
    rows = run_unit(config, STUB, subject, Unit(0, "copy", 0, 2)).rows
    assert len(rows) == 2 * (1 + 9 * 2)
    named = {(row.policy, row.base_policy, row.protection) for row in rows}
    assert named == {
        ("full", "full", "preset"),
        *(
            (name if kind == "preset" else f"{name}+{kind}", name, kind)
            for name in ("random", "snapkv", "oracle")
            for kind in ("preset", "none", "wide")
        ),
    }
    assert {(row.budget, row.kept_entries, row.keep_ratio) for row in rows} == {
        (1.0, 600, 1.0),
        (0.45, 270, 0.45),
        (40.0, 240, 0.4),
    }
    ends = {name: policy.protection for name, policy in subject.policies.items()}
    assert (ends["snapkv+none"].sinks, ends["snapkv+wide"].suffix_tokens) == (0, 35)
    assert ends["oracle+none"].sinks == 0 and ends["oracle"] == ends["random"]
    # Nine lines, three scores: a protection changes what is kept, not what is scored.
    answers = {row.policy: row.tokens for row in rows if row.item == 0 and row.budget == 40.0}
    assert len({*answers.values()}) > 1


def test_no_preset_protection_leaves_those_of_the_grid(gated):
    config = stub_config(gated, policies=("recency",), protections={"none": BARE}, preset_protection=False)
    subject = load_subject(config, STUB, 0)
    rows = run_unit(config, STUB, subject, Unit(0, "pair", 0, 1)).rows
    assert {row.policy for row in rows} == {"full", "recency+none"}


def test_needles_by_hand():
    item = replace(stub_item("copy", 0, 0, 100), needles=((3, 5), (4, 6)))
    assert needle_tokens(item) == [3, 4, 5]
    # Layer 0: 2 of 2 * 3; layer 1: 3 of 1 * 3.
    assert needle_share([2, 3], [2, 1], 3) == pytest.approx((2 / 6 + 1) / 2)


@pytest.mark.parametrize(
    ("raised", "kind", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), ValueError, "out of memory in seed0/copy/0-2"),
        (MemoryError(), ValueError, "out of memory in seed0/copy/0-2, decode at 0.2: nothing of it was"),
        (ValueError("too few"), ValueError, "in seed0/copy/0-2, decode at 0.2: too few"),
        (KeyError("k"), RuntimeError, "in seed0/copy/0-2, decode at 0.2: KeyError: 'k'"),
    ],
)
def test_what_goes_wrong_names_its_cell_and_is_no_score(raised, kind, says):
    with pytest.raises(kind, match=says), naming(Unit(0, "copy", 0, 2), "decode at 0.2"):
        raise raised


def test_out_of_memory_in_generation_stops_the_run(gated, monkeypatch):
    config = stub_config(gated, policies=("recency",), keep_ratios=(0.45,))
    subject = load_subject(config, STUB, 0)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(type(subject.model), "generate", full)
    with pytest.raises(ValueError, match=r"out of memory in seed0/copy/0-2, context_only, 1, full: .*Lower"):
        run_unit(config, STUB, subject, Unit(0, "copy", 0, 2))


PENALTIES = {
    "repetition_penalty": 1.5,
    "suppress_tokens": [*range(50)],
    "no_repeat_ngram_size": 1,
    "do_sample": True,
    "temperature": 3.0,
    "num_beams": 3,
    "max_new_tokens": 2,
}


def test_answers_are_greedy_whatever_the_checkpoint_says(monkeypatch):
    model = attach(tiny_model("qwen3")).model
    ids, mask = padded([stub_item("copy", 0, index, 100).context_ids for index in range(2)])

    def answers(**more):
        return respond(model, Cache(model, policy=None), ids, mask, new_tokens=8, **more)

    plain, ending = answers(), answers(end_ids=range(0, VOCAB, 3))
    assert len({answer.tokens for answer in (*plain, *ending)}) > 2 and any(one.ended for one in ending)
    with torch.no_grad():
        logits = model(torch.cat([ids[:1], torch.tensor([plain[0].tokens])], dim=1)).logits[0, 99:-1]
    assert tuple(logits.argmax(-1).tolist()) == plain[0].tokens
    own = GenerationConfig(**PENALTIES, eos_token_id=plain[0].tokens[0])
    monkeypatch.setattr(model, "generation_config", own)
    assert (answers(), answers(end_ids=range(0, VOCAB, 3))) == (plain, ending)
    assert model.generation_config is own

    def fail(*_, **__):
        raise KeyError("stopped")

    with pytest.raises(KeyError, match="stopped"):
        answers(watch=fail)
    assert model.generation_config is own


@pytest.mark.parametrize("regime", ["context_only", "query_aware"])
def test_no_more_forks_live_than_are_decoded_together(gated, monkeypatch, regime):
    names = ("random", "recency", "snapkv", "h2o", "oracle")
    config = stub_config(gated, policies=names, regimes=(regime,), keep_ratios=(0.45, 0.6))
    subject = load_subject(config, MORE_STUB, 0)
    unit = Unit(0, "turns", 0, 2)
    items = items_in(config, MORE_STUB, unit)
    live, most = weakref.WeakSet(), []
    evict, generate_all = shared_prefill.evict, shared_prefill.generate_all

    def watched(*given):
        made = evict(*given)
        live.add(made.cache)
        return made

    def counted(*given):
        most[-1] = max(most[-1], len(live))
        return generate_all(*given)

    monkeypatch.setattr(shared_prefill, "evict", watched)
    monkeypatch.setattr(shared_prefill, "generate_all", counted)
    found = []
    for sequences in (1, 5, 128):
        most.append(0)
        with torch.inference_mode():
            own = run_shared(replace(config, max_sequences=sequences), MORE_STUB, subject, unit, items)
        found.append(own)
    assert most == [1, 2, 5] and found[0] == found[1] == found[2]


def test_unequal_memory_in_another_slice_stops_the_run(gated, monkeypatch):
    config = stub_config(gated, policies=("recency", "snapkv"), keep_ratios=(0.45,), max_sequences=1)
    subject = load_subject(config, STUB, 0)
    evict = shared_prefill.evict

    def one_more(base, evidence, line, *rest):
        made = evict(base, evidence, line, *rest)
        more = tuple(kept + (line.name == "snapkv") for kept in made.kept_entries)
        return replace(made, kept_entries=more)

    monkeypatch.setattr(shared_prefill, "evict", one_more)
    says = r"unequal memory in seed0/copy/0-1 at budget 0.45: snapkv holds \(271,\) .* recency \(270,\)"
    with pytest.raises(RuntimeError, match=says):
        run_unit(config, STUB, subject, Unit(0, "copy", 0, 1))


def test_a_cache_that_holds_another_number_stops_the_run(gated, monkeypatch):
    config = stub_config(gated, policies=("recency",), keep_ratios=(0.45,))
    subject = load_subject(config, STUB, 0)
    monkeypatch.setattr(Cache, "entries_held", property(lambda _: 7))
    with pytest.raises(RuntimeError, match="in seed0/copy/0-1, context_only, full at 1: .* holds 7 entries"):
        run_unit(config, STUB, subject, Unit(0, "copy", 0, 1))


@pytest.mark.parametrize("regime", ["context_only", "query_aware"])
def test_the_oracle_looks_at_every_question_that_is_asked_of_what_is_left(gated, monkeypatch, regime):
    config = stub_config(gated, policies=("oracle",), regimes=(regime,), keep_ratios=(0.45,))
    subject = load_subject(config, MORE_STUB, 0)
    known = []
    score_all = shared_prefill.score_all

    def watched(*given):
        known.append((given[4], given[6]))
        return score_all(*given)

    monkeypatch.setattr(shared_prefill, "score_all", watched)
    run_unit(config, MORE_STUB, subject, Unit(0, "turns", 0, 2))
    items = [stub_item("turns", 0, index, 100) for index in range(2)]

    def future(question, num_seen):
        rows = [
            [*item.context_ids, *item.asked[question].question_ids, *item.asked[question].gold_ids[:1]]
            for item in items
        ]
        return oracle(observe(subject.model, torch.tensor(rows)), num_seen)

    stages = {"context_only": [(100, (0, 1, 2))], "query_aware": [(102, (0,)), (100, (1, 2))]}[regime]
    assert [num_seen for num_seen, _ in known] == [num_seen for num_seen, _ in stages]
    for (num_seen, questions), (_, scores) in zip(stages, known, strict=True):
        parts = [future(question, num_seen) for question in questions]
        for layer, score in enumerate(scores):
            values = torch.stack([own[layer].values_BHT for own in parts])
            assert torch.allclose(score.values_BHT, values.amax(0), rtol=1e-4)
            assert len(questions) == 1 or not torch.allclose(score.values_BHT, values[0], rtol=1e-2)


def test_no_question_no_future():
    with pytest.raises(ValueError, match="an oracle that is asked nothing"):
        largest([])


ALONE = ("gemma3", "gpt_oss", "qwen3_next")


@pytest.mark.parametrize("family", ALONE)
def test_models_with_layers_that_cannot_be_cropped_are_measured_too(gated, family):
    """Windows and recurrent states: what a regime has seen is read once more, not cropped to."""
    suite = replace(MORE_STUB, load_model=lambda seed: tiny_model(family, seed=seed))
    names = ("random", "snapkv", "knorm")
    config = stub_config(gated, policies=(*names, "oracle"), keep_ratios=(0.6,))
    subject = load_subject(config, suite, 0)
    for task in ("ragged", "turns"):
        unit = Unit(0, task, 0, 3)
        items = items_in(config, suite, unit)
        with torch.inference_mode():
            rows = run_shared(config, suite, subject, unit, items)
            plain = replace(config, policies=names)
            own = run_by_cache(plain, suite, subject, replace(unit, path="context_only"), items)
        found = {(row.regime, row.item, row.question, row.policy): row for row in rows}
        assert len(found) == len(rows) == 2 * 3 * (3 if task == "turns" else 1) * 5
        for row in own:
            assert found["context_only", row.item, row.question, row.policy] == replace(row, unit=unit.key)
        assert len({row.tokens for row in rows}) > 3
    # With the question seen, against a cache that is made by hand.
    item = items[0]
    whole = torch.tensor([[*item.context_ids, *item.question_ids]])
    looking = Cache(subject.model, policy=None)
    looking.prefill(whole, evict=False, hold_evidence=True)
    assert whole.shape[1] == observed_tokens(item, "query_aware") == seen_tokens(item, "query_aware") + 1
    cache = Cache(subject.model, policy=None).prefill(whole[:, :-1], evict=False, hold_evidence=True)
    policy = find_policy(config, "snapkv")
    keeps = _kept_of_first(policy, looking.evidence, cache.evidence)
    cache.evict_with(keeps)
    (answer,) = respond(subject.model, cache, whole, torch.ones_like(whole), new_tokens=2)
    row = found["query_aware", 0, 0, "snapkv"]
    assert (row.tokens, row.kept_entries) == (answer.tokens, sum(int(keep.sum()) for keep in keeps))


def _kept_of_first(policy: Policy, observed, evidence):
    scores = [
        shared_prefill.first_entries(score_entries(policy, layer), evidence[0].num_seen) for layer in observed
    ]
    made = decide_layers(policy, evidence, Budget(keep_ratio=0.6), scores=scores)
    return [one.keep_BHT for one in made]


def test_later_questions_are_read_with_their_own_answers():
    item = stub_item("turns", 0, 0, 100)
    longer = replace(item.asked[1], gold_ids=(5, 6, 7, 8), generate=4)
    assert read_back(replace(item, asked=(item.asked[0], longer)), 1) == (5, 6, 7)
    assert read_back(item) == item.gold_ids[:1]
    # What is read of them must be equally long where items are read together.
    short = replace(longer, gold_ids=(5,))
    items = {0: replace(item, asked=(item.asked[0], longer)), 1: replace(item, asked=(item.asked[0], short))}
    assert [[*group] for group in alike(items)] == [[0], [1]]

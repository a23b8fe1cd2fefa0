"""Lines of a comparison: one reading of the contexts gives what a cache made by hand gives, and memory is
equal and counted right."""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from retain.budget.statement import Budget
from retain.eval.config import Candidate
from retain.eval.run import memory
from retain.eval.run.answers import respond
from retain.eval.run.checks import load_checked
from retain.eval.run.memory import positions_held
from retain.eval.run.plan import Unit
from retain.eval.run.prefill import Reader, caches_of, scores_of
from retain.eval.run.scores import first_entries, gate_scores, oracle
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.intercept.lookahead_pass import lookahead_gates
from retain.hf.intercept.observe import observe
from retain.policy import decide_layers, score_entries
from retain.reference import load_model, load_tokenizer
from retain.scores import Score
from tests.eval.small import ENTRY_BYTES, HEADS, lines_of, save_small_gates, save_table, small
from tests.tiny import tiny_model

BARE = ("protection.sinks=0", "protection.prefix_fraction=0", "protection.suffix_fraction=0")
BOTH = ("unknown", "known")


@pytest.fixture(scope="module")
def ragged(tmp_path_factory):
    """Three contexts of unlike lengths."""
    return save_table(tmp_path_factory.mktemp("table") / "ragged.jsonl", shorter=60)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Three contexts with three questions each."""
    return save_table(tmp_path_factory.mktemp("table") / "shared.jsonl", questions=3)


@pytest.mark.parametrize("question", BOTH)
def test_lines_are_those_of_a_cache_made_by_hand(gated, ragged, question):
    variants = {"joint": ("layer_defensivekv", "protection.sinks=0"), "merged": ("snapkv", "correction={}")}
    policies = ("snapkv", "learned", "random", "defensivekv", "cake", "lava", *variants)
    config = small(gated, policies=policies, variants=variants, tasks=(ragged,), question=(question,))
    loaded, contexts = load_checked(config)
    context = contexts[ragged][0]
    row, asked, model = context.rows[0], context.encoded[0], loaded.model
    whole = torch.tensor([[*context.ids, *asked.question_ids]])
    for line in lines_of(replace(config, items_per_task=1)):
        candidate = Candidate(line.policy)
        policy, gates = loaded.policies.get(candidate), loaded.gates_of(candidate)
        how = {"gates": gates, "seeds": [context.random_seed]}
        if policy is None or question == "unknown":
            budget = {} if policy is None else {"keep_ratio": 0.5, **how}
            cache = Cache(model, policy, **budget).prefill(whole[:, : line.entries_seen // HEADS])
        else:
            cache = evicted_after_looking(model, policy, gates, how["seeds"], whole)
        assert (line.bytes_held, line.bytes_seen) == (cache.bytes_held(), cache.report().total.bytes_full)
        assert line.entries_held == cache.entries_held
        if policy is None or policy.correction is None:
            assert line.bytes_held == line.entries_held * ENTRY_BYTES
        (answer,) = respond(model, cache, whole, new_tokens=row.max_new_tokens, end_ids=asked.end_ids)
        assert line.text == loaded.tokenizer.decode(answer, skip_special_tokens=True)
        assert line.tokens == len(answer)


def evicted_after_looking(model, policy, gates, seeds, whole, keep_ratio=0.5):
    """Scores observe the whole prompt in one cache; another, which never saw its last token, evicts."""
    looking = Cache(model, policy=None).prefill(whole, evict=False, hold_evidence=True)
    cache = Cache(model, policy=None).prefill(whole[:, :-1], evict=False, hold_evidence=True)
    made = []
    for observed in looking.evidence:
        learned = None if gates is None else gates.score(observed)
        score = score_entries(policy, observed, learned=learned, seeds_B=seeds)
        made.append(first_entries(score, whole.shape[1] - 1))
    layers = decide_layers(policy, cache.evidence, Budget(keep_ratio=keep_ratio), scores=made)
    return cache.evict_with([layer.keep_BHT for layer in layers], correction=policy.correction)


@pytest.mark.parametrize("question", BOTH)
def test_questions_on_one_context_are_asked_of_what_is_left_of_it(gated, shared, question):
    config = small(gated, tasks=(shared,), items_per_task=9, question=(question,))
    lines = lines_of(replace(config, policies=("snapkv", "learned")))
    assert len(lines) == 3 * 3 * 3 and len({line.context_id for line in lines}) == 3
    assert len({line.text for line in lines}) > 3
    seen = {line.item: line.entries_seen for line in lines if line.policy == "full"}
    context = load_checked(config)[1][shared][0]
    lengths = [len(encoded.question_ids) for encoded in context.encoded]
    for item, length in enumerate(lengths):
        behind = 0 if question == "unknown" else length - 1
        assert seen[item] == HEADS * (len(context.ids) + behind)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_next"])
def test_models_with_layers_that_cannot_be_cropped_are_measured_too(tmp_path, ragged, family):
    tokenizer = load_tokenizer()
    tiny_model(family, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = small(tmp_path, model=str(tmp_path / "model"), policies=("random", "snapkv", "oracle"))
    config = replace(config, tasks=(ragged,), question=BOTH, items_per_task=3)
    lines = {(line.policy, line.question, line.item): line for line in lines_of(config)}
    assert len(lines) == 3 * 4 * 2 and len({line.text for line in lines.values()}) > 3
    loaded, contexts = load_checked(config)
    for item, context in enumerate(contexts[ragged]):
        ids, question_ids = context.ids, context.encoded[0].question_ids
        whole, policy = torch.tensor([[*ids, *question_ids]]), loaded.policies[Candidate("snapkv")]
        for question in BOTH:
            cache = Cache(loaded.model, policy, keep_ratio=0.5)
            if question == "known":
                cache = evicted_after_looking(loaded.model, policy, None, None, whole)
            else:
                cache.prefill(whole[:, : len(ids)])
            made = {"new_tokens": 4, "end_ids": context.encoded[0].end_ids}
            (answer,) = respond(loaded.model, cache, whole, **made)
            line = lines["snapkv", question, item]
            assert (line.text, line.tokens) == (tokenizer.decode(answer), len(answer))


def test_answers_end_anywhere_in_a_batch_as_alone(gated, ragged):
    def ending(context):
        return replace(context, encoded=(replace(context.encoded[0], end_ids=tuple(range(0, 1024, 3))),))

    config = small(gated, tasks=(ragged,), question=BOTH, items_per_task=3)
    lines = lines_of(config, ending)
    assert {*lines} == {*lines_of(replace(config, max_sequences=1), ending)}
    assert len({line.tokens for line in lines}) > 1
    assert all(line.score == 0.0 for line in lines if not line.text.strip())


def test_budgets_in_tokens_and_protections_are_axes_of_the_grid(gated):
    names, kinds = ("random", "snapkv", "oracle"), ("own", "none", "wide")
    protections = {"none": BARE, "wide": ("protection.recent=35",)}
    config = small(gated, policies=names, tokens_per_head=(60,), protections=protections, items_per_task=1)
    lines = [line for line in lines_of(config) if line.task == "reference/lists"]
    found = {(line.policy, line.protection, line.budget) for line in lines}
    budgets = {"keep_ratio=0.5": (0.5, 600), "tokens_per_head=60": (None, 480), "keep_ratio=1": (1.0, 1200)}
    assert found == {
        ("full", "own", "keep_ratio=1"),
        *itertools.product(names, kinds, ("keep_ratio=0.5", "tokens_per_head=60")),
    }
    assert {line.budget: (line.keep_ratio, line.entries_held) for line in lines} == budgets
    assert len(found) == len(lines) and len({line.identity for line in lines}) == 1 + 9


@pytest.mark.parametrize("when", ["chunk", "decode", "prefill+decode", "chunk+decode"])
def test_a_cache_holds_what_the_budget_and_the_last_eviction_say(gated, ragged, when):
    grid = {"policies": ("random", "h2o", "learned", "oracle"), "tokens_per_head": (60,), "when": (when,)}
    config = small(gated, **grid, tasks=(ragged,), every=3, chunk_tokens=40, items_per_task=1)
    lines = lines_of(config)
    assert {line.policy for line in lines} == {"full", "random", "h2o", "learned"}  # no control
    asked = len(load_checked(config)[1][ragged][0].encoded[0].question_ids)
    for line in lines:
        if line.policy == "full":
            assert line.entries_held == line.entries_seen
            continue
        most = line.entries_seen / 2 + HEADS if line.budget == "keep_ratio=0.5" else 60 * HEADS
        behind = 3 if "decode" in when else asked + line.tokens
        assert line.entries_held <= most + behind * HEADS < line.entries_seen


def test_a_cache_that_holds_more_than_its_budget_stops_the_run(gated, monkeypatch):
    monkeypatch.setattr(memory, "budget_for", lambda *_: Budget(keep_ratio=0.4))
    with pytest.raises(RuntimeError, match=r"random at keep_ratio=0.5 holds \d+ entries where the budget"):
        lines_of(small(gated))


# Policies of one budget: by how much bytes may be more or less than those of plain entries.
@pytest.mark.parametrize(
    ("change", "more", "less"),
    [
        ((), 0, 0),
        (("correction={threshold: 0.2, recent: 8}",), 0.02, 0.02),
        (("precision={bits: 8}",), 0, 0.1),
    ],
    ids=["plain", "counted", "packed"],
)
def test_policies_of_one_budget_hold_equally_much(gated, monkeypatch, change, more, less):
    config = small(gated, policies=("mine",), variants={"mine": ("snapkv", *change)}, items_per_task=1)
    config = replace(config, tasks=("reference/lists",), keep_ratios=(0.4,))
    *_, line = lines_of(config)
    plain = 0.4 * line.bytes_seen
    assert (1 - less) * plain <= line.bytes_held <= (1 + more) * plain
    assert (line.entries_held == 0.4 * line.entries_seen) == (not change)
    true = Cache.report
    for changed in ((1 + more) * plain + 9, (1 - less) * plain - 9):

        def lying(cache, held=int(changed)):
            found = true(cache)
            return SimpleNamespace(total=replace(found.total, bytes_held=held)) if cache.evictions else found

        monkeypatch.setattr(Cache, "report", lying)
        with pytest.raises(RuntimeError, match=r"unequal memory: mine at keep_ratio=0.4 holds \d+ bytes"):
            lines_of(config)


@pytest.mark.parametrize("known", [False, True])
def test_the_oracle_looks_at_every_question_that_is_asked_of_what_is_left(gated, shared, known):
    state = ("known" if known else "unknown",)
    config = small(gated, policies=("oracle",), tasks=(shared,), items_per_task=3, question=state)
    loaded, contexts = load_checked(config)
    (context,) = contexts[shared]
    reader = Reader(config, loaded, Unit("prefill", context, {}))
    (_, numbers, make), *_ = caches_of(reader)
    assert [*numbers] == ([0] if known else [0, 1, 2])
    count = len(context.ids) + (len(context.encoded[0].question_ids) - 1 if known else 0)
    assert make(Candidate("full"), config.budgets[0]).num_seen == count
    whole = reader.read(reader.ids(0, answered=True), evidence=True)
    made = scores_of(reader, whole, 0, count, known=known)
    futures = []
    for number in numbers:
        ids = [*context.ids, *context.encoded[number].question_ids]
        # All of a right answer but its last token, which nothing is generated behind.
        ids += context.encoded[number].answer_ids[: context.rows[number].max_new_tokens - 1]
        futures.append(oracle([observe(loaded.model, torch.tensor([ids]))], count))
    for layer, score in enumerate(made[Candidate("oracle")]):
        values = torch.stack([future[layer].values_BHT for future in futures])
        assert torch.allclose(score.values_BHT, values.amax(0), rtol=1e-4)
        assert known or not torch.allclose(score.values_BHT, values[0], rtol=1e-2)


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


def test_each_set_of_gates_scores_as_it_would_alone(gated, ragged, tmp_path):
    save_small_gates(tmp_path / "other", seed=1)
    save_small_gates(tmp_path / "qkv", family="qkv", F=8)
    uses = {"mine": str(tmp_path / "other"), "seen": str(tmp_path / "qkv")}
    variants = {name: ("gate", f"gates={place}") for name, place in uses.items()}
    grid = {"tasks": (ragged,), "when": ("prefill", "chunk"), "chunk_tokens": 40, "items_per_task": 3}
    config = small(gated, policies=("gate", "mine", "seen"), variants=variants, **grid)
    lines = lines_of(config)
    texts = {name: [line.text for line in lines if line.policy == name] for name in config.policies}
    assert len({str(answers) for answers in texts.values()}) == 3, "all sets keep the same"
    assert {line.policy: line.gates for line in lines} == {"full": None, "gate": config.gates, **uses}
    for name, place in uses.items():
        alone = lines_of(small(tmp_path, policies=("gate",), gates=place, **grid))
        assert texts[name] == [line.text for line in alone if line.policy == "gate"]


def test_lookahead_tokens_of_two_sets_are_read_apart():
    model = load_model()
    attach(model)
    ids = torch.arange(5, 85)[None]
    observed = observe(model, ids)

    def gates(seed):
        torch.manual_seed(seed)
        made = lookahead_gates(model, num_tokens=4, rank=2)
        for up in made.extension.up.values():
            up.data.normal_(std=0.1)
        return made

    def scored(made):
        prompt = partial(Cache(model, policy=None).prefill, ids, evict=False)
        return gate_scores(model, made, observed, prompt)[1].values_BHT

    one, two = gates(1), gates(2)
    first, second, again = scored(one), scored(two), scored(one)
    assert torch.equal(first, again) and not torch.allclose(first, second, rtol=0.1)


def test_positions_are_those_of_the_entries_held():
    model = tiny_model("qwen3")
    attach(model)
    cache = Cache(model, policy=None).prefill(torch.arange(2, 82)[None], evict=False)
    assert [held.tolist() for held in positions_held(cache)] == [[*range(80)]] * 6
    keep = torch.zeros(1, 2, 80, dtype=torch.bool)
    keep[0, 0, [20, 30]] = keep[0, 1, [79]] = True
    cache.evict_with([keep] * 3)
    assert [held.tolist() for held in positions_held(cache)] == [[20, 30], [79]] * 3

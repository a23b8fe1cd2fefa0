"""Cells of a comparison: one reading of the contexts gives the rows that a cache for each cell gives, and
memory is equal and counted right."""

import weakref
from dataclasses import replace

import pytest
import torch

from retain.eval.config import REGIMES, SHARED, Line, budget_of, find_policy, lines_of
from retain.eval.run import cells
from retain.eval.run.answers import respond
from retain.eval.run.caches import SingleEviction, observed_tokens, steps_of
from retain.eval.run.cells import (
    Watch,
    bytes_beside,
    needles_held,
    positions_held,
)
from retain.eval.run.evaluated_model import Unit, item_seed, load_evaluated, plan
from retain.eval.run.runner import run_unit
from retain.eval.run.scoring import first_entries
from retain.hf.cache.cache import Cache
from retain.policy import decide_layers, score_entries
from tests.eval.stub import MORE_STUB, spoken, stub_config, stub_item
from tests.tiny import tiny_model

HEADS = 3 * 2  # of all layers of the stub's model
ENTRY_BYTES = 2 * 16 * 4
BARE = ("protection.sinks=0", "protection.prefix_fraction=0", "protection.suffix_fraction=0")


def measure(config, task, start=0, stop=2, path="shared", suite=MORE_STUB):
    """The rows of one unit, without what says who wrote them."""
    evaluated = load_evaluated(config, suite, 0)
    rows = run_unit(config, suite, evaluated, Unit(0, task, start, stop, path)).rows
    assert {row.unit_rows for row in rows} == {len(rows)}
    return [replace(row, unit="", unit_rows=0) for row in rows]


def path_of(regime):
    return "shared" if regime in SHARED else regime


@pytest.mark.parametrize("regime", REGIMES)
def test_items_of_unlike_lengths_are_measured_together_as_alone(stub_gates, regime):
    again = regime not in SHARED
    names = ("random", "snapkv", "h2o") if again else ("random", "token_identity", "snapkv", "gate", "oracle")
    config = stub_config(
        stub_gates,
        policies=names,
        regimes=(regime,),
        keep_ratios=(0.6,),
        batch_items=3,
        every=2,
        chunk_tokens=40,
    )

    def rows(start, stop):
        # Recent queries are held as wide as the batch is.
        made = measure(config, "ragged", start, stop, path_of(regime))
        return [replace(row, bytes_beside=0) for row in made]

    together = rows(0, 3)
    assert together == [row for index in range(3) for row in rows(index, index + 1)]
    assert len(together) == 3 * (1 + len(names)) and len({row.num_prompt for row in together}) == 3
    assert len({row.tokens for row in together}) > 3, "every answer is the same"
    shares = {row.needles_kept for row in together}
    assert None not in shares and len(shares) > 3
    assert all(row.needles_kept == 1.0 for row in together if row.policy == "full")
    if not again:
        behind = 0 if regime == "context_only" else 3
        assert {row.seen_entries for row in together} == {HEADS * (own + behind) for own in (100, 83, 66)}


@pytest.mark.parametrize("task", ["odd", "ragged", "turns", "open"])
def test_a_shared_prefill_gives_the_rows_of_a_cache_for_each_cell(stub_gates, task):
    policies = ("random", "snapkv", "h2o", "cake", "fused", "layer_defensivekv")
    config = stub_config(
        stub_gates,
        policies=policies,
        regimes=("context_only",),
        keep_ratios=(0.6,),
        tokens_per_head=(50,) if task == "odd" else (),
        protections={"none": BARE} if task == "ragged" else {},
        batch_items=3,
    )
    shared, own = (measure(config, task, 0, 3, path) for path in ("shared", "context_only"))
    assert shared == own
    assert len(own) == 3 * (3 if task == "turns" else 1) * (1 + 6 * (2 if task in ("odd", "ragged") else 1))
    assert len({row.tokens for row in own}) > 3, "every answer is the same"


def test_a_shared_prefill_merges_as_a_cache_of_its_own(stub_gates):
    made = {"regimes": ("context_only",), "keep_ratios": (0.6,), "batch_items": 3}
    variants = {"merged": ("snapkv", "correction={threshold: -1, recent: 0}")}
    config = stub_config(stub_gates, policies=("snapkv", "merged"), variants=variants, **made)
    shared, own = (measure(config, "ragged", 0, 3, path) for path in ("shared", "context_only"))
    assert shared == own
    plain, merged = ([row for row in own if row.policy == name] for name in ("snapkv", "merged"))
    for one, other in zip(plain, merged, strict=True):
        assert (one.kept_entries, one.bytes_held) == (other.kept_entries, other.bytes_held)
    assert [row.tokens for row in plain] != [row.tokens for row in merged]


@pytest.mark.parametrize("regime", SHARED)
@pytest.mark.parametrize("task", ["copy", "odd"])
def test_rows_are_those_of_a_cache_made_by_hand(stub_gates, task, regime):
    policies = ("snapkv", "fused", "random", "defensivekv", "cake", "lava", "joint")
    config = stub_config(
        stub_gates,
        policies=policies,
        variants={"joint": ("layer_defensivekv", "protection.sinks=0")},
        keep_ratios=(0.45,),
        max_sequences=4,
        regimes=(regime,),
    )
    evaluated = load_evaluated(config, MORE_STUB, 0)
    rows = measure(config, task)
    assert len({row.tokens for row in rows}) > 1, "every answer is the same"
    for row in rows:
        item = stub_item(task, 0, row.item, 100)
        whole = torch.tensor([[*item.context_ids, *item.question_ids]])
        seeds = [item_seed(0, task, row.item)]
        gates = evaluated.sets["gates"] if row.policy == "fused" else None
        model, policy = evaluated.model, "full" if row.policy == "full" else find_policy(config, row.policy)
        if row.policy == "full" or regime != "query_aware":
            budget = {} if row.policy == "full" else {"keep_ratio": 0.45}
            cache = Cache(model, policy, gates=gates, seeds=seeds, **budget)
            cache.prefill(whole[:, : row.seen_entries // HEADS])
        else:
            cache = evicted_after_looking(
                evaluated.model, find_policy(config, row.policy), gates, seeds, whole
            )
        assert (cache.bytes_held(), cache.bytes_full()) == (row.bytes_held, row.bytes_full)
        assert row.bytes_held == row.kept_entries * ENTRY_BYTES
        (answer,) = respond(evaluated.model, cache, whole, torch.ones_like(whole), new_tokens=item.generate)
        assert answer.tokens == row.tokens and len(row.tokens) == item.generate
        assert (row.exact, row.partial) == item.score(row.tokens)


def evicted_after_looking(model, policy, gates, seeds, whole, keep_ratio=0.45):
    """Scores observe the whole prompt in one cache; another, which never saw its last token, evicts."""
    looking = Cache(model, policy=None).prefill(whole, evict=False, hold_evidence=True)
    cache = Cache(model, policy=None).prefill(whole[:, :-1], evict=False, hold_evidence=True)
    scores = []
    for observed in looking.evidence:
        learned = None if gates is None else gates.score(observed)
        score = score_entries(policy, observed, learned=learned, seeds_B=seeds)
        scores.append(first_entries(score, whole.shape[1] - 1))
    made = decide_layers(policy, cache.evidence, budget_of(keep_ratio), scores=scores)
    return cache.evict_with([one.keep_BHT for one in made])


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_next"])
def test_models_with_layers_that_cannot_be_cropped_are_measured_too(stub_gates, family):
    suite = replace(MORE_STUB, load_model=lambda seed: tiny_model(family, seed=seed))
    names = ("random", "snapkv")
    config = stub_config(stub_gates, policies=(*names, "oracle"), keep_ratios=(0.6,), batch_items=3)
    for task in ("ragged", "turns"):
        rows = measure(config, task, 0, 3, suite=suite)
        found = {(row.regime, row.item, row.question, row.policy): row for row in rows}
        assert len(found) == len(rows) == 2 * 3 * (3 if task == "turns" else 1) * 4
        for row in measure(replace(config, policies=names), task, 0, 3, "context_only", suite):
            assert found["context_only", row.item, row.question, row.policy] == row
        assert len({row.tokens for row in rows}) > 3
    evaluated, item = load_evaluated(config, suite, 0), stub_item("turns", 0, 0, 100)
    whole = torch.tensor([[*item.context_ids, *item.question_ids]])
    cache = evicted_after_looking(evaluated.model, find_policy(config, "snapkv"), None, None, whole, 0.6)
    row = found["query_aware", 0, 0, "snapkv"]
    assert row.kept_entries == cache.entries_held
    (answer,) = respond(evaluated.model, cache, whole, torch.ones_like(whole), new_tokens=2)
    assert row.tokens == answer.tokens


def test_when_entries_go_and_what_is_asked_then():
    turns, odd = stub_item("turns", 0, 0, 100), stub_item("odd", 0, 1, 100)
    assert steps_of(turns, "context_only") == [(100, (0, 1, 2))]
    assert steps_of(turns, "query_aware") == [(102, (0,)), (100, (1, 2))]
    assert steps_of(odd, "query_aware") == [(103, (0,))] and len(odd.question_ids) == 4
    assert [observed_tokens(odd, regime) for regime in SHARED] == [100, 104]


@pytest.mark.parametrize("regime", SHARED)
def test_every_question_is_asked_of_the_same_evicted_context(stub_gates, regime):
    config = stub_config(stub_gates, policies=("snapkv",), regimes=(regime,), keep_ratios=(0.45,))
    rows = measure(config, "turns")
    assert [(row.item, row.question, row.policy, row.about) for row in rows] == [
        (item, question, policy, {"turn": float(question)})
        for item in range(2)
        for question in range(3)
        for policy in ("full", "snapkv")
    ]
    behind = 0 if regime == "context_only" else 2
    assert [row.seen_entries for row in rows[:6:2]] == [HEADS * (100 + behind), 600, 600]
    assert len({row.tokens for row in rows}) > 3


def test_answers_end_where_they_like_in_a_batch_as_alone(stub_gates):
    config = stub_config(stub_gates, policies=("random", "snapkv"), keep_ratios=(0.45,), batch_items=6)
    rows = measure(config, "open", 0, 6)
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
        assert row.peak_entries == row.kept_entries + HEADS * read
    assert len({row.num_generated for row in rows}) > 2 and {row.ended for row in rows} == {True, False}
    assert any(row.null for row in rows)
    alone = measure(config, "open", 4, 5)
    assert alone == [row for row in rows if row.item == 4]


def test_budgets_in_tokens_and_protections_are_axes_of_the_grid(stub_gates):
    names, kinds = ("random", "snapkv", "oracle"), ("preset", "none", "wide")
    config = stub_config(
        stub_gates,
        policies=names,
        tokens_per_head=(40,),
        keep_ratios=(0.45,),
        protections={"none": BARE, "wide": ("protection.suffix_tokens=35",)},
        regimes=("context_only",),
    )
    rows = measure(config, "copy")
    assert len(rows) == 2 * (1 + 9 * 2)
    assert {(row.policy, row.base_policy, row.protection) for row in rows} == {
        ("full", "full", "preset"),
        *((name if kind == "preset" else f"{name}+{kind}", name, kind) for name in names for kind in kinds),
    }
    assert {(row.budget, row.kept_entries, row.keep_ratio) for row in rows} == {
        (1.0, 600, 1.0),
        (0.45, 270, 0.45),
        (40.0, 240, 0.4),
    }
    # Nine lines, three scores: a protection changes what is kept, not what is scored.
    assert len({row.tokens for row in rows if row.item == 0 and row.budget == 40.0}) > 1
    only = replace(config, policies=("recency",), preset_protection=False)
    assert {row.policy for row in measure(only, "pair", 0, 1)} == {"full", "recency+none", "recency+wide"}


@pytest.mark.parametrize("regime", ["chunked", "decode", "prefill+decode", "chunked+decode"])
def test_what_is_held_is_what_the_budget_and_the_last_eviction_say(stub_gates, regime):
    config = stub_config(
        stub_gates,
        policies=("random", "h2o", "fused", "oracle"),
        regimes=(regime,),
        keep_ratios=(0.45,),
        tokens_per_head=(40,),
        protections={"none": BARE},
        every=3,
        chunk_tokens=40,
    )
    tasks = {"chunked": ("turns",), "decode": ("copy", "open"), "prefill+decode": ("open",)}
    for task in tasks.get(regime, ("copy",)):
        rows = measure(config, task, path=regime)
        assert {row.base_policy for row in rows} == {"full", "random", "h2o", "fused"}  # no control
        assert len(rows) == 2 * (3 if task == "turns" else 1) * (1 + 3 * 2 * 2)
        for row in rows:
            seen = row.num_prompt + max(0, row.num_generated + row.ended - 1)
            assert row.seen_entries == seen * HEADS
            if row.policy == "full":
                assert row.kept_entries == row.peak_entries == row.seen_entries
                continue
            most = 0.45 * seen * HEADS + HEADS if row.budget == 0.45 else 40 * HEADS
            behind = 3 if "decode" in regime else seen - 100
            assert row.kept_entries <= most + behind * HEADS, row
            assert row.kept_entries < row.seen_entries or (regime == "decode" and seen - 100 < 3)
            # Nothing goes before decoding has begun, where the regime evicts while decoding alone.
            assert (row.peak_entries > most + max(3, seen - 100) * HEADS) == (regime == "decode")


def test_what_an_answer_was_given_from_by_hand(stub_gates):
    def cell(regime, every, task="copy"):
        options = {"regimes": (regime,), "keep_ratios": (0.45,), "every": every}
        full, row = measure(stub_config(stub_gates, policies=("snapkv",), **options), task, 0, 1, regime)
        assert full.attended_ratio == 1.0
        return row

    # Context of 100, question of 3, three answer tokens of which two are read: 105 seen. 45 % of 103 is left
    # when the question has been read, and one more later.
    left = round(0.45 * 103 * 2) * 3
    shares = (1, left / (103 * HEADS), (left + HEADS) / (104 * HEADS))
    assert cell("decode", 3).attended_ratio == pytest.approx(sum(shares) / 3)
    assert cell("decode", 3).read_entries == 100 * HEADS + left + left + HEADS
    late = cell("decode", 8)
    assert late.attended_ratio == late.keep_ratio == 1.0
    both = cell("prefill+decode", 3)
    assert both.attended_ratio < 0.5 and both.peak_entries < 0.5 * 105 * HEADS
    # An answer of one token comes from the full cache, whatever is held when it has been read.
    one = cell("decode", 1, "odd")
    assert one.num_generated == 1 and one.attended_ratio == 1.0 > one.keep_ratio


def test_bytes_beside_entries_and_of_gates_are_counted(stub_gates):
    options = {"policies": ("random", "snapkv", "h2o", "fused"), "keep_ratios": (0.45,), "chunk_tokens": 40}
    config = stub_config(stub_gates, regimes=("context_only", "chunked"), **options)
    assert {row.bytes_beside for row in measure(config, "pair", 0, 1)} == {0}  # nothing goes again
    rows = {row.policy: row for row in measure(config, "pair", 0, 1, "chunked")}
    beside = {name: row.bytes_beside for name, row in rows.items()}
    assert beside["full"] == beside["random"] == 0 < min(beside["snapkv"], beside["h2o"])
    evaluated = load_evaluated(config, MORE_STUB, 0)
    gates = evaluated.sets["gates"]
    numbers = sum(part.numel() for part in (*gates.parameters(), *gates.buffers()))
    assert numbers > sum(part.numel() for part in gates.parameters()) > 0
    assert [rows[name].gate_bytes for name in ("full", "snapkv", "fused")] == [0, 0, 4 * numbers]
    cache = Cache(evaluated.model, "snapkv", keep_ratio=0.45, regime="chunked")
    cache.prefill(torch.tensor([stub_item("pair", 0, 0, 100).context_ids]), chunk_size=40)
    queries = {
        chunk.untyped_storage().data_ptr(): chunk.untyped_storage().nbytes()
        for layer in cache.state.ragged
        for chunk in layer.recent.queries
    }
    noted = [column for layer in cache.state.ragged for column in layer.store.beside.values()]
    own = sum(queries.values()) + sum(column.numel() * column.element_size() for column in noted)
    assert bytes_beside(cache) == own > 0
    room = sum(
        tensor.untyped_storage().nbytes()
        for layer in cache.state.ragged
        for tensor in (
            *(layer.store.keys_CD, layer.store.values_CD, layer.store.positions_C),
            *(layer.store.plain.offsets_R1, layer.store.lengths_R, *layer.store.plain.pages.tables()),
        )
    )
    assert cache.bytes_allocated() == room + own


@pytest.mark.parametrize("regime", ["context_only", "chunked"])
def test_a_cache_that_holds_more_than_its_budget_stops_the_run(stub_gates, monkeypatch, regime):
    config = stub_config(stub_gates, policies=("snapkv",), regimes=(regime,), keep_ratios=(0.45,))
    real = cells.held_now
    monkeypatch.setattr(cells, "held_now", lambda cache: (real(cache)[0] + 1, real(cache)[1]))
    says = rf"in seed0/pair/0-1.*, {regime}, snapkv at 0.45: .* holds \[.*\] entries where the budget"
    with pytest.raises(RuntimeError, match=says):
        measure(config, "pair", 0, 1, path_of(regime))


@pytest.mark.parametrize("path", ["shared", "decode"])
@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("kept_entries", r"snapkv holds \d+ entries .* recency \d+ and"),
        ("bytes_held", r"snapkv holds .* and \d+ bytes"),
    ],
)
def test_lines_that_hold_unlike_amounts_stop_the_run(stub_gates, monkeypatch, path, field, says):
    """Also where they are measured one after another."""
    config = stub_config(
        stub_gates,
        policies=("recency", "snapkv"),
        regimes=("context_only", "decode"),
        keep_ratios=(0.45,),
        max_sequences=1,
    )
    real = cells.make_row

    def one_more(batch, index, question, regime, line, budget, held, *rest):
        more = held[field] + (line.name == "snapkv")
        return real(batch, index, question, regime, line, budget, held | {field: more}, *rest)

    monkeypatch.setattr(cells, "make_row", one_more)
    with pytest.raises(RuntimeError, match=rf"unequal memory in seed0/pair/0-1.* at budget 0.45: {says}"):
        measure(config, "pair", 0, 1, path)


@pytest.mark.parametrize("path", ["shared", "chunked"])
def test_what_a_line_pays_for_beside_entries_is_less_entries(stub_gates, path):
    """Bytes are equal but for what is rounded; lines that count and those that do not answer as one batch."""
    config = stub_config(
        stub_gates,
        policies=("snapkv", "counted", "recency"),
        variants={"counted": ("snapkv", "correction={threshold: 0.2, recent: 8, count: true}")},
        regimes=("context_only", "chunked"),
        keep_ratios=(0.45,),
    )
    rows = [row for row in measure(config, "copy", path=path) if row.policy != "full"]
    held = {row.policy: (row.kept_entries, row.bytes_held) for row in rows if row.item == 0}
    assert held["snapkv"] == held["recency"]
    assert held["counted"][0] < held["snapkv"][0]
    assert 0.98 * held["snapkv"][1] < held["counted"][1] <= held["snapkv"][1]


@pytest.mark.parametrize(
    ("policies", "name", "more"),
    [
        (("counted", "snapkv", "recency"), "recency", 1),  # whoever comes first
        (("snapkv", "counted"), "counted", 1000),
        (("counted", "snapkv"), "snapkv", 1000),
    ],
)
def test_bytes_beside_entries_excuse_no_other_difference(stub_gates, monkeypatch, policies, name, more):
    config = stub_config(
        stub_gates,
        policies=policies,
        variants={"counted": ("snapkv", "correction={threshold: 0.2, recent: 8, count: true}")},
        keep_ratios=(0.45,),
    )
    real = cells.make_row

    def other(batch, index, question, regime, line, budget, held, *rest):
        own = held | {"bytes_held": held["bytes_held"] + more * (line.name == name)}
        return real(batch, index, question, regime, line, budget, own, *rest)

    monkeypatch.setattr(cells, "make_row", other)
    with pytest.raises(RuntimeError, match="unequal memory"):
        measure(config, "copy")


def test_no_more_forks_live_than_are_decoded_together(stub_gates, monkeypatch):
    names = ("random", "recency", "snapkv")
    config = stub_config(stub_gates, policies=names, regimes=("query_aware",), keep_ratios=(0.45,))
    live, most, found, make = weakref.WeakSet(), [], [], SingleEviction.cache_of

    def watched(self, line, budget):
        made = make(self, line, budget)
        live.add(made)
        most[-1] = max(most[-1], len(live))
        return made

    monkeypatch.setattr(SingleEviction, "cache_of", watched)
    for sequences in (1, 5, 128):
        most.append(0)
        found.append(measure(replace(config, max_sequences=sequences), "turns"))
    assert most == [1, 2, 3] and found[0] == found[1] == found[2]


def test_entries_are_counted_at_every_forward(stub_gates):
    config = stub_config(stub_gates)
    evaluated = load_evaluated(config, MORE_STUB, 0)
    cache = Cache(evaluated.model, "snapkv", keep_ratio=0.45, regime="prefill+decode", every=4)
    item = stub_item("copy", 0, 0, 100)
    cache.prefill(torch.tensor([item.context_ids]))
    watch = Watch(cache, Line("snapkv", "snapkv"), 0.45)
    ids = torch.tensor([[*item.context_ids, *item.question_ids]])
    respond(evaluated.model, cache, ids, torch.ones_like(ids), new_tokens=7, watch=watch)
    # 103 tokens seen; one more, and four have come: 45 % of 104; then one by one, and again at 108.
    kept = [round(0.45 * seen * 2) * 3 for seen in (104, 108)]
    wanted = [270, 288, kept[0], kept[0] + 6, kept[0] + 12, kept[0] + 18, kept[1], kept[1] + 6]
    seen = [HEADS * length for length in (100, *range(103, 110))]
    assert watch.counts_of(0) == [*zip(wanted, seen, strict=True)]


def test_positions_and_needles_are_those_of_the_entries_held(stub_gates):
    evaluated = load_evaluated(stub_config(stub_gates), MORE_STUB, 0)
    ids = torch.tensor([stub_item("copy", 0, index, 100).context_ids for index in range(2)])
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    cache = Cache(evaluated.model, policy=None).prefill(ids, mask, evict=False)
    assert [own.tolist() for own in positions_held(cache, 0)[0]] == [[*range(80)]] * 2
    keep = torch.zeros(2, 2, 100, dtype=torch.bool)
    keep[0, 0, [20, 30]] = keep[0, 1, [99]] = keep[1, :, 5] = True
    cache.evict_with([keep] * 3)
    assert [[own.tolist() for own in layer] for layer in positions_held(cache, 0)] == [[[0, 10], [79]]] * 3
    assert [own.tolist() for own in positions_held(cache, 1)[2]] == [[5], [5]]
    item = replace(stub_item("copy", 0, 0, 100), needles=((9, 11), (10, 12), (79, 80)))
    assert needles_held(cache, 0, item) == pytest.approx(2 / (2 * 4))  # 9, 10, 11, 79; of two heads
    assert needles_held(cache, 0, stub_item("copy", 0, 0, 100)) is None


def test_controls_have_a_place_where_the_future_is_known(stub_gates):
    config = stub_config(stub_gates, policies=("snapkv", "oracle"), regimes=("context_only", "decode"))
    assert [line.name for line in lines_of(config, "context_only")] == ["snapkv", "oracle"]
    assert [line.name for line in lines_of(config, "decode")] == ["snapkv"]
    assert {unit.path for unit in plan(config, MORE_STUB)} == {"shared", "decode"}


def test_out_of_memory_in_generation_stops_the_run(stub_gates, monkeypatch):
    config = stub_config(stub_gates, policies=("recency",), keep_ratios=(0.45,))

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(cells, "respond", full)
    with pytest.raises(ValueError, match="out of memory in seed0/copy/0-2, context_only, full at 1: .*Lower"):
        measure(config, "copy")

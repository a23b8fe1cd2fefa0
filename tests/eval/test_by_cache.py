"""Regimes as a user writes them: they agree with the shared prefill where both can measure, and hold what the
budget states behind every forward."""

from dataclasses import replace

import pytest
import torch

from retain.eval.config import Line, lines_of
from retain.eval.run import by_cache
from retain.eval.run.by_cache import (
    Watch,
    bytes_beside,
    check_equal_memory,
    groups_of,
    positions_held,
    run_by_cache,
)
from retain.eval.run.evaluated_model import Unit, load_subject, plan
from retain.eval.run.runner import items_in, run_unit
from retain.eval.run.shared_prefill import run_shared
from retain.hf.cache.cache import Cache
from tests.eval.stub import MORE_STUB, STUB, save_stub_gates, stub_config, stub_item

BARE = ("protection.sinks=0", "protection.prefix_fraction=0", "protection.suffix_fraction=0")
POLICIES = ("random", "snapkv", "h2o", "cake", "fused", "layer_defensivekv")
TASKS = ("odd", "ragged", "turns", "open")


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gated")
    save_stub_gates(folder)
    return folder


def told(rows):
    """What must be the same on both paths: all but who wrote the row."""
    return {
        (row.item, row.question, row.policy, row.budget): replace(row, unit="", unit_rows=0) for row in rows
    }


@pytest.mark.parametrize("task", TASKS)
def test_the_shared_prefill_agrees_with_one_cache_for_every_cell(gated, task):
    config = stub_config(
        gated,
        policies=POLICIES,
        regimes=("context_only",),
        keep_ratios=(0.6,),
        tokens_per_head=(50,) if task == "odd" else (),
        protections={"none": BARE} if task == "ragged" else {},
        items_per_task=3,
        batch_items=3,
    )
    subject = load_subject(config, MORE_STUB, 0)
    unit = Unit(0, task, 0, 3)
    items = items_in(config, MORE_STUB, unit)
    with torch.inference_mode():
        shared = told(run_shared(config, MORE_STUB, subject, unit, items))
        plain = told(run_by_cache(config, MORE_STUB, subject, replace(unit, path="context_only"), items))
    for key, row in shared.items():
        assert row == plain[key]
    cells = 1 + 6 * (2 if task in ("odd", "ragged") else 1)
    assert len(shared) == len(plain) == 3 * (3 if task == "turns" else 1) * cells
    assert len({row.tokens for row in shared.values()}) > 3, "every answer is the same"


@pytest.mark.parametrize("regime", ["context_only", "chunked", "decode", "prefill+decode", "chunked+decode"])
def test_items_of_unlike_lengths_are_read_together_as_alone(gated, regime):
    config = stub_config(
        gated,
        policies=("random", "snapkv", "h2o"),
        regimes=(regime,),
        keep_ratios=(0.6,),
        every=2,
        chunk_tokens=40,
    )
    subject = load_subject(config, MORE_STUB, 0)

    def rows(start, stop):
        unit = Unit(0, "ragged", start, stop, regime)
        with torch.inference_mode():
            made = run_by_cache(config, MORE_STUB, subject, unit, items_in(config, MORE_STUB, unit))
        # Recent queries are held as wide as the batch is.
        return [replace(row, unit="", bytes_beside=0) for row in made]

    together = rows(0, 3)
    assert together == [row for index in range(3) for row in rows(index, index + 1)]
    assert len(together) == 3 * 4 and len({row.num_prompt for row in together}) == 3
    assert len({row.tokens for row in together}) > 3


def test_where_chunks_are_cut_nothing_is_padded():
    items = {index: stub_item("ragged", 0, index, 100) for index in range(4)}
    apart = [[0, 3], [1], [2]]
    assert [[*group] for group in groups_of(items, "chunked")] == apart
    assert [[*group] for group in groups_of(items, "chunked+decode")] == apart
    assert [[*group] for group in groups_of(items, "decode")] == [[0, 1, 2, 3]]
    ending = {index: replace(item, end_ids=(3,)) for index, item in items.items()}
    assert [[*group] for group in groups_of(ending, "decode")] == [[0], [1], [2], [3]]


def test_what_an_answer_was_given_from_by_hand(gated):
    heads = 3 * 2
    for regime, every in (("decode", 3), ("decode", 8), ("prefill+decode", 3)):
        config = stub_config(gated, policies=("snapkv",), regimes=(regime,), keep_ratios=(0.45,), every=every)
        subject = load_subject(config, STUB, 0)
        full, row = run_unit(config, STUB, subject, Unit(0, "copy", 0, 1, regime)).rows
        assert (full.num_generated, full.attended_ratio) == (3, 1.0)
        # Context of 100, question of 3, three answer tokens of which two are read: 105 seen.
        if (regime, every) == ("decode", 3):
            # The question is three tokens: 45 % of 103 is left when it has been read, and one more later.
            left = round(0.45 * 103 * 2) * 3
            shares = (1, left / (103 * heads), (left + heads) / (104 * heads))
            assert row.attended_ratio == pytest.approx(sum(shares) / 3)
        elif regime == "decode":
            assert row.attended_ratio == 1.0 and row.keep_ratio == 1.0
        else:
            assert row.attended_ratio < 0.5 and row.peak_entries < 0.5 * 105 * heads
    # Answers of one token come from the full cache, whatever is held when they have been read.
    config = stub_config(gated, policies=("snapkv",), regimes=("decode",), keep_ratios=(0.45,), every=1)
    _, row = run_unit(config, STUB, load_subject(config, STUB, 0), Unit(0, "odd", 0, 1, "decode")).rows
    assert row.num_generated == 1 and row.attended_ratio == 1.0


def test_what_is_kept_beside_entries_is_counted(gated):
    policies = ("random", "snapkv", "h2o")
    config = stub_config(
        gated, policies=policies, regimes=("context_only", "chunked"), keep_ratios=(0.45,), chunk_tokens=40
    )
    subject = load_subject(config, STUB, 0)
    rows = run_unit(config, STUB, subject, Unit(0, "pair", 0, 1)).rows
    assert {row.bytes_beside for row in rows} == {0}  # nothing goes again
    rows = run_unit(config, STUB, subject, Unit(0, "pair", 0, 1, "chunked")).rows
    found = {row.policy: row.bytes_beside for row in rows}
    assert found["full"] == found["random"] == 0 < min(found["snapkv"], found["h2o"])
    item = stub_item("pair", 0, 0, 100)
    cache = Cache(subject.model, "snapkv", keep_ratio=0.45, regime="chunked")
    cache.prefill(torch.tensor([item.context_ids]), chunk_size=40)
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
            *(layer.store.offsets_R1, layer.store.lengths_R, *layer.store.pages.tables()),
        )
    )
    assert cache.bytes_allocated() == room + own


@pytest.mark.parametrize("regime", ["chunked", "decode", "prefill+decode", "chunked+decode"])
def test_what_is_held_is_what_the_budget_and_the_last_eviction_say(gated, regime):
    config = stub_config(
        gated,
        policies=("random", "h2o", "fused", "oracle"),
        regimes=(regime,),
        keep_ratios=(0.45,),
        tokens_per_head=(40,),
        protections={"none": BARE},
        every=3,
        chunk_tokens=40,
    )
    subject = load_subject(config, MORE_STUB, 0)
    for task in {"chunked": ("turns",), "decode": ("copy", "open"), "prefill+decode": ("open",)}.get(
        regime, ("copy",)
    ):
        rows = run_unit(config, MORE_STUB, subject, Unit(0, task, 0, 2, regime)).rows
        assert {row.base_policy for row in rows} == {"full", "random", "h2o", "fused"}  # no control
        assert len(rows) == 2 * (3 if task == "turns" else 1) * (1 + 3 * 2 * 2)
        heads = 3 * 2
        for row in rows:
            seen = row.num_prompt + max(0, row.num_generated + row.ended - 1)
            assert row.seen_entries == seen * heads
            if row.policy == "full":
                assert row.kept_entries == row.peak_entries == row.seen_entries
                continue
            most = 0.45 * seen * heads + heads if row.budget == 0.45 else 40 * heads
            behind = 3 if "decode" in regime else seen - 100
            assert row.kept_entries <= most + behind * heads, row
            assert row.kept_entries < row.seen_entries or (regime == "decode" and seen - 100 < 3)
            # Nothing goes before decoding has begun, where the regime evicts while decoding alone.
            assert (row.peak_entries > most + max(3, seen - 100) * heads) == (regime == "decode")


def test_the_gates_bytes_are_those_of_policies_that_take_them(gated):
    config = stub_config(gated, policies=("snapkv", "fused"), regimes=("prefill+decode",))
    subject = load_subject(config, STUB, 0)
    rows = run_unit(config, STUB, subject, Unit(0, "pair", 0, 1, "prefill+decode")).rows
    numbers = sum(part.numel() for part in (*subject.gates.parameters(), *subject.gates.buffers()))
    assert numbers > sum(part.numel() for part in subject.gates.parameters()) > 0
    assert {row.policy: row.gate_bytes for row in rows} == {"full": 0, "snapkv": 0, "fused": 4 * numbers}


def test_a_cache_that_holds_more_than_its_budget_stops_the_run(gated, monkeypatch):
    config = stub_config(gated, policies=("snapkv",), regimes=("chunked",), keep_ratios=(0.45,))
    subject = load_subject(config, STUB, 0)
    real = by_cache.held_now

    def one_more(cache):
        held_B, seen_B = real(cache)
        return held_B + 1, seen_B

    monkeypatch.setattr(by_cache, "held_now", one_more)
    says = "in seed0/pair/0-1/chunked, snapkv at 0.45: .* holds .* entries where the budget"
    with pytest.raises(RuntimeError, match=says):
        run_unit(config, STUB, subject, Unit(0, "pair", 0, 1, "chunked"))


def test_policies_that_hold_unlike_amounts_stop_the_run(gated):
    config = stub_config(gated, policies=("snapkv", "recency"), regimes=("decode",), keep_ratios=(0.45,))
    subject = load_subject(config, STUB, 0)
    unit = Unit(0, "pair", 0, 1, "decode")
    rows = run_unit(config, STUB, subject, unit).rows
    other = [
        replace(row, kept_entries=row.kept_entries + 1) if row.policy == "recency" else row for row in rows
    ]
    with pytest.raises(RuntimeError, match="unequal memory in seed0/pair/0-1/decode at budget 0.45"):
        check_equal_memory(other, unit)


def test_what_is_watched_is_counted_at_every_forward(gated):
    config = stub_config(gated)
    subject = load_subject(config, STUB, 0)
    cache = Cache(subject.model, "snapkv", keep_ratio=0.45, regime="prefill+decode", every=4)
    item = stub_item("copy", 0, 0, 100)
    cache.prefill(torch.tensor([item.context_ids]))
    watch = Watch(cache, Line("snapkv", "snapkv"), 0.45, check=True)
    assert watch.held_B.tolist() == [45 * 2 * 3]
    counts = []

    class Counting:
        def __call__(self, input_ids, scores, **_):
            ended = watch(input_ids, scores)
            counts.append(int(watch.held_B))
            return ended

    ids = torch.tensor([[*item.context_ids, *item.question_ids]])
    subject.model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=7,
        min_new_tokens=7,
        do_sample=False,
        stopping_criteria=[Counting()],
    )
    # 103 tokens seen; one more, and four have come: 45 % of 104; then one by one, and again at 108.
    kept = [round(0.45 * seen * 2) * 3 for seen in (104, 108)]
    assert counts == [288, kept[0], kept[0] + 6, kept[0] + 12, kept[0] + 18, kept[1], kept[1] + 6]
    assert watch.peak_B.tolist() == [max(counts)]


def test_positions_are_those_of_the_entries_held(gated):
    config = stub_config(gated)
    subject = load_subject(config, STUB, 0)
    cache = Cache(subject.model, policy=None)
    ids = torch.tensor([stub_item("copy", 0, 0, 100).context_ids, stub_item("copy", 0, 1, 100).context_ids])
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    cache.prefill(ids, mask, evict=False)
    assert [own.tolist() for own in positions_held(cache, 0)[0]] == [[*range(80)]] * 2
    keep = torch.zeros(2, 2, 100, dtype=torch.bool)
    keep[0, 0, [20, 30]] = keep[0, 1, [99]] = keep[1, :, 5] = True
    cache.evict_with([keep] * 3)
    assert [[own.tolist() for own in layer] for layer in positions_held(cache, 0)] == [[[0, 10], [79]]] * 3
    assert [own.tolist() for own in positions_held(cache, 1)[2]] == [[5], [5]]


def test_controls_have_a_place_where_the_future_is_known(gated):
    config = stub_config(gated, policies=("snapkv", "oracle"), regimes=("context_only", "decode"))
    assert [line.name for line in lines_of(config, "context_only")] == ["snapkv", "oracle"]
    assert [line.name for line in lines_of(config, "decode")] == ["snapkv"]
    paths = {unit.path for unit in plan(config, STUB)}
    assert paths == {"shared", "decode"}

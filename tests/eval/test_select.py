"""Comparisons of policies that read: equal bytes read, apart from policies that evict."""

import json
from dataclasses import replace

import pytest
import torch

from retain.budget.statement import Budget
from retain.eval.compare import compare
from retain.eval.diagnose.dominant_pairs import measure_dominant_pairs
from retain.eval.diagnose.head_tables import measure_table
from retain.eval.run.checks import check
from retain.eval.run.results_store import read_rows
from retain.hf.cache.bound_policy import read_layers
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.intercept.observe import observe
from retain.hf.model.decoder import describe, rotary_of
from retain.policy import load_policy
from retain.reading.budget import ReadRequest
from tests.eval.stub import MORE_STUB, STUB, stub_config, stub_model, stub_probes
from tests.refused import refused

VARIANTS = {
    "random_pages": ("quest", "reading.by=random", "reading.page=4", "reading.whole_layers=0"),
    "quest_4": ("quest", "reading.page=4", "reading.whole_layers=0"),
    "fasa_0": ("fasa", "reading.whole_layers=0"),
    "late": ("quest", "reading.by=recency", "reading.page=1", "reading.whole_layers=0"),
}


def config_of(folder, **changes):
    given = {"regimes": ("select",), "policies": (*VARIANTS, "mpcache"), "variants": VARIANTS}
    given |= {"keep_ratios": (0.1, 0.4), "tasks": ("copy", "turns", "open")}
    return stub_config(folder, **given | changes)


@pytest.mark.always
def test_cells_read_equally_many_bytes_and_stand_in_a_table_of_their_own(tmp_path):
    config = config_of(tmp_path)
    notes, indexed = check(config, MORE_STUB), ("quest_4", "fasa_0", "mpcache")
    assert [note.partition(": its index")[0] for note in notes] == [
        f"policy '{name}' has no cell at 0.1" for name in indexed
    ]
    report, _ = compare(config, MORE_STUB)
    rows = read_rows(config.folder)
    assert {(row["policy"], row["budget"]) for row in rows} == {
        ("full", 1.0),
        *((name, 0.4) for name in config.policies),
        *((name, 0.1) for name in ("random_pages", "late")),
    }
    full = {(r["task"], r["item"], r["question"]): r["bytes_read"] for r in rows if r["policy"] == "full"}
    layers = read_layers(describe(stub_model(0)))
    for row in rows:
        assert row["keep_ratio"] == 1.0 and row["bytes_held"] == row["bytes_full"]
        if row["policy"] == "full":
            assert row["attended_ratio"] is None and row["read_entries"] is None
            continue
        page = {"late": 1, "fasa_0": 1, "mpcache": 16}.get(row["policy"], 4)
        spare = sum(layer.num_heads * page * layer.entry_bytes for layer in layers)
        most = row["budget"] * full[row["task"], row["item"], row["question"]]
        if row["num_generated"] == 2 or row["ended"] is False:  # as many steps as the full cache's
            assert row["bytes_read"] <= most * (1 + 1e-9)
        if row["policy"] != "mpcache":
            assert row["bytes_read"] > most - 2 * spare
        assert (row["bytes_index"] > 0) == (row["policy"] in ("quest_4", "mpcache"))
    text = report.read_text()
    assert "| KiB read a token | % of full | KiB of index |" in text
    assert "nothing is evicted; context and question are read whole" in text


def test_an_answer_is_given_from_what_is_read_from_the_questions_last_token_on(tmp_path):
    """As a cache gives it that has read context and question, but for that token, and then decodes."""
    config = config_of(tmp_path, policies=("late",), keep_ratios=(0.1,), tasks=("turns",))
    compare(config, MORE_STUB)
    rows = [row for row in read_rows(config.folder) if row["policy"] == "late"]
    model, found = stub_model(0), []
    with attach(model):
        for row in rows:
            item = MORE_STUB.item("turns", 0, row["item"], config.context_tokens)
            ids = torch.tensor([[*item.context_ids, *item.asked[row["question"]].question_ids]])
            policy = load_policy(VARIANTS["late"][0], VARIANTS["late"][1:])
            cache = Cache(model, policy, keep_ratio=0.1, regime="select").prefill(ids[:, :-1])
            given = {"past_key_values": cache, "max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
            found.append(model.generate(ids, **given)[0, ids.shape[1] :].tolist())
            read = cache.report().reading
            assert row["bytes_read"] == read.bytes_read and read.steps == 2
    assert [row["tokens"] for row in rows] == found and len(rows) == 6


def test_contexts_of_unlike_lengths_are_read_together_as_alone(tmp_path):
    """Three of a batch: answers, and bytes read of each."""
    read = {}
    for batch in (1, 3):
        folder = tmp_path / str(batch)
        config = config_of(folder, keep_ratios=(0.4,), tasks=("ragged",), items_per_task=3, batch_items=batch)
        compare(replace(config, unit_items=3), MORE_STUB)
        rows = read_rows(config.folder)
        read[batch] = {
            (row["policy"], row["item"]): (row["tokens"], pytest.approx(row["bytes_read"])) for row in rows
        }
    assert read[1] == read[3] and len(read[1]) == 3 * 6


@pytest.mark.always
def test_policies_of_two_kinds_are_not_ranked_together(tmp_path):
    refused(
        "(?s)quest_4 read what they choose of everything, and snapkv evict: .* make two comparisons",
        check, config_of(tmp_path, policies=("quest_4", "snapkv")), STUB,
    )  # fmt: skip
    refused(
        "(?s)quest evict nothing, and regimes context_only evict: take regimes=.select.; .* 'quest_evict'",
        check, config_of(tmp_path, policies=("quest",), regimes=("context_only",), tasks=()), STUB,
    )  # fmt: skip
    refused(
        "regime 'select' evicts nothing, and snapkv evict",
        check, config_of(tmp_path, policies=("snapkv",), tasks=()), STUB,
    )  # fmt: skip
    whole = {"whole": ("quest", "reading.whole_layers=2")}
    refused(
        "policy 'whole' has no cell at 0.1, 0.4: its index",
        check, config_of(tmp_path, policies=("whole",), variants=whole, tasks=()), STUB,
    )  # fmt: skip


def test_dominant_pairs_are_those_that_find_what_the_whole_head_finds():
    """By loops in float64: over the steps of the answers, the mean over a KV head's query heads."""
    model = stub_model(0)
    items, top = [*stub_probes(0, 2, 60)], 9
    with attach(model):
        table_LC, layers = measure_dominant_pairs(model, items, top=top)
        again, _ = measure_table("dominant_pairs", model, items)
        width = len(rotary_of(model).inverse_frequencies_F)
        want = torch.zeros(table_LC.shape, dtype=torch.float64)
        for item in items:
            asked = item.asked[0]
            prompt = [*item.context_ids, *asked.question_ids]
            ids = [*prompt, *asked.gold_ids[: asked.generate]][:-1]
            for place, layer in enumerate(observe(model, torch.tensor([ids]))):
                queries, keys = layer.queries_BQSD[0].double(), layer.keys_BHTD[0].double()
                group = len(queries) // len(keys)
                for h in range(len(keys)):
                    for f in range(width):
                        found = []
                        for step in range(len(prompt) - 1, len(ids)):
                            most = max(1, min(top, (step + 1) // 4))
                            for g in range(h * group, (h + 1) * group):
                                q = queries[g, step]
                                whole = [float(q @ keys[h, t]) for t in range(step + 1)]
                                part = [
                                    float(q[f] * keys[h, t, f] + q[f + width] * keys[h, t, f + width])
                                    for t in range(step + 1)
                                ]
                                best = [
                                    set(sorted(range(step + 1), key=lambda t, own=own: (own[t], t))[-most:])
                                    for own in (whole, part)
                                ]
                                found.append(len(best[0] & best[1]) / most)
                        want[place, h * width + f] += sum(found) / len(found) / len(items)
    assert layers == [spec.layer_idx for spec in describe(model)]
    torch.testing.assert_close(table_LC, want, atol=1e-6, rtol=0)
    assert table_LC.shape == again.shape and float(table_LC.max() - table_LC.min()) > 0.2
    with pytest.raises(ValueError, match="there are none: pass one"):
        measure_dominant_pairs(model, [])


def test_the_tables_of_a_run_are_its_own_models(tmp_path):
    config = config_of(tmp_path, policies=("fasa_0",), keep_ratios=(0.5,), tasks=("copy",))
    compare(config, MORE_STUB)
    manifest = json.loads((config.folder / "manifest.json").read_text())
    assert manifest["identity"]["policies"]["fasa_0"]["reading"]["dominant_pairs"] == "dominant_pairs.tsv"
    assert (config.folder / "dominant_pairs-seed0.tsv").is_file()
    assert all(row["trained"] for row in read_rows(config.folder) if row["policy"] == "fasa_0")


def test_a_read_request_of_a_model_knows_its_layers():
    model = stub_model(0)
    request = ReadRequest(load_policy("quest"), Budget(keep_ratio=0.9), read_layers(describe(model)))
    assert request.full_bytes(10) == 10 * sum(
        own.num_kv_heads * 2 * own.head_dim * 4 for own in describe(model)
    )

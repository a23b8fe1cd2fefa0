"""Measured tables of heads and layers: against loops over attention, and as policies read them back."""

import itertools
import json

import pytest
import torch

from retain.eval.diagnose.head_importance import MEASURES, measure_head_importance, probe_of
from retain.eval.diagnose.head_tables import (
    load,
    main,
    measure_head_classes,
    rank_heads,
    read_documents,
    write_head_classes,
    write_table,
)
from retain.eval.diagnose.layer_errors import measure_layer_errors
from retain.eval.tasks.suite import Asked, Item
from retain.eval.tasks.suites import load_suite
from retain.head_tables import read_table
from retain.hf.intercept.observe import observe
from retain.reference import load_tokenizer
from retain.reference.documents import Document
from tests.close import assert_close
from tests.naive import naive_attention
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model


def _documents(*lengths: tuple[int, int]) -> list[Document]:
    documents = []
    for seed, (context, appendix) in enumerate(lengths):
        ids = tiny_batch((0,), context + appendix, seed=seed)[0][0].tolist()
        documents.append(Document(tuple(ids[:context]), tuple(ids[context:])))
    return documents


def _naive_shares(model, documents, sinks: int, recent: int) -> torch.Tensor:
    """Loops over documents, layers, heads, queries and entries, in float64."""
    of_documents = []
    for document in documents:
        ids = [*document.context_ids, *document.appendix_ids]
        queries = range(len(ids))[len(document.context_ids) :] or range(sinks + recent, len(ids))
        shares = torch.zeros(model.config.num_hidden_layers, model.config.num_key_value_heads).double()
        for evidence in observe(model, torch.tensor([ids])):
            attention, group = naive_attention(evidence), evidence.group
            for h, j in itertools.product(range(evidence.num_heads), queries):
                held = {*range(sinks), *range(j - recent + 1, j + 1)}
                lost = [i for i in range(j + 1) if i not in held]
                heads = range(h * group, (h + 1) * group)
                far = max(sum(float(attention[0, q, j, i]) for i in lost) for q in heads)
                shares[evidence.layer_idx, h] += far / len(queries)
        of_documents.append(shares)
    return torch.stack(of_documents).mean(0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("lengths", [((17, 4),), ((21, 0),), ((15, 3), (23, 0), (9, 6))])
def test_shares_are_the_attention_that_a_streaming_head_could_not_pay(family, lengths):
    model, documents, ids = tiny_model(family), _documents(*lengths), tiny_batch()[0]
    before = model(ids).logits
    shares = measure_head_classes(model, documents, sinks=2, recent=5, chunk=3)
    naive = _naive_shares(model, documents, 2, 5)
    assert shares.shape == (model.config.num_hidden_layers, model.config.num_key_value_heads)
    assert_close(shares, naive, dtype=torch.float32)
    assert (shares > 0.05).any()  # else nothing was measured
    assert_close(measure_head_classes(model, documents, sinks=2, recent=5), shares, dtype=torch.float32)
    assert torch.equal(model(ids).logits, before)  # the model is left as it was


@pytest.mark.parametrize(("shape", "retrieval"), [((2, 4), 4), ((3, 3), 5), ((1, 1), 1), ((4, 1), 2)])
def test_ranks_make_half_of_the_heads_retrieval_heads(shape, retrieval):
    shares = torch.rand(shape, dtype=torch.float64)
    ranks = rank_heads(shares)
    flat = sorted(shares.flatten().tolist())
    for share, rank in zip(shares.flatten().tolist(), ranks.flatten().tolist(), strict=True):
        assert rank == (flat.index(share) / (len(flat) - 1) if len(flat) > 1 else 1.0)
    assert int((ranks >= 0.5).sum()) == retrieval == int((rank_heads(torch.zeros(shape)) >= 0.5).sum())


def test_the_table_is_read_back_by_policies(tmp_path):
    shares = torch.tensor([[0.5, 0.125], [0.25, 0.75]])
    path, raw = write_head_classes(shares, tmp_path / "made" / "heads.tsv")
    assert path == tmp_path / "made" / "heads.tsv"
    assert read_table("head_classes", str(path)).rows == ((0.666667, 0.0), (0.333333, 1.0))
    assert raw.read_text() == "0.500000\t0.125000\n0.250000\t0.750000\n"


def _letters(text: str, special: bool) -> list[int]:
    return [1] * special + [2 + ord(letter) % 90 for letter in text]


def test_documents_of_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "abcdef"}, {"context": "abc", "question": "d", "answer": "e"}]
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    first, second = read_documents(path, _letters, 4)
    assert first == Document(tuple(_letters("abc", True)), ())
    assert second == Document(tuple(_letters("abc", True)), tuple(_letters("\nd\ne", False)))
    with pytest.raises(FileNotFoundError, match="does not exist: pass --jsonl"):
        list(read_documents(tmp_path / "none.jsonl", _letters, 4))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": "a"}', "line 1 holds 'question'; wanted 'text', or 'context', 'question' and"),
        ('{"text": "a"}\n{"text"', "line 2 is no JSON"),
    ],
)
def test_rows_that_are_no_documents_are_refused(tmp_path, text, says):
    (tmp_path / "rows.jsonl").write_text(text)
    refused(says, lambda: list(read_documents(tmp_path / "rows.jsonl", _letters, 4)))


@pytest.mark.parametrize(
    ("lengths", "window", "says"),
    [
        ((), (2, 5), "there are none: pass at least one"),
        (((9, 1), (6, 1)), (2, 5), r"document 1 has 7 tokens, and a streaming head holds 2 \+ 5"),
        (((9, 1),), (4, 0), "got sinks=4, recent=0"),
    ],
)
def test_what_cannot_be_measured_is_refused(lengths, window, says):
    how = dict(zip(("sinks", "recent"), window, strict=True))
    refused(says, measure_head_classes, tiny_model(), _documents(*lengths), **how)
    refused("no reference model of seed 9: there is reference:0 alone", load, "reference:9", None, 1, 10)
    refused("for 'some/model' are read from a file: pass --jsonl", load, "some/model", None, 1, 10)


def test_the_command_measures_the_reference_model(tmp_path, capsys):
    output = tmp_path / "heads.tsv"
    given = ["--model", "reference:0", "--documents", "1", "--context-tokens", "120", "--output", str(output)]
    assert main(given) == 0
    table = read_table("head_classes", str(output)).rows
    heads = [cell for row in table for cell in row]
    assert sum(cell >= 0.5 for cell in heads) == (len(heads) + 1) // 2
    shown = capsys.readouterr().out
    assert "DuoAttention optimises its gates" in shown and str(output) in shown
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "the cat sat on the mat and looked at the moon " * 20}) + "\n")
    assert main([*given, "--jsonl", str(rows)]) == 0
    assert read_table("head_classes", str(output)).rows != table
    assert main([*given[:-1], str(output), "--recent", "4000"]) == 2
    assert "nothing is far" in capsys.readouterr().err


def test_a_hub_model_is_loaded_by_its_folder(tmp_path):
    tiny_model(vocab_size=8192).save_pretrained(tmp_path)
    load_tokenizer().save_pretrained(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"text": "the cat sat on the mat " * 20}) + "\n") * 3)
    model, documents = load(str(tmp_path), str(rows), 2, 50)
    found = list(documents)
    assert [len(document.context_ids) for document in found] == [50, 50]
    assert measure_head_classes(model, found).shape == (3, 2)


def _items(*lengths: tuple[int, int, int]) -> list[Item]:
    """Of a context, question and answer each; the needle is two spans, with some tokens of the answer."""
    items = []
    for seed, (context, question, answer) in enumerate(lengths):
        ids = tiny_batch((0,), context + question, seed=seed)[0][0].tolist()
        gold = (*ids[3 : 3 + answer], 0)
        asked = Asked(tuple(ids[context:]), gold, answer, lambda _: (0.0, 0.0))
        items.append(Item(tuple(ids[:context]), (asked,), needles=((2, 6), (9, 10))))
    return items


def _naive_importance(model, items, measure: str) -> torch.Tensor:
    """Loops over items, layers, heads, steps and entries."""
    found = torch.zeros(model.config.num_hidden_layers, model.config.num_attention_heads).double()
    for item in items:
        prompt, answer = [*item.context_ids, *item.question_ids], item.gold_ids[: item.generate]
        ids, needle = [*prompt, *answer], [2, 3, 4, 5, 9]
        for evidence in observe(model, torch.tensor([ids])):
            attention = naive_attention(evidence)[0]
            for q, (step, token) in itertools.product(range(len(attention)), enumerate(answer)):
                row = attention[q, len(prompt) - 1 + step].tolist()
                order = sorted(range(len(row)), key=lambda i: -row[i])
                if measure == "semantic":
                    share = sum(row[i] for i in needle) * sum(ids[i] == token for i in needle)
                elif measure == "retrieval":
                    share = (order[0] in needle and ids[order[0]] == token) / len(needle)
                else:
                    share = sum(row[i] for i in order[: len(needle)] if i in needle) / len(needle)
                found[evidence.layer_idx, q] += share / len(items)
    return found


@pytest.mark.parametrize("measure", MEASURES)
def test_importance_is_what_papers_measure(measure):
    model, items = tiny_model(), _items((14, 2, 3), (19, 1, 2), (12, 3, 1))
    naive = _naive_importance(model, items, measure)
    assert naive.max() > 0
    got, layers = measure_head_importance(model, items, measure, chunk=2)
    assert_close(got, naive / naive.max(), dtype=torch.float32)
    assert layers == [*range(len(naive))] and got.shape == (3, model.config.num_attention_heads)
    assert_close(measure_head_importance(model, items, measure)[0], got, dtype=torch.float32)


def test_errors_of_layers_are_what_eviction_changes_in_their_output():
    """Loops over entries; with all heads voting the table does not matter, with one it does."""
    model, items = tiny_model(), _items((24, 2, 3), (27, 3, 2))
    heads = model.config.num_attention_heads
    table = [[float(q == layer % heads) for q in range(heads)] for layer in range(3)]
    naive = torch.zeros(3, dtype=torch.float64)
    for item in items:
        prompt = [*item.context_ids, *item.question_ids]
        ids = [*prompt, *item.gold_ids[: item.generate]]
        for evidence in observe(model, torch.tensor([ids])):
            attention, T = naive_attention(evidence)[0], len(prompt)
            mass = [
                sum(float(attention[evidence.layer_idx % heads, j, i]) for j in range(T - 4, T))
                for i in range(T)
            ]
            smooth = [sum(mass[max(0, i - 2) : min(T - 4, i + 3)]) for i in range(T - 4)]
            left = {*sorted(range(T - 4), key=lambda i: (-smooth[i], -i))[:6], *range(T - 4, T)}
            for j in range(T, len(ids)):
                seen = [i for i in range(j + 1) if i >= T or i in left]
                outs = []
                for among in (range(j + 1), seen):
                    out = torch.zeros(evidence.output_weight_QDE.shape[-1], dtype=torch.float64)
                    for q in range(heads):
                        value = evidence.values_BHTD[0, q // evidence.group].double()
                        whole = sum(float(attention[q, j, i]) for i in among)
                        mean = sum(float(attention[q, j, i]) / whole * value[i] for i in among)
                        out += mean @ evidence.output_weight_QDE[q].double()
                    outs.append(out)
                error = (outs[1] - outs[0]).norm() / (outs[0].norm() + 1e-5)
                naive[evidence.layer_idx] += error
    got, layers = measure_layer_errors(model, items, table, entries=10, window=4, num_voters=1)
    assert_close(got[:, 0], naive / naive.max(), dtype=torch.float32, ops=8)
    assert layers == [0, 1, 2] and got.shape == (3, 1)
    every = [
        measure_layer_errors(model, items, own, entries=10, num_voters=9)[0] for own in (table, table[::-1])
    ]
    assert torch.equal(*every) and not torch.equal(every[0], got)
    refused("has 26 tokens, and 26 entries", measure_layer_errors, model, items, table, entries=26)
    refused("leave more than a window", measure_layer_errors, model, items, table, entries=8)
    refused("for 2 layers of 6 query heads, and", measure_layer_errors, model, items, table[:2], entries=10)
    refused("there are none", measure_layer_errors, model, [], table)


def test_items_without_needles_measure_nothing():
    refused("0 tokens of a needle and 3 of an answer", probe_of, Item((1, 2), _items((14, 2, 3))[0].asked))
    refused("there are none: pass one", measure_head_importance, tiny_model(), [], "semantic")
    refused("unknown measure", measure_head_importance, tiny_model(), _items((14, 2, 3)), "semantics")


def test_probes_are_no_items_of_tasks():
    """Of the reference generator, and in text."""
    suite = load_suite("reference")
    probes = [*suite.probes(0, 4, 200)]
    assert [*suite.probes(0, 4, 200)][3].context_ids == probes[3].context_ids
    assert all(probe_of(item).needle and len(item.context_ids) == 200 for item in probes)
    items = [suite.item(task, 0, index, 200) for task in ("single", "multikey") for index in range(3)]
    assert not {item.context_ids for item in probes} & {item.context_ids for item in items}
    text = load_suite("text", model="reference:0", tasks=("niah/grid",))
    (probe,) = text.probes(0, 1, 400)
    assert probe_of(probe).needle and probe.context_ids != text.item("niah/grid", 0, 0, 400).context_ids


def test_the_command_measures_importance_and_errors(tmp_path, capsys):
    small = ["--model", "reference:0", "--documents", "2", "--context-tokens", "120"]
    heads, errors, other = (str(tmp_path / name) for name in ("heads.tsv", "errors.tsv", "other.tsv"))
    assert main(["--table", "retrieval_heads", "--output", heads, *small]) == 0
    assert "Pass observed_settings={'retrieval_heads': path}." in capsys.readouterr().out
    typed = ["--table", "layer_errors", *small, "--retrieval-heads", heads]
    assert main([*typed, "--output", errors]) == 0
    assert max(read_table("layer_errors", errors).rows) == (1.0,)
    typed = ["--table", "head_importance", *small, "--output", other]
    assert main(typed) == 0
    first = read_table("head_importance", other).rows
    assert main([*typed, "--measure", "retrieval"]) == 0
    assert read_table("head_importance", other).rows != first
    assert main([*typed, "--retrieval-heads", heads]) == 2
    assert main(["--table", "layer_errors", *small, "--output", errors]) == 2
    assert "--table layer_errors wants --retrieval-heads" in capsys.readouterr().err


def test_layers_that_do_not_evict_are_named(tmp_path):
    path = write_table((torch.tensor([[0.5], [1.0]]), [1, 3]), tmp_path / "errors.tsv")
    assert read_table("layer_errors", str(path)).layers == (1, 3)

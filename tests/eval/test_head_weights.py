"""Measured weights of heads: against loops over attention, and as policies read them back."""

import itertools
import json

import pytest
import torch

from retain.eval.diagnose.head_importance import measure_head_importance, probe_of
from retain.eval.diagnose.head_weights import (
    class_weights,
    importance_weights,
    load,
    main,
    measure_far_attention,
    read_documents,
    write_weights,
)
from retain.eval.tasks.suite import Asked, Item
from retain.eval.tasks.suites import load_suite
from retain.head_weights import read_weights
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
    shares = measure_far_attention(model, documents, sinks=2, recent=5, chunk=3)
    naive = _naive_shares(model, documents, 2, 5)
    assert shares.shape == (model.config.num_hidden_layers, model.config.num_key_value_heads)
    assert_close(shares, naive, dtype=torch.float32)
    assert (shares > 0.05).any()  # else nothing was measured
    assert_close(measure_far_attention(model, documents, sinks=2, recent=5), shares, dtype=torch.float32)
    assert torch.equal(model(ids).logits, before)  # the model is left as it was


@pytest.mark.parametrize(("shape", "retrieval"), [((2, 4), 4), ((3, 3), 5), ((1, 1), 1), ((4, 1), 2)])
def test_half_of_the_heads_are_retrieval_heads(shape, retrieval):
    shares = torch.rand(shape, dtype=torch.float64)
    weights, flat = class_weights(shares, 0.5), shares.flatten().sort(descending=True).values
    assert torch.equal(weights == 1, shares >= flat[retrieval - 1]) and int(weights.sum()) == retrieval
    assert int(class_weights(torch.zeros(shape), 0.5).sum()) == retrieval
    assert class_weights(shares, 0.0).all() and int(class_weights(shares, 1.0).sum()) == 1


def test_weights_by_importance_are_the_published_budgets():
    """HeadKV's own words, query head by query head: its part of the pool and its equal part."""
    importance = torch.rand(3, 4, dtype=torch.float64)
    for beta in (1.0, 1.005, 1.5, 10.0):
        pool = 50 / beta * 12
        of_queries = 50 - 50 / beta + importance / importance.sum() * pool
        want = of_queries.unflatten(1, (2, 2)).mean(-1)
        got = importance_weights(importance, 2, beta)
        torch.testing.assert_close(got / got.sum() * 50 * 6, want)
    assert not importance_weights(torch.zeros(3, 4, dtype=torch.float64), 2, 1.5).any()


def test_weights_are_read_back_by_policies(tmp_path):
    path = write_weights(torch.tensor([[0.5, 0.125], [0.25, 0.75]]), [1, 3], tmp_path / "made" / "heads.json")
    assert path == tmp_path / "made" / "heads.json"
    assert dict(read_weights(str(path))) == {1: (0.5, 0.125), 3: (0.25, 0.75)}


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
    refused(says, measure_far_attention, tiny_model(), _documents(*lengths), **how)
    refused("no reference model of seed 9: there is reference:0 alone", load, "reference:9", None, 1, 10)
    refused("for 'some/model' are read from a file: pass --jsonl", load, "some/model", None, 1, 10)


def test_the_command_measures_the_reference_model(tmp_path, capsys):
    output = tmp_path / "duo.json"
    small = ["--model", "reference:0", "--context-tokens", "120", "--output", str(output)]
    given = ["--policy", "duoattention", *small, "--documents", "1"]
    assert main(given) == 0
    weights = read_weights(str(output))
    heads = [cell for row in weights.values() for cell in row]
    assert {*heads} == {0.0, 1.0} and sum(heads) == (len(heads) + 1) // 2
    shown = capsys.readouterr().out
    assert "DuoAttention optimises its gates" in shown and f"'weights': '{output}'" in shown
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "the cat sat on the mat and looked at the moon " * 20}) + "\n")
    assert main([*given, "--jsonl", str(rows)]) == 0
    assert capsys.readouterr().out != shown
    assert main([*given, "--recent", "4000"]) == 2
    assert "nothing is far" in capsys.readouterr().err
    given = ["--policy", "headkv", *small, "--documents", "2"]
    assert main(given) == 0
    first = read_weights(str(output))
    assert [*first] == [*weights] and len({*first.values()}) > 1
    assert main([*given, "--beta", "1"]) == 0
    assert read_weights(str(output)) != first
    assert main([*given, "--beta", "0.5"]) == 2
    assert main([*given, "--sinks", "4", "--threshold", "0.5"]) == 2
    said = capsys.readouterr().err
    assert "--beta 0.5: wanted" in said and "--sinks, --threshold: not read for --policy headkv" in said


def test_a_hub_model_is_loaded_by_its_folder(tmp_path):
    tiny_model(vocab_size=8192).save_pretrained(tmp_path)
    load_tokenizer().save_pretrained(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"text": "the cat sat on the mat " * 20}) + "\n") * 3)
    model, documents = load(str(tmp_path), str(rows), 2, 50)
    found = list(documents)
    assert [len(document.context_ids) for document in found] == [50, 50]
    assert measure_far_attention(model, found).shape == (3, 2)


def _items(*lengths: tuple[int, int, int]) -> list[Item]:
    """Of a context, question and answer each; the needle is two spans, with some tokens of the answer."""
    items = []
    for seed, (context, question, answer) in enumerate(lengths):
        ids = tiny_batch((0,), context + question, seed=seed)[0][0].tolist()
        gold = (*ids[3 : 3 + answer], 0)
        asked = Asked(tuple(ids[context:]), gold, answer, lambda _: (0.0, 0.0))
        items.append(Item(tuple(ids[:context]), (asked,), needles=((2, 6), (9, 10))))
    return items


def _naive_importance(model, items) -> torch.Tensor:
    """Loops over items, layers, heads, steps and entries."""
    found = torch.zeros(model.config.num_hidden_layers, model.config.num_attention_heads).double()
    for item in items:
        prompt, answer = [*item.context_ids, *item.question_ids], item.gold_ids[: item.generate]
        needle = [2, 3, 4, 5, 9]
        for evidence in observe(model, torch.tensor([[*prompt, *answer]])):
            attention = naive_attention(evidence)[0]
            for q, step in itertools.product(range(len(attention)), range(len(answer))):
                row = attention[q, len(prompt) - 1 + step].tolist()
                order = sorted(range(len(row)), key=lambda i: -row[i])
                share = sum(row[i] for i in order[: len(needle)] if i in needle) / len(needle)
                found[evidence.layer_idx, q] += share / len(items)
    return found


def test_importance_is_what_the_paper_measures():
    model, items = tiny_model(), _items((14, 2, 3), (19, 1, 2), (12, 3, 1))
    naive = _naive_importance(model, items)
    assert naive.max() > 0
    got, layers = measure_head_importance(model, items, chunk=2)
    assert_close(got, naive / naive.max(), dtype=torch.float32)
    assert layers == [*range(len(naive))] and got.shape == (3, model.config.num_attention_heads)
    assert_close(measure_head_importance(model, items)[0], got, dtype=torch.float32)


def test_items_without_needles_measure_nothing():
    refused("0 tokens of a needle and 3 of an answer", probe_of, Item((1, 2), _items((14, 2, 3))[0].asked))
    refused("there are none: pass one", measure_head_importance, tiny_model(), [])


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

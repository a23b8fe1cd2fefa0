"""Measured weights of heads: against loops over attention, and as policies read them back."""

import itertools
from dataclasses import replace

import pytest
import torch

from retain.attention.head_weights import read_weights
from retain.eval import head_weights
from retain.eval.head_weights import (
    REFERENCE_TASK,
    SEED,
    class_weights,
    importance_weights,
    main,
    measure_far_attention,
    measure_head_importance,
)
from retain.eval.tasks.encode import Encoded, encode
from retain.eval.tasks.sources import load_rows
from retain.hf.intercept.observe import observe
from retain.reference import load_model, load_tokenizer
from tests.close import assert_close
from tests.naive import naive_attention
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model


def drawn(*lengths):
    """Items of a context, question and answer; the needle is two spans, with some tokens of the answer."""
    items = []
    for seed, (context, question, answer) in enumerate(lengths):
        ids = tuple(tiny_batch((0,), context + question, seed=seed)[0][0].tolist())
        items.append(Encoded(ids[:context], ids[context:], ids[3 : 3 + answer], (), ((2, 6), (9, 10))))
    return items


def naive_shares(model, items, sinks, recent):
    """Loops over items, layers, heads, queries and entries, in float64."""
    of_items = []
    for item in items:
        ids = [*item.context_ids, *item.question_ids, *item.answer_ids]
        queries = range(len(ids))[len(item.context_ids) :]
        shares = torch.zeros(model.config.num_hidden_layers, model.config.num_key_value_heads).double()
        for evidence in observe(model, torch.tensor([ids])):
            attention, group = naive_attention(evidence), evidence.group
            for h, j in itertools.product(range(evidence.num_heads), queries):
                held = {*range(sinks), *range(j - recent + 1, j + 1)}
                lost = [i for i in range(j + 1) if i not in held]
                heads = range(h * group, (h + 1) * group)
                far = max(sum(float(attention[0, q, j, i]) for i in lost) for q in heads)
                shares[evidence.layer_idx, h] += far / len(queries)
        of_items.append(shares)
    return torch.stack(of_items).mean(0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_shares_are_the_attention_that_a_streaming_head_could_not_pay(family, monkeypatch):
    model, items, ids = tiny_model(family), drawn((15, 2, 1), (23, 1, 2), (11, 6, 1)), tiny_batch()[0]
    before = model(ids).logits
    shares = measure_far_attention(model, items, sinks=2, recent=5)
    assert_close(shares, naive_shares(model, items, 2, 5), dtype=torch.float32)
    assert (shares > 0.05).any()  # else nothing was measured
    monkeypatch.setattr(head_weights, "CHUNK", 3)
    assert_close(measure_far_attention(model, items, sinks=2, recent=5), shares, dtype=torch.float32)
    assert torch.equal(model(ids).logits, before)  # the model is left as it was


@pytest.mark.parametrize(("shape", "retrieval"), [((2, 4), 4), ((3, 3), 5), ((1, 1), 1), ((4, 1), 2)])
def test_half_of_the_heads_are_retrieval_heads(shape, retrieval):
    shares = torch.rand(shape, dtype=torch.float64)
    weights, flat = class_weights(shares), shares.flatten().sort(descending=True).values
    assert torch.equal(weights == 1, shares >= flat[retrieval - 1]) and int(weights.sum()) == retrieval
    assert int(class_weights(torch.zeros(shape)).sum()) == retrieval


def test_weights_by_importance_are_the_published_budgets():
    """HeadKV's formula, query head by query head: its part of the pool and its equal part."""
    importance = torch.rand(3, 4, dtype=torch.float64)
    for beta in (1.0, 1.005, 1.5, 10.0):
        pool = 50 / beta * 12
        of_queries = 50 - 50 / beta + importance / importance.sum() * pool
        want = of_queries.unflatten(1, (2, 2)).mean(-1)
        got = importance_weights(importance, 2, beta)
        torch.testing.assert_close(got / got.sum() * 50 * 6, want)
    assert not importance_weights(torch.zeros(3, 4, dtype=torch.float64), 2, 1.5).any()


def test_what_cannot_be_measured_is_refused():
    said = "a document has 7 tokens, and a streaming head holds 2 \\+ 5"
    refused(said, measure_far_attention, tiny_model(), drawn((9, 1, 2), (4, 1, 2)), sinks=2, recent=5)
    refused("0 tokens of a needle", measure_head_importance, tiny_model(), [Encoded((1,), (3,), (4,), ())])


def naive_importance(model, items):
    """Loops over items, layers, heads, steps and entries."""
    found = torch.zeros(model.config.num_hidden_layers, model.config.num_attention_heads).double()
    for item in items:
        prompt, answer = [*item.context_ids, *item.question_ids], item.answer_ids
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
    model, items = tiny_model(), drawn((14, 2, 3), (19, 1, 2), (12, 3, 1))
    naive = naive_importance(model, items)
    assert naive.max() > 0
    got = measure_head_importance(model, items)
    assert_close(got, naive / naive.max(), dtype=torch.float32)
    assert got.shape == (3, model.config.num_attention_heads)


def test_the_command_measures_the_reference_model(tmp_path, capsys):
    output = tmp_path / "made" / "heads.json"
    small = ["--model", "reference:0", "--context-tokens", "120", "--documents", "2", "--output", str(output)]
    assert main(["--policy", "duoattention", *small]) == 0
    weights = read_weights(str(output))
    heads = [cell for row in weights.values() for cell in row]
    assert {*heads} == {0.0, 1.0} and sum(heads) == (len(heads) + 1) // 2
    assert f"'weights': '{output}'" in capsys.readouterr().out
    assert main(["--policy", "headkv", *small]) == 0
    found, model, tokenizer = read_weights(str(output)), load_model(), load_tokenizer()
    rows = load_rows(REFERENCE_TASK, tokenizer, seed=SEED, context_tokens=120, items=2)
    items = [encode(row, tokenizer, model) for row in rows]
    one = [replace(item, answer_ids=item.answer_ids[:1]) for item in items]  # without the end of the text
    assert all(len(item.answer_ids) == 2 for item in items)
    wanted_LH = importance_weights(measure_head_importance(model, one), 2)
    assert_close(torch.tensor([*found.values()]), wanted_LH.float())
    assert [*found] == [*weights] and len({*found.values()}) > 1

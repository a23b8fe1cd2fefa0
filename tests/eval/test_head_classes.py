"""Measured head classes: the shares against loops over attention, and the table that a policy reads back."""

import itertools
import json

import pytest
import torch

from retain.eval.diagnose.head_classes import (
    load,
    main,
    measure_head_classes,
    rank_heads,
    read_documents,
    write_head_classes,
)
from retain.head_classes import read_head_classes
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
    assert read_head_classes(str(path)) == ((0.666667, 0.0), (0.333333, 1.0))
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
    refused("no reference model of seed 9 .*seeds 0, 1, 2 are there", load, "reference:9", None, 1, 10)
    refused("for 'some/model' are read from a file: pass --jsonl", load, "some/model", None, 1, 10)


def test_the_command_measures_the_reference_model(tmp_path, capsys):
    output = tmp_path / "heads.tsv"
    given = ["--model", "reference:0", "--documents", "1", "--context-tokens", "120", "--output", str(output)]
    assert main(given) == 0
    table = read_head_classes(str(output))
    heads = [cell for row in table for cell in row]
    assert sum(cell >= 0.5 for cell in heads) == (len(heads) + 1) // 2
    shown = capsys.readouterr().out
    assert "DuoAttention optimises its gates" in shown and str(output) in shown
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "the cat sat on the mat and looked at the moon " * 20}) + "\n")
    assert main([*given, "--jsonl", str(rows)]) == 0
    assert read_head_classes(str(output)) != table
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

"""Documents: read, checked, split, ordered and padded."""

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from retain.train.data import DataSettings, Document, collate, load_corpus, share_of, step_indices


def encode(text: str, special: bool) -> list[int]:
    return [1] * special + [ord(letter) for letter in text]


def jsonl(path: Path, rows: list) -> DataSettings:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSettings(source="jsonl", path=str(path), held_out=1, documents=0, min_tokens=1, max_tokens=100)


def load(settings: DataSettings, shortest: int = 2, seed: int = 0):
    return load_corpus(settings, shortest=shortest, seed=seed, encode=encode)


def test_three_kinds_of_rows(tmp_path: Path) -> None:
    rows = [
        {"text": "plain text"},
        {"context": "a story", "question": "who?", "answer": "me"},
        {"context": "a list", "question": "which?", "answer": ["x", "y"]},
        {"context_ids": [5, 6, 7, 8], "appendix_ids": [9]},
    ]
    corpus = load(jsonl(tmp_path / "d.jsonl", rows))
    everything = {*corpus.train, *corpus.held_out}
    assert everything == {
        Document(tuple(encode("plain text", True))),
        Document(tuple(encode("a story", True)), tuple(encode("\nwho?\nme", False))),
        Document(tuple(encode("a list", True)), tuple(encode("\nwhich?\nx, y", False))),
        Document((5, 6, 7, 8), (9,)),
    }


def test_split_is_by_document_and_by_seed(tmp_path: Path) -> None:
    rows = [{"text": f"document {i}"} for i in range(20)] * 2
    settings = replace(jsonl(tmp_path / "d.jsonl", rows), held_out=5)
    corpus = load(settings)
    assert len(corpus.held_out) == 5 and len(corpus.train) == 15, "duplicates are dropped"
    assert not set(corpus.train) & set(corpus.held_out)
    assert load(settings) == corpus and load(settings, seed=1) != corpus
    assert len(load(replace(settings, documents=3)).train) == 3


def test_long_texts_are_cut(tmp_path: Path) -> None:
    corpus = load(jsonl(tmp_path / "d.jsonl", [{"text": "x" * 500}, {"text": "y" * 500}]))
    assert [len(d.context_ids) for d in (*corpus.train, *corpus.held_out)] == [100, 100]


def test_short_documents_are_refused_or_skipped(tmp_path: Path) -> None:
    settings = jsonl(
        tmp_path / "d.jsonl", [{"text": "long enough"}, {"text": "also long enough"}, {"text": "no"}]
    )
    with pytest.raises(
        ValueError, match="1 of 3 documents .* number 2 with 3 tokens, and more than 5 are needed"
    ):
        load(settings, shortest=5)
    assert len(load(replace(settings, short="skip"), shortest=5).train) == 1


@pytest.mark.parametrize("rows", [[], [{"text": "only one document"}]])
def test_empty_data_set(tmp_path: Path, rows: list) -> None:
    with pytest.raises(ValueError, match="empty data set"):
        load(jsonl(tmp_path / "d.jsonl", rows))


def test_rows_that_cannot_be_read(tmp_path: Path) -> None:
    settings = jsonl(tmp_path / "d.jsonl", [{"txet": "?"}])
    with pytest.raises(ValueError, match=r"row 1 of .* has fields \['txet'\]; wanted `text`"):
        load(settings)
    Path(settings.path or "").write_text("{not json\n")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        load(settings)
    with pytest.raises(FileNotFoundError, match="no such data file"):
        load(replace(settings, path=str(tmp_path / "missing.jsonl")))
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        load_corpus(jsonl(tmp_path / "e.jsonl", [{"text": "abc"}]), shortest=1, seed=0, encode=None)


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"needs data.path .*min_tokens=9 must be"):
        load(DataSettings(source="hub", min_tokens=9, max_tokens=3))


def test_hub_data_sets_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    class Stream(list):
        def take(self, count: int) -> list:
            return self[:count]

    def load_dataset(path: str, subset: str | None, **settings: object) -> Stream:
        asked.update(settings, path=path, subset=subset)
        return Stream({"text": f"document {i}"} for i in range(9))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    settings = DataSettings(source="hub", path="o/n", revision="abc", documents=4, held_out=2, min_tokens=1)
    corpus = load(settings)
    assert (len(corpus.train), len(corpus.held_out)) == (4, 2)
    assert asked == {"path": "o/n", "subset": None, "split": "train", "revision": "abc", "streaming": True}


def test_hub_without_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs the `datasets` package"):
        load(DataSettings(source="hub", path="o/n", min_tokens=1))


def test_reference_documents_have_mixed_lengths_and_come_from_the_training_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from retain.reference import documents

    written = []

    class Writer:
        def __init__(self, split: str, seed: int):
            self.split, self.seed = split, seed

    def distill_document(writer: Writer, context_tokens: int) -> Document:
        written.append((writer.split, writer.seed, context_tokens))
        return Document((1,) * (context_tokens - 1) + (len(written),), (2, 3))

    monkeypatch.setattr(documents, "Writer", Writer)
    monkeypatch.setattr(documents, "distill_document", distill_document)
    corpus = load(DataSettings(documents=30, held_out=5, min_tokens=20, max_tokens=60), seed=4)
    assert (len(corpus.train), len(corpus.held_out)) == (30, 5)
    assert {(split, seed) for split, seed, _ in written} == {("train", 4)}
    lengths = {count for _, _, count in written}
    assert len(lengths) > 10 and min(lengths) >= 20 and max(lengths) <= 60


def test_every_document_is_read_once_an_epoch() -> None:
    order = [i for step in range(5) for i in step_indices(step, num_documents=10, batch_documents=4, seed=3)]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10)) and order[:10] != order[10:]
    assert order[4:8] == step_indices(1, num_documents=10, batch_documents=4, seed=3), (
        "a step needs no history"
    )


def test_shares_are_disjoint_and_complete() -> None:
    documents = [Document(tuple(range(n + 1))) for n in (5, 1, 9, 3, 7, 2)]
    shares = [share_of([5, 1, 2, 4], documents, process=p, num_processes=2) for p in range(2)]
    assert shares == [[2, 5], [4, 1]]


def test_batches_are_padded_on_the_left() -> None:
    batch = collate([Document((1, 2, 3), (4,)), Document((5,), ())], [7, 8], pad_id=0, device="cpu")
    assert batch.input_ids_BT.tolist() == [[1, 2, 3, 4], [0, 0, 0, 5]]
    assert torch.equal(batch.valid_BT, batch.input_ids_BT > 0)
    assert (batch.document_length_B.tolist(), batch.appendix_length_B.tolist()) == ([3, 1], [1, 0])
    assert batch.keys == (7, 8)

"""Documents: read, checked, split, ordered and padded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retain.reference.documents import Writer, distill_document
from retain.train.data import corpus as data
from retain.train.data.corpus import Corpus, load_corpus
from retain.train.data.document import Document, held_out_fraction
from retain.train.data.settings import DataSettings, check_data
from tests.refused import refused
from tests.train.made import encode_letters


def jsonl(path: Path, rows: list) -> DataSettings:
    """All documents are trained on, unless a test holds some out."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSettings(source="jsonl", path=str(path), held_out=0, documents=0, min_tokens=1, max_tokens=100)


def load(settings: DataSettings, shortest: int = 2, seed: int = 0, **others: Any) -> Corpus:
    corpus = load_corpus(settings, shortest=shortest, seed=seed, encode=encode_letters, **others)
    assert isinstance(corpus, Corpus)
    return corpus


def test_duplicates_are_dropped(tmp_path: Path) -> None:
    settings = jsonl(tmp_path / "d.jsonl", [{"text": f"document {i}"} for i in range(20)] * 2)
    checked: list[Document] = []
    corpus = load(settings, check=checked.append)
    assert len(corpus.train) == 20 and (*corpus.train,) * 2 == tuple(checked), "each is checked as it is read"
    assert len(load(replace(settings, documents=3)).train) == 3


def test_the_splits_hash_is_uniform_and_known() -> None:
    fractions = torch.tensor([held_out_fraction((i, i + 1)) for i in range(4000)]).sort().values
    even = (torch.arange(4000) + 0.5) / 4000
    # Kolmogorov-Smirnov: 1.63 / sqrt(n) is passed by chance in one case of a hundred, and these are fixed.
    assert float((fractions - even).abs().max()) < 1.63 / 4000**0.5
    # What was held out once must stay so in later versions.
    assert held_out_fraction((1, 2, 3)) == 0.4404713558580001
    assert held_out_fraction((1, 2, 3)) != held_out_fraction((1, 2)) != held_out_fraction((1, 2, 0))


def test_documents_are_known_by_their_tokens() -> None:
    document = Document((1, 2, 3), (4,), "here")
    assert document == Document((1, 2, 3), (4,), "there") and document.key == Document((1, 2, 3), (4,)).key
    others = [
        Document((1, 2, 3)),
        Document((1, 2, 3, 4)),
        Document((1, 2), (3, 4)),
        Document((), (1, 2, 3, 4)),
    ]
    assert len({document.key, *(other.key for other in others)}) == 5
    assert 0 <= document.key < 2**48
    one, two = document, others[0]
    sides = [((one, two), ()), ((two, one), ()), ((one,), (two,)), ((one, one, two), ()), ((two, two), ())]
    assert len({Corpus(*both).describe() for both in sides}) == 5
    assert Corpus((one,), ()).describe() == Corpus((one,), (), batch_documents=7).describe()


def test_the_split_depends_on_the_context_alone(tmp_path: Path) -> None:
    """Neither the order, nor what is added, nor the seed moves a context to the other side."""
    rows = [{"text": f"document {i}"} for i in range(60)]
    settings = replace(jsonl(tmp_path / "d.jsonl", rows), held_out=5, held_out_share=0.3)
    one, more = load(settings), [{"text": f"another {i}"} for i in range(40)]
    reserved = [r for r in rows if held_out_fraction(encode_letters(r["text"], True)) < 0.3]
    assert len(one.train) == 60 - len(reserved) < 55, "the others of the share are not trained on"
    jsonl(tmp_path / "d.jsonl", rows[::-1])
    assert load(settings, seed=3).held_out == one.held_out and len(one.held_out) == 5
    jsonl(tmp_path / "d.jsonl", [*more, *rows])
    both = load(replace(settings, held_out=12))
    assert {*one.train} < {*both.train} and not {*one.held_out} & {*both.train}


@pytest.mark.parametrize("share", [0.01, 0.99], ids=["too-few-held-out", "none-left-to-train-on"])
def test_a_small_set_holds_out_as_many_as_are_asked_for(tmp_path: Path, share: float) -> None:
    rows = [{"context": f"document {i // 2}", "question": str(i), "answer": "a"} for i in range(60)]
    settings = replace(jsonl(tmp_path / "d.jsonl", rows), held_out=8, held_out_share=share)
    corpus = load(settings)
    assert (len(corpus.held_out), len(corpus.train)) == (8, 52)
    fractions = [held_out_fraction(one.context_ids) for one in corpus.held_out]
    assert max(fractions) < min(held_out_fraction(one.context_ids) for one in corpus.train)
    # Of an odd number, what has the last one's context is held out too, and looked at by nobody.
    odd = load(replace(settings, held_out=7))
    assert (odd.held_out, odd.train) == (corpus.held_out[:7], corpus.train)
    said = "gives 60 that are usable and differ, data.held_out=60 .*hold out fewer"
    refused(said, load, replace(settings, held_out=60))


def test_generated_documents_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where none can be used: all too short, or all alike."""
    one = Document((1,) * 300)
    monkeypatch.setattr(data, "_reference_documents", lambda *_: iter(lambda: one, None))
    asked = DataSettings(documents=8, held_out=2, min_tokens=300)
    refused("the generator' gives 1 that are usable and differ", load, asked)
    refused("is too short: its context has 300 tokens", load, asked, shortest=300)
    refused("the generator' gives 0 that are", load, replace(asked, short="skip"), shortest=300)


def test_long_texts_are_cut_and_short_ones_refused_or_skipped(tmp_path: Path) -> None:
    settings = jsonl(tmp_path / "d.jsonl", [{"text": "x" * 500}, {"text": "y" * 50}, {"text": "no"}])
    assert [len(d.context_ids) for d in load(settings).train] == [100, 51, 3]
    refused("line 3 is too short: its context has 3 tokens, and more than 5", load, settings, shortest=5)
    assert len(load(replace(settings, short="skip"), shortest=5).train) == 2


def test_mixed_lengths_are_keyed_by_document(tmp_path: Path) -> None:
    rows = [{"text": f"{i:04d}" * 30} for i in range(400)]
    settings = replace(jsonl(tmp_path / "d.jsonl", rows), lengths=(10,) * 6 + (40,) * 3 + (90,))
    corpus = load(settings)
    lengths = [len(d.context_ids) for d in corpus.train]
    shares = [lengths.count(n) / len(lengths) for n in (10, 40, 90)]
    assert sum(shares) == pytest.approx(1) and shares == pytest.approx([0.6, 0.3, 0.1], abs=0.08)
    other = load(replace(settings, path=jsonl(tmp_path / "e.jsonl", rows[::-1]).path), seed=5)
    assert set(other.train) == set(corpus.train)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": None, "min_tokens": 9, "max_tokens": 3}, r"needs data.path .*min_tokens=9 must be"),
        ({"revision": "main"}, "data.revision means nothing for data.source=jsonl, only for hub"),
        ({"streaming": True}, "data.streaming means nothing for data.source=jsonl, only for hub"),
        ({"source": "hub", "streaming": True, "documents": 9}, r"set data.documents=0 \(got 9\)"),
        ({"lengths": (300, 9)}, "data.lengths has 9; all must be between data.min_tokens=256"),
        ({"source": "reference", "path": None}, "data.documents=0: the generator needs to know"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_mean_nothing(changes: dict[str, Any], message: str) -> None:
    fine = DataSettings(source="jsonl", path="d.jsonl", documents=0)
    check_data(fine)
    check_data(replace(fine, min_tokens=fine.max_tokens))  # contexts of one length
    refused(message, check_data, replace(fine, **changes))


def test_reference_documents_have_mixed_lengths_and_come_from_the_training_split() -> None:
    settings = DataSettings(documents=30, held_out=5, min_tokens=20, max_tokens=60)
    corpus = load(settings, seed=4)
    assert (len(corpus.train), len(corpus.held_out)) == (30, 5)
    lengths = {len(d.context_ids) for d in corpus.train}
    assert len(lengths) > 10 and min(lengths) >= 20 and max(lengths) <= 60
    assert all(held_out_fraction(d.context_ids) < 0.05 for d in corpus.held_out)
    assert all(held_out_fraction(d.context_ids) >= 0.05 for d in corpus.train)
    draws = np.random.default_rng([4, 2])
    first = distill_document(Writer("train", 4), int(draws.integers(20, 61)))
    assert Document(first.context_ids, first.appendix_ids) in (*corpus.train, *corpus.held_out)


def steps_of(corpus: Corpus, steps: int) -> list[Document]:
    return [document for step in range(steps) for document in corpus.documents_of(step)]


def test_every_document_is_read_once_an_epoch() -> None:
    documents = tuple(Document((i, i)) for i in range(10))
    corpus = Corpus(documents, (), batch_documents=4, seed=3)
    order = steps_of(corpus, 5)
    assert set(order[:10]) == set(order[10:]) == set(documents) and order[:10] != order[10:]
    assert order[4:8] == corpus.documents_of(1), "a step needs no history"
    assert steps_of(replace(corpus, seed=4), 5) != order
    assert len(replace(corpus, batch_documents=25).documents_of(0)) == 25, "a step may be several epochs"

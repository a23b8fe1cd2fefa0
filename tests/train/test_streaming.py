"""A stream of documents: every one once a pass, resumed to the very documents of the uninterrupted run."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from retain.train.data.corpus import Corpus, StreamingCorpus, load_corpus
from retain.train.data.document import Document, held_out_fraction
from retain.train.data.rows import Reader
from retain.train.data.settings import DataSettings
from retain.train.data.sources import Dataset, Row
from tests.refused import refused
from tests.train.made import encode_letters

NUM_ROWS = 90
FOLDER_KINDS = ("parquet", "jsonl")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": f"document {i}" * (1 + i % 3)} for i in range(NUM_ROWS)]
    made = {kind: tmp_path_factory.mktemp(kind) for kind in FOLDER_KINDS}
    for start in range(0, NUM_ROWS, 40):
        part = rows[start : start + 40]
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (made["jsonl"] / f"{start:02d}.jsonl").write_text(lines)
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(part), made["parquet"] / f"{start:02d}.parquet", row_group_size=7
        )
    return made


def settings_of(folders: dict[str, Path], kind: str = "parquet", **changes: Any) -> DataSettings:
    values: dict[str, Any] = {
        **{"documents": 0, "held_out": 3, "held_out_share": 0.1, "min_tokens": 1},
        **{"shuffle_rows": 16},
    }
    return DataSettings(source="hub", path=str(folders[kind]), streaming=True, **{**values, **changes})


def stream(made: DataSettings, batch: int = 4, seed: int = 0, **others: Any) -> StreamingCorpus:
    corpus = load_corpus(made, shortest=0, seed=seed, batch_documents=batch, encode=encode_letters, **others)
    assert isinstance(corpus, StreamingCorpus)
    return corpus


def read(corpus: StreamingCorpus, first: int, last: int) -> list[Document]:
    return [document for step in range(first, last) for document in corpus.documents_of(step)]


def trained_on(folders: dict[str, Path], share: float) -> set[Document]:
    """By a loader that holds everything in memory."""
    made = replace(settings_of(folders), streaming=False, held_out=0)
    corpus = load_corpus(made, shortest=0, seed=0, encode=encode_letters)
    assert isinstance(corpus, Corpus)
    return {d for d in corpus.train if held_out_fraction(d.context_ids) >= share}


def test_every_document_is_read_once_a_pass(folders: dict[str, Path]) -> None:
    wanted = trained_on(folders, 0.1)
    corpus = stream(settings_of(folders), batch=1)
    passes = [read(corpus, i * len(wanted), (i + 1) * len(wanted)) for i in range(3)]
    assert all(set(documents) == wanted for documents in passes)
    assert passes[0] != passes[1] != passes[2]
    assert len(corpus.held_out) == 3 and not set(corpus.held_out) & wanted
    assert corpus.num_documents is None
    again, other = stream(settings_of(folders), batch=1), stream(settings_of(folders), batch=1, seed=1)
    assert again.held_out == other.held_out == corpus.held_out
    assert read(again, 0, 20) == passes[0][:20] != read(other, 0, 20), "every process reads the same"
    # Rows move within their block of 16 and no further.
    places = [int(d.origin.rpartition(" ")[2]) for d in passes[0]]
    assert places != sorted(places)
    assert [(p - 1) // 16 for p in places] == sorted((p - 1) // 16 for p in places)


@pytest.mark.parametrize("kind", FOLDER_KINDS)
@pytest.mark.parametrize(
    ("shuffle_rows", "batch", "steps"), [(1, 4, 5), (7, 3, 40), (16, 9, 12), (200, 1, 90)]
)
def test_a_stream_resumes_at_any_step(
    folders: dict[str, Path], kind: str, shuffle_rows: int, batch: int, steps: int
) -> None:
    made = settings_of(folders, kind, shuffle_rows=shuffle_rows)
    whole = read(stream(made, batch), 0, steps + 8)
    resumed = read(stream(made, batch), steps, steps + 8)
    assert resumed == whole[steps * batch :]
    assert [d.origin for d in resumed] == [d.origin for d in whole[steps * batch :]]


def test_a_stream_with_too_few_documents_is_refused(folders: dict[str, Path]) -> None:
    said = r"gives \d+ held-out documents, of data.held_out=30 .*0.1 is held out.* some other"
    refused(said, stream, settings_of(folders, held_out=30))


def test_a_step_can_be_asked_for_again_and_not_be_left_out(folders: dict[str, Path]) -> None:
    corpus = stream(settings_of(folders))
    first = corpus.documents_of(0)
    assert corpus.documents_of(0) == first
    assert corpus.documents_of(1) != first
    with pytest.raises(AssertionError, match="step 0 of a stream that is at step 2"):
        corpus.documents_of(0)


class Endless(Dataset):
    """Rows without end, which counts how many were taken."""

    taken = 0

    def __init__(self) -> None:
        super().__init__("endless")

    def rows(self) -> Iterator[Row]:
        for number in count():
            self.taken += 1
            yield Row(f"row {number}", {"text": f"document {number}"})


def test_a_stream_is_read_no_further_than_is_needed() -> None:
    source = Endless()
    made = DataSettings(held_out=2, held_out_share=0.2, shuffle_rows=32)
    corpus = StreamingCorpus(source, Reader(made, encode_letters).document, made, batch_documents=4, seed=0)
    ahead = source.taken
    assert ahead < 100
    read(corpus, 0, 30)
    # 120 documents are four fifths of 150 rows; the last block is read to its end.
    assert source.taken - ahead <= 150 + 2 * 32 + 20


def test_a_stream_is_known_by_its_source_settings_and_first_documents(folders: dict[str, Path]) -> None:
    made = settings_of(folders)
    known = stream(made).describe()
    assert stream(made).describe() == known
    changes = [
        *({"shuffle_rows": 17}, {"max_tokens": 700}, {"held_out_share": 0.2}),
        *({"lengths": (300,)}, {"short": "skip"}),
    ]
    others = [stream(replace(made, **change)).describe() for change in changes]  # type: ignore[arg-type]
    others.append(stream(settings_of(folders, "jsonl")).describe())
    others += [stream(made, seed=1).describe(), stream(made, batch=5).describe()]
    assert len({known, *others}) == len(others) + 1

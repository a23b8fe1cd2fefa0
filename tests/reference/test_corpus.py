"""Prose of the standard library: what counts as such, and that splits do not share it."""

from pydoc_data.topics import topics

import numpy as np
import pytest

from retain.reference import corpus
from retain.reference.tokenizer import load_tokenizer

LONG = "Return what is asked for, or nothing where there is no such thing."
MODULE = f'''"""{LONG} Of the module."""
import os

class Thing:
    """{LONG} Of the class."""

    def short(self):
        """Too few words."""

    async def made(self):
        """{LONG}

        Of the method.
        """
        text = """{LONG} Of no docstring."""
'''


@pytest.fixture
def two_files(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {
        "train": [("a.py", MODULE), ("broken.py", "def (:")],
        "eval": [("b.py", f'"""{LONG} Held out."""')],
    }
    monkeypatch.setattr(corpus, "sources", lambda split: held[split])


def test_prose_is_docstrings_and_topics(two_files: None) -> None:
    found = corpus.prose_texts("train")
    docstrings = [own for own in found if own.startswith(LONG)]
    assert [own.rsplit("Of ")[-1].strip() for own in docstrings] == [
        "the module.",
        "the class.",
        "the method.",
    ]
    # Indentation is the file's, and no part of what is said.
    assert docstrings[2] == f"{LONG}\n\nOf the method.\n\n"
    assert not any("Too few" in own or "no docstring" in own for own in found)
    assert len(found) - len(docstrings) > 40


def test_splits_of_prose_share_no_text(two_files: None) -> None:
    train, held = (corpus.prose_texts(split) for split in ("train", "eval"))
    assert f"{LONG} Held out.\n\n" in held and not {*train} & {*held}
    assert {*topics.values()} <= {*train, *held}


def test_prose_is_encoded_whole_in_an_order_that_stays(
    two_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "topics", {})
    ids = corpus.prose.__wrapped__("train")
    assert ids.dtype == np.int64 and np.array_equal(ids, corpus.prose.__wrapped__("train"))
    said = load_tokenizer().decode(ids)
    assert len(said) == sum(map(len, corpus.prose_texts("train")))
    assert all(own in said for own in corpus.prose_texts("train"))

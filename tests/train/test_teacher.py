"""The frozen model: loaded by name or refused with a reason, and matched with the documents."""

from pathlib import Path

import pytest

from retain.train.data import Document
from retain.train.teacher import check_documents, load_frozen
from tests.tiny import tiny_model


def test_a_local_model_is_frozen_and_needs_no_tokenizer(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    frozen = load_frozen(str(tmp_path), dtype="float32")
    assert frozen.encode is None and not frozen.model.training
    assert not any(p.requires_grad for p in frozen.model.parameters())


@pytest.mark.parametrize("name", ["no/such-model-anywhere", "reference:x"])
def test_names_that_cannot_be_resolved(name: str) -> None:
    with pytest.raises(ValueError, match=f"model='{name}'"):
        load_frozen(name)


def test_documents_of_another_tokenizer_or_too_long() -> None:
    config = tiny_model(max_position_embeddings=16).config
    check_documents(config, [Document((1, 2), (96,))])
    with pytest.raises(ValueError, match="document 1 holds token id 97 and the model knows 97 tokens"):
        check_documents(config, [Document((1,)), Document((2, 97))])
    with pytest.raises(ValueError, match="document 0 has 17 tokens with its appendix and the model takes 16"):
        check_documents(config, [Document((1,) * 10, (2,) * 7)])

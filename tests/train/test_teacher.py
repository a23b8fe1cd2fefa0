"""The frozen model: loaded by name or refused with a reason, matched with documents, and walked through."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer

from retain.hf.intercept.observe import observe
from retain.train.data.branches import check_document
from retain.train.data.document import Branch, Document, Reading
from retain.train.objectives.targets import TargetSettings
from retain.train.teacher import Frozen, View, load_frozen, walk
from tests.refused import refused
from tests.tiny import tiny_model
from tests.train.made import draw_ids


def reading(tokens: int, *branches: int) -> Reading:
    named = tuple(Branch("appendix", draw_ids(length, length)) for length in branches)
    return Reading(Document(draw_ids(tokens, 0)), named)


def test_a_local_model_is_frozen_and_needs_no_tokenizer(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    frozen = load_frozen(str(tmp_path), dtype="float32")
    assert frozen.encode is None and frozen.tokenizer is None and frozen.chat is None
    assert not frozen.model.training and not any(p.requires_grad for p in frozen.model.parameters())
    assert len(frozen.layout.evicting) == 2


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (Document((2, 97)), "a document holds token id 97 and the model knows 97 tokens"),
        (
            Document((1,) * 10, (2,) * 7),
            "a document has 10 tokens, 17 with its appendix, and the model takes 16",
        ),
        (Document((1, 2), (96,)), None),
    ],
)
def test_documents_of_another_tokenizer_or_too_long(document: Document, message: str | None) -> None:
    frozen, settings = Frozen(tiny_model(max_position_embeddings=16), None, 0), TargetSettings()
    if message is None:
        check_document(document, frozen, settings, "a document")
        return
    refused(message, check_document, document, frozen, settings, "a document")


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "qwen3_next"])
def test_a_walk_shows_every_reading_and_layer_once(family: str) -> None:
    """Views equal what `observe` shows of `[document; branch]`, for every layer, branch and reading."""
    model = tiny_model(family, dtype=torch.float64)
    readings = [reading(30, 5) if family == "qwen3_next" else reading(30, 5, 9), reading(12)]
    wanted = {
        (row, branch, evidence.layer_idx): evidence
        for row, one in enumerate(readings)
        for branch in one.branches
        for evidence in observe(model, torch.tensor([one.document.context_ids + branch.ids]))
    }
    seen: list[tuple[int, int]] = []

    def see(views: list[View]) -> None:
        for view in views:
            seen.append((view.row, view.layer_idx))
            one = readings[view.row]
            assert view.key == one.document.key and view.document.layer_idx == view.layer_idx
            assert [source for source, _ in view.branches] == [branch.source for branch in one.branches]
            assert len(view.behind) == len(view.sources) == len(one.branches)
            for (_, evidence), branch in zip(view.branches, one.branches, strict=True):
                keys_BHTD = wanted[view.row, branch, view.layer_idx].keys_BHTD
                torch.testing.assert_close(evidence.keys_BHTD, keys_BHTD, rtol=1e-9, atol=1e-9)
                assert evidence.num_queries == len(branch.ids)

    frozen = Frozen(model, None, 0)
    walk(frozen, readings, see)
    layers = [spec.layer_idx for spec in frozen.layout.evicting]
    assert sorted(seen) == [(row, layer) for row in range(2) for layer in layers]


def test_a_visitor_may_train_inside_a_walk() -> None:
    weight = torch.nn.Linear(48, 2)

    def see(views: list[View]) -> None:
        assert not torch.is_grad_enabled()
        for view in views:
            with torch.enable_grad():
                weight(view.document.hidden_BTE).square().mean().backward()

    walk(Frozen(tiny_model("qwen3"), None, 0), [reading(20, 4)], see)
    assert weight.weight.grad is not None and weight.weight.grad.abs().sum() > 0


def test_the_stream_is_shown_if_it_is_wanted() -> None:
    frozen = Frozen(tiny_model("llama"), None, 0)
    for wanted in ((), ("hidden", "keys"), ("hidden", "stream")):
        shown: list[Any] = []
        walk(
            frozen,
            [reading(9)],
            lambda views, shown=shown: shown.append(views[0].document.stream_BTE),
            wanted=wanted,
        )
        assert all((stream is not None) == ("stream" in wanted) for stream in shown)
    refused("nothing to read", walk, frozen, [], lambda views: None)


def test_a_tokenizer_that_cannot_be_asked_for_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are at hand, the hub does not answer: that is said, and not that there is no tokenizer."""
    tiny_model("llama").save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: (whole, {}))

    def unreachable(*_: Any, **__: Any) -> None:
        try:
            raise LocalEntryNotFoundError("tokenizer_config.json is not in the cache")
        except LocalEntryNotFoundError as error:
            raise OSError("We couldn't connect to the hub.") from error

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    refused("has no tokenizer that can be read: OSError: We couldn't connect", load_frozen, "nobody/nothing")

"""A packed row shows what separate forwards of transformers would show, and leaves the model as it was."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from retain.attention import causal as causal
from retain.attention.causal import causal_attention
from retain.evidence import Evidence
from retain.hf.intercept.observe import observe
from retain.hf.model.decoder import base_model, describe
from retain.hf.training.block_reader import Shown, Text, read_texts
from tests.memory import Watch
from tests.refused import refused
from tests.tiny import FAMILIES, SINGLE, tiny_model

FIELDS = ("queries_BQSD", "keys_BHTD", "values_BHTD", "hidden_BTE", "positions_BT")


def draw(length: int, seed: int) -> list[int]:
    return torch.randint(2, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# Documents longer and shorter than the windows of the tiny models; none, one and two branches.
TEXTS = [Text(draw(50, 0), [draw(9, 1), draw(40, 2)]), Text(draw(13, 3)), Text(draw(30, 4), [draw(1, 5)])]


def gather(model: Any, texts: list[Text], **settings: Any) -> dict[Any, Evidence]:
    """(text, layer, "document" or number of the branch) -> evidence."""
    found: dict[Any, Evidence] = {}

    def visit(shown: list[Shown]) -> None:
        for one in shown:
            found[one.row, one.document.layer_idx, "document"] = one.document
            for number, branch in enumerate(one.branches):
                found[one.row, one.document.layer_idx, number] = branch()

    read_texts(model, texts, visit, **settings)
    return found


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {*SINGLE}))
def test_a_row_equals_separate_forwards(family: str) -> None:
    """Hidden states of each layer come out of the attention of those before it."""
    model = tiny_model(family, dtype=torch.float64)
    texts = TEXTS[1:] if family in ("qwen3_next", "qwen3_5") else TEXTS
    found = gather(model, texts, wanted=("stream",))
    base, layers = base_model(model), [spec.layer_idx for spec in describe(model)]
    assert {key[:2] for key in found} == {(row, layer) for row in range(len(texts)) for layer in layers}
    for row, text in enumerate(texts):
        end = len(text.document)
        for number, branch in enumerate([[], *text.branches]):
            ids = torch.tensor([[*text.document, *branch]])
            with torch.no_grad():
                plain = base(ids, use_cache=False, output_hidden_states=True)
            for wanted in observe(model, ids):
                layer = wanted.layer_idx
                shown = found[row, layer, number - 1 if number else "document"]
                for field in FIELDS:
                    value = getattr(wanted, field)
                    if field == "queries_BQSD" and number:
                        value = value[:, :, end:]
                    same(getattr(shown, field), value)
                if number:
                    assert shown.stream_BTE is None
                else:
                    same(shown.stream_BTE, plain.hidden_states[layer])
                same(shown.output_weight_QDE, wanted.output_weight_QDE)
                assert bool(shown.valid_BT.all()) and shown.num_seen == ids.shape[1]
                for field in ("scaling", "soft_cap"):
                    assert getattr(shown, field) == getattr(wanted, field)
                assert (shown.sinks_Q is None) == (wanted.sinks_Q is None)
                assert (shown.rotary is None) == (wanted.rotary is None)


def test_a_rotation_that_looks_at_the_length_is_read_text_by_text() -> None:
    """A long text must not turn the short ones as if they were long."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", dtype=torch.float64, max_position_embeddings=24, rope_parameters=rope)
    texts = [Text(draw(20, 0)), Text(draw(60, 1)), Text(draw(22, 2))]
    found = gather(model, texts)
    for row, text in enumerate(texts):
        for wanted in observe(model, torch.tensor([text.document])):
            same(found[row, wanted.layer_idx, "document"].keys_BHTD, wanted.keys_BHTD)


CASES = [
    *({}, {"window": 5}, {"window": 90}, {"soft_cap": 2.0}),
    *({"soft_cap": 2.0, "window": 6}, {"sinks": True}, {"sinks": True, "window": 4, "soft_cap": 3.0}),
]


@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("num_queries", [1, 6, 23, 40])
@pytest.mark.parametrize("mask", [64, 2**22])
def test_causal_attention_is_its_definition(
    settings: dict[str, Any], num_queries: int, mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal, "MASK", mask)
    monkeypatch.setattr(causal, "ROWS", (2, 3))
    generator = torch.Generator().manual_seed(0)
    T, Q, H, D = 40, 4, 2, 8
    queries, keys, values = (
        torch.randn(1, heads, length, D, generator=generator, dtype=torch.float64)
        for heads, length in ((Q, num_queries), (H, T), (H, T))
    )
    sinks = torch.randn(Q, generator=generator, dtype=torch.float64) if "sinks" in settings else None
    given = {name: value for name, value in settings.items() if name != "sinks"}
    out = causal_attention(queries, keys, values, scaling=0.3, sinks_Q=sinks, **given)
    for q in range(Q):
        for s in range(num_queries):
            place = T - num_queries + s
            seen = range(place + 1)
            if "window" in given:
                seen = range(max(0, place - given["window"] + 1), place + 1)
            logits = [float(queries[0, q, s] @ keys[0, q // 2, i]) * 0.3 for i in seen]
            if "soft_cap" in given:
                logits = [given["soft_cap"] * math.tanh(x / given["soft_cap"]) for x in logits]
            total = sum(map(math.exp, logits)) + (math.exp(float(sinks[q])) if sinks is not None else 0.0)
            wanted = sum(
                math.exp(x) / total * values[0, q // 2, i] for i, x in zip(seen, logits, strict=True)
            )
            torch.testing.assert_close(out[0, q, s], wanted, rtol=1e-9, atol=1e-9)


def peak(model: Any, tokens: int, branches: tuple[int, ...] = (8,)) -> int:
    text = Text(draw(tokens, 0), [draw(length, 1) for length in branches])
    with Watch() as watch:
        read_texts(model, [text], lambda shown: [None for _ in shown[0].branches][:0])
    return watch.peak


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_memory_is_linear_in_the_row_and_does_not_grow_with_the_layers(family: str) -> None:
    def deep(layers: int) -> Any:
        kinds = {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
        how = {"num_hidden_layers": layers, **(kinds if family == "gemma3" else {})}
        return tiny_model(family, max_position_embeddings=16384, **how)

    model = deep(4)
    peaks = {tokens: peak(model, tokens) for tokens in (1024, 2048, 4096, 8192)}
    slopes = [(peaks[2 * tokens] - peaks[tokens]) / tokens for tokens in (1024, 2048, 4096)]
    assert max(slopes) <= 1.1 * min(slopes)
    assert peaks[8192] < 8192 * 8192 / 2, "half a mask of all pairs"
    assert peak(deep(8), 2048) <= 1.02 * peaks[2048]


@pytest.mark.parametrize(
    ("family", "texts", "message"),
    [
        ("llama", [], "nothing to read: there are no texts"),
        ("llama", [Text([1, 2]), Text([])], "text 1 has an empty document or branch"),
        ("llama", [Text([1, 2], [[3], []])], "text 0 has an empty document or branch"),
        ("qwen3_next", TEXTS, "has recurrent layers, which read at most one branch"),
    ],
)
def test_texts_that_cannot_be_read_are_refused(family: str, texts: list[Text], message: str) -> None:
    refused(message, read_texts, tiny_model(family), texts, lambda shown: None)

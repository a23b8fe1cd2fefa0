"""The layer-local objective: what it starts from, and that its parts add up however they are cut."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from retain.gates import GateSet, build_gates
from retain.kernels.attention_stats import reference as stats
from retain.train.data.branches import readings_of
from retain.train.data.corpus import Corpus, load_corpus
from retain.train.data.document import Document
from retain.train.local_stage import LayerLocal
from retain.train.objectives.case import LossSettings
from retain.train.objectives.targets import TargetSettings, layer_target
from retain.train.recipe import check_reading
from retain.train.teacher import Frozen, View, load_frozen, walk
from tests.memory import Watch
from tests.refused import refused
from tests.tiny import tiny_model
from tests.train.made import gates_for, look


@pytest.fixture
def config(make_config: Callable[..., Any]) -> Any:
    return make_config()


@pytest.fixture
def frozen(config: Any) -> Frozen:
    return load_frozen(config.model, dtype="float32")


@pytest.fixture
def corpus(config: Any) -> Corpus:
    found = load_corpus(config.data, shortest=8, seed=0, batch_documents=4, encode=None)
    assert isinstance(found, Corpus)
    return found


def fresh(family: str, **settings: int) -> GateSet:
    torch.manual_seed(0)
    return build_gates(family, {layer: {"E": 48, "H": 2, **settings} for layer in range(2)})


def test_gates_begin_with_a_standardised_input_and_the_mean_target(
    config: Any, frozen: Frozen, corpus: Corpus
) -> None:
    gates = fresh("mlp", F=16)
    documents = corpus.documents_of(0)
    LayerLocal(gates, frozen, config.target, config.loss, seed=0).prepare_(documents)
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    risks: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def see(views: list[View]) -> None:
        for view in views:
            risk_HT, reached_HT = layer_target(view, config.target)
            assert view.document.hidden_BTE is not None
            gate: Any = gates[view.layer_idx]
            rows[view.layer_idx].append(gate.standardise(view.document.hidden_BTE)[0, reached_HT.any(0)])
            risks[view.layer_idx].append(risk_HT[:, reached_HT.any(0)])

    walk(frozen, readings_of(documents, config.target, frozen), see)
    for layer in (0, 1):
        found, risk_HN = torch.cat(rows[layer]), torch.cat(risks[layer], dim=1)
        gate: Any = gates[layer]
        torch.testing.assert_close(found.mean(0), torch.zeros(48), atol=1e-4, rtol=0)
        torch.testing.assert_close(found.std(0, correction=0), torch.ones(48), atol=1e-3, rtol=0)
        torch.testing.assert_close(gate.risk_floor_H, config.target.floor * risk_HN.mean(1))
        log_risk_HN = (risk_HN + gate.risk_floor_H[:, None]).log()
        torch.testing.assert_close(gate.out.bias.detach(), log_risk_HN.mean(1))


def gradients(
    config: Any, frozen: Frozen, packs: Sequence[Sequence[Document]]
) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    gates = fresh("linear")
    objective = LayerLocal(gates, frozen, config.target, config.loss, seed=0)
    objective.prepare_([document for pack in packs for document in pack])
    rows = []
    for pack in packs:
        rows += objective.rows_of(pack, 0, 0.25)
    found = [parameter.grad for parameter in gates.parameters()]
    assert all(gradient is not None and gradient.any() for gradient in found)
    return rows, [gradient for gradient in found if gradient is not None]


def test_packs_change_nothing_but_rounding(config: Any, frozen: Frozen, corpus: Corpus) -> None:
    documents = corpus.documents_of(0)
    whole, whole_grads = gradients(config, frozen, [documents])
    parts, part_grads = gradients(config, frozen, [documents[:1], documents[1:]])
    for one, two in zip(whole, parts, strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    for one_grad, two_grad in zip(whole_grads, part_grads, strict=True):
        torch.testing.assert_close(two_grad, one_grad, rtol=1e-3, atol=1e-6)


def test_the_gradient_is_that_of_the_reported_loss(config: Any, frozen: Frozen, corpus: Corpus) -> None:
    """A small step against it lowers the loss by step times squared norm."""
    documents = corpus.documents_of(0)
    gates = fresh("linear")
    objective = LayerLocal(gates, frozen, config.target, config.loss, seed=0)
    objective.prepare_(documents)
    before = sum(row["loss"] for row in objective.rows_of(documents, 3, 1.0))
    step = 1e-4
    fall = 0.0
    with torch.no_grad():
        for parameter in gates.parameters():
            assert parameter.grad is not None
            fall += step * float(parameter.grad.square().sum())
            parameter -= step * parameter.grad
    after = sum(row["loss"] for row in objective.rows_of(documents, 3, 1.0))
    assert before - after == pytest.approx(fall, rel=0.05)


def test_a_look_leaves_no_gradient(config: Any, frozen: Frozen, corpus: Corpus) -> None:
    gates = fresh("linear")
    objective = LayerLocal(gates, frozen, config.target, config.loss, seed=0)
    objective.prepare_(corpus.documents_of(0))
    rows = look(objective, corpus.held_out)
    assert len(rows) == len(corpus.held_out) and all(p.grad is None for p in gates.parameters())
    for row in rows:
        assert {"loss", "overlap", "overlap_random", "overlap_recency", "overlap_value_norm"} <= row.keys()


def test_what_cannot_be_read_is_refused(make_config: Callable[..., Any]) -> None:
    recurrent, plain = (Frozen(tiny_model(family), None, 0) for family in ("qwen3_next", "llama"))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    dynamic = Frozen(tiny_model("llama", rope_parameters=rope), None, 0)
    chunks = {"sources": {"own": 1.0, "repeat": 1.0}, "horizon": 8, "repeat_chunk": 99}
    both = {"sources": {"appendix": 1.0, "repeat": 1.0}, "horizon": 8}
    for target in (chunks, both):
        said = "recurrent layers, which read at most one branch behind a document"
        refused(said, check_reading, make_config(target=target), recurrent, sharded=False)
    check_reading(make_config(target=chunks | {"repeat_chunk": 100}), recurrent, sharded=False)
    check_reading(make_config(target=chunks), plain, sharded=True)
    for frozen in (recurrent, dynamic):
        check_reading(make_config(), frozen, sharded=False)
        refused("forwards of its own", check_reading, make_config(), frozen, sharded=True)
    refused("forwards of its own", check_reading, make_config(stage="lookahead"), plain, sharded=True)
    written = make_config(target={"sources": {"continuation": 1.0}})
    refused("generates at its own length", check_reading, written, plain, sharded=True)
    check_reading(written, plain, sharded=False)


def test_a_layer_of_which_nothing_is_reached_is_refused() -> None:
    frozen, horizon = Frozen(tiny_model("mistral"), None, 0), 80
    gates, loss = gates_for(frozen.model), LossSettings()
    target = TargetSettings(horizon=horizon)
    objective = LayerLocal(gates, frozen, target, loss, seed=0)
    document = Document(tuple(range(2, 2 + horizon)))
    refused(r"layer 0: no query of target.sources=\[own, appendix\] reaches", objective.prepare_, [document])
    objective.prepare_([Document(document.context_ids, (3, 4, 5))])
    assert all(value.isfinite().all() for value in gates.state_dict().values())


@pytest.mark.parametrize("source", ["repeat", "continuation"])
def test_memory_of_training_is_linear_and_does_not_grow_with_the_layers(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From documents to gradients, with a branch for every few tokens, and the layer's output in the loss."""
    for name, floats in (("_BLOCK", 2**13), ("_LARGEST_BLOCK", 2**14), ("_ROWS", 1)):
        monkeypatch.setattr(stats, name, floats)  # blocks that short documents fill too
    size = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    loss = LossSettings(terms={"mse": 1.0, "layer_output": 1.0}, output_queries=16)
    settings: dict[str, Any] = {"sources": {"own": 1.0, source: 1.0}, "aggregate": "max"}
    target = TargetSettings(**settings, repeat_chunk=128, continuation_tokens=2, weight="value_norm")

    def peak(tokens: int, layers: int) -> int:
        model = tiny_model("llama", max_position_embeddings=32768, num_hidden_layers=layers, **size)
        gates = build_gates("linear", {layer: {"E": 32, "H": 1} for layer in range(layers)})
        ids = torch.randint(2, 97, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        objective = LayerLocal(gates, Frozen(model, None, 0), target, loss, seed=0)
        for parameter in gates.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with Watch() as watch:
            objective.rows_of([Document(tuple(ids))], 0, 1.0)
        return watch.peak

    peaks = [peak(tokens, 4) for tokens in (512, 1024, 2048)]
    slopes = [(peaks[place + 1] - peaks[place]) / 2**place for place in range(2)]
    assert max(slopes) <= 1.1 * min(slopes)
    assert peaks[2] < 2048 * 2048 * 4, "a row of float32 for every pair"
    if source == "repeat":
        assert peak(1024, 8) <= 1.02 * peaks[1]

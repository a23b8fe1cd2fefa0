"""The lookahead stage: its loss and gradient are those of one plain graph, and it learns."""

import pytest
import torch

from retain.gates import GateSet
from retain.hf.intercept.lookahead_pass import lookahead_gates
from retain.hf.model.decoder import base_model, describe
from retain.train.data.document import Document
from retain.train.lookahead_stage import Lookahead
from retain.train.objectives.targets import TargetSettings
from retain.train.teacher import Frozen
from tests.hf.behind import paid_behind
from tests.tiny import tiny_model
from tests.train.made import look

NUM_TOKENS = 3
ANSWER = TargetSettings(sources={"appendix": 1.0})


def frozen_of(model) -> Frozen:
    return Frozen(model, None, 0)


def documents(number: int = 3, appendix: int = 5) -> list[Document]:
    generator = torch.Generator().manual_seed(11)
    drawn = [
        torch.randint(2, 97, (30 + 7 * i + appendix,), generator=generator).tolist() for i in range(number)
    ]
    return [Document(tuple(ids[: len(ids) - appendix]), tuple(ids[len(ids) - appendix :])) for ids in drawn]


def gates_of(model, **settings) -> GateSet:
    gates = lookahead_gates(model, num_tokens=NUM_TOKENS, rank=2, **settings)
    generator = torch.Generator().manual_seed(7)
    for up in gates.extension.up.values():
        up.data = 0.1 * torch.randn(up.shape, generator=generator)
    return gates.to(model.dtype)


def naive_loss(model, gates: GateSet, document: Document, answers: dict[tuple[int, ...], float]):
    """`mean_layers mean_heads sum_i s_i log(s_i / s^_i)`, one graph, all attention eager."""
    ids = torch.tensor([document.context_ids])
    specs, embedding = describe(model), base_model(model).get_input_embeddings()

    def per_head(paid: list[torch.Tensor]) -> list[torch.Tensor]:
        scores = []
        for spec, paid_QT in zip(specs, paid, strict=True):
            group = paid_QT.unflatten(0, (spec.num_kv_heads, -1))
            score = group.mean(1)
            scores.append(score / score.sum(-1, keepdim=True))
        return scores

    targets = [0.0] * len(specs)
    with torch.no_grad():
        for answer, weight in answers.items():
            found = per_head(paid_behind(model, ids, embedding(torch.tensor([answer]))))
            targets = [
                total + weight / sum(answers.values()) * one
                for total, one in zip(targets, found, strict=True)
            ]
    predicted = per_head(paid_behind(model, ids, gates.extension.tokens_SE[None], gates.extension))
    losses = [(s * (s / p).log()).sum(-1).mean() for s, p in zip(targets, predicted, strict=True)]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_loss_and_gradient_are_those_of_one_plain_graph(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    gates, found = gates_of(model), documents(2)
    objective = Lookahead(gates, frozen_of(model), ANSWER, seed=0)
    rows = objective.rows_of(found, 0, 0.5)
    got = [parameter.grad.clone() for parameter in objective.gates.parameters()]
    gates.zero_grad()
    losses = [naive_loss(model, gates, one, {one.appendix_ids: 1.0}) for one in found]
    (0.5 * sum(losses)).backward()
    for row, loss in zip(rows, losses, strict=True):
        assert row["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    # Norms are computed in float32 inside the models.
    wanted = [parameter.grad for parameter in objective.gates.parameters()]
    scale = max(float(one.abs().max()) for one in wanted)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4 * scale)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_several_answers_are_mixed_by_weight() -> None:
    model = tiny_model("qwen3", dtype=torch.float64)
    gates, (found,) = gates_of(model), documents(1)
    sources = {"appendix": 1.0, "continuation": 3.0}
    target = TargetSettings(sources=sources, continuation_tokens=4)
    objective = Lookahead(gates, frozen_of(model), target, seed=0)
    (row,) = look(objective, [found])
    with torch.no_grad():
        written = model.generate(torch.tensor([found.context_ids]), max_new_tokens=4, do_sample=False)
        answer = tuple(written[0, len(found.context_ids) :].tolist())
        loss = naive_loss(model, gates, found, {found.appendix_ids: 1.0, answer: 3.0})
    assert row["loss"] == pytest.approx(float(loss), rel=1e-4)


def test_gradients_add_up_and_nothing_is_drawn() -> None:
    model = tiny_model("qwen3")
    gates, found = gates_of(model), documents(3)
    objective = Lookahead(gates, frozen_of(model), ANSWER, seed=0)

    def gradient(batches: list[list[Document]], step: int) -> list[torch.Tensor]:
        gates.zero_grad()
        for batch in batches:
            objective.rows_of(batch, step, 0.25)
        return [parameter.grad.clone() for parameter in objective.gates.parameters()]

    random = torch.get_rng_state()
    whole, again = gradient([found], 0), gradient([found], 5)
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))
    apart = gradient([[one] for one in found], 0)
    for one, other in zip(whole, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert torch.equal(torch.get_rng_state(), random)


def test_looking_leaves_no_gradient_and_reports_baselines() -> None:
    model = tiny_model("qwen3")
    gates = gates_of(model)
    objective = Lookahead(gates, frozen_of(model), ANSWER, seed=0)
    rows = look(objective, documents(2))
    assert all(parameter.grad is None for parameter in gates.parameters())
    names = {"loss", "overlap", "overlap_random", "overlap_recency", "overlap_value_norm"}
    assert all(set(row) == names for row in rows)
    assert look(objective, documents(2)) == rows


def test_what_cannot_be_learned_is_refused() -> None:
    model = tiny_model("llama")
    frozen = frozen_of(model)
    with pytest.raises(
        ValueError, match=r"lookahead tokens learn what comes behind .* set target.sources to"
    ):
        Lookahead(gates_of(model), frozen, TargetSettings(), seed=0)
    with pytest.raises(ValueError, match="needs something after every document, and document 0 has nothing"):
        look(Lookahead(gates_of(model), frozen, ANSWER, seed=0), documents(1, appendix=0))

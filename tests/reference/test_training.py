"""The recipe made the shipped weights: its first steps give the committed curve, its parts hold."""

import json
from dataclasses import asdict

import pytest
import torch

from retain.reference.documents import Writer
from retain.reference.evaluate import accuracy
from retain.reference.items import SEEN_TASKS
from retain.reference.model import SEEDS, build, load_model, save_model, weights_path
from retain.reference.recipe import Phase, Recipe, Stage
from retain.reference.tokenizer import load_tokenizer
from retain.reference.train import Curve, answer_loss, rate, train_phase
from tests.refused import refused

# Another Python version brings other text, and bfloat16 rounds differently on other processors.
CURVE_TOLERANCE = 0.04


def committed_curve(seed: int) -> list[dict[str, float]]:
    lines = weights_path(seed).with_suffix(".curve.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def test_the_first_steps_give_the_committed_curve() -> None:
    golden = committed_curve(0)[0]
    curve = Curve(50, None)
    train_phase(build(0).train(), Recipe(), 0, 0, curve, stop_after=50)
    (row,) = curve.rows
    assert row["step"] == golden["step"] == 50
    assert row["tokens"] == golden["tokens"]
    assert row["loss"] == pytest.approx(golden["loss"], rel=CURVE_TOLERANCE)


def test_a_curve_goes_on_where_the_first_phase_ended(tmp_path) -> None:
    path = tmp_path / "curve.jsonl"
    rows = [{"step": step, "tokens": 10 * step, "minutes": step / 100} for step in (50, 100, 150)]
    path.write_text("\n".join(map(json.dumps, [{"seed": 0}, *rows])) + "\n")
    curve = Curve(50, path)
    curve.go_on_after(100)
    assert curve.rows == rows[:2]
    assert curve.tokens == 1000
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"seed": 0}, *rows[:2]]
    # Killed while it wrote a row.
    with path.open("a") as file:
        file.write('{"step": 150, "to')
    curve.go_on_after(100)
    assert curve.rows == rows[:2]
    refused("its rows end at step 100, .* goes on from step 150", curve.go_on_after, 150)
    path.unlink()
    refused("is gone or cut: its rows end at step 0", curve.go_on_after, 100)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_seed_solves_its_tasks_at_the_end_of_its_curve_and_by_generation(seed: int) -> None:
    last = committed_curve(seed)[-1]
    assert last["step"] == Recipe().steps
    assert min(last[kind] for kind in ("get", "all", "trace", "list", "use")) > 0.97
    assert last["common"] > 0.9
    results = accuracy(load_model(seed), items=3, context_tokens=400, tasks=SEEN_TASKS)
    assert sum(row["exact"] for row in results.values()) / len(results) > 0.85, results


def test_an_untrained_model_answers_nothing() -> None:
    results = accuracy(build(0).eval(), items=3, context_tokens=200, tasks=("single", "tracing"))
    assert max(row["exact"] for row in results.values()) == 0.0


def test_saved_weights_come_back_rounded_to_bfloat16(tmp_path) -> None:
    model = build(3)
    save_model(model, tmp_path / "seed3.safetensors")
    again = load_model(3, path=tmp_path / "seed3.safetensors")
    for (name, before), (_, after) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(before.to(torch.bfloat16).float(), after), name


def test_an_unknown_seed_is_refused_with_the_command_that_makes_it() -> None:
    refused(r"no reference model of seed 99[\s\S]* --seed 99", load_model, 99)


def test_the_tokenizer_encodes_any_text() -> None:
    tokenizer = load_tokenizer()
    for text in ("def f(x):\n\treturn x", "Grüße, 你好 🙂", "\x00\x7f"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer("<q> get name<a>")["input_ids"][0] == tokenizer.convert_tokens_to_ids("<q>")


def test_the_loss_adds_up_what_is_accepted() -> None:
    logits_NV = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]]))
    losses, right = answer_loss(logits_NV, torch.tensor([[1, 2, -1], [3, -1, -1]]))
    torch.testing.assert_close(losses, -torch.log(torch.tensor([0.5, 0.4])))
    assert right.tolist() == [False, True]


def test_rates_warm_up_stay_and_fall() -> None:
    phase = Phase((Stage(64, 100),), peak=0.5, decay_share=0.5)
    rates = [rate(phase, 10, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.05)
    assert rates[9:50] == [0.5] * 41
    assert rates[75] == pytest.approx(0.25)
    assert rates[99] == pytest.approx(0.01)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_recipe_is_that_of_the_weights_that_are_shipped(seed: int) -> None:
    """The first line of a curve; settings that are younger than it do nothing as they stand."""
    trained = json.loads(weights_path(seed).with_suffix(".curve.jsonl").read_text().splitlines()[0])["recipe"]
    now = json.loads(json.dumps(asdict(Recipe())))
    assert now | trained == now and len(trained) >= 9


def test_documents_of_training_and_evaluation_differ_at_the_same_seed() -> None:
    assert (Writer("train", 1).text[:1000] != Writer("eval", 1).text[:1000]).any()

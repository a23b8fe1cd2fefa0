"""Another size is trained by the same loop: its batches, its state, its folder, its plan.

The text is a stand-in, since what is tested here is no matter of text; `test_corpus.py` reads the real one.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from retain.hf.version_names import set_checkpointing_
from retain.reference import documents
from retain.reference.batches import batch_at, batches, parts
from retain.reference.checkpoint import Checkpoint
from retain.reference.cost import count, held_bytes, matrix_parameters
from retain.reference.curriculum import WEIGHTS, Batch, text_document
from retain.reference.documents import Writer, words
from retain.reference.items import TASKS, write_item
from retain.reference.model import build, load_folder, save_folder
from retain.reference.recipe import LARGE, SIZES, SMALL, TINY, Phase, Recipe, Stage
from retain.reference.train import Curve, Resources, files_of, main, make, run_settings, step_loss, train
from tests.refused import refused

CPU = torch.device("cpu")
# Two phases of five steps, saved every second: one is killed between saves, in either phase.
QUICK = replace(
    TINY,
    recipe=replace(
        TINY.recipe,
        phases=(Phase((Stage(64, 5),)), Phase((Stage(64, 5),), 0.5, 1.0, 0.35)),
        tokens_per_step=256,
        reach=150,
        log_every=1,
        save_every=2,
    ),
)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """Text and prose of the pool's words, told apart by which half of them they use."""
    pool, rng = words(), np.random.default_rng(0)
    text, prose = rng.choice(pool[:256], 40_000), rng.choice(pool[256:], 40_000)
    monkeypatch.setattr(documents, "stream", lambda split: text)
    monkeypatch.setattr(documents, "prose", lambda split: prose)
    return text, prose


def same(one: tuple[int, Batch], other: tuple[int, Batch]) -> bool:
    arrays = map(np.array_equal, vars(one[1]).values(), vars(other[1]).values())
    return one[0] == other[0] and all(arrays)


def test_a_step_of_an_indexed_recipe_depends_on_nothing_before_it() -> None:
    recipe = TINY.recipe
    whole = list(batches(recipe, 0, 3))
    assert [length for length, _ in whole] == [64] * 6 + [128] * 6
    assert all(map(same, whole[9:], batches(recipe, 0, 3, start=9))) and same(
        batch_at(recipe, 0, 3, 7), whole[7]
    )
    twice = replace(recipe, phases=(recipe.phases[0],) * 2)
    for _, other in (batch_at(recipe, 0, 3, 6), batch_at(recipe, 0, 4, 7), batch_at(twice, 1, 3, 7)):
        assert not np.array_equal(other.ids_BT, whole[7][1].ids_BT)
    refused("step 12 is behind the phase's 12", batch_at, recipe, 0, 3, 12)


def test_a_stream_and_processes_go_on_where_they_were() -> None:
    recipe = Recipe(phases=(Phase((Stage(64, 4), Stage(128, 3))),), tokens_per_step=256)
    whole, rest = list(batches(recipe, 0, 1)), list(batches(recipe, 0, 1, start=5))
    assert [length for length, _ in whole] == [64] * 4 + [128] * 3
    assert len(rest) == 2 and all(map(same, rest, whole[5:]))
    refused(r"loaders=2: this recipe's documents are one stream.*pass 0", batches, Recipe(), 0, 0, loaders=2)
    found = list(batches(QUICK.recipe, 0, 3, start=3, loaders=1))
    assert len(found) == 2 and all(map(same, batches(QUICK.recipe, 0, 3, start=3), found))


def test_parts_are_the_batch() -> None:
    _, batch = batch_at(TINY.recipe, 0, 0, 0)
    assert [*parts(batch, 8)] == [batch]
    cut = list(parts(batch, 3))
    assert [len(part.ids_BT) for part in cut] == [3, 3, 2]
    assert np.array_equal(np.concatenate([part.ids_BT for part in cut]), batch.ids_BT)
    # Every target still follows the same token, and accepts the same ones.
    for name in ("accept", "kinds"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in cut]), getattr(batch, name))
    tokens = [part.ids_BT.reshape(-1)[part.places] for part in cut]
    assert np.array_equal(np.concatenate(tokens), batch.ids_BT.reshape(-1)[batch.places])


@pytest.mark.parametrize(
    "room", [Resources(micro_tokens=150), Resources(micro_tokens=1), Resources(checkpointing=True)]
)
def test_less_room_gives_the_same_gradients(room: Resources) -> None:
    _, batch = batch_at(QUICK.recipe, 0, 0, 0)
    kind_weights = torch.tensor(list(WEIGHTS.values()))
    got = []
    for own in (Resources(), room):
        model = build(0, **QUICK.model).train()
        if own.checkpointing:
            set_checkpointing_(model, True)
        loss, losses, right = step_loss(model, batch, kind_weights, own.micro_tokens)
        assert len(losses) == len(right) == len(batch.places)
        got.append((loss, losses, torch.cat([p.grad.reshape(-1) for p in model.parameters()])))
    assert got[0][0] == pytest.approx(got[1][0], rel=1e-3)
    torch.testing.assert_close(got[0][1], got[1][1], rtol=0.02, atol=0.02)
    # bfloat16 products of other shapes round differently.
    apart = (got[0][2] - got[1][2]).norm() / got[0][2].norm()
    assert apart < 0.02


class Killed(Exception):
    """Stands for a signal."""


@pytest.mark.parametrize("at", [3, 8])
def test_a_killed_run_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def run(output: Path) -> None:
        make(QUICK, 0, output, device=CPU, room=Resources())

    run(whole)
    add = Curve.add

    def dies(self: Curve, step: int, *rest: object) -> bool:
        if step == at:
            raise Killed
        return add(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Curve, "add", dies)
        with pytest.raises(Killed):
            run(killed)
    assert not (killed / "model.safetensors").exists()
    settings, unfinished = run_settings(QUICK, 0), files_of(killed)[1]
    assert Checkpoint(unfinished, settings).found
    run(killed)
    one, other = map(load_folder, (whole, killed))
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    rows = [
        [json.loads(line) for line in files_of(own)[0].read_text().splitlines()] for own in (whole, killed)
    ]
    for own in rows:
        assert own[0] == json.loads(json.dumps(settings)) and len(own) == 11
        [row.pop("minutes") for row in own[1:]]
    assert rows[0] == rows[1]
    assert not unfinished.exists() and not list(killed.glob("*partial*"))


def test_another_run_does_not_go_on(tmp_path: Path) -> None:
    path = tmp_path / "unfinished"
    model = build(0, **QUICK.model)
    settings = run_settings(QUICK, 0)
    Checkpoint(path, settings).save(1, 2, model, [])
    again = Checkpoint(path, settings)
    assert (again.found, again.phase_idx, again.step) == (True, 1, 2)
    with pytest.raises(ValueError, match=r"unfinished run of another planted, seed: pass another --output"):
        Checkpoint(path, run_settings(QUICK, 1, planted=False))
    path.write_bytes(b"damaged")
    refused(r"holds no unfinished run .*remove it to begin again", Checkpoint, path, settings)


def test_a_loss_that_is_none_stops_and_says_where_the_last_state_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = Checkpoint(tmp_path / "unfinished", {})
    result = (float("nan"), torch.zeros(1), torch.zeros(1, dtype=torch.bool))
    monkeypatch.setattr("retain.reference.train.step_loss", lambda *given: result)
    with pytest.raises(
        RuntimeError, match=r"the loss is nan at step 1, length 64; the last good state is in"
    ):
        train(build(0, **QUICK.model), QUICK.recipe, 0, Curve(1, None), unfinished=unfinished)


def test_a_folder_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    model = build(2, **TINY.model).eval()
    save_folder(model, tmp_path)
    plain, own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"), load_folder(tmp_path)
    assert plain.dtype == own.dtype == torch.float32 and not own.training
    ids = torch.tensor([[1, 700, 800, 900]])
    assert torch.equal(own(ids).logits, model(ids).logits)
    assert own.config.max_position_embeddings == 512
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("<q> get", add_special_tokens=False)["input_ids"][0] == 3
    assert tokenizer.padding_side == "left"


def test_what_is_no_reference_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model at .*: make one with `python -m retain.reference.train"):
        load_folder(tmp_path / "nothing")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 32_000}))
    refused(r"knows 32000 tokens.*3072.*take suite=text", load_folder, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 3072, "model_type": "qwen3"}))
    refused("cannot be loaded", load_folder, tmp_path)


def test_planting_can_be_left_out() -> None:
    for planted in (True, False):
        bias = build(0, planted=planted, **TINY.model).model.layers[0].self_attn.k_proj.bias
        assert bool(torch.any(bias != 0)) == planted


def test_prose_fills_its_share_of_documents(
    stand_in: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, prose = (set(own.tolist()) for own in stand_in)

    def documents_in_prose(prose_share: float) -> int:
        writer = Writer("train", 0, prose_share=prose_share)
        found = [set(writer.filler(200, (), ()).tolist()) for _ in range(60)]
        # A fifth are decoys, of either half; the rest is one text.
        return sum(len(ids & prose) > len(ids & text) for ids in found)

    assert documents_in_prose(0.0) == 0 and documents_in_prose(1.0) == 60
    assert 15 <= documents_in_prose(0.5) <= 45
    # Without it, prose is not even read, and a seed's documents are as they were before there was any.
    mixed = text_document(Writer("train", 5, prose_share=0.5), 128)
    monkeypatch.setattr(documents, "prose", lambda split: pytest.fail("no prose was asked for"))
    one, two = (text_document(Writer("train", seed), 128) for seed in (5, (5,)))
    assert np.array_equal(one.ids, two.ids) and not np.array_equal(one.ids, mixed.ids)


def test_a_long_document_states_more_where_it_may() -> None:
    few, many = (
        text_document(Writer("train", 1), 4096, **limits)
        for limits in ({}, {"statement_tokens": 4096, "most_facts": 160})
    )
    assert len(few.ids) == len(many.ids) == 4096
    stated, more = (sum(target.kind != "text" for target in made.targets) for made in (few, many))
    assert more > 1.5 * stated


def test_a_filler_without_a_word_that_stands_once_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writer, "quotable", lambda *given: np.array([], dtype=np.int64))
    made = text_document(Writer("train", 1), 512)
    assert len(made.ids) == 512 and {target.kind for target in made.targets} - {"quote"}
    assert "quote" not in {target.kind for target in made.targets}


@pytest.mark.parametrize("task", TASKS)
def test_items_are_written_at_the_longest_context(task: str) -> None:
    context_ids, asked = write_item(Writer("eval", 3), task, 8192)
    assert len(context_ids) == 8192 and asked.score(asked.gold_ids) == (1.0, 1.0)


def test_every_size_fits_its_positions() -> None:
    assert [*SIZES] == ["small", "tiny", "large"] and SMALL.recipe == Recipe() and not SMALL.model
    for size in SIZES.values():
        positions = size.model.get("max_position_embeddings", 4096)
        longest = max(stage.length for phase in size.recipe.phases for stage in phase.stages)
        assert longest < size.recipe.reach <= positions
        assert size.recipe.save_every % size.recipe.log_every == 0
    assert LARGE.recipe.sequences(8192) == 4 and Recipe().sequences(1024) == 2


def test_a_plan_counts_what_a_run_does() -> None:
    recipe = Recipe(phases=(Phase((Stage(64, 3), Stage(1024, 2))),), tokens_per_step=2048)
    model = build(0, **TINY.model)
    matrices = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    )
    assert matrix_parameters(model) == matrices
    # Scores and their product with the values: 2 D each for every entry not after the query.
    tokens, entries = 3 * 32 * 64 + 2 * 2 * 1024, 3 * 32 * 64**2 / 2 + 2 * 2 * 1024**2 / 2
    assert count(recipe, model) == (tokens, 6 * matrices * tokens, 3 * (3 * 4) * 2 * (2 * 32) * entries)
    assert count(recipe, model, checkpointing=True)[1] == pytest.approx(8 * matrices * tokens)


def test_what_the_backward_pass_needs_grows_with_layers() -> None:
    three, six = (held_bytes(build(0, **{**TINY.model, "num_hidden_layers": n}).train()) for n in (3, 6))
    assert 1.8 < six / three < 2.2
    # At least what every layer's matrices read, in bfloat16: width, heads, twice the feed-forward.
    assert three > 3 * 2 * (64 + 4 * 32 + 64 + 2 * 128)


def test_a_plan_is_printed_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("retain.reference.cost.tokens_a_second", lambda recipe, length: 1e5)
    assert main(["--size", "tiny", "--plan", "--loaders", "2", "--micro-tokens", "64"]) == 0
    said = capsys.readouterr().out
    for part in ("size tiny", "64 x 6, 128 x 6; 128 x 4", "in 16 steps of at most 512", "for 128 tokens"):
        assert part in said, part
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--size", "lrage"], r"unknown size of a reference model 'lrage': did you mean 'large'"),
        (["--size", "tiny", "--micro-tokens", "0"], r"--micro-tokens 0: pass 1 or more"),
        (["--loaders", "2"], r"--loaders 2: the documents of size small are one stream"),
        (["--size", "tiny", "--device", "gpu"], r"--device 'gpu' is none: pass cpu, cuda"),
        (["--size", "tiny", "--output", "here.safetensors"], r"only size small is loaded from one: pass a"),
        (["--size", "tiny", "--output", "done"], r"done holds a finished model: pass another --output"),
    ],
)
def test_what_cannot_be_is_said(
    typed: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "model.safetensors").touch()
    assert main(typed) == 2
    assert re.search(said, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["done"]

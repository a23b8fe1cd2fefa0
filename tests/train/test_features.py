"""Features on disk: the same examples come back, extraction goes on, other recipes are refused."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open

from retain.gates import GateInputs
from retain.train.data.document import Document
from retain.train.data.features import RECIPE_FILE, CachedExamples, Example, FeatureSettings, fill_, recipe_of
from tests.refused import refused

LAYERS = (1, 3)
DOCUMENTS = [Document(tuple(range(2, 20 + 3 * i)), tuple(range(5, 5 + i))) for i in range(7)]
RECIPE = recipe_of({"dtype": "bfloat16"}, model_sha256="m", layers=LAYERS, gate_inputs=["hidden", "keys"])


class Source:
    """A teacher whose examples are functions of document and layer, views into one packed row."""

    def __init__(self, *, stop_after: int | None = None) -> None:
        self.asked: list[int] = []
        self.stop_after = stop_after

    def __call__(self, documents: Sequence[Document], visit: Callable[[list[Example]], None]) -> None:
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked += [document.key for document in documents]
        for layer in LAYERS:
            visit([self.example(layer, row, document) for row, document in enumerate(documents)])

    def example(self, layer: int, row: int, document: Document) -> Example:
        draw = torch.Generator().manual_seed(document.key % 2**31 + layer)
        T = len(document.context_ids)
        row_BTE = torch.randn(1, T + 50, 6, generator=draw).to(torch.bfloat16)
        keys = torch.randn(1, 2, T, 4, generator=draw).to(torch.bfloat16).transpose(2, 3)
        inputs = GateInputs(hidden_BTE=row_BTE[:, 20 : 20 + T], keys_BHTD=keys.transpose(2, 3))
        target = torch.rand(2, T, generator=draw)
        return Example(layer, row, document.key, inputs, target, target > 0.2, view=object())


def collect(source: Any, documents: Sequence[Document]) -> list[Example]:
    found: list[Example] = []
    source(documents, found.extend)
    return found


def same(left: Example, right: Example) -> None:
    assert (left.layer_idx, left.row, left.key) == (right.layer_idx, right.row, right.key)
    for name in ("hidden_BTE", "keys_BHTD"):
        a, b = getattr(left.inputs, name), getattr(right.inputs, name)
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert right.inputs.values_BHTD is None
    assert left.target_HT.dtype == right.target_HT.dtype == torch.float32
    assert torch.equal(left.target_HT, right.target_HT) and torch.equal(left.reached_HT, right.reached_HT)
    assert right.view is None


def test_what_comes_back_is_what_the_teacher_gave(tmp_path: Path) -> None:
    said: list[str] = []
    source = Source()
    fill_(tmp_path / "f", DOCUMENTS, source, RECIPE, FeatureSettings(shard_documents=3), say=said.append)
    assert source.asked == [document.key for document in DOCUMENTS]
    assert len(list((tmp_path / "f").glob("shard-*.safetensors"))) == 3
    assert not list((tmp_path / "f").glob("*.new"))
    cached = CachedExamples(tmp_path / "f", RECIPE)
    # In any order, across shards, the same document twice.
    asked = [DOCUMENTS[i] for i in (5, 0, 2, 5)]
    expected = collect(Source(), asked)
    got = collect(cached, asked)
    assert [e.layer_idx for e in got] == [1, 1, 1, 1, 3, 3, 3, 3]
    for left, right in zip(expected, got, strict=True):
        same(left, right)
    assert len(said) == 1 and "features of 7 documents (of 7" in said[0] and "GiB free" in said[0]


def test_views_of_a_packed_row_are_written_alone(tmp_path: Path) -> None:
    fill_(tmp_path, DOCUMENTS[:1], Source(), RECIPE, FeatureSettings(), say=lambda text: None)
    (shard,) = tmp_path.glob("shard-*.safetensors")
    T = len(DOCUMENTS[0].context_ids)
    own = 2 * T * (6 * 2 + 2 * 4 * 2 + 2 * 4 + 2)
    assert own < shard.stat().st_size < own + 2000
    with safe_open(shard, framework="pt") as file:
        assert set(file.keys()) == {
            f"{DOCUMENTS[0].name}/{layer}/{field}"
            for layer in LAYERS
            for field in ("hidden_BTE", "keys_BHTD", "target_HT", "reached_HT")
        }


def test_extraction_goes_on_where_it_stopped(tmp_path: Path) -> None:
    settings = FeatureSettings(shard_documents=2)
    with pytest.raises(KeyboardInterrupt):
        fill_(tmp_path, DOCUMENTS, Source(stop_after=4), RECIPE, settings, say=lambda text: None)
    (tmp_path / "shard-torn.safetensors.new").write_bytes(b"half")
    source, said = Source(), []
    fill_(tmp_path, DOCUMENTS, source, RECIPE, settings, say=said.append)
    assert source.asked == [document.key for document in DOCUMENTS[4:]]
    assert "features of 3 documents (of 7; the others are there)" in said[0]
    again = Source()
    fill_(tmp_path, DOCUMENTS, again, RECIPE, settings, say=said.append)
    assert again.asked == [] and "all 7 documents are in" in said[1]
    for left, right in zip(
        collect(Source(), DOCUMENTS), collect(CachedExamples(tmp_path, RECIPE), DOCUMENTS), strict=True
    ):
        same(left, right)


def test_processes_share_the_work(tmp_path: Path) -> None:
    settings = FeatureSettings(shard_documents=2)
    asked = []
    # The second process lists what is missing before the first has written anything, as in a real run.
    for process in range(2):
        source = Source()
        folder = tmp_path / str(process)
        fill_(
            folder, DOCUMENTS, source, RECIPE, settings, process=process, num_processes=2, say=lambda t: None
        )
        asked.append(source.asked)
    assert sorted(asked[0] + asked[1]) == sorted(document.key for document in DOCUMENTS)
    for shard in (tmp_path / "1").glob("shard-*"):
        shutil.copy(shard, tmp_path / "0")
    assert len(collect(CachedExamples(tmp_path / "0", RECIPE), DOCUMENTS)) == 14


def test_features_of_another_recipe_are_refused(tmp_path: Path) -> None:
    fill_(tmp_path, DOCUMENTS[:2], Source(), RECIPE, FeatureSettings(), say=lambda text: None)
    other = {**RECIPE, "model": "another"}
    for use in (
        lambda: CachedExamples(tmp_path, other),
        lambda: fill_(tmp_path, DOCUMENTS, Source(), other, FeatureSettings(), say=lambda text: None),
    ):
        refused("another recipe .model: 'm' -> 'another'.*features.folder", use)
    (tmp_path / RECIPE_FILE).unlink()
    refused(f"no {RECIPE_FILE}", CachedExamples, tmp_path, RECIPE)
    with pytest.raises(ValueError, match=f"no {RECIPE_FILE}"):
        fill_(tmp_path, DOCUMENTS, Source(), RECIPE, FeatureSettings(), say=lambda text: None)


def test_a_document_that_is_not_there_is_named(tmp_path: Path) -> None:
    fill_(tmp_path, DOCUMENTS[:2], Source(), RECIPE, FeatureSettings(), say=lambda text: None)
    with pytest.raises(ValueError, match="1 of 2 documents have no features.*the first is number 1"):
        collect(CachedExamples(tmp_path, RECIPE), [DOCUMENTS[0], DOCUMENTS[4]])


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_what_does_not_fit_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 0, 2000))
    said: list[str] = []
    with pytest.raises(ValueError, match="they do not fit. Set features.folder on a larger disk"):
        fill_(tmp_path, DOCUMENTS, Source(), RECIPE, FeatureSettings(), say=said.append)
    assert said and list(tmp_path.glob("shard-*")) == []


def test_half_precision_targets_are_halved_and_checked(tmp_path: Path) -> None:
    settings = FeatureSettings(target_dtype="float16")
    recipe = {**RECIPE, "target_dtype": "float16"}
    fill_(tmp_path / "half", DOCUMENTS[:1], Source(), recipe, settings, say=lambda text: None)
    got = collect(CachedExamples(tmp_path / "half", recipe), DOCUMENTS[:1])
    for left, right in zip(collect(Source(), DOCUMENTS[:1]), got, strict=True):
        assert right.target_HT.dtype == torch.float32
        assert torch.equal(right.target_HT, left.target_HT.half().float())

    class Large(Source):
        def example(self, layer: int, row: int, document: Document) -> Example:
            one = super().example(layer, row, document)
            return Example(layer, row, one.key, one.inputs, one.target_HT * 1e6, one.reached_HT)

    with pytest.raises(ValueError, match="beyond float16: set features.target_dtype=float32"):
        fill_(tmp_path / "large", DOCUMENTS[:1], Large(), recipe, settings, say=lambda text: None)


def test_the_recipe_holds_what_decides_and_nothing_else() -> None:
    config = {
        **{"dtype": "float32", "seed": 3, "output": "here", "training": {"lr": 1.0}},
        "target": {"horizon": 32, "chunk": 64},
        "features": {"folder": "there", "target_dtype": "float16"},
    }
    made = recipe_of(config, model_sha256="m", layers=[2, 0], gate_inputs={"hidden"})
    assert made["target"] == {"horizon": 32} and made["layers"] == [0, 2] and made["seed"] == 3
    changed = {**config, "output": "there", "training": {}, "target": {"horizon": 32, "chunk": 1}}
    assert recipe_of(changed, model_sha256="m", layers=[0, 2], gate_inputs=["hidden"]) == made
    assert (
        recipe_of({**config, "target": {"horizon": 8}}, model_sha256="m", layers=[0], gate_inputs=[]) != made
    )


@pytest.mark.always
def test_a_run_reads_features_again_and_ends_where_the_teacher_would_have_led(
    make_config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run with features never asks the teacher: not to begin, not in a step, not in a look."""
    from retain import load_gates
    from retain.train import local_stage as local
    from retain.train.distill import distill
    from retain.train.run.checkpoint import read_log

    uncalibrated = {"kind": "none", "curve": False}

    def run(name: str, **changes: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        folder = distill(make_config(output=str(tmp_path / name), calibration=uncalibrated, **changes))
        return load_gates(folder).state_dict(), read_log(folder)

    def forbidden(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("the teacher was asked")

    kept = {"features.folder": str(tmp_path / "features"), "features.shard_documents": 3}
    taught, taught_log = run("taught")
    first, first_log = run("first", **kept)
    with monkeypatch.context() as patch:
        patch.setattr(local, "walk", forbidden)
        again, again_log = run("again", **kept)
        with pytest.raises(AssertionError, match="the teacher was asked"):
            run("elsewhere", **{**kept, "features.folder": str(tmp_path / "others")})
    assert again_log == first_log and first.keys() == again.keys() == taught.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    # The same digits on the machine where this was written; another one may round a row of three documents
    # otherwise. A step moves a parameter by 1e-2: a hundredth of one would be seen.
    for name, tensor in taught.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=1e-4)
    for one, other in zip(taught_log, again_log, strict=True):
        assert one.get("documents") == other.get("documents") and one.keys() == other.keys()
        if "loss" in one:
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)

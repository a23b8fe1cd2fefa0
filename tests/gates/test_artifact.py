"""The gate artifact: what is saved comes back, and what is damaged, foreign or newer is refused."""

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from retain.gates import GATES, GateSet, build_gates, dims_for
from retain.gates.artifact import METADATA_FILE, WEIGHTS_FILE, load_gates, save_gates
from retain.gates.calibrate import Calibrator
from retain.gates.lookahead import LookaheadExtension
from tests.refused import refusal

FINGERPRINT = {"model_type": "qwen3", "hidden_size": 6, "sha256": "abc"}
SIZES = {0: {"E": 6, "H": 2, "Q": 4, "D": 4}, 3: {"E": 6, "H": 2, "Q": 2, "D": 4}}


def some_gates(family: str = "mlp") -> GateSet:
    gates = build_gates(family, dims_for(family, SIZES))
    with torch.no_grad():
        for tensor in gates.state_dict().values():
            tensor.copy_(torch.randn_like(tensor))
    return gates


def saved(gates: GateSet, folder: Path, **metadata: object) -> Path:
    return save_gates(gates, folder, fingerprint=FINGERPRINT, metadata=metadata)


def record_of(folder: Path) -> dict:
    return json.loads((folder / METADATA_FILE).read_text())


def same_tensors(one: GateSet, other: GateSet) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(some_gates(), tmp_path / "gates", base_model="org/base", loss={"a": 1})


def rewrite(folder: Path, **changes: object) -> None:
    (folder / METADATA_FILE).write_text(json.dumps({**record_of(folder), **changes}))


@pytest.mark.parametrize("family", sorted(GATES))
def test_round_trip(family: str, tmp_path: Path) -> None:
    gates = some_gates(family)
    saved(gates, tmp_path, protected_window=32)
    back = load_gates(tmp_path, fingerprint=FINGERPRINT)
    assert back.layers == (0, 3) and back.family == family and back.inputs == gates.inputs
    assert [back[layer].dims() for layer in back.layers] == [gates[layer].dims() for layer in gates.layers]
    assert back.metadata["protected_window"] == 32 and back.metadata["unit"] == gates[0].unit
    assert back.metadata["schema_version"] == 2
    assert not back.training and not any(p.requires_grad for p in back.parameters())
    assert same_tensors(gates, back)
    assert record_of(tmp_path)["score_unit"] == gates.unit == back.unit


def test_what_layers_share_is_stored_once_and_shared_again(tmp_path: Path) -> None:
    gates = some_gates("decay_shared")
    saved(gates, tmp_path)
    stored = load_file(tmp_path / WEIGHTS_FILE)
    ties = {f"gates.3.out.{part}" for part in ("weight", "bias")}
    assert set(stored) == set(gates.state_dict()) - ties
    back = load_gates(tmp_path)
    assert back[0].out is back[3].out and same_tensors(gates, back)
    again = saved(back, tmp_path / "again")
    assert (again / WEIGHTS_FILE).read_bytes() == (tmp_path / WEIGHTS_FILE).read_bytes()
    # Equal ones that are not shared are both stored.
    gates = some_gates("linear")
    with torch.no_grad():
        gates[3].out.weight.copy_(gates[0].out.weight)
    saved(gates, tmp_path)
    assert set(load_file(tmp_path / WEIGHTS_FILE)) == set(gates.state_dict())


def test_an_extension_comes_back(tmp_path: Path) -> None:
    extension = LookaheadExtension(num_tokens=3, E=6, rank=2, modules={"layers.0.self_attn.q_proj": (6, 16)})
    with torch.no_grad():
        extension.up["layers/0/self_attn/q_proj"].normal_()
    gates = build_gates("lookahead", dims_for("lookahead", SIZES))
    gates.extension = extension
    saved(gates, tmp_path)
    assert any(name.startswith("extension.") for name in load_file(tmp_path / WEIGHTS_FILE))
    back = load_gates(tmp_path)
    assert back.extension is not None and back.extension.dims() == extension.dims()
    assert same_tensors(gates, back)


def test_half_the_bytes_and_nearly_the_same_numbers(folder: Path, tmp_path: Path) -> None:
    gates = load_gates(folder)
    half = save_gates(gates, tmp_path / "half", fingerprint=FINGERPRINT, half=True)
    assert (half / WEIGHTS_FILE).stat().st_size < 0.7 * (folder / WEIGHTS_FILE).stat().st_size
    for name, tensor in load_gates(half).state_dict().items():
        wanted = gates.state_dict()[name]
        rounded = wanted.half().float() if wanted.dim() > 1 else wanted
        assert tensor.dtype == torch.float32 and torch.equal(tensor, rounded), name


def cut(keep: int) -> Callable[[Path], object]:
    """Cut the weights to so many bytes."""
    return lambda folder: (folder / WEIGHTS_FILE).write_bytes((folder / WEIGHTS_FILE).read_bytes()[:keep])


def flip_a_bit(folder: Path) -> None:
    payload = bytearray((folder / WEIGHTS_FILE).read_bytes())
    payload[-1] ^= 1
    (folder / WEIGHTS_FILE).write_bytes(bytes(payload))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *((cut(keep), "truncated or corrupt") for keep in (0, 200, -1)),
        (flip_a_bit, "do not belong together .the sha256 differs"),
        (lambda folder: (folder / METADATA_FILE).unlink(), "is not a gate artifact"),
        (lambda folder: (folder / WEIGHTS_FILE).unlink(), "but no gates.saf"),
        (shutil.rmtree, "is not a gate artifact"),
        (lambda folder: (folder / METADATA_FILE).write_text("{"), "not readable JSON"),
        (
            lambda folder: rewrite(folder, schema_version=99),
            "schema version 99, this retain reads 2: upgrade",
        ),
    ],
)
def test_damaged_files_are_refused(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [METADATA_FILE, WEIGHTS_FILE]
    damage(folder)
    with refusal(message):
        load_gates(folder)


def test_another_model_is_refused_with_what_differs(folder: Path) -> None:
    other = {**FINGERPRINT, "sha256": "abd"}
    said = "trained on another model .sha256 'abc' -> 'abd'.*allow_other_weights=True.*'org/base'"
    with refusal(said):
        load_gates(folder, fingerprint=other)
    assert load_gates(folder, fingerprint=other, allow_other_weights=True).allowed_on == "abd"
    assert load_gates(folder, fingerprint=FINGERPRINT, allow_other_weights=True).allowed_on is None
    with refusal("hidden_size .* so they do not fit"):
        load_gates(folder, fingerprint={**other, "hidden_size": 7}, allow_other_weights=True)


DIMS = {"E": 6, "H": 2, "F": 64}


def calibrated(layers: tuple[str, ...] = ("0", "3"), **changes: object) -> dict[str, object]:
    curves = {layer: {"kind": "shared", "H": 2, "K": 3, **changes} for layer in layers}
    return {"calibration": {"layers": curves}}


def layer_0(**changes: object) -> dict[str, object]:
    return {"layers": {"0": {**DIMS, **changes}}}


INCONSISTENT: list[tuple[dict[str, object], str]] = [
    ({"family": "mpl"}, "unknown gate family 'mpl': did you mean 'mlp'"),
    (layer_0(F=8), "does not hold the tensors"),
    (layer_0(F=10**12), "does not hold the tensors"),
    (layer_0(depth=8), "cannot build .*unknown key 'mlp.depth'.*upgrade retain"),
    (layer_0(E=-6), "cannot build"),
    (layer_0(F="8"), "cannot build .*mlp.F: .*'8'"),
    ({"layers": {"0": {"H": 2}}}, "cannot build .*KeyError: 'E'"),
    ({"layers": {}}, "at least one layer"),
    ({"extension": {"E": 6}}, "cannot build"),
    ({"score_unit": "risks"}, "score_unit is .*; got 'risks'"),
    (calibrated(kind="spline"), "kind 'spline' are not read any more"),
    (calibrated(space="lgo"), "space of a calibrator is 'log' or 'asinh'; got 'lgo'"),
    (calibrated(unit="rank"), "unit of a calibrator is 'risk' or 'mass'; got 'rank'"),
    (calibrated(H=3), "with KV heads .* and calibrators with"),
    (calibrated(), "not hold the tensors"),
    (calibrated(layers=("0",)), "calibrate all of them, in one unit, or none"),
    ({"schema_version": None}, "schema version None, this retain reads 2"),
]


@pytest.mark.parametrize(("changes", "message"), INCONSISTENT)
def test_inconsistent_metadata(folder: Path, changes: dict, message: str) -> None:
    rewrite(folder, **changes)
    with refusal(message):
        load_gates(folder)


def tampered(folder: Path, name: str, change) -> None:  # type: ignore[no-untyped-def]
    """Another tensor in the weights, and a sha256 that fits."""
    path = folder / WEIGHTS_FILE
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path)
    rewrite(folder, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_numbers_that_no_training_gives_are_refused(folder: Path) -> None:
    for change in (lambda tensor: tensor.fill_(float("nan")), lambda tensor: tensor.zero_().long()):
        tampered(folder, "gates.3.out.weight", change)
        with refusal("'gates.3.out.weight' holds numbers that are not finite fractions"):
            load_gates(folder)


def everything(calibrated: bool = True) -> GateSet:
    """Gates with all that an artifact can hold of linear ones."""
    plain = some_gates("linear")
    made = {0: Calibrator(H=2, K=3), 3: Calibrator(H=2, K=4)}
    made[0].offset_H.add_(torch.rand(2))
    curve = {"keep_ratio": [0.1, 0.5], "threshold": [2.0, 1.0]}
    return GateSet(
        {layer: plain[layer] for layer in (0, 3)},
        {
            "score_unit": "rank",
            "calibration": {"documents": 8, "curve": curve},
            "recipe": {"lr": 0.1},
        },
        calibrators=made if calibrated else {},
    )


@pytest.mark.parametrize("calibrated", [False, True])
def test_what_was_read_is_written_again(calibrated: bool, tmp_path: Path) -> None:
    gates = everything(calibrated)
    first, unit = gates, gates.unit
    said = dict(gates.metadata["calibration"])
    if calibrated:
        said["layers"] = {layer: one.dims() for layer, one in gates.calibrators.items()}
    assert unit == ("risk" if calibrated else "rank")
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        gates = load_gates(saved(gates, folder))
        assert gates.unit == unit and gates.metadata["score_unit"] == "rank"
        assert gates.metadata["recipe"] == {"lr": 0.1} and gates.metadata["calibration"] == said
        assert [gates.threshold_for(ratio) for ratio in (0.1, 0.2, 0.5)] == [2.0, 1.75, 1.0]
        assert same_tensors(first, gates)
    for name in (METADATA_FILE, WEIGHTS_FILE):
        assert len({(folder / name).read_bytes() for folder in folders}) == 1


def test_a_unit_that_is_none_is_refused_before_anything_is_written(folder: Path) -> None:
    before = load_gates(folder)
    with refusal("score_unit is .*; got 'rsk'"):
        saved(before, folder, score_unit="rsk")
    assert same_tensors(before, load_gates(folder))


@pytest.mark.parametrize("at", [1, 2])
def test_a_write_that_fails_leaves_the_old_artifact(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The `at`-th file cannot be written to the end."""
    before, calls = load_gates(folder), []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("retain.process.disk.os.fsync", full)
    wanted = f"No space left on device: {re.escape(str(folder))}/.* could not be written, and is as it was"
    with pytest.raises(OSError, match=wanted):
        saved(some_gates(), folder)
    assert same_tensors(before, load_gates(folder))
    assert sorted(path.name for path in folder.iterdir()) == [METADATA_FILE, WEIGHTS_FILE]

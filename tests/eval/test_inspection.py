"""`retain inspect`: what is said of each kind of folder is what lies in it; nothing is written there."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import retain
from retain.cache.file_format import read_file
from retain.eval.cli import main
from retain.eval.diagnose.gate_cost import GateCost, cost_of, gate_flops, projection_flops, weight_flops
from retain.eval.inspection.path import inspect_path
from retain.gates import GATES, build_gates
from retain.gates.artifact import save_gates
from retain.hf.model.decoder import describe
from retain.hf.model.identity import fingerprint
from tests.refused import refused
from tests.tiny import VOCAB, tiny_model

E, H, F = 32, 2, 16


def files_of(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def model() -> Any:
    made = tiny_model("llama")
    retain.attach(made)
    return made


@pytest.fixture(scope="module")
def gates_folder(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Path:
    """Untrained MLP gates of a tiny model that lies beside them."""
    root = tmp_path_factory.mktemp("gates")
    model.save_pretrained(root / "model")
    dims = {spec.layer_idx: {"E": E, "H": H, "F": F} for spec in describe(model)}
    heads = len(dims) * H
    even = {str(layer): [[1_000_000 // heads] * H for _ in range(2)] for layer in dims}
    for row in even[str(min(dims))]:
        row[0] += 1_000_000 % heads  # of exact sum
    metadata = {
        "base_model": str(root / "model"),
        "protected_window": 8,
        "target": {"sources": {"own": 1.0}, "horizon": 8},
        "calibration": {
            "curve": {"keep_ratio": [0.1, 0.5, 0.9], "threshold": [3.0, 2.0, 1.0]},
            "quotas": {"keep_ratio": [0.02, 0.95], "parts": even},
            "capacity": {"limit": 469.8758, "keep_ratio": 0.02, "unit": "risk"},
        },
        "training": {"steps": 7, "held_out": {"loss": 1.25}},
    }
    save_gates(build_gates("mlp", dims), root / "own", fingerprint=fingerprint(model), metadata=metadata)
    (root / "own" / "log.jsonl").write_text(
        '{"step": 0, "held_out": {"loss": 2.0}}\n{"step": 1, "loss": 1.5}\n{"step": 2, "lo'
    )
    return root / "own"


def rows_of(path: Path, model: str | None = None) -> dict[str, str]:
    found = inspect_path(path, model)
    return {label: str(text) for label, text in found.rows}


def test_a_gate_artifact(gates_folder: Path, model: Any) -> None:
    rows = rows_of(gates_folder)
    layers = len(describe(model))
    own = layers * (E * F + F + F * H + H)
    assert rows["family"].startswith("mlp: reads hidden")
    assert rows["layers"].startswith(f"{layers} (0-{layers - 1}), each E {E}, H {H}, F {F}")
    assert rows["parameters"].startswith(f"{own:,} (")
    assert rows["says"] == "log_risk; as a score, risk"
    assert "hidden_size 32" in rows["base model"] and fingerprint(model)["sha256"][:16] in rows["base model"]
    assert rows["protected"] == "trained for a window of 8 last entries"
    assert rows["target"] == "sources own 1.0; horizon 8"
    assert rows["calibration"] == (
        "thresholds for keep_ratios 0.1 to 0.9; quotas for keep_ratios 0.02 to 0.95; "
        "warns where a risk above 469.9 would go"
    )
    assert rows["held-out"] == "at the end of 7 steps: loss 1.25"
    # 2 (E F + F H) a layer, over 2 x the weights of a layer.
    weights = 2 * E * (4 * 8 + 2 * 8) + 3 * E * 64
    share = 2 * (E * F + F * H) / (2 * weights)
    assert rows["cost"].startswith(f"inference overhead {100 * share:.3g} % of prefill FLOPs")


def test_the_cost_without_the_model_is_an_upper_bound(gates_folder: Path) -> None:
    gates = retain.load_gates(gates_folder)
    known = {name: value for name, value in gates.metadata.items() if name != "base_model"}
    bound, whole = cost_of(gates, known), cost_of(gates, gates.metadata)
    assert bound.share() > whole.share() > 0
    assert "at most" in str(bound) and "pass --model" in str(bound) and "at most" not in str(whole)
    nothing = cost_of(gates, {})
    assert nothing.share() is None and "nothing is known: pass --model" in str(nothing)
    assert projection_flops(known["fingerprint"]) == 2 * 2 * (2 * 32 * 4 * 8 + 2 * 32 * 2 * 8)


@pytest.mark.parametrize("family", sorted(GATES))
def test_flops_of_every_family_are_counted(family: str) -> None:
    sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    letters = {"E": 32, "H": 2, "Q": 4, "D": 8}
    dims = {letter: letters[letter] for letter in GATES[family].sizes}
    added = GATES[family].extension
    extension = None if added is None else added(E=32, modules={"a": (32, 32)}, num_tokens=4)
    one = gate_flops(build_gates(family, {0: dims}, extension=extension), sizes, 64)
    two = gate_flops(build_gates(family, {0: dims, 3: dims}, extension=extension), sizes, 64)
    assert two == 2 * one > 0
    if family == "linear":
        assert one == 2 * 32 * 2


def test_experts_and_lookahead_tokens_count_as_far_as_a_token_meets_them(tmp_path: Path) -> None:
    assert GateCost(1.0, 100.0, "all", True, lookahead=32).share(1024) == pytest.approx(0.01 + 1 / 32)
    made = tiny_model("qwen3_moe")
    made.config.save_pretrained(tmp_path)
    sizes = {
        name: weight.numel() for name, weight in made.model.layers.named_parameters() if weight.dim() > 1
    }
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    whole = sum(sizes.values()) - experts
    share = made.config.num_experts_per_tok / made.config.num_experts
    assert weight_flops(str(tmp_path), {}) == pytest.approx(2 * (whole + share * experts))


def test_another_model_is_refused(gates_folder: Path, model: Any) -> None:
    refused("has no config to count with", inspect_path, gates_folder, "no/such/model")
    refused("is not what these gates were", inspect_path, gates_folder, "reference:0")
    name, sizes = str(gates_folder.parent / "model"), fingerprint(model)
    differing = (("num_kv_heads", 2, 4), ("num_layers", 2, 3), ("hidden_size", 32, 64), ("num_heads", 4, 8))
    for size, here, there in differing:
        message = f"{size} is {here}, and {there} in the artifact. Pass the gates' base model"
        refused(message, weight_flops, name, {**sizes, size: there})
    # Where some layers are left alone, the fingerprint counts the others, and names them.
    assert weight_flops(name, {**sizes, "num_layers": 1, "layers": "1"}) == weight_flops(name, sizes)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, gates_folder: Path) -> Path:
    """What a killed training run leaves, by the layout of train/run/checkpoint.py."""
    import hashlib

    root = tmp_path_factory.mktemp("runs") / "killed"
    checkpoint = root / "checkpoints" / "step-000050"
    checkpoint.mkdir(parents=True)
    (root / "run.json").write_text("{}")
    (root / "config.yaml").write_text("model: reference:0\ntraining:\n  steps: 200\ngate:\n  family: mlp\n")
    (root / "log.jsonl").write_text('{"step": 50, "loss": 1.5, "held_out": {"loss": 2.0}}\n{"step"')
    shutil.copy(gates_folder / "gates.safetensors", checkpoint)
    (checkpoint / "state.json").write_text('{"step": 50, "num_updates": 50, "extra": {}}')
    described = {
        name: {"sha256": hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}
        for name in ("gates.safetensors", "state.json")
    }
    (checkpoint / "manifest.json").write_text(json.dumps({"files": described}))
    return root


def test_a_killed_run_and_its_checkpoint(run_folder: Path, tmp_path: Path) -> None:
    rows = rows_of(run_folder)
    assert rows["state"].startswith("not finished: step 50 of 200 is logged")
    assert (rows["checkpoints"], rows["gate"], rows["held-out"]) == ("step-000050", "family mlp", "loss 2")
    rows = rows_of(run_folder / "checkpoints" / "step-000050")
    assert rows["state"] == "step 50; num_updates 50" and rows["whole"].startswith("yes")
    # A torn checkpoint.
    shutil.copytree(run_folder / "checkpoints" / "step-000050", tmp_path / "torn")
    (tmp_path / "torn" / "state.json").write_text('{"step": 51}')
    assert rows_of(tmp_path / "torn")["whole"].startswith("no: state.json differ")


@pytest.fixture(scope="module")
def results_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks, two policies, one budget and the full cache; a line that a kill cut."""
    root = tmp_path_factory.mktemp("results") / "half"
    root.mkdir()
    lines = []
    for task, items in (("short", 1), ("long", 3)):
        for policy, budget, hits in (("full", 1.0, 1), ("good", 0.2, 1), ("poor", 0.2, 0)):
            for item in range(items):
                score = float(hits and (task == "short" or item == 0 or policy == "full"))
                row = {"unit": task, "task": task, "item": item, "regime": "context_only", "policy": policy}
                lines.append(json.dumps({**row, "budget": budget, "score": score, "null": False}))
    (root / "items.jsonl").write_text("\n".join([*lines, '{"unit": "lo']))
    manifest = {
        "run": "half",
        "config": {"seeds": [0], "keep_ratios": [0.2]},
        "identity_sha": "abc",
        "code": {"commit": "0123456789abcdef", "clean": False},
        "environment": {"device": "cpu", "versions": {"torch": "2"}},
        "samples": {"units": 4},
        "started": "2026-01-01",
    }
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def test_results(results_folder: Path, tmp_path: Path) -> None:
    rows = rows_of(results_folder)
    assert rows["run"] == "half, identity abc"
    assert rows["state"] == "not finished; 2 of 4 units have rows; started 2026-01-01"
    assert rows["code"] == "0123456789ab (scratch)"
    manifest = json.loads((results_folder / "manifest.json").read_text())
    manifest["code_states"] = [manifest.pop("code") | {"clean": True}]  # as a comparison writes it
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert rows_of(tmp_path)["code"] == "0123456789ab (clean)"
    assert rows["tasks"] == "2: long, short"
    assert rows["rows"].startswith("12 (0 without an answer")
    assert rows["undecided"] == "rows do not say their keep_ratio" and "context_only" not in rows
    assert rows["context_only at 1"] == "full cache 100.0"
    # Tasks count alike: (1 + 1/3) / 2.
    assert rows["context_only at 0.2"] == "good 66.7, poor 0.0"


def test_results_in_parquet_and_of_an_older_layout(results_folder: Path, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    lines = (results_folder / "items.jsonl").read_text().splitlines()[:-1]
    rows = [json.loads(line) for line in lines]
    (tmp_path / "table").mkdir()
    write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table" / "items.parquet")
    assert rows_of(tmp_path / "table")["context_only at 0.2"] == "good 66.7, poor 0.0"
    assert rows_of(tmp_path / "table")["state"].startswith("unknown: no manifest.json")
    (tmp_path / "older").mkdir()
    names = {"score": "exact", "budget": "keep_ratio"}
    older = [{names.get(name, name): value for name, value in row.items()} for row in rows]
    (tmp_path / "older" / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in older))
    assert rows_of(tmp_path / "older")["context_only at 0.2"] == "good 66.7, poor 0.0"


RUN, CHECKPOINT, RESULTS, ARTIFACT = "run_folder", "checkpoint", "results_folder", "gates_folder"
DAMAGED = {
    "an artifact in pieces": (ARTIFACT, "gates.safetensors", "{", "truncated or corrupt"),
    "an empty config": (RUN, "config.yaml", "", "config.yaml holds None, where names and values"),
    "a cut config": (RUN, "config.yaml", "model: {a: [1", "config.yaml is not readable YAML"),
    "a config of a list": (RUN, "config.yaml", "- 1", r"config.yaml holds \[1\], where names"),
    "a config of other things": (RUN, "config.yaml", "training: 3", "by its files: training run. It"),
    "a config in another code": (RUN, "config.yaml", b"a: \xff", "config.yaml is not readable YAML"),
    "a log of numbers": (RUN, "log.jsonl", "3\n", "log.jsonl, line 1, is '3', where an object"),
    "a log without steps": (RUN, "log.jsonl", "{}\n", "log.jsonl, line 1, has no 'step'"),
    "an empty checkpoint": (CHECKPOINT, "manifest.json", "{}", "by its files: checkpoint.*KeyError: 'files'"),
    "a checkpoint of a list": (CHECKPOINT, "state.json", "[]", r"state.json holds \[\], where an object"),
    "a checkpoint in pieces": (CHECKPOINT, "gates.safetensors", "{", "truncated or corrupt"),
    "a cut manifest": (RESULTS, "manifest.json", '{"run": ', "manifest.json is not readable JSON"),
    "a list for a manifest": (RESULTS, "manifest.json", "[]", r"manifest.json holds \[\], where an"),
    "a manifest of others": (RESULTS, "manifest.json", '{"code": 3}', "by its files: results of a"),
    "rows of numbers": (RESULTS, "items.jsonl", "{}\n3\n", "items.jsonl, line 2, is '3', where an"),
    "a table in pieces": (RESULTS, "items.parquet", "PAR", "does not read as Parquet"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_damaged_is_said_in_one_line(
    request: pytest.FixtureRequest, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, name, content, match = DAMAGED[case]
    source = request.getfixturevalue(RUN if kind == CHECKPOINT else kind)
    path = tmp_path / "damaged"
    shutil.copytree(source / "checkpoints" / "step-000050" if kind == CHECKPOINT else source, path)
    if name == "items.parquet":
        (path / "items.jsonl").unlink()
    (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(match, inspect_path, path)
    assert main(["inspect", str(path), "--picture", str(tmp_path / "none.png")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("content", ['{"name": "an extension", "version": 3}', "[]", "3", "no JSON"])
def test_a_manifest_of_another_program_is_no_result(content: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content)
    refused("holds nothing that retain wrote", inspect_path, tmp_path)


def test_a_run_may_have_no_rows_yet_or_one_that_was_cut_inside_of_a_letter(
    results_folder: Path, tmp_path: Path
) -> None:
    shutil.copy(results_folder / "manifest.json", tmp_path)
    assert rows_of(tmp_path)["state"].startswith("not finished; 0 of 4 units have rows")
    row = {"unit": "a", "task": "short\u2028", "policy": "full", "regime": "any", "budget": 1.0, "score": 1.0}
    whole = json.dumps(row, ensure_ascii=False).encode() + b"\n"
    (tmp_path / "items.jsonl").write_bytes(whole + '{"task": "\u00e9'.encode()[:-1])
    assert rows_of(tmp_path)["rows"].startswith("1,")


@pytest.fixture(scope="module")
def cache_file(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Path:
    path = tmp_path_factory.mktemp("saved") / "context.safetensors"
    cache = retain.Cache(model, "knorm", tokens_per_head=12, protection={"minimum": 1, "recent": 2})
    ids = torch.randint(1, VOCAB, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, :8] = 0
    cache.prefill(ids, mask).save(path)
    return path


def test_a_saved_cache(cache_file: Path, model: Any, tmp_path: Path) -> None:
    rows = rows_of(cache_file)
    heads = sum(spec.num_kv_heads for spec in describe(model))
    assert rows["sequences"] == "2, of 32, 40 tokens seen"
    assert rows["entries"].startswith(f"{24 * heads:,} held of {72 * heads:,} seen (33.3%)")
    assert rows["policy"] == "knorm, budget tokens_per_head 12"
    # The batch's mean share: (12 / 32 + 12 / 40) / 2, in every head.
    assert rows["by head"].startswith(("33.7 % to 33.7 %", "33.8 % to 33.8 %"))
    # One that was cut.
    (tmp_path / "cut.safetensors").write_bytes(cache_file.read_bytes()[:-100])
    refused("truncated or corrupt", inspect_path, tmp_path / "cut.safetensors")


def test_a_saved_cache_in_few_bits(model: Any, tmp_path: Path) -> None:
    own = {"protection": {"minimum": 1, "recent": 2}, "precision": {"bits": 4, "group": 4, "recent": 2}}
    ids = torch.randint(1, VOCAB, (1, 40))
    cache = retain.Cache(model, "knorm", tokens_per_head=12, **own).prefill(ids)
    heads = sum(spec.num_kv_heads for spec in describe(model))
    path = cache.save(tmp_path / "context.safetensors")
    packed = sum(tier.bytes_held for store in cache.state.stores for tier in store.packed)
    rows = rows_of(path)
    plain = cache.bytes_held() - packed
    assert rows["entries"] == f"{12 * heads} held of {40 * heads} seen (30.0%), {cache.bytes_held():,} bytes"
    assert f"4 bits: {10 * heads} entries, {packed:,} bytes" in rows["held in"]
    assert f"as they are: {2 * heads} entries, {plain:,} bytes" in rows["held in"]
    full = path.stat().st_size - packed + 5 * plain
    assert rows["file"].endswith(f"; {full:,} in full precision ({path.stat().st_size / full:.1%})")
    assert "error" not in rows
    rows = rows_of(cache.save(path, bits=2))
    coded = read_file(path)[0]["coded"]
    assert f"2 bits in the file: {2 * heads} entries" in rows["held in"]
    assert rows["error"].startswith(
        f"of the 2 bits in the file, decoded when loaded: {coded['keys']:.2%} of k"
    )
    assert rows["error"].endswith(f"at most {coded['largest']:.3g}")
    assert len(inspect_path(path).panels()) == 1


@pytest.mark.parametrize("kind", ["gates_folder", "run_folder", "results_folder", "cache_file"])
def test_the_picture_lies_where_it_was_asked_for_and_nothing_else_is_written(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path: Path = request.getfixturevalue(kind)
    before = files_of(path.parent)
    assert main(["inspect", str(path)]) == 0
    assert list(tmp_path.iterdir()) == []
    assert main(["inspect", str(path), "--picture", str(tmp_path / "new" / "one.png")]) == 0
    assert files_of(path.parent) == before
    drawn = (tmp_path / "new" / "one.png").read_bytes()
    assert drawn.startswith(b"\x89PNG") and len(drawn) > 5000
    assert "picture: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "picture", "picture.jpg"])
def test_a_picture_is_written_to_no_other_name_than_the_one_that_is_said(
    name: str, results_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    assert main(["inspect", str(results_folder), "--picture", str(made / name)]) == 2
    captured = capsys.readouterr()
    assert "name a file that ends in .png" in captured.err and captured.out == ""
    assert sorted(tmp_path.rglob("*")) == [made]


def test_a_path_of_nothing_says_what_was_looked_for(
    gates_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(r"Looked for: gate artifact \(gates.json\).*saved cache", inspect_path, tmp_path)
    refused(r"Inside of it there are: .*own", inspect_path, gates_folder.parent)
    with pytest.raises(FileNotFoundError, match="Beside it there are: own"):
        inspect_path(gates_folder.parent / "ownn")
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")

"""Arguments, gate artifacts and saved caches drawn at random: each runs, or is refused by name.

    python -m tests.hf.any_input [EXAMPLES]

Run in a process of its own (by `test_any_input.py`): as users run it, without the shape checks of the test
suite, and with a limit on memory, so that nothing can be allocated that was not given.
"""

import hashlib
import json
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import retain
from retain.cache import file_format
from retain.gates import build_gates, dims_for
from retain.gates.artifact import METADATA_FILE, WEIGHTS_FILE, load_gates, save_gates
from retain.gates.calibrate import Calibrator
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import describe
from retain.hf.model.identity import fingerprint
from retain.hf.version_names import CACHE
from tests.tiny import tiny_batch, tiny_model

# Seconds and bytes that one example may take on top of what is there: against loops and tables.
SECONDS, MEMORY = 30, 1 << 30
# Plain JSON values that stand where another was wanted.
PLAIN: list[Any] = [
    *(None, True, -1, 0, 1, 7, 2.5, 10**12, 10**400),
    *("", "abc", "0", [], [1.5], [[1]], {}, {"a": 1}),
]
ANYTHING: list[Any] = [
    *PLAIN,
    *(float("nan"), float("inf"), b"x", object(), (1, 2), {1}),
    *(np.float32(0.5), np.int64(3), np.array([1, 2])),
    *(torch.tensor([1, 2]), torch.tensor(float("nan")), len, Path("no/such")),
]
NAMES = [
    *("policy", "keep_ratio", "tokens_per_head", "bytes", "byte_ratio", "threshold", "regime", "every"),
    *("gates", "seeds", "pinned", "slack"),
    *("fusion", "protection", "scope", "nothing"),
]
# So that prompts of a few dozen tokens have something to lose.
PROTECTION = {"minimum": 1, "recent": 2}
# What an argument may also be called where it is refused.
CALLED = {"protection": ("protected",)}


class Endless(Exception):
    """An example took longer than it may."""


def limited(run: Callable[[], Any], *names: str) -> bool:
    """Whether it ran; where it did not, the error names one of these.

    Raises:
        AssertionError: another error, one that names nothing, or no end.
    """

    def stop(*_: Any) -> None:
        raise Endless(f"{names}: more than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        run()
        return True
    except (ValueError, FileNotFoundError) as error:
        assert any(name in str(error) for name in names), (names, error)
        return False
    finally:
        signal.alarm(0)


def gates_for(model: Any, calibrated: bool = False) -> Any:
    sizes = {spec.layer_idx: spec.sizes for spec in describe(model)}
    calibrators = None
    if calibrated:
        calibrators = {layer: Calibrator(H=own["H"], K=3) for layer, own in sizes.items()}
    torch.manual_seed(0)
    return build_gates("mlp", dims_for("mlp", sizes, {"F": 4}), calibrators=calibrators)


def reads(cache: Cache) -> None:
    """A prompt, and one token more."""
    ids, mask = tiny_batch((0, 3), 30)
    with torch.no_grad():
        cache.prefill(ids, mask)
        more = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        where = (more.cumsum(-1) - 1)[:, -1:]
        cache.model(input_ids=ids[:, :1], attention_mask=more, position_ids=where, **{CACHE: cache})


def changed(value: Any, draw: Any) -> Any:
    """A JSON value with one place in it replaced, left out, or added to."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        name = draw(st.sampled_from(sorted(value)))
        what = draw(st.integers(0, 7))
        if what == 0:
            return {key: own for key, own in value.items() if key != name}
        if what == 1:
            return {**value, "abc": draw(st.sampled_from(PLAIN))}
        return {**value, name: changed(value[name], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], changed(value[place], draw), *value[place + 1 :]]
    return draw(st.sampled_from(PLAIN))


def changed_tensors(tensors: dict[str, torch.Tensor], draw: Any) -> dict[str, torch.Tensor]:
    name = draw(st.sampled_from(sorted(tensors)))
    tensor = tensors[name]
    others: list[Any] = [
        *(None, tensor[:-1] if tensor.ndim else tensor, tensor[None], tensor.flatten()),
        *(tensor.float(), tensor.long(), tensor.bool(), torch.zeros_like(tensor)),
        torch.full_like(tensor, 1 if tensor.dtype == torch.bool else -1),
        torch.zeros(0),
        torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else torch.full_like(tensor, 1),
    ]
    other = draw(st.sampled_from(others))
    left = {key: own for key, own in tensors.items() if key != name}
    return left if other is None else {**left, name: other.contiguous()}


def rules(examples: int) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[*HealthCheck],
    )


def check_arguments(model: Any, examples: int) -> None:
    gates, ran = gates_for(model), []
    bases = [
        {"policy": "knorm", "keep_ratio": 0.7},
        {"policy": "gate", "tokens_per_head": 24, "gates": gates},
    ]

    @rules(examples)
    @given(st.data())
    def one(data: Any) -> None:
        name = data.draw(st.sampled_from(NAMES))
        value = data.draw(st.sampled_from(ANYTHING))
        base: dict[str, Any] = data.draw(st.sampled_from(bases))
        asked = {"protection": PROTECTION, **base, name: value}
        said = (name, f"{value!r:.20}", *CALLED.get(name, ()))
        ran.append(limited(lambda: reads(Cache(model, asked.pop("policy"), **asked)), *said))

    one()
    assert any(ran) and not all(ran)


def check_prefill(model: Any, examples: int) -> None:
    ids, mask = tiny_batch((0, 3), 30)
    prompts = [
        *(*ANYTHING, ids, ids[0], ids[:, :0], ids.float(), ids.int()),
        *(ids - 100, ids + 10**6, ids.tolist(), ids[None]),
    ]
    masks = [
        *(*ANYTHING, mask, mask.bool(), mask.float(), mask[:1], mask[:, 1:]),
        *(1 - mask, mask * torch.nan, mask - 1, mask.flip(1)),
    ]
    ran = []

    @rules(examples)
    @given(st.sampled_from(["input_ids", "attention_mask", "chunk_size", "wanted"]), st.data())
    def one(name: str, data: Any) -> None:
        pool = {"input_ids": prompts, "attention_mask": masks}.get(name, ANYTHING)
        value = data.draw(st.sampled_from(pool))
        asked = {"input_ids": ids, "attention_mask": mask, name: value}
        # Of a mask it may be said what it means: padding on the right, or nothing else.
        said = (name, "padding") if name == "attention_mask" else (name,)
        cache = Cache(model, "knorm", keep_ratio=0.7, protection=PROTECTION)
        ran.append(limited(lambda: cache.prefill(**asked), *said))

    one()
    assert any(ran) and not all(ran)


def check_gates(model: Any, examples: int, folder: Path) -> None:
    curve = {"curve": {"keep_ratio": [0.1, 0.9], "threshold": [2.0, 1.0]}}
    whole = save_gates(
        gates_for(model, calibrated=True),
        folder / "whole",
        fingerprint=fingerprint(model),
        metadata={"calibration": curve, "protected_window": 4},
    )
    record, tensors = json.loads((whole / METADATA_FILE).read_text()), load_file(whole / WEIGHTS_FILE)
    ran = []

    @rules(examples)
    @given(st.data())
    def one(data: Any) -> None:
        own = Path(shutil.copytree(whole, folder / "changed", dirs_exist_ok=True))
        other = dict(record)
        if data.draw(st.booleans()):
            save_file(changed_tensors(tensors, data.draw), own / WEIGHTS_FILE)
            other["sha256"] = hashlib.sha256((own / WEIGHTS_FILE).read_bytes()).hexdigest()
        else:
            other = changed(record, data.draw)
        (own / METADATA_FILE).write_text(json.dumps(other))
        ran.append(limited(lambda: load_gates(own, fingerprint=fingerprint(model)), str(own)))

    one()
    assert any(ran) and not all(ran)


def check_caches(model: Any, examples: int, folder: Path) -> None:
    made = Cache(
        model, "knorm", keep_ratio=0.7, protection=PROTECTION, regime="chunked", seeds=[1, 2], pinned=[(0, 2)]
    )
    reads(made)
    packed = Cache(model, "full", precision={"bits": 4, "recent": 4})
    reads(packed)
    whole = folder / "whole.safetensors"
    files = [
        file_format.read_file(made.save(whole)),
        file_format.read_file(packed.save(whole)),
        file_format.read_file(packed.save(whole, bits=4)),
    ]
    path, ran = folder / "changed.safetensors", []

    @rules(examples)
    @given(st.data())
    def one(data: Any) -> None:
        header, tensors = data.draw(st.sampled_from(files))
        other, held = header, tensors
        if data.draw(st.booleans()):
            held = changed_tensors(tensors, data.draw)
        else:
            other = changed(header, data.draw)
        text = json.dumps(other)
        told = {"schema_version": 3, "sha256": file_format.digest(text, held.items()), "header": text}
        save_file(held, path, {file_format.FORMAT: json.dumps(told)})

        def goes_on() -> None:
            cache = Cache.load(path, model)
            ids = torch.ones(2, 2, dtype=torch.int64)
            mask = torch.cat([cache.state.valid_BT.long(), torch.ones(2, 2)], 1)
            where = (mask.long().cumsum(-1) - 1)[:, -2:]
            with torch.no_grad():
                model(input_ids=ids, attention_mask=mask.long(), position_ids=where, **{CACHE: cache})

        # Positions that a file says were read may lie behind those of the call, which is then told so.
        ran.append(limited(goes_on, str(path), "position_ids"))

    one()
    assert any(ran) and not all(ran)


def main(examples: int) -> None:
    """Draw so many of each kind."""
    torch.set_num_threads(1)
    model = tiny_model("llama")
    retain.attach(model)
    with open("/proc/self/statm", encoding="utf-8") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, resource.RLIM_INFINITY))
    check_arguments(model, examples)
    check_prefill(model, examples)
    with tempfile.TemporaryDirectory() as folder:
        check_gates(model, examples, Path(folder))
        check_caches(model, examples, Path(folder))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)

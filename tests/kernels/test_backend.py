import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retain.kernels import backend

ROOT = Path(__file__).resolve().parents[2]
ONE = torch.ones(2)


class OnCuda:
    """A tensor as far as a choice of path looks at it."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, dtype=torch.bfloat16):
        self.dtype = dtype


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Pretends that Triton and a Hopper GPU are there; none is asked for."""
    monkeypatch.setattr(backend, "_said", {})
    monkeypatch.setattr(backend, "_has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_what_keeps_a_call_from_the_kernel_is_logged_once(monkeypatch, caplog):
    """Loudly on a GPU; and what is forced nevertheless raises."""
    caplog.set_level(logging.INFO, "retain.kernels")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which is only reached by force
    kept = [
        ((ONE,), None, "the tensors are not on CUDA"),
        ((OnCuda(),), "a head width of 512", "a head width of 512"),
        ((OnCuda(), OnCuda(torch.float64)), None, "kernels take float32, float16 and bfloat16, not float64"),
        ((OnCuda(),), None, "this GPU's compute capability is 7.5, and kernels need 8.0 or later"),
        ((OnCuda(),), None, "Triton is not installed (pip install 'retain-kv[kernels]')"),
    ]
    assert backend.path_for("op", OnCuda(), OnCuda(torch.float32)) == "triton"
    for tensors, unsupported, why in kept:
        if "capability" in why:
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        if "installed" in why:
            monkeypatch.setattr(backend, "_has_triton", lambda: False)
        for _ in range(2):
            assert backend.path_for("op", *tensors, unsupported=unsupported) == "reference"
            assert backend.which(*tensors, unsupported=unsupported) == "reference"
        if tensors[0] is not ONE:
            with (
                backend.using("triton"),
                pytest.raises(ValueError, match=re.escape(f"forced, but {why}; lea")),
            ):
                backend.path_for("op", *tensors, unsupported=unsupported)
    assert [reason for _, _, reason in backend.said()] == ["", *(why for *_, why in kept)]
    levels = [logging.INFO, logging.INFO, *[logging.WARNING] * 4]
    assert [record.levelno for record in caplog.records] == levels
    assert caplog.records[-1].getMessage() == f"op runs as reference: {kept[-1][2]}"


def test_tensors_of_several_devices_are_refused():
    with pytest.raises(ValueError, match="op: the tensors lie on cpu, cuda:0; move them to one device"):
        backend.path_for("op", OnCuda(), ONE)


def test_tiles_are_hoppers_or_small_ones(monkeypatch):
    assert backend.architecture(OnCuda()) == backend.architecture(ONE) == 90, "as in the interpreter"
    for capability, table in ((80, 80), (90, 90), (100, 80)):
        with backend.compiling_for(capability):
            assert backend.architecture(ONE) == table and backend.path_for("op", ONE) == "triton"
    for newer in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, newer=newer: newer)
        assert backend.path_for("op", OnCuda()) == "triton"
        assert backend.architecture(OnCuda()) == 80, "wgmma is Hopper's alone"


def test_what_is_forced_is_forced_inside_only(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with backend.using("triton"):
        assert backend.path_for("op", ONE) == "triton"
        with backend.using("reference"):
            assert backend.path_for("op", ONE) == backend.path_for("op", OnCuda()) == "reference"
        assert backend.path_for("op", ONE) == "triton"
    assert backend.said() == (), "nobody need be told what they asked for"
    with pytest.raises(RuntimeError, match="inner"), backend.using("triton"):
        raise RuntimeError("inner")
    assert backend.path_for("op", ONE) == "reference"


BLOCKED = """
import sys

blocked = ("triton", "datasets", "deepspeed", "wandb")
sys.modules.update({name: None for name in blocked})  # to import one of them is an ImportError
import importlib
import torch
from retain.kernels import backend, bench, build, measure

for op in build.OPS:
    cases = importlib.import_module(f"retain.kernels.{op}.cases")
    for name, case in list(cases.CASES.items())[:3]:
        cases.run(case, cases.inputs(case, torch.float32, torch.device("cpu")))
assert {path for _, path, _ in backend.said()} == {"reference"}, backend.said()

import retain
from tests.tiny import tiny_batch, tiny_model

model = tiny_model("llama")
ids, mask = tiny_batch((0, 3), 90)
with retain.attach(model):
    cache = retain.Cache(model, policy="defensivekv", keep_ratio=0.7)
    model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=3, do_sample=False)
assert cache.report().total.entries_evicted > 0
assert all(sys.modules[name] is None for name in blocked)
"""


def test_without_triton_every_op_runs_its_reference():
    """And the cache runs on them. Nor is anything needed of what training or logging brings."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

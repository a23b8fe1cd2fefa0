import importlib.metadata
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retain.kernels import backend

ROOT = Path(__file__).resolve().parents[2]
ONE = torch.ones(2)


@pytest.fixture(autouse=True)
def unsaid(monkeypatch):
    monkeypatch.setattr(backend, "_said", {})


MISSING = "Triton is not installed (pip install 'retain-kv[kernels]')"


class OnCuda:
    """A tensor as far as a choice of path looks at it."""

    is_cuda = True

    device = torch.device("cuda", 0)

    def __init__(self, dtype=torch.bfloat16):
        self.dtype = dtype


@pytest.fixture(autouse=True)
def _capability(monkeypatch):
    """A GPU that is not asked for, since none need be there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_cpu_tensors_take_the_reference_even_where_kernels_can_be_interpreted(monkeypatch):
    for interpret in ("0", "1"):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        assert backend.path_for("op", ONE) == "reference"
    assert backend.said() == (("op", "reference", "the tensors are not on CUDA"),)


def test_cuda_tensors_take_the_kernel_unless_something_keeps_them(monkeypatch):
    monkeypatch.setattr(backend, "_missing", lambda: None)
    assert backend.path_for("op", OnCuda(), OnCuda(torch.float32)) == "triton"
    assert backend.path_for("op", OnCuda(), unsupported="a head width of 512") == "reference"
    assert backend.path_for("op", OnCuda(), OnCuda(torch.float64)) == "reference"
    monkeypatch.setattr(backend, "_missing", lambda: MISSING)
    assert backend.path_for("op", OnCuda()) == "reference"
    assert [why for _, _, why in backend.said()] == [
        "",
        "a head width of 512",
        "kernels take float32, float16 and bfloat16, not float64",
        MISSING,
    ]


def test_tensors_of_several_devices_are_refused():
    with pytest.raises(ValueError, match="op: the tensors lie on cpu, cuda:0; move them to one device"):
        backend.path_for("op", OnCuda(), ONE)


@pytest.mark.parametrize(
    ("version", "fits"), [("3.6.0", True), ("3.8.9", True), ("3.5.1", False), ("3.9.0", False)]
)
def test_another_triton_is_stepped_aside_for(version, fits, monkeypatch):
    backend._missing.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    try:
        missing = backend._missing()
    finally:
        backend._missing.cache_clear()
    assert (
        missing is None
        if fits
        else f"{version} is installed" in missing and "3.6 or later, below 3.9" in missing
    )


def test_an_old_gpu_takes_the_reference_and_others_small_tiles(monkeypatch):
    monkeypatch.setattr(backend, "_missing", lambda: None)
    assert backend.architecture(OnCuda()) == backend.architecture(ONE) == 90, "as in the interpreter"
    for capability, table in ((80, 80), (90, 90), (100, 80)):
        with backend.compiling_for(capability):
            assert backend.architecture(ONE) == table and backend.path_for("op", ONE) == "triton"
    for newer in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, newer=newer: newer)
        assert backend.path_for("op", OnCuda()) == "triton"
        assert backend.architecture(OnCuda()) == 80, "wgmma is Hopper's alone"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert backend.path_for("op", OnCuda()) == "reference"
    assert "compute capability is 7.5" in backend.said()[-1][-1]


def test_a_fallback_on_a_gpu_warns_and_a_kernel_does_not(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "retain.kernels")
    monkeypatch.setattr(backend, "_missing", lambda: None)
    backend.path_for("op", OnCuda())
    backend.path_for("op", OnCuda(), unsupported="pages")
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.INFO, "op runs as triton"),
        (logging.WARNING, "op runs as reference: pages"),
    ]


def test_what_is_forced_is_forced_inside_only(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with backend.using("triton"):
        assert backend.path_for("op", ONE) == "triton"
        with backend.using("reference"):
            assert backend.path_for("op", ONE) == "reference"
            assert backend.path_for("op", OnCuda()) == "reference"
        assert backend.path_for("op", ONE) == "triton"
    assert backend.said() == (), "nobody need be told what they asked for"
    assert backend.path_for("op", ONE) == "reference"
    with pytest.raises(RuntimeError, match="inner"), backend.using("triton"):
        raise RuntimeError("inner")
    assert backend.path_for("op", ONE) == "reference"


def test_a_forced_kernel_that_cannot_run_raises(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with backend.using("triton"):
        with pytest.raises(
            ValueError, match="op: the Triton path was forced, but the tensors are not on CUDA"
        ):
            backend.path_for("op", ONE)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(ValueError, match="forced, but a head width of 512; leave the choice to the op"):
            backend.path_for("op", ONE, unsupported="a head width of 512")
        with pytest.raises(ValueError, match="float32, float16 and bfloat16, not float64"):
            backend.path_for("op", ONE.double())
        monkeypatch.setattr(backend, "_missing", lambda: MISSING)
        with pytest.raises(ValueError, match="Triton is not installed"):
            backend.path_for("op", ONE)


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

"""`retain doctor`: versions, devices and kernels as they are."""

from importlib import metadata

from packaging.requirements import Requirement

from retain.eval import describe


def test_nothing_is_wrong_here(capsys):
    assert describe.doctor([]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "Nothing is wrong." and "WRONG" not in shown
    assert "of 8,0" in shown and "entries held" in shown


def test_a_version_out_of_range(monkeypatch, capsys):
    true = metadata.version
    changed = {"safetensors": "0.1.0", "triton": "0.0.1", "retain": "1.3.0"}
    monkeypatch.setattr(metadata, "version", lambda name: changed.get(name) or true(name))
    monkeypatch.setattr(describe, "trial", lambda device: "")
    stated = {one.name: str(one.specifier) for one in map(Requirement, metadata.requires("retain-kv"))}
    assert describe.doctor([]) == 1
    shown = capsys.readouterr().out
    assert f"WRONG  safetensors 0.1.0 (wanted: {stated['safetensors']})" in shown
    assert "WRONG  the package 'retain' 1.3.0 is another project" in shown and "2 wrong" in shown
    assert "ok     torch " in shown and "triton 0" not in shown


def test_devices_say_why_the_reference_is_taken(monkeypatch):
    first = "ops on cpu: the reference in PyTorch: the tensors are not on CUDA"
    assert first in [*describe.findings()][-1][1]
    monkeypatch.setattr(describe, "why_reference", lambda *tensors, **how: None)
    assert "ops on cpu: Triton kernels" in [*describe.findings()][-1][1]

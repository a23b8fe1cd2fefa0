"""`retain doctor`: versions, devices and kernels as they are; a hub that is not there is no fault."""

import os
import re
from importlib import metadata

import pytest
import torch
from huggingface_hub import constants
from packaging.requirements import Requirement

from retain.eval import describe
from retain.kernels import backend


def states(findings):
    return {finding.about: (finding.state, finding.text) for finding in findings}


def test_nothing_is_wrong_here(capsys):
    assert describe.doctor([]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "Nothing is wrong." and "WRONG" not in shown
    assert "HF_HUB_OFFLINE is set" in shown  # as it is for tests


def test_a_version_out_of_range_and_a_missing_extra(monkeypatch, capsys):
    true = metadata.version
    changed = {"safetensors": "0.1.0", "datasets": "0.0.1"}
    monkeypatch.setattr(metadata, "version", lambda name: changed.get(name) or true(name))
    found = states(describe.versions())
    stated = {one.name: str(one.specifier) for one in map(Requirement, metadata.requires("retain-kv"))}
    assert found["safetensors"] == ("WRONG", f"0.1.0 (wanted: {stated['safetensors']})")
    assert found["torch"][0] == "ok"
    state, text = found["extra train"]
    assert state == "note" and "datasets" in text and "pip install 'retain-kv[train]'" in text
    monkeypatch.setattr(describe, "trial", lambda device: describe.Finding("ok", device, ""))
    assert describe.doctor([]) == 1
    assert "1 wrong: retain may not work here." in capsys.readouterr().out


def test_the_other_project_of_that_name_is_told(monkeypatch):
    assert "retain" not in states(describe.versions())
    true = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.3.0" if name == "retain" else true(name))
    state, text = states(describe.versions())["retain"]
    assert state == "WRONG" and "'retain' 1.3.0 is installed, which is another project" in text


def test_a_checkout_that_is_not_installed(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    assert states(describe.versions())["retain-kv"][0] == "note"


def test_devices_say_why_the_reference_is_taken(monkeypatch):
    monkeypatch.setattr(describe, "trial", lambda device: describe.Finding("ok", f"trial on {device}", ""))
    assert states(describe.devices())["ops on cpu"][1].startswith(
        "the reference in PyTorch: the tensors are not on CUDA"
    )
    tensor = torch.zeros(1)
    monkeypatch.setattr(backend, "_why_not", lambda tensors, unsupported, anywhere: None)
    assert backend.why_reference(tensor) is None and backend.which(tensor) == "triton"
    assert states(describe.devices())["ops on cpu"][1].startswith("Triton kernels")


def test_a_trial_that_breaks_is_reported(monkeypatch):
    from retain import reference

    def broken(seed):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(reference, "load_model", broken)
    assert describe.trial("cpu") == ("WRONG", "trial on cpu", "RuntimeError: no such instruction")


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "no address"])
def test_a_hub_that_does_not_answer_is_a_note(monkeypatch, address):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    state, text = states(describe.hub())["hub"]
    assert state == "note" and address in text and "does not answer" in text


def test_memory_is_that_of_the_machine(monkeypatch):
    monkeypatch.setattr(describe, "trial", lambda device: describe.Finding("ok", device, ""))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = re.search(r"([\d.]+) of ([\d.]+) GiB free", next(describe.devices()).text)
    free, of = map(float, found.groups())
    assert of == pytest.approx(total, rel=0.05) and 0 < free <= of

"""`retain doctor`: versions, devices and kernels as they are; a hub that is not there is no fault."""

import os
import re
from importlib import metadata

import pytest
import torch
from huggingface_hub import constants
from packaging.requirements import Requirement

from retain.eval.inspection import doctor
from retain.kernels import backend


def states(findings):
    return {finding.about: (finding.state, finding.text) for finding in findings}


def test_nothing_is_wrong_here(capsys):
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "Nothing is wrong." and "WRONG" not in shown
    assert "HF_HUB_OFFLINE is set" in shown  # as it is for tests


def test_a_version_out_of_range_and_a_missing_extra(monkeypatch, capsys):
    true = metadata.version
    changed = {"safetensors": "0.1.0", "psutil": "0.0.1"}
    monkeypatch.setattr(metadata, "version", lambda name: changed.get(name) or true(name))
    found = states(doctor.versions())
    stated = {one.name: str(one.specifier) for one in map(Requirement, metadata.requires("retain-kv"))}
    assert found["safetensors"] == ("WRONG", f"0.1.0 (wanted: {stated['safetensors']})")
    assert found["torch"][0] == "ok"
    state, text = found["extra train"]
    assert state == "note" and "psutil" in text and "pip install 'retain-kv[train]'" in text
    monkeypatch.setattr(doctor, "trial", lambda: ())
    assert doctor.main([]) == 1
    assert "1 wrong: retain may not work here." in capsys.readouterr().out


def test_the_other_project_of_that_name_is_told(monkeypatch):
    assert "retain" not in states(doctor.versions())
    true = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.3.0" if name == "retain" else true(name))
    state, text = states(doctor.versions())["retain"]
    assert state == "WRONG" and "'retain' 1.3.0 is installed, which is another project" in text


def test_a_checkout_that_is_not_installed(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    assert states(doctor.versions())["retain-kv"][0] == "note"


def test_paths_say_why_the_reference_is_taken(monkeypatch):
    assert states(doctor.paths())["ops on cpu"][1].startswith(
        "the reference in PyTorch: the tensors are not on CUDA"
    )
    tensor = torch.zeros(1)
    monkeypatch.setattr(backend, "_why_not", lambda tensors, unsupported, anywhere: None)
    assert backend.why_reference(tensor) is None and backend.which(tensor) == "triton"
    assert states(doctor.paths())["ops on cpu"][1].startswith("Triton kernels")


def test_a_trial_that_breaks_is_reported(monkeypatch):
    from retain import reference

    def broken(seed):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(reference, "load_model", broken)
    assert states(doctor.trial())["trial on cpu"] == ("WRONG", "RuntimeError: no such instruction")


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "no address"])
def test_a_hub_that_does_not_answer_is_a_note(monkeypatch, address):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    state, text = states(doctor.hub())["hub"]
    assert state == "note" and address in text and "does not answer" in text


def test_other_words_are_refused(capsys):
    assert doctor.main(["--help"]) == 0 and doctor.main(["everything"]) == 2
    assert "usage: retain doctor" in capsys.readouterr().out


def test_memory_is_that_of_the_machine():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    free, of = map(float, re.fullmatch(r"([\d.]+) of ([\d.]+) GiB free", doctor._free_memory()).groups())
    assert of == pytest.approx(total, rel=0.05) and 0 < free <= of

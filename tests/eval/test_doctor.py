"""`retain doctor`: versions, devices and kernels as they are."""

from importlib import metadata

from packaging.requirements import Requirement

from retain.eval import describe


def states(findings):
    return {finding.about: (finding.state, finding.text) for finding in findings}


def test_nothing_is_wrong_here(capsys):
    assert describe.doctor([]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "Nothing is wrong." and "WRONG" not in shown


def test_a_version_out_of_range(monkeypatch, capsys):
    true = metadata.version
    changed = {"safetensors": "0.1.0", "triton": "0.0.1", "retain": "1.3.0"}
    monkeypatch.setattr(metadata, "version", lambda name: changed.get(name) or true(name))
    found = states(describe.versions())
    stated = {one.name: str(one.specifier) for one in map(Requirement, metadata.requires("retain-kv"))}
    assert found["safetensors"] == ("WRONG", f"0.1.0 (wanted: {stated['safetensors']})")
    assert found["torch"][0] == "ok" and "triton" not in found
    assert found["retain"][0] == "WRONG" and "another project under the same" in found["retain"][1]
    monkeypatch.setattr(describe, "trial", lambda device: describe.Finding("ok", device, ""))
    assert describe.doctor([]) == 1
    assert "2 wrong: retain may not work here." in capsys.readouterr().out


def test_devices_say_why_the_reference_is_taken(monkeypatch):
    monkeypatch.setattr(describe, "trial", lambda device: describe.Finding("ok", f"trial on {device}", ""))
    said = states(describe.devices())["ops on cpu"][1]
    assert said.startswith("the reference in PyTorch: the tensors are not on CUDA")
    monkeypatch.setattr(describe, "why_reference", lambda *tensors, **how: None)
    assert states(describe.devices())["ops on cpu"][1].startswith("Triton kernels")


def test_a_trial_that_breaks_is_reported(monkeypatch):
    from retain import reference

    def broken(seed):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(reference, "load_model", broken)
    assert describe.trial("cpu") == ("WRONG", "trial on cpu", "RuntimeError: no such instruction")

import pytest
import torch

from retain import resident
from retain.resident import held_at_most, held_now, measurable, reset_peak

MIB = 2**20


def test_a_peak_is_seen_until_it_is_forgotten():
    assert measurable()
    block = torch.ones(16 * MIB)  # 64 MiB, touched
    reset_peak()
    with_block = held_now()
    assert held_at_most() >= with_block - MIB
    more = torch.ones(16 * MIB)
    assert held_at_most() - with_block > 48 * MIB
    del block, more


def test_a_system_that_does_not_tell(monkeypatch, tmp_path):
    empty = tmp_path / "status"
    empty.write_text("Name: x\n")
    monkeypatch.setattr(resident, "STATUS", empty)
    with pytest.raises(RuntimeError, match="has no VmRSS: memory is measured on Linux only"):
        held_now()
    monkeypatch.setattr(resident, "CLEAR", tmp_path / "nothing")
    assert not measurable()

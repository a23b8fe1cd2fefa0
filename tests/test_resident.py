import mmap

import pytest

from retain import resident
from retain.resident import held_at_most, held_now, measurable, reset_peak

MIB = 2**20


def test_the_peak_is_forgotten_and_found_again():
    def hold():
        with mmap.mmap(-1, 64 * MIB) as held:  # which is given back, whatever the allocator keeps
            for start in range(0, 64 * MIB, 4096):
                held[start] = 1

    assert measurable()
    hold()
    first = held_at_most()
    reset_peak()
    forgotten = held_at_most()
    assert first - forgotten > 48 * MIB and forgotten >= held_now() - MIB > 0
    hold()
    assert held_at_most() - forgotten > 48 * MIB


def test_a_system_that_does_not_tell(monkeypatch, tmp_path):
    empty = tmp_path / "status"
    empty.write_text("Name: x\n")
    monkeypatch.setattr(resident, "STATUS", empty)
    with pytest.raises(RuntimeError, match="has no VmRSS: memory is measured on Linux only"):
        held_now()
    monkeypatch.setattr(resident, "CLEAR", tmp_path / "nothing")
    assert not measurable()

import mmap

import pytest
import torch

from retain.process import memory as resident
from retain.process.memory import Peak, held_at_most, held_now, in_a_process, measurable, reset_peak

MIB = 2**20


def hold():
    with mmap.mmap(-1, 64 * MIB) as held:  # which is given back, whatever the allocator keeps
        for start in range(0, 64 * MIB, 4096):
            held[start] = 1


def test_the_peak_is_forgotten_and_found_again():
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


def test_a_peak_is_what_was_held_beyond_what_was_held_before():
    hold()
    peak = Peak("cpu")
    hold()
    assert 48 * MIB < peak.beyond() < 80 * MIB
    assert peak.beyond() < 16 * MIB, "it starts anew each time"


def test_a_peak_on_a_gpu_is_what_torch_allocated(monkeypatch):
    """On a device that counts: (now, most)."""
    held, order = [10, 10], []

    def reset(device):
        order.append("reset")
        held[1] = held[0]

    calls = {
        "synchronize": lambda device: order.append("synchronize"),
        "reset_peak_memory_stats": reset,
        "memory_allocated": lambda device: held[0],
        "max_memory_allocated": lambda device: order.append("most") or held[1],
    }
    for name, call in calls.items():
        monkeypatch.setattr(torch.cuda, name, call)
    held[:] = [10, 99]
    peak = Peak("cuda:0")
    held[:] = [12, 30]
    assert peak.beyond() == 20 and peak.beyond() == 2
    assert order[:2] == ["synchronize", "reset"] and order[2:4] == ["synchronize", "most"]


def test_a_process_of_its_own_gives_back_what_is_freed(tmp_path, monkeypatch):
    body = "import os, sys\nprint(os.environ['MALLOC_TRIM_THRESHOLD_'])\nprint(*sys.argv[1:])\n"
    (tmp_path / "shown.py").write_text(body)
    (tmp_path / "broken.py").write_text("import sys\nsys.exit('x' * 3000 + 'it broke')\n")
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert in_a_process("shown", ["--a=1", "b"]) == ["65536", "--a=1 b"]
    with pytest.raises(RuntimeError, match="the watched process failed: x+it broke$") as failed:
        in_a_process("broken", [])
    assert len(str(failed.value)) < 2100
    with pytest.raises(RuntimeError, match=r"took longer than 0.5 s and was ended: measure less"):
        in_a_process("slow", [], timeout=0.5)

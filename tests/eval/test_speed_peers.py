"""The benchmark beside the field's main library, on a process that answers like it."""

import json
import sys

import pytest
import torch

from retain.eval.speed.__main__ import main
from retain.eval.speed.caches import TimedCache
from retain.eval.speed.peers import BENCHMARK, PRESSES, PeersSettings, memory_of
from tests.eval.test_speed import ENTRY, typed

# Answers like peer_side.py: everything takes as long as it is told here, and AdaKV frees nothing.
BODY = """
folder = sys.argv[2]
how = json.load(open(folder + "/request.json"))

def answered(asked):
    if asked["do"] == "versions":
        return {"python": "3", "kvpress": VERSION}
    press, kept = asked["press"], asked["kept"]
    if press is None and FAILS:
        return {"error": "OutOfMemoryError: no"}
    if press is not None and press["name"] == "KnormPress":
        return {"error": "AssertionError: no"}
    held = how["tokens"] if press is None or press["name"] == "AdaKVPress" else kept
    size, peak = held * 2 * ENTRY * asked["batch"], 7 if asked["watch"] else None
    answer = {"ttft_ms": 2.0 if press is None else 3.0, "token_ms": 1.0 if press is None else 0.5}
    answer |= {"bytes_held": size, "bytes_allocated": size, "bytes_beside": 24 if held != kept else 0}
    return answer | {"prefill_peak": peak, "decode_peak": peak, "entries_masked": 0}

for line in sys.stdin:
    with open(LOG, "a") as log:
        log.write(line)
    print(json.dumps(answered(json.loads(line))), flush=True)
"""


def peer(folder, version, *, plain_fails=False, entry=ENTRY):
    path = folder / "python"
    values = {"LOG": str(folder / "log"), "VERSION": version, "ENTRY": entry, "FAILS": plain_fails}
    lines = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{lines}\n{BODY}")
    path.chmod(0o755)
    return str(path)


def run(tmp_path, *more, **changes):
    changes = {"policies": "snapkv,adakv", "keep_ratios": "0.5", "batches": "2", **changes}
    words = ["--what", "peers", *typed("serving", **changes)[2:]]
    return main([*words, *more, "--output", str(tmp_path / "peers.json")])


def rows_of(tmp_path):
    record = json.loads((tmp_path / "peers.json").read_text())
    return {row["name"]: row for row in record["rows"]}


def test_both_libraries_are_measured_at_the_same_budget(tmp_path, monkeypatch, capsys):
    peaks = [
        {"policy": name, "keep_ratio": ratio, "batch": 2, "prefill": 5, "decode": 6}
        for name, ratio in (("plain", 1.0), ("full", 1.0), ("snapkv", 0.5), ("adakv", 0.5))
    ]
    monkeypatch.setattr(type(BENCHMARK), "watched", lambda self, asked: [peaks] * (self is BENCHMARK))
    # Prompts so long, and heads so wide, that entries and not positions and tables are what a cache takes.
    tokens, entry = 1024, 2 * ENTRY
    python = peer(tmp_path, "9.9", entry=entry)
    assert run(tmp_path, "--peer-python", python, tokens=tokens, width=64, memory=True) == 0
    record, text = json.loads((tmp_path / "peers.json").read_text()), (tmp_path / "peers.txt").read_text()
    assert BENCHMARK.text(record) == text and capsys.readouterr().out.startswith(text)
    rows = rows_of(tmp_path)
    assert [(row["library"], name) for name, row in rows.items()] == [
        *(("transformers", f"DynamicCache, {where}") for where in ("here", "there")),
        *(("retain", name) for name in ("full", "snapkv", "adakv")),
        *(("kvpress", name) for name in ("SnapKVPress", "AdaKVPress(SnapKVPress)")),
    ]
    full = 2 * 2 * tokens * entry
    for name, row in rows.items():
        freed, ours = name in ("snapkv", "adakv", "SnapKVPress"), row["library"] == "retain"
        held, allocated = row["cache_bytes"]["held"], row["cache_bytes"]["allocated"]
        assert held == (full // 2 if freed else full) and row["cache_bytes"]["full"] == full, name
        assert allocated > held if ours else allocated == held, "positions and tables take some, too"
        assert row["memory"] == ("freed" if freed else "simulated" if "AdaKV" in name else "full"), name
        assert not freed or allocated <= 1.25 * full / 2
        assert row["peak_bytes"]["prefill"] == (7 if "Press" in name or ", there" in name else 5)
    theirs, ours = rows["AdaKVPress(SnapKVPress)"], rows["adakv"]
    assert theirs["ttft_over_plain"]["all"] == [1.5, 1.5] and theirs["token_over_plain"]["median"] == 0.5
    assert theirs["cache_bytes"]["beside"] == 24
    ratios = [own / 3.0 for own in ours["ttft_ms"]["all"]]
    assert theirs["ttft_ours_over_theirs"]["all"] == pytest.approx(ratios)
    assert len(rows["DynamicCache, there"]["ttft_ms"]["all"]) == 2 * 2
    for part in ("kvpress 9.9", "simulated", "python -m retain.eval.speed --what peers"):
        assert part in text

    asked = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    lives, watched = (
        [one for one in asked if one["do"] == "life" and one["watch"] == watch] for watch in (False, True)
    )
    assert all(one["kept"] == tokens // 2 for one in lives if one["press"])
    assert [one["press"] is None for one in watched] == [True, False, False]
    # Warm-up (turn -1), then turns 0 and 1: a press and its plain neighbour, whose order alternates.
    pairs = [[one["press"] is None for one in lives[i : i + 2]] for i in range(0, 12, 2)]
    assert pairs == [[True, False]] * 2 + [[False, True]] * 2 + [[True, False]] * 2


def test_what_fails_there_is_said_and_the_others_go_on(tmp_path, capsys):
    assert run(tmp_path, "--peer-python", peer(tmp_path, "9.9"), policies="knorm,snapkv") == 0
    (failed,) = [row for row in rows_of(tmp_path).values() if row["failed"]]
    assert failed["name"] == "KnormPress" and failed["failed"].endswith("AssertionError: no")
    assert "kvpress's side could not life: AssertionError: no" in capsys.readouterr().out


@pytest.mark.parametrize("there", [False, True])
def test_plain_transformers_without_memory_take_nothing_from_the_others(there, tmp_path, monkeypatch):
    decode = TimedCache.decode

    def small(self, cache, seen, ids_BS):
        if self.name == "plain":
            raise torch.OutOfMemoryError("CUDA out of memory")
        decode(self, cache, seen, ids_BS)

    monkeypatch.setattr(TimedCache, "decode", small)
    assert run(tmp_path, "--peer-python", peer(tmp_path, "9.9", plain_fails=there)) == 0
    rows = rows_of(tmp_path)
    assert rows["DynamicCache, here"]["failed"] == "out of memory"
    assert rows["DynamicCache, there"]["failed"].endswith("OutOfMemoryError: no" if there else "")
    assert bool(rows["DynamicCache, there"]["failed"]) == there
    for name in ("full", "snapkv", "adakv"):
        assert len(rows[name]["ttft_ms"]["all"]) == 2 and "ttft_over_plain" not in rows[name]
    for name, ours in (("SnapKVPress", "snapkv"), ("AdaKVPress(SnapKVPress)", "adakv")):
        theirs = rows[name]
        assert (theirs["ttft_over_plain"] is None) == there and theirs["ttft_ms"]["all"] == [3.0, 3.0]
        ratios = [taken / 3.0 for taken in rows[ours]["ttft_ms"]["all"]]
        assert theirs["ttft_ours_over_theirs"]["all"] == pytest.approx(ratios)
        assert theirs["cache_bytes"]["full"] == 2 * 2 * 96 * ENTRY
        assert theirs["memory"] == ("simulated" if "Ada" in name else "freed")


@pytest.mark.parametrize("installed", [False, True])
def test_absence_is_one_line_and_no_failure(tmp_path, capsys, installed):
    more = ["--peer-python", peer(tmp_path, None)] if installed else []
    assert run(tmp_path, *more, policies="snapkv", batches="1") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not compared" in line]
    why = "it is not installed in the environment of" if installed else "no --peer-python was given"
    assert f"kvpress: not compared, {why}" in line and "pip install" in line
    assert [row["library"] for row in rows_of(tmp_path).values()] == ["transformers", "retain", "retain"]


@pytest.mark.parametrize(
    ("more", "changes", "message"),
    [
        ([], {"policies": "snapkv,scope=layer"}, "policy 'snapkv,scope=layer' has no counterpart in kvpress"),
        (["--peer-python", "/no/python"], {}, "'/no/python' is no interpreter"),
    ],
)
def test_errors(tmp_path, capsys, more, changes, message):
    assert run(tmp_path, *more, **changes) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "peers.json").exists()
    assert PeersSettings().entries() == list(PRESSES)


@pytest.mark.parametrize(
    ("allocated", "keep_ratio", "said"),
    [
        *((100, 1.0, "full"), (20, 0.2, "freed"), (25, 0.2, "freed"), (26, 0.2, "partly freed")),
        *((94, 0.2, "partly freed"), (95, 0.2, "simulated"), (105, 0.2, "simulated"), (95, 0.9, "simulated")),
    ],
)
def test_memory_is_simulated_where_the_storage_stays(allocated, keep_ratio, said):
    assert memory_of(allocated, 100, keep_ratio) == {"memory": said, "allocated_of_full": allocated / 100}

"""The benchmark beside the field's main library, on a process that answers like it."""

import gc
import json
import sys

import pytest
import torch

from retain.eval.speed import peers as speed_peers
from retain.eval.speed import scoring as speed
from retain.eval.speed.peers import Foreign, main, memory_of, table
from retain.eval.speed.scoring import build_model
from retain.eval.speed.serving import Setting, Side
from tests.eval.test_speed_serving import ENTRY, TINY

# Answers like peer_side.py: everything takes as long as it is told here, and AdaKV frees nothing.
BODY = """
folder = sys.argv[2]
how = json.load(open(folder + "/request.json"))
for line in sys.stdin:
    asked = json.loads(line)
    with open(LOG, "a") as log:
        log.write(json.dumps(asked) + "\\n")
    if asked["do"] == "versions":
        print(json.dumps({"python": "3", "kvpress": VERSION}), flush=True)
        continue
    press, batch = asked["press"], asked["batch"]
    held = how["tokens"] if press is None or press["class"] == "AdaKVPress" else asked["kept"]
    if press is not None and press["class"] == "KnormPress":
        print(json.dumps({"error": "AssertionError: no"}), flush=True)
        continue
    peak = 7 if asked["watch"] else None
    answer = {"ttft_ms": 2.0 if press is None else 3.0, "token_ms": 1.0 if press is None else 0.5}
    if press is None and FAILS:
        print(json.dumps({"error": "OutOfMemoryError: no"}), flush=True)
        continue
    answer |= {"bytes_held": held * 2 * ENTRY * batch, "bytes_beside": 24 if held != asked["kept"] else 0}
    answer["bytes_allocated"] = answer["bytes_held"]
    answer |= {"prefill_peak": peak, "decode_peak": peak, "entries_masked": 0}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def young():
    """As in test_speed_serving."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def peer(folder, version, *, plain_fails=False, entry=ENTRY):
    path = folder / "python"
    values = {"LOG": str(folder / "log"), "VERSION": version, "ENTRY": entry, "FAILS": plain_fails}
    lines = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{lines}\n{BODY}")
    path.chmod(0o755)
    return str(path)


def run(tmp_path, *more, **changes):
    values = {**TINY, "policies": "snapkv,adakv", "keep_ratios": "0.5", "batches": "2", **changes}
    command = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return main([*command, *more, "--output", str(tmp_path / "peers.json")])


def test_both_libraries_are_measured_at_the_same_budget(tmp_path, monkeypatch, capsys):
    peaks = [
        {"policy": name, "keep_ratio": ratio, "batch": 2, "prefill": 5, "decode": 6}
        for name, ratio in (("plain", 1.0), ("full", 1.0), ("snapkv", 0.5), ("adakv", 0.5))
    ]
    monkeypatch.setattr(speed_peers, "watched", lambda setting: peaks)
    # Prompts so long, and heads so wide, that entries and not positions and tables are what a cache takes.
    tokens, entry = 1024, 2 * ENTRY
    python = peer(tmp_path, "9.9", entry=entry)
    assert run(tmp_path, "--peer-python", python, tokens=tokens, width=64) == 0
    record, text = json.loads((tmp_path / "peers.json").read_text()), (tmp_path / "peers.txt").read_text()
    assert table(record) == text and capsys.readouterr().out.startswith(text)
    rows = {(row["library"], row["name"]): row for row in record["rows"]}
    assert list(rows) == [
        ("transformers", "DynamicCache, here"),
        ("transformers", "DynamicCache, there"),
        ("retain", "full"),
        ("retain", "snapkv"),
        ("retain", "adakv"),
        ("kvpress", "SnapKVPress"),
        ("kvpress", "AdaKVPress(SnapKVPress)"),
    ]
    full = 2 * 2 * tokens * entry
    for (_, name), row in rows.items():
        freed, ours = name in ("snapkv", "adakv", "SnapKVPress"), name in ("full", "snapkv", "adakv")
        held, allocated = row["cache_bytes"]["held"], row["cache_bytes"]["allocated"]
        assert held == (full // 2 if freed else full) and row["cache_bytes"]["full"] == full, name
        assert allocated > held if ours else allocated == held, "positions and tables take some, too"
        assert row["memory"] == ("freed" if freed else "simulated" if "AdaKV" in name else "full"), name
        assert not freed or allocated <= 1.25 * full / 2
        assert row["peak_bytes"]["prefill"] == (7 if "Press" in name or ", there" in name else 5)
    theirs = rows["kvpress", "AdaKVPress(SnapKVPress)"]
    assert theirs["ttft_over_plain"]["all"] == [1.5, 1.5] and theirs["token_over_plain"]["median"] == 0.5
    assert theirs["cache_bytes"]["beside"] == 24
    ours = rows["retain", "adakv"]
    ratios = [own / 3.0 for own in ours["ttft_ms"]["all"]]
    assert theirs["ttft_ours_over_theirs"]["all"] == pytest.approx(ratios)
    assert len(rows["transformers", "DynamicCache, there"]["ttft_ms"]["all"]) == 2 * 2
    for part in ("kvpress 9.9", "simulated", "python -m retain.eval.speed.peers"):
        assert part in text

    asked = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    lives = [one for one in asked if one["do"] == "life" and not one["watch"]]
    watched = [one for one in asked if one["do"] == "life" and one["watch"]]
    assert all(one["kept"] == tokens // 2 for one in lives if one["press"])
    assert [one["press"] is None for one in watched] == [True, False, False]
    # Warm-up (turn -1), then turns 0 and 1: a press and its plain neighbour, whose order alternates.
    pairs = [[one["press"] is None for one in lives[i : i + 2]] for i in range(0, 12, 2)]
    assert all(sum(pair) == 1 for pair in pairs)
    plain_first = [pair[0] for pair in pairs]
    assert plain_first == [False, False, True, True, False, False]


def test_what_fails_there_is_said_and_the_others_go_on(tmp_path, capsys):
    python = peer(tmp_path, "9.9")
    assert run(tmp_path, "--no-memory", "--peer-python", python, policies="knorm,snapkv") == 0
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    (failed,) = [row for row in rows if row["failed"]]
    assert failed["name"] == "KnormPress" and failed["failed"].endswith("AssertionError: no")
    assert "failed: kvpress's side could not life" in capsys.readouterr().out


def test_plain_transformers_without_memory_here_or_there_take_nothing_from_the_others(tmp_path, monkeypatch):
    decode = Side.decode

    def small(self, cache, seen, ids_BS):
        if self.policy == "plain":
            raise torch.OutOfMemoryError("CUDA out of memory")
        decode(self, cache, seen, ids_BS)

    monkeypatch.setattr(Side, "decode", small)
    for there in (False, True):
        python = peer(tmp_path, "9.9", plain_fails=there)
        assert run(tmp_path, "--no-memory", "--peer-python", python) == 0
        rows = {row["name"]: row for row in json.loads((tmp_path / "peers.json").read_text())["rows"]}
        assert rows["DynamicCache, here"]["failed"] == "out of memory"
        assert rows["DynamicCache, there"]["failed"].endswith("OutOfMemoryError: no" if there else "")
        assert bool(rows["DynamicCache, there"]["failed"]) == there
        for name in ("full", "snapkv", "adakv"):
            assert len(rows[name]["ttft_ms"]["all"]) == 2 and rows[name]["ttft_over_plain"] is None
        for name, ours in (("SnapKVPress", "snapkv"), ("AdaKVPress(SnapKVPress)", "adakv")):
            theirs = rows[name]
            assert (theirs["ttft_over_plain"] is None) == there and theirs["ttft_ms"]["all"] == [3.0, 3.0]
            ratios = [taken / 3.0 for taken in rows[ours]["ttft_ms"]["all"]]
            assert theirs["ttft_ours_over_theirs"]["all"] == pytest.approx(ratios)
            assert theirs["cache_bytes"]["full"] == 2 * 2 * 96 * ENTRY
            assert theirs["memory"] == ("simulated" if "Ada" in name else "freed")


def test_lives_are_joined_by_round():
    """Theirs of rounds 0 and 2, ours of 0, 1 and 2, a plain one there in round 2 only."""
    life = {"bytes_held": 5, "bytes_allocated": 5, "bytes_beside": 0, "prefill_peak": None}
    life |= {"decode_peak": None}
    times = {0: 2.0, 2: 8.0}
    one = Foreign("snapkv", 0.5, "SnapKVPress")
    one.lives = {turn: {**life, "ttft_ms": taken, "token_ms": 1.0} for turn, taken in times.items()}
    one.beside = {2: {**life, "bytes_held": 10, "ttft_ms": 4.0, "token_ms": 1.0}}
    model = build_model(Setting(**TINY).shape())
    ours = Side("snapkv", 0.5, model, list, turns=[0, 1, 2], ttft_ms=[1.0, 5.0, 2.0], token_ms=[1.0] * 3)
    row = speed_peers._row(one, [*one.lives.values()], 10, 1, ours)
    assert row["ttft_ours_over_theirs"]["all"] == [1.0 / 2.0, 2.0 / 8.0]
    assert row["ttft_over_plain"] is None, "one ratio is no spread"
    assert row["memory"] == "freed" and row["cache_bytes"]["full"] == 10


@pytest.mark.parametrize("installed", [False, True])
def test_absence_is_one_line_and_no_failure(tmp_path, capsys, installed):
    more = ["--peer-python", peer(tmp_path, None)] if installed else []
    assert run(tmp_path, "--no-memory", *more, policies="snapkv", batches="1") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "not compared" in line]
    assert len(lines) == 1
    why = "it is not installed in the environment of" if installed else "no --peer-python was given"
    assert f"kvpress: not compared, {why}" in lines[0] and "pip install" in lines[0]
    record = json.loads((tmp_path / "peers.json").read_text())
    assert [row["library"] for row in record["rows"]] == ["transformers", "retain", "retain"]


@pytest.mark.parametrize(
    ("more", "changes", "message"),
    [
        ([], {"policies": "lava"}, "policy 'lava' has no counterpart in kvpress here"),
        ([], {"policies": "snapkv,scope=layer"}, "policy 'snapkv' has no counterpart|unknown|as it ships"),
        (["--peer-python", "/no/python"], {}, "'/no/python' is no interpreter"),
        ([], {"batches": "x"}, "batches are whole numbers"),
    ],
)
def test_errors(tmp_path, capsys, more, changes, message):
    assert run(tmp_path, *more, **changes) == 2
    with pytest.raises(ValueError, match=message):
        raise ValueError(capsys.readouterr().err)
    assert not (tmp_path / "peers.json").exists()


def test_by_default_all_that_both_have():
    setting = speed_peers.known(speed_peers.Setting())
    assert [entry.policy for entry in setting.entries()] == list(speed_peers.PRESSES)


def test_memory_is_simulated_where_the_storage_stays_and_freed_where_it_is_about_what_was_asked_for():
    assert memory_of(100, 100, 1.0) == "full"
    assert memory_of(20, 100, 0.2) == memory_of(25, 100, 0.2) == "freed"
    assert memory_of(26, 100, 0.2) == memory_of(94, 100, 0.2) == "partly freed"
    assert memory_of(95, 100, 0.2) == memory_of(105, 100, 0.2) == memory_of(95, 100, 0.9) == "simulated"


def test_it_is_reached_from_the_first_benchmark(monkeypatch):
    seen = []
    monkeypatch.setattr(speed_peers, "main", lambda arguments: seen.append(arguments) or 0)
    assert speed.main(["--tokens", "96", "--what", "peers"]) == 0
    assert seen == [["--tokens", "96"]]

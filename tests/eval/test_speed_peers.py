"""The benchmark beside the field's main library, on a process that answers like it."""

import gc
import json
import sys

import pytest

from retain.eval import speed, speed_peers
from retain.eval.speed_peers import main, memory_of, table
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
    answer |= {"bytes_held": held * 2 * ENTRY * batch, "bytes_beside": 24 if held != asked["kept"] else 0}
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


def peer(folder, version):
    path = folder / "python"
    values = {"LOG": str(folder / "log"), "VERSION": version, "ENTRY": ENTRY}
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
    assert run(tmp_path, "--peer-python", peer(tmp_path, "9.9")) == 0
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
    full, cut = 2 * 2 * 96 * ENTRY, 2 * 2 * 48 * ENTRY
    for (_, name), row in rows.items():
        freed = name in ("snapkv", "adakv", "SnapKVPress")
        assert row["cache_bytes"]["held"] == (cut if freed else full), name
        assert row["cache_bytes"]["full"] == full
        wanted = "freed" if freed else "simulated" if "AdaKV" in name else "full"
        assert row["memory"] == wanted
        assert row["peak_bytes"]["prefill"] == (7 if "Press" in name or ", there" in name else 5)
    theirs = rows["kvpress", "AdaKVPress(SnapKVPress)"]
    assert theirs["ttft_over_plain"]["all"] == [1.5, 1.5] and theirs["token_over_plain"]["median"] == 0.5
    assert theirs["cache_bytes"]["beside"] == 24
    ours = rows["retain", "adakv"]
    ratios = [own / 3.0 for own in ours["ttft_ms"]["all"]]
    assert theirs["ttft_ours_over_theirs"]["all"] == pytest.approx(ratios)
    assert len(rows["transformers", "DynamicCache, there"]["ttft_ms"]["all"]) == 2 * 2
    for part in ("kvpress 9.9", "simulated", "python -m retain.eval.speed_peers"):
        assert part in text

    asked = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    lives = [one for one in asked if one["do"] == "life" and not one["watch"]]
    watched = [one for one in asked if one["do"] == "life" and one["watch"]]
    assert all(one["kept"] == 48 for one in lives if one["press"])
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


def test_memory_is_simulated_where_the_cache_holds_what_was_to_go():
    assert memory_of(100, 100, 1.0) == "full"
    assert memory_of(20, 100, 0.2) == memory_of(21, 100, 0.2) == "freed"
    assert memory_of(100, 100, 0.2) == memory_of(22, 100, 0.2) == "simulated"


def test_it_is_reached_from_the_first_benchmark(monkeypatch):
    seen = []
    monkeypatch.setattr(speed_peers, "main", lambda arguments: seen.append(arguments) or 0)
    assert speed.main(["--tokens", "96", "--what", "peers"]) == 0
    assert seen == [["--tokens", "96"]]

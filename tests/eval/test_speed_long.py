import json
import warnings

import pytest
import torch

from retain.eval.speed import long as speed_long
from retain.eval.speed import scoring as speed
from retain.eval.speed.long import FIRST, Setting, Side, describe_side, main, table, waits_of
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attachment_of
from retain.hf.model.random_llama import VOCABULARY

TINY = {
    **{"tokens": "200,260", "policies": "fused,defensivekv,lava", "steps": 3, "batch": 2, "layers": 2},
    **{"width": 32, "heads": 4, "kv_heads": 2, "intermediate": 48, "keep_ratio": 0.5, "rounds": 2},
    **{"warmup": 0, "threads": 1, "dtype": "float32", "device": "cpu"},
}
ENTRY = 2 * 2 * 2 * 8 * 4  # layers x heads x (key and value) x width x float32


def typed(**more):
    """A tiny setting as a command line."""
    return [
        part
        for name, value in {**TINY, **more}.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]


def test_the_default_is_a_model_of_8b_at_32k_and_128k(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    setting = Setting()
    assert setting.lengths == [32768, 131072]
    shape = setting.shape()
    assert (shape.layers, shape.width, shape.heads, shape.kv_heads) == (32, 4096, 32, 8)
    assert shape.width // shape.heads == 128 and shape.intermediate == 14336 and shape.dtype == "bfloat16"
    assert shape.tokens == 131072 + FIRST + setting.steps, "room for what is decoded"
    assert [entry.policy for entry in setting.entries()] == ["full", "fused", "defensivekv", "lava"]
    attention = shape.width * (2 * shape.width + 2 * shape.kv_heads * 128)
    layer = attention + 3 * shape.width * shape.intermediate + 2 * shape.width
    weights = shape.layers * layer + 2 * VOCABULARY * shape.width + shape.width
    assert 6.9e9 < weights < 7.1e9, "8B, but for a vocabulary of 128K: two matrices of half a billion each"


def test_a_record_tells_of_every_side_at_every_length(tmp_path, capsys):
    output = tmp_path / "runs" / "long.json"
    assert main([*typed(), "--output", str(output)]) == 0
    record, text = json.loads(output.read_text()), output.with_suffix(".txt").read_text()
    assert capsys.readouterr().out.startswith(text) and table(record) == text
    assert record["check"]["error"] <= record["check"]["allowed"] == 1e-4
    assert list(record["lengths"]) == ["200", "260"]
    for length, rows in record["lengths"].items():
        assert list(rows) == ["plain", "full", "fused", "defensivekv", "lava"]
        new = FIRST + 3
        everything = 2 * (int(length) + new) * ENTRY
        kept = 2 * (int(length) // 2 + new) * ENTRY
        for name, row in rows.items():
            assert row["bytes_held"] == (everything if name in ("plain", "full") else kept)
            assert row["bytes_allocated"] >= row["bytes_held"]
            for what in ("prefill_ms", "decode_ms"):
                assert len(row[what]["all"]) == 2 and row[what]["p20"] <= row[what]["p80"]
                assert (f"{what}_over_plain" in row) == (name != "plain")
                assert (f"{what}_over_full" in row) == (name != "full")
            assert row["prefill_peak_bytes"] is row["decode_peak_bytes"] is row["waits_a_token"] is None
    for part in (
        "prefill of 200",
        "decoding behind 260",
        "gates: random, linear",
        "python -m retain.eval.speed.long",
    ):
        assert part in text
    assert "paths: " in text and "reference (the tensors are not on CUDA)" in text


def test_sides_live_in_turn_and_in_an_order_that_rotates(monkeypatch):
    order = []
    live = speed_long.live

    def look(side, *args, counts):
        order.append((side.name, counts))
        assert (attachment_of(side.model) is not None) == (side.name != "plain"), (
            "the plain side is not attached"
        )
        live(side, *args, counts=counts)

    monkeypatch.setattr(speed_long, "live", look)
    setting = Setting(**{**TINY, "tokens": "128", "policies": "snapkv", "keep_ratio": 0.7, "warmup": 1})
    record = speed_long.benchmark(setting)
    names = ["plain", "full", "snapkv"]
    assert order == [
        *((name, False) for name in (*names[2:], *names[:2])),
        *((name, True) for name in names),
        *((name, True) for name in (*names[1:], *names[:1])),
    ]
    assert len(record["lengths"]["128"]["snapkv"]["prefill_ms"]["all"]) == 2


def test_both_sides_decode_the_same_tokens_at_the_same_positions(monkeypatch):
    """A cache that keeps everything gives the plain side's logits, also behind the first tokens."""
    setting = Setting(**{**TINY, "tokens": "128"})
    model = speed.build_model(setting.shape())
    with speed_long.attach(model), torch.no_grad():
        twin = speed.build_model(setting.shape())
        plain, full, *_ = speed_long.sides_of(setting, model, twin, speed_long.random_gates(model))
        ids = torch.randint(VOCABULARY, (2, 140))
        logits = []
        for side in (plain, full):
            cache = side.prefill(ids[:, :130])
            side.decode(cache, 130, ids[:, 130:134])
            logits.append(torch.cat(side.decode(cache, 134, ids[:, 134:]), dim=1))
        whole = twin(input_ids=ids).logits[:, 134:]
    for one in logits:
        assert float((one - whole).abs().max()) < 1e-5 * float(whole.abs().max())


def test_nothing_is_timed_if_our_cache_is_wrong(monkeypatch, tmp_path, capsys):
    decode = Side.decode

    def off(self, cache, *args):
        logits = decode(self, cache, *args)
        return [one * 1.01 for one in logits] if isinstance(cache, Cache) else logits

    monkeypatch.setattr(Side, "decode", off)
    monkeypatch.setattr(speed_long, "live", None)
    assert main([*typed(), "--output", str(tmp_path / "long.json")]) == 2
    shown = capsys.readouterr()
    assert "keeps everything gives other logits than transformers' own: error" in shown.err and not shown.out
    assert not list(tmp_path.iterdir())


def test_a_side_without_memory_is_said_and_the_others_go_on(monkeypatch, tmp_path):
    prefill = Side.prefill

    def small(self, ids_BT):
        if self.name == "plain" and ids_BT.shape[1] == 260:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(self, ids_BT)

    monkeypatch.setattr(Side, "prefill", small)
    record = speed_long.benchmark(Setting(**{**TINY, "policies": "snapkv"}))
    short, long = record["lengths"].values()
    assert long["plain"] == {"failed": "out of memory"} and "prefill_ms" in short["plain"]
    assert "prefill_ms_over_plain" not in long["snapkv"] and "prefill_ms_over_full" in long["snapkv"]
    (line,) = [line for line in table(record).splitlines() if "out of memory" in line]
    assert line.split() == ["plain", "out", "of", "memory"]


def test_ratios_are_taken_within_rounds():
    model = speed.build_model(Setting(**TINY).shape())
    plain, own = (Side(name, model, list) for name in ("plain", "own"))
    plain.prefill_ms, own.prefill_ms = [1.0, 2.0, 10.0], [2.0, 2.0, 11.0]
    plain.decode_ms, own.decode_ms = [4.0, 4.0, 4.0], [2.0, 1.0, 8.0]
    row = describe_side(own, [plain, own])
    assert row["prefill_ms_over_plain"]["median"] == 1.1 and row["decode_ms_over_plain"]["median"] == 0.5
    assert "prefill_ms_over_full" not in row


def test_policies_with_settings_are_separated_by_semicolons():
    setting = Setting(**{**TINY, "policies": "snapkv,scope=layer;lava"})
    assert [entry.typed for entry in setting.entries()] == ["full", "snapkv,scope=layer", "lava"]
    assert Setting(**{**TINY, "policies": "full,lava"}).entries()[1].policy == "lava", "full counts once"


def test_waits_are_counted_where_there_is_a_device(monkeypatch):
    modes: list[str] = []
    assert waits_of(lambda: modes.append("ran"), "cpu") is None and modes.pop() == "ran"
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def run():
        assert modes == ["warn"]
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert waits_of(run, "cuda") == 3
    assert modes == ["warn", "default"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tokens": "32K"}, r"tokens are whole numbers of at least 128, separated by commas, got '32K'"),
        ({"tokens": "64"}, r"tokens are whole numbers of at least 128"),
        ({"rounds": 1}, "rounds is a whole number of at least 2, got 1"),
        ({"kv_heads": 3}, "heads 4 are not a multiple of kv_heads 3"),
        ({"keep_ratio": 2.0}, "keep_ratio is kept / seen"),
        ({"policies": "snapvk"}, "unknown policy 'snapvk': did you mean 'snapkv'"),
        ({"policies": "snapkv,scope"}, "unknown policy 'scope'"),
        ({"device": "cuda"}, "torch sees no CUDA device; take cpu"),
    ],
)
def test_errors_come_before_work(more, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(speed_long, "live", None)
    monkeypatch.setattr(speed_long, "check", None)
    assert main([*typed(**more), "--output", str(tmp_path / "long.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)
    assert not list(tmp_path.iterdir())

"""The other side of a comparison with the field's main library, on a stand-in for it, and how it is asked."""

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from retain.eval.speed import peer_side
from retain.eval.speed.peer_side import Here, found_again, positions_of_cache, watching
from retain.eval.speed.peers import PRESSES, Peer, Press, write_exchange
from retain.hf.version_names import CACHE
from retain.presets import policies
from tests.eval import press as stand_in
from tests.refused import refused
from tests.tiny import tiny_model

TOKENS, NEW, LAYERS, HEADS = 40, 3, 2, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exchange")
    draw = torch.Generator().manual_seed(1)
    # Each token once, and no norm of keys: norms without ties.
    ids = torch.stack([torch.randperm(96, generator=draw)[: TOKENS + NEW] + 1 for _ in range(2)])
    write_exchange(folder, tiny_model("llama"), ids, tokens=TOKENS)
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", stand_in)
    threads = torch.get_num_threads()
    with torch.no_grad():
        yield Here(folder)
    torch.set_num_threads(threads)


def answer(folder, python_body):
    """A process that is started like an interpreter, and runs this instead of what it is told to."""
    path = folder / "fake"
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{python_body}")
    path.chmod(0o755)
    return path


def test_both_sides_read_the_same_model_and_tokens(here, folder):
    own, ids = tiny_model("llama"), here.ids_BT
    assert ids.shape == (2, TOKENS + NEW) and here.how == {
        **{"tokens": TOKENS, "threads": 1, "dtype": "float32", "device": "cpu"}
    }
    with torch.no_grad():
        assert torch.equal(own(ids).logits, here.model(ids).logits)
    assert json.loads((folder / "request.json").read_text())["tokens"] == TOKENS


def kept_by(here, kept, press):
    """What a press keeps of each prompt, and its scores, as files give them."""
    request = {"press": {"settings": {}, "attentions": False, **press}, "tokens": TOKENS}
    found = here.kept({**request, "ratio": here.ratio(kept)})
    assert found["layers"] == LAYERS
    return peer_side.load_file(here.folder / found["file"])


@pytest.mark.parametrize("kept", [1, 7, 20, 39])
def test_what_a_press_gathers_is_found_again_in_any_order(here, kept):
    tensors, cache = kept_by(here, kept, {"name": "KnormPress"}), DynamicCache()
    here.model(here.ids_BT[:, :TOKENS], **{CACHE: cache})
    for idx, layer in enumerate(cache.layers):
        norms, mask = layer.keys.norm(dim=-1), tensors[f"kept.{idx}"]
        places = norms.argsort(-1)[..., :kept]
        assert mask.dtype == torch.bool and torch.equal(
            mask, torch.zeros_like(mask).scatter(-1, places, True)
        )
        torch.testing.assert_close(tensors[f"score.{idx}"], -norms, atol=1e-5, rtol=1e-5)


def test_what_a_press_only_masks_is_read_off_its_list(here):
    found = kept_by(here, 10, {"name": "AdaKVPress", "inner": {"name": "KnormPress", "settings": {}}})
    for idx in range(LAYERS):
        for kept, first in zip(
            found[f"kept.{idx}"].flatten(1), found[f"first.{idx}"].flatten(1), strict=True
        ):
            assert int(kept.sum()) == 10 * HEADS and kept.equal(first >= first.topk(10 * HEADS).values[-1])
    press = stand_in.AdaKVPress(stand_in.KnormPress(0.5))
    for watched in (True, False):  # and a press is as it was afterwards
        with watching(press) if watched else nullcontext():
            assert ("compress" in vars(press)) == ("score" in vars(press.press)) == watched


@pytest.mark.parametrize("tokens", [7, 64, 100, 300, 4095])
def test_their_ratio_keeps_just_as_many(tokens, here):
    here.how = {**here.how, "tokens": tokens}
    for kept in range(1, tokens):
        ratio = here.ratio(kept)
        assert int(tokens * (1 - ratio)) == kept, "as the library rounds"
        assert 0 <= ratio < 1


def test_entries_that_are_alike_cannot_be_named():
    keys = torch.ones(1, 1, 4, 2)
    alike = (keys, keys, keys[:, :, :2], keys[:, :, :2])
    refused("not exactly one of those that there were", found_again, *alike)
    values = torch.arange(8.0).view(1, 1, 4, 2)
    mask = found_again(keys, values, keys[:, :, [3, 1]], values[:, :, [3, 1]])
    assert mask.tolist() == [[[False, True, False, True]]]


def test_what_cannot_be_exchanged_is_refused(tmp_path):
    given = tmp_path, tiny_model("llama"), torch.ones(1, 40, dtype=torch.int64)
    refused("41 tokens of prompt in rows of 40", write_exchange, *given, tokens=41)
    assert not list(tmp_path.iterdir())
    says = "is no interpreter: pass that of an environment where kvpress"
    refused(says, Peer, tmp_path / "nowhere", tmp_path)


def test_hooks_are_told_positions_where_transformers_tells_none():
    cache = DynamicCache()
    cache.update(*(torch.zeros(1, 1, 5, 2),) * 2, 0)
    module = SimpleNamespace(layer_idx=0)
    own = {CACHE: cache, "hidden_states": torch.zeros(1, 3, 4)}
    args, kwargs = positions_of_cache(module, (), own)
    assert args == () and kwargs["cache_position"].tolist() == [5, 6, 7]
    assert positions_of_cache(module, (), {**own, "cache_position": torch.arange(2)}) is None, "told already"


def test_a_life_says_what_is_freed_and_what_is_not(here):
    knorm = {"name": "KnormPress", "settings": {}}
    plain = here.life({"press": None, "kept": TOKENS, "batch": 1})
    freed = here.life({"press": knorm, "kept": 10, "batch": 1})
    head_wise = {"name": "AdaKVPress", "settings": {}, "inner": knorm}
    simulated = here.life({"press": head_wise, "kept": 10, "batch": 1, "watch": True})
    entry = plain["bytes_held"] // TOKENS
    assert entry == LAYERS * 2 * HEADS * 8 * 4, "layers, keys and values, heads, width, float32"
    assert freed["bytes_held"] == 10 * entry and freed["bytes_beside"] == freed["entries_masked"] == 0
    assert simulated["bytes_held"] == plain["bytes_held"] == simulated["bytes_allocated"]
    assert freed["bytes_held"] <= freed["bytes_allocated"] < plain["bytes_allocated"]
    masked = LAYERS * HEADS * (TOKENS - 10)
    assert simulated["entries_masked"] == masked and simulated["bytes_beside"] == masked * 3 * 8
    assert plain["ttft_ms"] > 0 and plain["token_ms"] > 0 and plain["prefill_peak"] is None
    assert simulated["prefill_peak"] >= 0 and simulated["decode_peak"] >= 0


def test_every_counterpart_is_a_preset_and_a_press_is_named_with_what_it_wraps():
    assert set(PRESSES) <= {preset.name for preset in policies()}
    assert str(PRESSES["adakv"]) == "AdaKVPress(SnapKVPress)"
    outer = Press("A", {"x": 1}, Press("B"), attentions=True)
    inner = {"name": "B", "settings": {}, "inner": None, "attentions": False}
    assert asdict(outer) == {"name": "A", "settings": {"x": 1}, "inner": inner, "attentions": True}


def test_a_process_is_asked_line_by_line_in_an_environment_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    body = """
import os
print('noise', file=sys.stderr)
for line in sys.stdin:
    told = {'asked': json.loads(line), 'folder': sys.argv[2], 'environment': {**os.environ}}
    print(json.dumps(told), flush=True)
"""
    with Peer(answer(tmp_path, body), tmp_path / "x", environment={"MORE": "1"}) as peer:
        told = peer.ask("anything", number=1)
        assert told["asked"] == {"do": "anything", "number": 1} and told["folder"] == str(tmp_path / "x")
        assert told["environment"]["MORE"] == "1" and "PYTHONPATH" not in told["environment"]
        asked = peer.life(Press("B"), 3, 2, watch=True)["asked"]
    assert asked["press"] == asdict(Press("B"))
    assert (asked["kept"], asked["batch"], asked["watch"]) == (3, 2, True)


FAILS = "print(json.dumps({'error': 'KeyError: x'}), flush=True)\nsys.stdin.read()"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (FAILS, "could not versions: KeyError: x"),
        ("sys.exit('ImportError: no torch here')", "ended with status 1: ImportError: no torch here"),
        ("sys.exit(3)", "ended with status 3: it said nothing"),
        ("sys.stdin.read()", "no answer in 0.2 s"),
    ],
)
def test_what_goes_wrong_there_is_said_here(tmp_path, body, message):
    timeout = 0.2 if "no answer" in message else 60.0
    with (
        Peer(answer(tmp_path, body), tmp_path, timeout=timeout) as peer,
        pytest.raises(RuntimeError, match=message),
    ):
        peer.versions()

"""The tool that compares scores and keep sets with the field's main library, on stand-ins for it."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from retain.eval.speed.peer import WINDOW
from retain.eval.studies import parity
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.intercept.observe import observe
from retain.policy import load_policy
from tests.eval import press as stand_in
from tests.evictions import FOLDER
from tests.tiny import tiny_batch, tiny_model


class KnormPress:
    def __init__(self, ratio, sign=-1.0):
        self.sign = sign

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return self.sign * keys.norm(dim=-1)


class Library:
    KnormPress = KnormPress


@pytest.mark.parametrize(("sign", "alike"), [(-1.0, True), (1.0, False)])
def test_agreement_and_disagreement_show(sign, alike):
    model, (ids, mask) = tiny_model("qwen3"), tiny_batch((0, 3, 11), 60)
    pair = parity.Pair("KnormPress", "knorm", press_settings={"sign": sign}, first=2, last=5)
    found = parity.compare_pair(Library, pair, model, observe(model, ids, mask))
    if alike:
        assert found.worst < 1e-6 and found.shared == 1.0 and found.tied
    else:
        assert found.worst > 1.0 and found.shared < 0.5 and not found.tied
    assert found.agrees == alike


@pytest.mark.parametrize(
    ("worst", "shared", "tied", "agrees"),
    [
        (1e-6, 0.5, True, True),
        (1e-6, 0.995, False, True),
        (1e-6, 0.98, False, False),
        (2e-4, 1.0, True, False),
        (float("nan"), 1.0, True, False),
    ],
)
def test_scores_agree_up_to_rounding_and_ties(worst, shared, tied, agrees):
    assert parity.Scores(worst, shared, tied).agrees == agrees


@pytest.mark.parametrize(("sign", "status"), [(-1.0, 0), (1.0, 1)])
def test_the_comparison_of_scores_fails_where_they_differ(sign, status, monkeypatch, capsys):
    library = SimpleNamespace(KnormPress=KnormPress, version=lambda name: "9.9")
    monkeypatch.setattr(parity.importlib, "import_module", lambda name: library)
    monkeypatch.setattr(parity, "PAIRS", (parity.Pair("KnormPress", "knorm", press_settings={"sign": sign}),))
    with torch.random.fork_rng():
        assert parity.main([]) == status
    said = capsys.readouterr()
    assert "kvpress 9.9" in said.out and said.out.count("DIFFERS") == 2 * status
    wanted = "error: scores differ by more than rounding: knorm on Llama, knorm on Qwen3" if status else ""
    assert said.err.strip() == wanted


def test_without_the_library_the_tool_says_how_to_get_it(monkeypatch, capsys):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(parity.importlib, "import_module", missing)
    with torch.random.fork_rng():
        assert parity.main([]) == 2
    error = capsys.readouterr().err
    assert "No module named 'kvpress': pip install --no-deps kvpress" in error
    assert "--peer-python" in error


def masks(*rows):
    """Keep masks `[1, H, T]` from words of x and dots, one a head."""
    return torch.tensor([[[letter == "x" for letter in row] for row in rows]])


def test_overlap_is_counted_head_by_head():
    """Against sets of positions."""
    theirs, ours = masks("xx..x", "xxx.."), masks("x.x.x", "xxx..")
    found = parity.overlap_of({"kept": theirs}, ours)
    sets = [[set(side[0, h].nonzero().flatten().tolist()) for h in range(2)] for side in (theirs, ours)]
    both = sum(len(a & b) for a, b in zip(*sets, strict=True))
    alone = sum(len(a ^ b) for a, b in zip(*sets, strict=True))
    assert (found.both, found.alone, found.theirs, found.ours) == (both, alone, 6, 6) == (5, 2, 6, 6)
    assert found.share == 5 / 6 and found.least == pytest.approx(2 / 3) and found.ties == 0


@pytest.mark.parametrize(
    ("scores", "ties"),
    [
        ([5.0, 2.0, 2.0 * (1 - 1e-6), 1.0], 2),  # rounding could have gone either way
        ([5.0, 2.0, 1.9, 1.0], 1),  # what we keep has a lower score: no tie, whatever theirs is
        ([-1.0, -2.0, -2.0 * (1 + 1e-6), -3.0], 2),
    ],
)
def test_a_tie_is_a_score_at_the_cut(scores, ties):
    found = parity.overlap_of({"kept": masks("xx.."), "score": torch.tensor([[scores]])}, masks("x.x."))
    assert (found.alone, found.ties) == (2, ties)


def test_a_tie_of_a_first_stage_is_one_too():
    most = torch.finfo(torch.float32).max
    theirs = {
        "kept": masks("xx.x"),
        "score": torch.tensor([[[most, most, 1.0, 7.0]]]),
        "first": torch.tensor([[[9.0, 4.0, 4.0, 0.5]]]),
    }
    found = parity.overlap_of(theirs, masks("x.xx"))
    assert (found.alone, found.ties) == (2, 2)
    theirs["first"][..., 2] = 3.0
    assert parity.overlap_of(theirs, masks("x.xx")).ties == 1


def test_where_heads_share_a_budget_the_cut_is_that_of_all_heads():
    first = torch.tensor([[[9.0, 8.0, 1.0], [5.0, 1.0, 0.0]]])
    theirs = {"kept": masks("xxx", "x.."), "first": first}
    assert parity.overlap_of(theirs, masks("xx.", "xx.")).ties == 2, "1.0 in either head"
    assert parity.overlap_of(theirs, masks("xx.", "x.x")).ties == 1


def test_what_is_kept_here_is_read_off_the_cache():
    # Each token once, and no norm of keys: norms without ties.
    model, ids = tiny_model("llama"), torch.stack([torch.randperm(96)[:50] + 1 for _ in range(2)])
    kept = parity.kept_here(model, ids, "knorm:released", 0.19)
    with attach(model), torch.no_grad():
        cache = Cache(model, None).prefill(ids)
        for mask, layer in zip(kept, cache.state.ragged, strict=True):
            for b in range(2):
                for h in range(mask.shape[1]):
                    keys, _, _ = layer.store.row(b, h)
                    lowest = keys.norm(dim=-1).sort().indices[:9].sort().values
                    assert mask[b, h].nonzero().flatten().tolist() == lowest.tolist()


def test_every_press_of_the_library_that_a_preset_releases_is_compared():
    of_library = {
        path.stem
        for path in FOLDER.glob("*.yaml")
        if "of kvpress 0.5.5" in path.read_text(encoding="utf-8").partition("  released:")[2]
    }
    assert set(parity.METHODS) == of_library
    for name, press in parity.METHODS.items():
        window = (press.inner or press).settings.get("window_size", WINDOW)
        assert load_policy(f"{name}:released").observed_settings.get("window", WINDOW) == window


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter of an environment where a stand-in for the library is installed."""
    folder = tmp_path_factory.mktemp("peer")
    shutil.copy(Path(stand_in.__file__), folder / "kvpress.py")
    info = folder / "kvpress-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpress\nVersion: 9.9\n")
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def test_keep_sets_are_compared_with_a_library_in_its_own_process(python, capsys, tmp_path):
    """The stand-in's StreamingLLM is right; its norms order as ours do, ties apart."""
    command = ["--peer-python", str(python), "--models", "Llama", "--keep-ratios", "0.2", "--tokens", "300"]
    command += ["--folder", str(tmp_path), "--methods", "streaming_llm", "knorm"]
    assert parity.main(command) == 0
    shown = capsys.readouterr().out
    assert "kvpress 9.9" in shown and "streaming_llm, knorm: the same entries are kept" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("streaming_llm ")]
    assert line.split()[1:6] == ["Llama", "300", "0.2", "StreamingLLMPress", "100.0%"]
    assert (tmp_path / "Llama" / "answer-1.safetensors").exists()


class Fixed:
    """A peer that keeps the first entries of every head."""

    def kept(self, press, ratio, tokens):
        mask = torch.zeros(2, 2, tokens, dtype=torch.bool)
        mask[..., : int(tokens * (1 - ratio))] = True
        return [{"kept": mask}] * 3


def test_a_difference_fails(capsys, monkeypatch):
    model, ids = tiny_model("qwen3"), torch.randint(1, 97, (2, 50))
    line = parity.compare_kept(Fixed(), "tiny", model, ids, "streaming_llm", 0.22)
    assert line.share == pytest.approx(4 / 10) and not line.agrees
    text = parity.show([line])
    assert "40.0% 40.0% 40.0%" in text and text.splitlines()[1].endswith("DIFFERS")
    sinks = parity.compare_kept(Fixed(), "tiny", model, ids, "streaming_llm", 0.09)
    assert sinks.agrees, "the sinks alone"
    assert "DIFFERS" not in parity.show([sinks])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "snapvk"], "unknown method 'snapvk': did you mean 'snapkv'"),
        (["--models", "Lama"], "unknown model 'Lama': did you mean 'Llama'"),
        (["--keep-ratios", "1.5"], "keep_ratios lie between 0 and 1"),
        (["--tokens", "300", "20"], "a prompt has more tokens than the window of 32"),
        (["--models", "Llama"], "is no interpreter: pass that of an environment where kvpress is installed"),
    ],
)
def test_errors(arguments, message, capsys, tmp_path):
    assert parity.main(["--peer-python", str(tmp_path / "none"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_environment_without_the_library(capsys, tmp_path):
    path = tmp_path / "python"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfor line in sys.stdin: print('{{\"kvpress\": null}}', flush=True)\n"
    )
    path.chmod(0o755)
    assert parity.main(["--peer-python", str(path), "--models", "Llama"]) == 2
    assert "has no kvpress: pass the interpreter of an environment where it is installed" in (
        capsys.readouterr().err
    )

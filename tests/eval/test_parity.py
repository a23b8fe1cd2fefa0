"""The tool that compares keep sets with the field's main library, on stand-ins for it."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from retain.eval.speed.peers import WINDOW
from retain.eval.studies import parity
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.policy import load_policy
from tests.eval import press as stand_in
from tests.evictions import FOLDER
from tests.tiny import tiny_model


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


MOST = torch.finfo(torch.float32).max
# Scores of two stages: the first takes two entries, by `first`.
STAGES = {"score": [[MOST, MOST, 1.0, 7.0]], "first": [[9.0, 4.0, 4.0, 0.5]]}
# Scores by which heads compete for one budget.
SHARED = {"first": [[9.0, 8.0, 1.0], [5.0, 1.0, 0.0]]}


@pytest.mark.parametrize(
    ("kept", "ours", "scores", "ties"),
    [
        # Rounding could have gone either way.
        (["xx.."], ["x.x."], {"score": [[5.0, 2.0, 2.0 * (1 - 1e-6), 1.0]]}, 2),
        (["xx.."], ["x.x."], {"score": [[-1.0, -2.0, -2.0 * (1 + 1e-6), -3.0]]}, 2),
        # The entry that we keep has a lower score: no tie, whatever theirs is.
        (["xx.."], ["x.x."], {"score": [[5.0, 2.0, 1.9, 1.0]]}, 1),
        (["xx.x"], ["x.xx"], STAGES, 2),
        (["xx.x"], ["x.xx"], STAGES | {"first": [[9.0, 4.0, 3.0, 0.5]]}, 1),
        (["xxx", "x.."], ["xx.", "xx."], SHARED, 2),  # 1.0 in either head
        (["xxx", "x.."], ["xx.", "x.x"], SHARED, 1),
    ],
)
def test_a_tie_is_a_score_at_the_cut(kept, ours, scores, ties):
    theirs = {"kept": masks(*kept), **{name: torch.tensor([own]) for name, own in scores.items()}}
    found = parity.overlap_of(theirs, masks(*ours))
    assert (found.alone, found.ties) == (2, ties)


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


def test_a_difference_fails():
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

"""Gates stored in half the bytes, with a card that says their new name."""

import pytest
import torch

import retain
from retain.gates.artifact import save_gates
from retain.gates.shrink import main, shrink
from retain.hf.model.identity import fingerprint
from tests.tiny import tiny_model


@pytest.fixture
def trained(tmp_path):
    """Gates with a card, as a run leaves them."""
    model = tiny_model("qwen3")
    folder = tmp_path / "runs" / "mine"
    save_gates(retain.new_gates(model, F=64), folder, fingerprint=fingerprint(model))
    (folder / "README.md").write_text(
        f"retain.load_gates({str(folder)!r}, model)\n\n![curves](curves.png)\n\nend"
    )
    return model, folder


def test_half_the_bytes_and_nearly_the_same_scores(trained, tmp_path):
    model, folder = trained
    out = tmp_path / "tiny"
    assert shrink(folder, out) < 0.6 * (folder / "gates.safetensors").stat().st_size
    assert (out / "README.md").read_text() == "retain.load_gates('tiny', model)\n\nend"
    before, after = retain.load_gates(folder, model), retain.load_gates(out, model)
    for old, new in zip(before.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-3, atol=1e-4)


def test_what_cannot_be(trained, tmp_path, capsys):
    _, folder = trained
    assert main([str(folder), str(folder)]) == 2
    assert "over itself" in capsys.readouterr().err
    (folder / "README.md").unlink()
    assert main([str(folder), str(tmp_path / "out")]) == 2 and not (tmp_path / "out").exists()
    assert "has no card" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "not a gate artifact" in capsys.readouterr().err

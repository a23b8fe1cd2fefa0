"""Published models, described from their configs alone, against counts by hand.

A file of `configs/` holds one family. Each model has its config without what shapes no cache, where that was
read (`sources`), and keys that no source gives (`unverified`).
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from retain.eval.describe import describe_model

CONFIGS = Path(__file__).with_name("configs")
# One fixture makes all models, which takes longer than a test of the default tier may: nothing quicker
# compares the sizes of real models.
pytestmark = pytest.mark.always

TOKENS = (8 * 1024, 32 * 1024, 128 * 1024)


@dataclass(frozen=True)
class Hand:
    """A model as its makers describe it.

    Args:
        evict: layers that evict.
        H, D: their KV heads and head width.
        E, Q: width, and query heads.
        slide: layers left alone with a window, and that window; their heads are the same.
        state: layers left alone with a recurrent state.
    """

    evict: int
    H: int
    D: int
    E: int
    Q: int
    slide: tuple[int, int] = (0, 1)
    state: int = 0

    def full(self, tokens: int) -> int:
        """An entry's numbers, of 2 bytes, for each KV head and token."""
        return self.evict * self.H * 2 * self.D * 2 * tokens

    def kept(self, tokens: int) -> int:
        """A fifth of the entries."""
        return self.full((2 * tokens + 5) // 10)

    def alone(self, tokens: int) -> int | None:
        """Windows; the size of a recurrent state is not computed."""
        layers, window = self.slide
        return None if self.state else layers * self.H * 2 * self.D * 2 * min(tokens, window - 1)


# One or two of each kind of model.
HAND = {
    "meta-llama/Llama-3.1-8B": Hand(32, 8, 128, 4096, 32),
    "Qwen/Qwen2.5-7B": Hand(28, 4, 128, 3584, 28),
    "Qwen/Qwen3-8B": Hand(36, 8, 128, 4096, 32),
    "Qwen/Qwen3-30B-A3B": Hand(48, 4, 128, 2048, 32),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Hand(12, 2, 256, 2048, 16, state=36),
    "Qwen/Qwen3.5-9B": Hand(8, 4, 256, 4096, 16, state=24),
    "google/gemma-2-2b": Hand(13, 4, 256, 2304, 8, slide=(13, 4096)),
    "google/gemma-3-4b-it": Hand(5, 4, 256, 2560, 8, slide=(29, 1024)),
    "google/gemma-3-27b-it": Hand(10, 16, 128, 5376, 32, slide=(52, 1024)),
    "openai/gpt-oss-20b": Hand(12, 8, 64, 2880, 64, slide=(12, 128)),
    "allenai/OLMo-2-1124-7B": Hand(32, 32, 128, 4096, 32),
    "HuggingFaceTB/SmolLM3-3B": Hand(36, 4, 128, 2048, 16),
    "ibm-granite/granite-3.3-2b-base": Hand(40, 8, 64, 2048, 32),
    "CohereLabs/c4ai-command-r7b-12-2024": Hand(8, 8, 128, 4096, 32, slide=(24, 4096)),
    "zai-org/GLM-4.5-Air": Hand(46, 8, 128, 4096, 96),
}


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """Every published model, described by a folder with nothing but its config; of a refused one, why."""
    found = {}
    for entry in [
        entry for path in sorted(CONFIGS.glob("*.yaml")) for entry in yaml.safe_load(path.read_text())
    ]:
        folder = tmp_path_factory.mktemp(entry["model"].replace("/", "--"))
        (folder / "config.json").write_text(json.dumps(entry["config"]))
        try:
            found[entry["model"]] = describe_model(str(folder), TOKENS, dtype="bfloat16")
        except ValueError as error:
            found[entry["model"]] = str(error)
    return found


def test_layers_heads_and_bytes_are_those_that_were_counted_by_hand(described):
    for name, hand in HAND.items():
        found = described[name]
        assert not isinstance(found, str), found
        specs, left = found.layout.evicting, list(found.layout.alone.values())
        assert len(specs) == hand.evict, name
        for spec in specs:
            sizes = {"E": hand.E, "H": hand.H, "Q": hand.Q, "D": hand.D}
            assert (spec.sizes, spec.dtype) == (sizes, torch.bfloat16), name
        assert len(left) == hand.slide[0] + hand.state, name
        assert {layer.window for layer in left} <= {hand.slide[1] if hand.slide[0] else None}, name
        for tokens, shown in zip(TOKENS, found.footprints, strict=True):
            want = (tokens, hand.full(tokens), hand.kept(tokens), hand.alone(tokens))
            assert (shown.tokens, shown.full, shown.kept, shown.alone) == want, name
    # Two by rote: 16 GiB of an 8B Llama, and a fifth of it.
    longest = described["meta-llama/Llama-3.1-8B"].footprints[-1]
    assert longest.full == 17_179_869_184 and abs(longest.full / 5 - longest.kept) < 32 * 8 * 512


def test_models_whose_layers_all_have_a_window_are_refused(described):
    refused = {name for name, found in described.items() if "all are sliding_attention" in str(found)}
    assert refused == {"mistralai/Mistral-7B-v0.1", "microsoft/Phi-3-mini-4k-instruct"}


def test_the_logits_are_scaled_as_the_config_says(described):
    """The divisor of a logit is not the head's width everywhere."""
    others = {"ibm-granite/granite-3.3-2b-base": 0.015625, "google/gemma-3-27b-it": 168**-0.5}
    for name, hand in HAND.items():
        for spec in described[name].layout.evicting:
            assert spec.scaling == pytest.approx(others.get(name, hand.D**-0.5)), name


def test_a_multimodal_checkpoint_says_that_its_text_decoder_is_meant(described):
    whole = {name for name, found in described.items() if getattr(found, "whole", None) is not None}
    assert whole == {"google/gemma-3-4b-it", "google/gemma-3-27b-it"}
    assert "reads more than text, its text decoder" in str(described["google/gemma-3-4b-it"])

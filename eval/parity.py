"""Do our scores rank as the field's main library ranks? Its scorers beside ours, on the same layers.

    python -m retain.eval.parity

In: NVIDIA/kvpress, where it is installed (it is no dependency; `pip install --no-deps kvpress requests`), and
small random models. Out: per scorer and model the largest relative difference of the scores, and how much of
what one would keep the other would keep too. The decision taken here: both see the very same tensors, its
scorers through `retain.hf.press`; entries that a scorer forces (its window, its sinks, a first stage) are
left out, since those are masks here.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from retain.hf.model import observe
from retain.hf.press import press_score
from retain.ranking import rank_entries
from retain.scores import SCORES

TOKENS, PADS, KEPT = 120, (0, 7, 23), 0.4
MODELS = {"Llama": (LlamaConfig, LlamaForCausalLM), "Qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@dataclass(frozen=True)
class Pair:
    """A scorer of theirs and the score of ours that should be it.

    Attributes:
        press: Name of their class.
        score: Name in `SCORES`.
        settings: Of ours.
        press_settings: Of theirs.
        first: First entries that theirs forces.
        last: Last entries that theirs forces.
        inner: Scorer that theirs wraps.
        attentions: Whether theirs wants the attention matrix.
    """

    press: str
    score: str
    settings: dict[str, Any] = field(default_factory=dict)
    press_settings: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    last: int = 0
    inner: str | None = None
    attentions: bool = False


PAIRS = (
    Pair("SnapKVPress", "snapkv", press_settings={"window_size": 32}, last=32),
    Pair("CriticalKVPress", "critical", press_settings={"window_size": 32}, last=32, inner="SnapKVPress"),
    Pair("TOVAPress", "tova", last=1),
    Pair("ObservedAttentionPress", "h2o", {"reduce": "mean"}, attentions=True),
    Pair("ExpectedAttentionPress", "expected_attention", first=4),
    Pair("KeyDiffPress", "keydiff"),
    Pair("KnormPress", "knorm"),
)


@torch.no_grad()
def compare_pair(library: Any, pair: Pair, model: Any, evidence: Sequence[Any]) -> tuple[float, float]:
    """Largest relative difference over layers, and the least share of kept entries that both keep."""
    press = _press(library, pair)
    theirs_of = press_score(model, press, attentions=pair.attentions)
    worst, shared = 0.0, 1.0
    for layer in evidence:
        theirs = theirs_of(layer).values_BHT
        ours = SCORES[pair.score].function(layer, **pair.settings).values_BHT
        place_BT = layer.valid_BT.cumsum(-1) - 1
        free_BT = layer.valid_BT & (place_BT >= pair.first)
        free_BT &= place_BT < layer.valid_BT.sum(-1, keepdim=True) - pair.last
        # CriticalKV marks its first stage by the largest number that there is.
        free = free_BT[:, None] & (theirs < torch.finfo(torch.float32).max)
        worst = max(worst, float((theirs - ours)[free].abs().max() / ours[free].abs().max()))
        kept = [_kept(one.masked_fill(~free, float("-inf"))) for one in (theirs, ours)]
        shared = min(shared, float((kept[0] & kept[1]).sum() / kept[0].sum()))
    return worst, shared


def _press(library: Any, pair: Pair) -> Any:
    if pair.inner is None:
        return getattr(library, pair.press)(0.5, **pair.press_settings)
    return getattr(library, pair.press)(getattr(library, pair.inner)(0.5, **pair.press_settings))


def _kept(score_BHT: Tensor) -> Tensor:
    exists = (score_BHT > float("-inf")).sum(-1, keepdim=True)
    return rank_entries(score_BHT) < (KEPT * exists).round().long()


def main() -> int:
    """Print a table; 2 where the library is not there."""
    models = {}
    for name, (config_class, model_class) in MODELS.items():
        torch.manual_seed(0)
        config = config_class(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
        model = model_class(config).eval()
        for weight in model.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
        valid = (torch.arange(TOKENS) >= torch.tensor(PADS)[:, None]).long()
        ids = torch.randint(1, 97, valid.shape) * valid
        # Before the library is imported, which wraps every attention function of transformers.
        models[name] = model, observe(model, ids, valid)
    try:
        library = importlib.import_module("kvpress")
    except ImportError as error:
        print(f"error: {error}: pip install --no-deps kvpress requests", file=sys.stderr)
        return 2
    print(f"kvpress {importlib.import_module('importlib.metadata').version('kvpress')}")
    print(f"{'theirs':<24} {'ours':<20} {'model':<8} {'difference':>10} {'kept alike':>10}")
    for pair in PAIRS:
        for name, (model, evidence) in models.items():
            worst, shared = compare_pair(library, pair, model, evidence)
            print(f"{pair.press:<24} {pair.score:<20} {name:<8} {worst:>10.1e} {shared:>10.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

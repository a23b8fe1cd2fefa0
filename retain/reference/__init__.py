"""The reference model: a small decoder, trained here, on which eviction can be judged without a model hub.

`load_model()` and `load_tokenizer()` give a stock Qwen3 and a stock fast tokenizer; `documents` writes
texts with needles. `MODEL_CARD.md` describes the model and its limits.
"""

from retain.reference.model import load_model
from retain.reference.tokenizer import load_tokenizer

__all__ = ["load_model", "load_tokenizer"]

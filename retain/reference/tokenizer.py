"""Loads the reference model's tokenizer: a byte-level BPE of the standard library's sources.

A stock fast tokenizer (`tokenizer.json` beside this file) that encodes any text. Control tokens are special
tokens; everything else, needles included, is ordinary text, so that no token by itself betrays a needle.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "tokenizer"
VOCAB_SIZE = 3072
# Of <pad>, <bos>, <eos>, <q>, <a>.
PAD_ID, BOS_ID, EOS_ID, QUESTION_ID, ANSWER_ID = range(5)


@functools.cache
def load_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the reference model, as `AutoTokenizer` would load it from its folder."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(FOLDER)

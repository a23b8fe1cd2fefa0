"""Loads and trains the reference model's tokenizer: a byte-level BPE over the standard library's sources.

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
PAD, BOS, EOS, QUESTION, ANSWER = "<pad>", "<bos>", "<eos>", "<q>", "<a>"
SPECIAL_TOKENS = (PAD, BOS, EOS, QUESTION, ANSWER)
PAD_ID, BOS_ID, EOS_ID, QUESTION_ID, ANSWER_ID = range(5)


@functools.cache
def load_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the reference model, as `AutoTokenizer` would load it from its folder."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(FOLDER)


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE (Sennrich et al., arXiv 1508.07909) that `load_tokenizer` serves; the
    vocabulary includes special tokens and the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[QUESTION, ANSWER],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )

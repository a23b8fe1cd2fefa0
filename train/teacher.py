"""The frozen model: loaded by name, checked against the documents, and looked at.

In: a name, or a padded batch. Out: a model without gradients and its tokenizer's `encode`, or the evidence of
each attention layer over `[context; appendix]`. The one decision taken here: everything that a gate
learns from comes out of one forward pass; nothing is generated and nothing is patched.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from retain.evidence import Evidence
from retain.hf.model import observe
from retain.train.data import Batch, Document, Encode

REFERENCE = "reference:"


@dataclass(frozen=True)
class Frozen:
    """A loaded model.

    Args:
        model: the language model, in eval mode, no parameter requires a gradient.
        encode: text -> token ids; None if there is no tokenizer.
        pad_id: token id under the padding (never attended to).
    """

    model: Any
    encode: Encode | None
    pad_id: int


def load_frozen(
    name: str,
    *,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Frozen:
    """Load `reference:<seed>`, a local path or a hub name.

    Raises:
        ValueError: the name cannot be resolved.
    """
    if name.startswith(REFERENCE):
        model, tokenizer = _load_reference(name, dtype)
    else:
        model, tokenizer = _load_hub(name, dtype, revision, trust_remote_code)
    model.eval().requires_grad_(False)
    pad_id = next(
        (i for i in (model.config.pad_token_id, model.config.eos_token_id) if isinstance(i, int)), 0
    )
    if tokenizer is None:
        return Frozen(model, None, pad_id)

    def encode(text: str, special: bool) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])

    return Frozen(model, encode, pad_id)


def _load_reference(name: str, dtype: str) -> tuple[Any, Any]:
    from retain.reference import load_model, load_tokenizer

    seed = name.removeprefix(REFERENCE)
    if not seed.isdigit():
        raise ValueError(f"model={name!r}: wanted `reference:<seed>`, for instance reference:0.")
    model = load_model(seed=int(seed))
    return model if dtype == "auto" else model.to(getattr(torch, dtype)), load_tokenizer()


def _load_hub(name: str, dtype: str, revision: str | None, trust_remote_code: bool) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    origin = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype if dtype == "auto" else getattr(torch, dtype), **origin
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model={name!r} cannot be loaded: {error} Pass a local folder, a hub name, or reference:0."
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **origin)
    except (OSError, ValueError, KeyError):
        tokenizer = None  # rows of token ids need none; text without one is refused where it is met
    return model, tokenizer


def check_documents(config: Any, documents: Iterable[Document]) -> None:
    """Refuse token ids that the model does not have, and documents longer than it can take.

    Raises:
        ValueError: naming the first of them.
    """
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(text_config, "max_position_embeddings", None)
    for number, document in enumerate(documents):
        largest = max(document.context_ids + document.appendix_ids)
        if largest >= text_config.vocab_size:
            raise ValueError(
                f"document {number} holds token id {largest} and the model knows {text_config.vocab_size} "
                "tokens: it was "
                "encoded with another model's tokenizer. Give text instead of ids, or the right model."
            )
        if longest is not None and document.num_tokens > longest:
            raise ValueError(
                f"document {number} has {document.num_tokens} tokens with its appendix and the model takes "
                f"{longest}: lower "
                "data.max_tokens, or use shorter documents."
            )


@torch.no_grad()
def look(model: Any, batch: Batch) -> list[Evidence]:
    """The evidence of every attention layer, over `[context; appendix]`, from one forward pass."""
    return observe(model, batch.input_ids_BT, attention_mask=batch.valid_BT.long())

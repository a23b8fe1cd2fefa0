"""Runs token-wise modules (feed-forward, norms) over a few tokens at a time.

The results are the same, and the largest activation of a forward over a long context no longer grows with the
feed-forward width times the sequence. Only what is known by its name to be token-wise is cut.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Parts of the names of a decoder layer's modules that are token-wise.
TOKEN_WISE = ("mlp", "moe", "feed_forward", "feedforward", "ffn", "norm")


@contextmanager
def token_wise_in_pieces(layers: Iterable[nn.Module], chunk: int | None) -> Iterator[None]:
    """Inside, token-wise modules of these layers run over `chunk` tokens of every sequence at a time; None:
    over all.

    Raises:
        ValueError: a chunk below one token.
    """
    if chunk is None:
        yield
        return
    if chunk < 1:
        raise ValueError(f"token-wise modules run over 1 token or more at a time, got chunk={chunk}.")
    # A forward of the instance is somebody else's: accelerate puts one in a model on several devices.
    before: list[tuple[dict[str, Any], Any]] = []
    try:
        for layer in layers:
            for name, module in layer.named_children():
                if any(part in name.lower() for part in TOKEN_WISE):
                    attributes = vars(module)
                    before.append((attributes, attributes.get("forward")))
                    attributes["forward"] = _in_pieces(module.forward, chunk)
        yield
    finally:
        for attributes, forward in before:
            del attributes["forward"]
            if forward is not None:
                attributes["forward"] = forward


def _in_pieces(whole: Callable[..., Any], chunk: int) -> Callable[..., Any]:
    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden.ndim != 3 or hidden.shape[1] <= chunk:
            return whole(hidden, *args, **kwargs)
        outs = [whole(piece, *args, **kwargs) for piece in hidden.split(chunk, 1)]
        if isinstance(outs[0], Tensor):
            return torch.cat(outs, 1)
        # A mixture of experts also returns its router's logits, a row a token.
        return tuple(
            torch.cat(parts, 1 if parts[0].ndim == 3 else 0) if isinstance(parts[0], Tensor) else parts[0]
            for parts in zip(*outs, strict=True)
        )

    return forward

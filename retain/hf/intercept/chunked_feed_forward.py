"""Runs token-wise modules (feed-forward, norms) over a few tokens at a time.

The results are the same, and what is held at once no longer grows with the feed-forward width times the
sequence: the largest activation of a forward over a long context. Only what is known by its name to be
token-wise is cut; an unknown part is run as it was written.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Parts of the names of a decoder layer's modules that are token-wise.
TOKEN_WISE = ("mlp", "moe", "feed_forward", "feedforward", "ffn", "norm")


@contextmanager
def token_wise_in_pieces(layers: Iterable[nn.Module], chunk: int | None) -> Iterator[None]:
    """Inside, token-wise modules of these layers run over `chunk` tokens of a sequence at a time.

    Args:
        layers: a decoder's.
        chunk: tokens at a time, of every sequence of the batch; None: all, which changes nothing.

    Raises:
        ValueError: a chunk below one token.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(
            f"token-wise modules run over chunk={chunk} tokens at a time: pass 1 or more, or None."
        )
    with ExitStack() as undo:
        for layer in layers if chunk is not None else ():
            for name, module in layer.named_children():
                if any(part in name.lower() for part in TOKEN_WISE):
                    undo.enter_context(_cut(module, chunk))
        yield


@contextmanager
def _cut(module: nn.Module, chunk: int | None) -> Iterator[None]:
    """The module's `forward`, for as long as this lasts, in pieces."""
    own, whole = vars(module).get("forward"), module.forward
    vars(module)["forward"] = _in_pieces(whole, chunk)
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:  # somebody else's (accelerate puts one of its own in a model on several devices)
            vars(module)["forward"] = own


def _in_pieces(whole: Callable[..., Any], chunk: int | None) -> Callable[..., Any]:
    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if chunk is None or hidden.ndim != 3 or hidden.shape[1] <= chunk:
            return whole(hidden, *args, **kwargs)
        outs = [whole(piece, *args, **kwargs) for piece in hidden.split(chunk, 1)]
        if isinstance(outs[0], Tensor):
            return torch.cat(outs, 1)
        # A mixture of experts gives what its router said beside: of each token, in a row of its own.
        return tuple(
            torch.cat(parts, 1 if parts[0].ndim == 3 else 0) if isinstance(parts[0], Tensor) else parts[0]
            for parts in zip(*outs, strict=True)
        )

    return forward

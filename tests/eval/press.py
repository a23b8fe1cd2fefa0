"""A stand-in for the field's main library, in its calling convention: what comparisons with it are tested on.

In: a model of transformers. Out: presses that hook its attention modules while it reads a prompt. One gathers
what it keeps, in the order of its scores; the other only writes down what it would overwrite.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch

from retain.eval.speed.peer_side import CACHE


class BasePress:
    def hook(self, module, args, kwargs, output):
        hidden, cache = kwargs["hidden_states"], kwargs[CACHE]
        if int(kwargs["cache_position"][-1]) + 1 == hidden.shape[1]:
            layer = cache.layers[module.layer_idx]
            layer.keys, layer.values = self.compress(
                module, hidden, layer.keys, layer.values, output[1], kwargs
            )
        return output

    @contextmanager
    def __call__(self, model):
        hooks = [
            layer.self_attn.register_forward_hook(self.hook, with_kwargs=True) for layer in model.model.layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@dataclass
class KnormPress(BasePress):
    compression_ratio: float = 0.0

    def score(self, module, hidden, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)

    def compress(self, module, hidden, keys, values, attentions, kwargs):
        scores = self.score(module, hidden, keys, values, attentions, kwargs)
        index = scores.topk(int(keys.shape[2] * (1 - self.compression_ratio)), dim=-1).indices[..., None]
        index = index.expand(-1, -1, -1, keys.shape[3])
        return keys.gather(2, index), values.gather(2, index)


@dataclass
class StreamingLLMPress(KnormPress):
    n_sink: int = 0

    def score(self, module, hidden, keys, values, attentions, kwargs):
        place = torch.arange(keys.shape[2])
        return torch.where(place < self.n_sink, 10**6, place).expand(keys.shape[:3])


class AdaKVPress(BasePress):
    """Heads share a budget; nothing is freed."""

    def __init__(self, press):
        self.press = press

    @property
    def compression_ratio(self):
        return self.press.compression_ratio

    @compression_ratio.setter
    def compression_ratio(self, value):
        self.press.compression_ratio = value

    def compress(self, module, hidden, keys, values, attentions, kwargs):
        scores = self.press.score(module, hidden, keys, values, attentions, kwargs)
        B, H, T = scores.shape
        gone = H * (T - int(T * (1 - self.compression_ratio)))
        index = (-scores.reshape(B, -1)).topk(gone, dim=1).indices.flatten()
        module.masked_key_indices = (torch.zeros_like(index), index // T, index % T)
        return keys, values

"""Finds the rotary embedding of a model by trying it.

Nothing is taken on trust. The frequencies found must give the module's tables, near the beginning and far
beyond the trained length (those of some kinds change with the length); and every attention module is asked
for the keys of a few made-up tokens with the true tables and with those of position 0: the one must be the
other, turned.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.hf.model.families import FULL, SLIDING, kinds_of
from retain.hf.model.layout import LayerSpec
from retain.hf.model.projection import undisturbed
from retain.hf.version_names import CACHE

# What a module raises that wants other arguments than those of Llama and its relatives.
CALLED_IN_ANOTHER_WAY = (TypeError, AttributeError, ValueError, LookupError)


def rotary_of(embedding: Any, config: Any, specs: Sequence[LayerSpec]) -> Rotary | None:
    """The embedding of these layers, by the decoder's rotary module, if it is of the half convention."""
    # A module with one embedding for each kind of layer (Gemma-3) names buffers and calls by the kind.
    kind = (FULL if specs[0].window is None else SLIDING) if not hasattr(embedding, "inv_freq") else None
    prefix = "" if kind is None else f"{kind}_"
    frequencies = getattr(embedding, f"{prefix}inv_freq", None)
    if not isinstance(frequencies, Tensor) or frequencies.device.type == "meta":
        return None
    if kind is not None and {one.name for one in kinds_of(config, config.num_hidden_layers)} != set(
        config.layer_types
    ):
        return None  # a sliding layer without a window made layers of two kinds evict
    scaling = float(getattr(embedding, f"{prefix}attention_scaling", 1.0))
    rotary = Rotary(frequencies.detach().float().clone(), scaling)

    # A copy: asking some kinds about long sequences changes them. On the CPU, where products are exact.
    copied = copy.deepcopy(embedding).cpu()
    on_cpu = Rotary(rotary.inverse_frequencies_F.cpu(), scaling)
    trained = int(getattr(config, "max_position_embeddings", None) or 1)
    halves = False
    for positions in ([[0, 1, 2, 7]], [[3, 1, trained, 2 * trained]]):
        at = torch.tensor(positions)
        # Of text, all three are the same.
        asked = at.expand(3, *at.shape) if hasattr(embedding, "mrope_section") else at
        try:
            tables = copied(torch.zeros(1), asked, *([] if kind is None else [kind]))
        except CALLED_IN_ANOTHER_WAY:
            return None
        for table, ours in zip(tables, on_cpu.tables(at), strict=True):
            halves = 2 * table.shape[-1] == ours.shape[-1]  # gpt-oss does not write each number twice
            table = torch.cat([table, table], dim=-1) if halves else table
            if table.shape != ours.shape or not torch.allclose(table.float(), ours, atol=1e-5):
                return None
    return rotary if all(_turns_keys(spec, rotary, halves) for spec in specs) else None


class _KeysSeen(Exception):
    """Carries the keys that an attention module was about to store; ends its forward there."""


class _KeyProbe:
    """Stands where an attention module expects a cache."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> None:
        raise _KeysSeen(key_states)


@torch.no_grad()
def _turns_keys(spec: LayerSpec, rotary: Rotary, halves: bool) -> bool:
    """Returns whether the layer's keys are those of position 0, turned by this embedding."""
    device, dtype = spec.device, spec.dtype
    at = torch.tensor([[0, 1, 4, 19]], device=rotary.inverse_frequencies_F.device)
    tokens = torch.arange(4 * spec.hidden_size, device=device).float()
    hidden = torch.sin(tokens**2).view(1, 4, spec.hidden_size).to(dtype)
    seen, attention = [], undisturbed(spec.module)  # an adapter may drop out
    for positions in (torch.zeros_like(at), at):
        tables = [table.to(device, dtype) for table in rotary.tables(positions)]
        if halves:
            tables = [table.chunk(2, dim=-1)[0] for table in tables]
        try:
            attention(
                hidden_states=hidden,
                position_embeddings=tuple(tables),
                attention_mask=None,
                **{CACHE: _KeyProbe()},
            )
        except _KeysSeen as keys:
            seen.append(keys.args[0].to(at.device))
        except torch.OutOfMemoryError:
            raise
        except (*CALLED_IN_ANOTHER_WAY, RuntimeError):  # shapes that do not fit are RuntimeErrors
            return False
    if len(seen) != 2 or seen[0].shape[-1] < 2 * len(rotary.inverse_frequencies_F):
        return False
    plain = rotary.unrotate(seen[0], torch.zeros_like(at))
    allowed = 16 * torch.finfo(dtype).eps * float(plain.abs().max()) * max(1.0, rotary.scaling)
    return bool((rotary.rotate(plain, at) - seen[1]).abs().max() <= allowed)

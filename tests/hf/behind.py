"""Tokens behind a prompt, the plain way: one eager forward over all of it, adapters by hand."""

from contextlib import ExitStack

import torch
from torch import Tensor
from transformers import DynamicCache

from retain.gates.lookahead import LookaheadExtension
from retain.hf.model.decoder import base_model, describe
from retain.hf.version_names import CACHE


def paid_behind(
    model, input_ids: Tensor, embeds_1SE: Tensor, extension: LookaheadExtension | None = None
) -> list[Tensor]:
    """Mean attention, `[Q, T]` per layer that evicts, that tokens pay to a prompt without padding.

    Args:
        model: not attached; attends eagerly meanwhile.
        input_ids: the prompt, one sequence.
        embeds_1SE: the tokens behind it.
        extension: whose adapters `B A x` are added on the tokens' positions alone; None: none.
    """
    base, T, S = base_model(model), input_ids.shape[1], embeds_1SE.shape[1]
    previous = base.config._attn_implementation
    model.set_attn_implementation("eager")
    embeds = torch.cat([base.get_input_embeddings()(input_ids), embeds_1SE.to(base.dtype)], dim=1)
    with ExitStack() as hooks:
        for name in () if extension is None else extension.modules_of:
            down, up = (side[name.replace(".", "/")] for side in (extension.down, extension.up))
            scale = extension.alpha / extension.rank

            def add(module, args, output, down=down, up=up, scale=scale):
                behind = scale * args[0][..., -S:, :] @ down.T @ up.T
                return torch.cat([output[..., :-S, :], output[..., -S:, :] + behind], dim=-2)

            hooks.callback(base.get_submodule(name).register_forward_hook(add).remove)
        out = base(inputs_embeds=embeds, **{CACHE: DynamicCache(config=base.config)}, output_attentions=True)
    model.set_attn_implementation(previous)
    specs, attentions = describe(model), [each for each in out.attentions if each is not None]
    if len(attentions) > len(specs):
        attentions = [attentions[spec.layer_idx] for spec in specs]
    return [attention[0, :, -S:, :T].mean(1) for attention in attentions]

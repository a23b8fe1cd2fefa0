"""Runs the tokens of a lookahead gate behind a prompt that a cache still holds whole.

The prompt is read by the frozen model as ever; then the tokens alone run through the extended one, on a cache
that is read and never written. The price is the peak: no layer can be cut before the last one has read the
prompt. Every layer of the model must evict.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from retain.evidence import Evidence
from retain.gates import GateSet
from retain.gates.lookahead import LookaheadExtension, LookaheadGate
from retain.hf.intercept.interceptor import InterceptedCache, Step
from retain.hf.model.decoder import base_model, layout_of
from retain.hf.model.layout import LayerSpec
from retain.hf.model.projection import input_width
from retain.hf.version_names import CACHE


class Asked(NamedTuple):
    """Queries (after norm and RoPE) and keys of tokens behind a prompt, in one layer."""

    queries_BQSD: Float[Tensor, "B Q S D"]
    keys_BHSD: Float[Tensor, "B H S D"]


class _ReadLayer(DynamicLayer):
    """A layer's prompt: new tokens attend to it, and are not stored."""

    def __init__(self, keys_BHTD: Tensor, values_BHTD: Tensor):
        super().__init__()
        self.lazy_initialization(keys_BHTD, values_BHTD)
        self.keys, self.values = keys_BHTD, values_BHTD

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)


class QueryRecorder:
    """The engine of a `ReadCache`: it records the queries and keys of every layer, and computes its attention
    as the model would have."""

    is_quick = is_static = reads_stream = False

    def __init__(self) -> None:
        self.asked: dict[int, Asked] = {}

    def begin(self, decoder: nn.Module, given: Any) -> None:
        """Nothing is to be prepared, nor finished."""

    def finish(self) -> None:
        pass

    def expect(self, layer_idx: int, hidden_BSE: Tensor) -> Step:
        return Step(self, layer_idx, hidden_BSE)

    def attention(
        self, step: Step, queries_BQSD: Tensor, keys_BHSD: Tensor, values_BHSD: Tensor, dense: Any, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        self.asked[step.layer_idx] = Asked(queries_BQSD, keys_BHSD[:, :, -queries_BQSD.shape[2] :])
        return dense()


class ReadCache(InterceptedCache):
    """A prompt that tokens are run behind, of the keys and values of every layer, `[B, H, T, D]`."""

    def __init__(self, held: Sequence[tuple[Tensor, Tensor]]):
        super().__init__(layers=[_ReadLayer(*layer) for layer in held])
        self.engine = QueryRecorder()


def run_behind(
    model: nn.Module,
    cache: ReadCache,
    embeds_BSE: Float[Tensor, "B S E"],
    valid_BT: Tensor,
    positions_BT: Int[Tensor, "B T"],
) -> dict[int, Asked]:
    """Runs tokens (`embeds_BSE`, as the decoder reads them) behind the prompt of a cache through an attached
    model, with whatever adapters it carries now. `valid_BT` is False on the prompt's padding. Returns the
    tokens' queries and keys by layer."""
    device, (B, S) = embeds_BSE.device, embeds_BSE.shape[:2]
    valid_BT = valid_BT.to(device)
    last_B1 = positions_BT.to(device).masked_fill(~valid_BT, -1).amax(-1, keepdim=True)
    base_model(model)(
        inputs_embeds=embeds_BSE,
        attention_mask=torch.cat([valid_BT, valid_BT.new_ones(B, S)], dim=1).long(),
        position_ids=last_B1 + 1 + torch.arange(S, device=device),
        use_cache=True,
        output_attentions=False,
        **{CACHE: cache},
    )
    return cache.engine.asked


def look_ahead(
    model: nn.Module, gates: GateSet, cache: ReadCache, evidence: Sequence[Evidence]
) -> list[Evidence]:
    """The evidence of a prompt (one per layer, nothing evicted from) that a cache of an attached model holds,
    with the queries of the gates' lookahead tokens behind it."""
    first, extension = evidence[0], gates.extension
    assert first.held_BHT is None, "lookahead tokens ask behind a whole prompt"
    assert isinstance(extension, LookaheadExtension)
    with extension.extend(base_model(model)):
        embeds_BSE = lookahead_embeds(model, extension, len(first.valid_BT))
        asked = run_behind(model, cache, embeds_BSE, first.valid_BT, first.positions_BT)
    return [
        replace(
            layer,
            lookahead_BQSD=asked[layer.layer_idx].queries_BQSD,
            lookahead_keys_BHSD=asked[layer.layer_idx].keys_BHSD,
        )
        for layer in evidence
    ]


def lookahead_embeds(
    model: nn.Module, extension: LookaheadExtension, num_sequences: int
) -> Float[Tensor, "B lookahead E"]:
    """The tokens as input embeddings of a model's decoder, one copy a sequence."""
    base = base_model(model)
    device = base.get_input_embeddings().weight.device
    return extension.tokens_SE.to(device, base.dtype).expand(num_sequences, -1, -1)


def lookahead_gates(
    model: nn.Module, *, num_tokens: int = 32, rank: int = 8, alpha: float = 32.0, seed: int = 0
) -> GateSet:
    """Fresh lookahead gates for a model, in float32 on the CPU. The defaults are the paper's.

    Every linear module is adapted that the tokens' queries and keys depend on, which gives the paper's count
    of parameters (20.6M on an 8B Llama). The tokens begin as embeddings of tokens drawn at random.

    `rank` and `alpha` are the adapters', `seed` that of the first weights. ValueError: unsupported
    architecture, layers that are left alone, or settings that mean nothing.
    """
    layout, base = layout_of(model), base_model(model)
    if layout.alone:
        kinds = ", ".join(sorted({left.name for left in layout.alone.values()}))
        raise ValueError(
            f"lookahead gates take models whose layers all evict, and {type(model).__name__} has others "
            f"({kinds}): take gates of another family."
        )
    specs = layout.evicting
    embedding: Any = base.get_input_embeddings()
    sizes: dict[str, Any] = {"num_tokens": num_tokens, "rank": rank, "alpha": alpha}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = adapted_modules(base, specs[-1])
        extension = LookaheadExtension(E=specs[-1].hidden_size, modules=modules, **sizes)
        drawn = torch.randint(base.config.get_text_config().vocab_size, (num_tokens,))
    with torch.no_grad():
        extension.tokens_SE.copy_(embedding(drawn.to(embedding.weight.device)).float().cpu())
    gates = {one.layer_idx: LookaheadGate(E=one.hidden_size, H=one.num_kv_heads) for one in specs}
    return GateSet(gates, extension=extension)


def adapted_modules(base: nn.Module, last: LayerSpec) -> dict[str, tuple[int, int]]:
    """Names in the decoder, and widths, of the linear modules that the queries and keys of the last layer
    depend on: all of attention and MLP up to it, but its output projection, MLP and value projection."""
    behind = {id(module) for module in (last.output, *last.inputs[2:])}
    layers: Any = base.layers
    found = {}
    for idx, layer in enumerate(layers[: last.layer_idx + 1]):
        for name, module in layer.named_modules():
            mlp = name.partition(".")[0] in ("mlp", "feed_forward") and idx == last.layer_idx
            width = input_width(module) if hasattr(module, "in_features") else None
            if width is not None and not mlp and id(module) not in behind:
                found[f"layers.{idx}.{name}"] = (width, int(module.out_features))
    return found

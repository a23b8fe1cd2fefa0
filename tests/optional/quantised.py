"""Real quantised weights, of torchao and bitsandbytes: `make quantised`, which installs both in an
environment of its own. They are no part of the other tests: transformers imports them wherever they are
installed, and their warnings are not ours. The path itself is always tested, on a packed module of the tests'
own (tests/hf/test_projection.py).
"""

import bitsandbytes
import pytest
import torch
import torchao.quantization as torchao
from torch import nn

import retain
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import describe
from retain.hf.model.identity import fingerprint
from retain.hf.model.projection import plain_weight
from retain.hf.version_names import CACHE
from tests.tiny import tiny_batch, tiny_model


def test_torchao_weights():
    model, plain = tiny_model(), tiny_model()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    check(model, plain)


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_weights(bits):
    model, plain = tiny_model(hidden_size=64, head_dim=64), tiny_model(hidden_size=64, head_dim=64)
    for layer in model.model.layers:
        for name, module in list(layer.self_attn.named_children()):
            if isinstance(module, nn.Linear):
                size = (module.in_features, module.out_features)
                if bits == 4:
                    packed = bitsandbytes.nn.Linear4bit(*size, bias=False, compute_dtype=torch.float32)
                else:
                    packed = bitsandbytes.nn.Linear8bitLt(*size, bias=False, has_fp16_weights=False)
                packed.load_state_dict(module.state_dict())
                setattr(layer.self_attn, name, packed.to("cpu").requires_grad_(False))
    check(model, plain, bits)


def check(model, plain, bits=8):
    """Near the plain weights, as attention goes through them, and fit for eviction."""
    ids, mask = tiny_batch((0, 5), 80)
    for spec, before in zip(describe(model), describe(plain), strict=True):
        assert plain_weight(spec.output) is None
        near, want = spec.output_weight_QDE, before.output_weight_QDE
        assert (near - want).abs().max() < (0.4 if bits == 4 else 0.02) * want.abs().max()
        heads = torch.randn(7, spec.num_heads * spec.head_dim)
        got = spec.output(heads)
        mixed = heads @ near.flatten(0, 1)
        # 8-bit modules of bitsandbytes round what goes in as well.
        assert (got - mixed).abs().max() < 0.02 * got.abs().max()
    assert fingerprint(model) == fingerprint(model) != fingerprint(plain)
    with retain.attach(model):
        cache = Cache(
            model,
            policy="defensive",
            keep_ratio=0.3,
            protection={"recent": 8},
            observed_settings={"window": 8},
            regime="prefill+decode",
            every=2,
        )
        out = model.generate(
            input_ids=ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=8, do_sample=False
        )
    assert out.shape == (2, 88) and 0 < cache.entries_held < cache.entries_seen and cache.evictions > 2

"""The bytes that a config promises, against caches that read as many tokens."""

import pytest
import torch
from transformers import Gemma2ForCausalLM

import retain
from retain.eval.describe import ModelDescription, describe_model, main
from retain.hf.model.decoder import layout_of
from retain.models.named import load_named_model, meta_model_of, named_config
from tests.refused import refused
from tests.tiny import attached, tiny_batch, tiny_model

TOKENS = 400
# Full attention; a window in some layers; a recurrent state; soft caps; experts and sinks.
MODELS = ("qwen3", "gemma2", "cohere2", "qwen3_next", "gpt_oss")


def said(family: str, tmp_path, **settings) -> ModelDescription:
    """The description of a folder with nothing but a config."""
    tiny_model(family).config.save_pretrained(tmp_path)
    return describe_model(str(tmp_path), [TOKENS], dtype="float32", **settings)


@pytest.mark.parametrize("family", MODELS)
def test_bytes_are_those_that_a_cache_holds(family, tmp_path):
    found = said(family, tmp_path, keep_ratio=0.2)
    (want,) = found.footprints
    model, (ids, mask) = attached(family), tiny_batch((0,), TOKENS)
    cache = retain.Cache(model, policy="keydiff", keep_ratio=0.2, short="raise")
    report = cache.prefill(ids, mask).report()
    assert report.total.bytes_held == want.kept
    alone = sum(row.bytes_held for row in report.alone)
    assert want.alone == (None if family == "qwen3_next" else alone)
    assert want.kept < want.full == report.total.bytes_full
    assert [row.name for row in report.layers] == [
        f"layer {spec.layer_idx}" for spec in found.layout.evicting
    ]


def test_the_command_prints_a_config_or_why_not(tmp_path, capsys):
    tiny_model("cohere2").config.save_pretrained(tmp_path)
    assert main([str(tmp_path / "config.json"), "--tokens", "100", "1000", "--dtype", "float32"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "model_type    cohere2",
        "layers evict  2 (1, 3): 2 KV heads of width 8, 4 query heads",
        "left alone    2 (0, 2): sliding_attention of 16 tokens",
        "1,000 tokens  full cache 0.2 MiB; 0.0 MiB kept at keep_ratio 0.2, and 0.0 MiB left",
    ):
        assert line in shown
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v32", "num_hidden_layers": 1}')
    assert main([str(tmp_path)]) == 2
    assert "its model_type is 'deepseek_v32'" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2
    assert "cannot be loaded" in capsys.readouterr().err


def test_lengths_are_those_that_the_model_has_positions_for():
    (whole,) = describe_model("reference:0").footprints
    assert whole.tokens == 4096


def test_a_training_step_of_a_dense_model_by_hand(tmp_path):
    config = tiny_model("llama").config
    config.save_pretrained(tmp_path)
    found, N = describe_model(str(tmp_path), [100], dtype="float32"), 100
    L, Q, D, E = config.num_hidden_layers, config.num_attention_heads, config.head_dim, config.hidden_size
    parameters = sum(one.numel() for one in found.model.parameters())
    inside = parameters - 2 * config.vocab_size * E * (1 - config.tie_word_embeddings / 2) - E
    ((*_, flops, peak),) = found.footprints
    assert flops == pytest.approx(2 * inside * N + 2 * L * 2 * Q * D * N**2)
    assert peak == 4 * parameters + 4 * N * (3 * E + 4 * (Q + config.num_key_value_heads) * D)


def test_a_folder_that_is_not_there_is_said_to_be_none():
    for name in ("no/such/folder", "./nothing"):
        for call in (describe_model, load_named_model):
            refused(f"model='{name}' cannot be loaded: .*Pass a local folder, a hub name", call, name)
    refused("did you mean 'smollm2-135m'", describe_model, "smollm-135m")


def test_a_model_without_weights_is_described_and_not_used(tmp_path):
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    model = meta_model_of(named_config(str(tmp_path)), torch.float32)
    assert len(layout_of(model, on_meta=True).evicting) == 3
    refused("on the meta device", layout_of, model)
    refused("on the meta device", retain.attach, model)


def test_a_soft_cap_that_sdpa_leaves_out_is_refused():
    if not Gemma2ForCausalLM._supports_sdpa:  # from 5.24 on transformers itself refuses it
        refused("scaled_dot_product_attention", tiny_model, "gemma2", attn="sdpa")
        return
    model = tiny_model("gemma2", attn="sdpa")
    refused("caps its attention logits at 2 .*set_attn_implementation..eager", retain.attach, model)
    model.set_attn_implementation("eager")
    assert retain.attach(model)

"""Latent attention: one row a token and layer, which is the key and the value of all heads."""

from functools import partial

import pytest
import torch
from transformers import (
    AXK2Config,
    AXK2ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    DynamicCache,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    HYV4Config,
    HYV4ForCausalLM,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
)

import retain
from retain.correction.merge import Merge
from retain.evidence import attention_probs
from retain.hf.cache.cache import Cache
from retain.hf.intercept.lookahead_pass import lookahead_gates
from retain.hf.intercept.observe import observe
from retain.hf.intercept.press import press_score
from retain.hf.model.decoder import describe, rotary_of
from retain.hf.training.soft_attention import SoftGated
from retain.hf.version_names import CACHE
from retain.policy import load_policy, shape_of
from tests.close import MODEL, assert_close
from tests.evictions import EVICTING
from tests.hf.masked import masked_logits, random_keep
from tests.hf.test_cache import ragged_logits
from tests.hf.test_families import INSIDE, choose, chunks_of
from tests.refused import refused
from tests.tiny import ALIKE, LATENT, LATENTS, ROUTED, VOCAB, attached, tiny_batch, tiny_model

R, P, N, V = (LATENT[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
D, HEADS, BATCH = P + R, 4, 3


@pytest.mark.parametrize("family", ALIKE)
def test_relatives_equal_the_masked_full_cache(family):
    model = tiny_model(family, dtype=torch.float64)
    chunks, mask, whole = chunks_of(BATCH)
    keep = random_keep(model, mask)
    want, plain = masked_logits(model, keep, chunks, whole), masked_logits(model, None, chunks, whole)
    with retain.attach(model):
        got = ragged_logits(model, Cache(model, policy=choose(model, keep)), chunks, whole)
    for a, b, real in zip(
        got, want, whole.bool().split([ids.shape[1] for ids in chunks], dim=1), strict=True
    ):
        assert_close(a[real], b[real], **INSIDE)
    assert float((got[-1] - plain[-1]).abs().max()) > 0.05


@pytest.mark.parametrize("family", LATENTS)
def test_a_layer_is_described_as_attention_with_one_head(family):
    model = tiny_model(family)
    for spec in describe(model):
        assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.entry_width) == (HEADS, 1, D, D)
        assert spec.sizes == {"E": 32, "H": 1, "Q": HEADS, "D": D}
        assert spec.scaling == spec.module.scaling and spec.hidden_size == 32


def _by_heads(model, layer_idx, hidden_BTE):
    """What each head asks of each token, pays it and gets of it, by loops over heads and tokens, from the
    weights: keys and values of heads, as DeepSeek-V3's paper has them (without RoPE's share: `turned`)."""
    module = model.model.layers[layer_idx].self_attn
    down = module.kv_a_proj_with_mqa(hidden_BTE)
    latents = module.kv_a_layernorm(down[..., :R])
    up = module.kv_b_proj.weight.view(HEADS, N + V, R)
    queries = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_BTE))).unflatten(-1, (HEADS, -1))
    out = module.o_proj.weight.view(32, HEADS, V)
    plain = torch.zeros(HEADS, *hidden_BTE.shape[:2], hidden_BTE.shape[1], dtype=hidden_BTE.dtype)
    gets = torch.zeros(HEADS, *hidden_BTE.shape[:2], 32, dtype=hidden_BTE.dtype)
    for q in range(HEADS):
        for b in range(hidden_BTE.shape[0]):
            for i in range(hidden_BTE.shape[1]):
                key, value = up[q, :N] @ latents[b, i], up[q, N:] @ latents[b, i]
                gets[q, b, i] = out[:, q] @ value
                for s in range(hidden_BTE.shape[1]):
                    plain[q, b, s, i] = queries[b, s, q, :N] @ key
    return plain.transpose(0, 1), gets.transpose(0, 1), latents


def test_rows_say_of_every_head_what_its_keys_and_values_say():
    model = tiny_model("deepseek_v3", dtype=torch.float64)
    ids, mask = tiny_batch((0, 2), 9)
    for evidence in observe(model, ids, mask):
        plain_BQST, gets_BQTE, latents = _by_heads(model, evidence.layer_idx, evidence.hidden_BTE)
        rows_BTD = evidence.keys_BHTD[:, 0]
        assert torch.equal(rows_BTD[..., P:], latents) and evidence.keys_BHTD.shape[1] == 1
        assert torch.equal(evidence.values_BHTD[:, 0, :, P:], latents)
        assert not evidence.values_BHTD[..., :P].any(), "a value has no rotated part"
        turned = torch.einsum("bqsp,btp->bqst", evidence.queries_BQSD[..., :P], rows_BTD[..., :P])
        both = torch.einsum("bqsd,btd->bqst", evidence.queries_BQSD, rows_BTD)
        assert_close(both - turned, plain_BQST, **INSIDE)
        got = torch.einsum("bhtd,qde->bqte", evidence.values_BHTD, evidence.output_weight_QDE)
        assert_close(got, gets_BQTE, **INSIDE)
        probs = attention_probs(evidence, 0, 9)
        assert_close(probs.sum(-1)[:, 0][mask.bool()], torch.ones(int(mask.sum())).double(), **INSIDE)


def _filled(policy="snapkv", family="deepseek_v3", **settings):
    """A batch of 64, 61 and 53 tokens, read and evicted from."""
    model, (ids, mask) = attached(family), tiny_batch((0, 3, 11), 64)
    settings = {"keep_ratio": 0.4, "protection": {"recent": 4}, "short": "raise", **settings}
    return model, Cache(model, policy=policy, **settings).prefill(ids, mask)


def test_a_token_is_held_once_and_takes_what_it_takes_in_transformers_cache():
    model, (ids, mask) = attached("deepseek_v3"), tiny_batch((0,))
    cache, full = Cache(model, policy=None).prefill(ids, mask), DynamicCache(config=model.config)
    model(input_ids=ids, **{CACHE: full})
    entry = full.layers[0].keys.element_size() * (R + P)
    assert full.layers[0].keys.shape[-1] + full.layers[0].values.shape[-1] == R + P
    whole = Cache(model, policy=None).prefill(ids, mask, evict=False)
    held = [layer.keys.untyped_storage().nbytes() for layer in whole.state.ragged]
    assert cache.bytes_held() == whole.bytes_held() == 2 * 40 * entry and held == [40 * entry] * 2
    (evidence, *_) = observe(model, ids)
    assert shape_of(evidence).entry_bytes == entry
    _, cut = _filled("snapkv")
    store = cut.state.stores[0]
    assert store.one_vector and store.values_CD.data_ptr() == store.keys_CD.data_ptr()
    assert store.entry_bytes == entry and cut.bytes_held() == cut.entries_held * entry
    _, exact = _filled("snapkv", keep_ratio=None, bytes=2 * 16 * entry)
    assert exact.entries_held == 3 * 2 * 16


def test_what_is_done_to_a_cache_leaves_one_vector_a_token(tmp_path):
    model, cache = _filled("snapkv")
    after = torch.full((3, 1), 9)
    ones = torch.cat([tiny_batch((0, 3, 11), 64)[1], torch.ones(3, 1, dtype=torch.long)], dim=1)
    cache.save(tmp_path / "cache")
    turns = {
        "saved": Cache.load(tmp_path / "cache", model),
        "forked": cache.fork(),
        "itself": cache,
    }
    logits = {
        name: model(input_ids=after, attention_mask=ones, **{CACHE: one}).logits
        for name, one in turns.items()
    }
    for name, one in turns.items():
        assert all(store.one_vector for store in one.state.stores), name
        assert_close(logits[name], logits["itself"], ops=MODEL)
    assert turns["saved"].bytes_held() == cache.bytes_held()


ELSEWHERE = ("compresskv", "duoattention", "headkv", "merge")


@pytest.mark.parametrize("policy", [name for name in EVICTING if name not in ELSEWHERE])
def test_every_policy_keeps_its_budget_and_goes_on(policy):
    gates = retain.new_gates(tiny_model("deepseek_v3"), family="linear")
    model, cache = _filled(policy, **({"gates": gates} if load_policy(policy).learned else {}))
    assert cache.entries_held == 2 * (26 + 24 + 21) and cache.evictions == 1  # 0.4 of each sequence
    ids, mask = torch.full((3, 1), 9), torch.cat([tiny_batch((0, 3, 11), 64)[1], torch.ones(3, 1).long()], 1)
    assert model(input_ids=ids, attention_mask=mask, **{CACHE: cache}).logits.isfinite().all()
    assert all(store.one_vector for store in cache.state.stores)


def test_rows_are_turned_back_where_the_rotation_is_understood():
    """DeepSeek-V3 turns pairs of neighbours and leaves them in halves; V2 leaves them neighbours."""
    model = tiny_model("deepseek_v3", dtype=torch.float64)
    rotary = rotary_of(model)
    for evidence in observe(model, tiny_batch((0,), 12)[0]):
        module = model.model.layers[evidence.layer_idx].self_attn
        down = module.kv_a_proj_with_mqa(evidence.hidden_BTE)
        halves = down[..., R:].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        want = torch.cat([halves, module.kv_a_layernorm(down[..., :R])], dim=-1)
        assert_close(rotary.unrotate(evidence.keys_BHTD, evidence.positions_BT)[:, 0], want, **INSIDE)
        assert float((evidence.keys_BHTD[:, 0] - want).abs().max()) > 0.1
    for family in ("deepseek_v2", "kimi_linear"):
        assert rotary_of(tiny_model(family)) is None
        refused("RoPE|rotary", _filled, "expected_attention", family)


def made(config_class, model_class, attn="sdpa", **settings):
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0, **LATENT, **settings}
    return model_class(config_class(**sizes, attn_implementation=attn))


SPARSE = {**ROUTED, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 8}
LONGCAT = {"num_layers": 2, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "n_routed_experts": 4}
INDEXED = "(deepseek_sparse|indexed)_attention, whose queries .* an indexer picks"
PICKED = f"layer 0 .{{0}}DecoderLayer. is of type {INDEXED}"
REFUSED = {
    PICKED.format("DeepseekV32"): partial(made, DeepseekV32Config, DeepseekV32ForCausalLM, **SPARSE),
    PICKED.format("GlmMoeDsa"): partial(made, GlmMoeDsaConfig, GlmMoeDsaForCausalLM, **SPARSE),
    PICKED.format("HYV4"): partial(made, HYV4Config, HYV4ForCausalLM, "eager", **SPARSE),
    PICKED.format("AXK2"): partial(made, AXK2Config, AXK2ForCausalLM, **SPARSE),
    "layer 0 .LongcatFlashDecoderLayer.: it has 2 attention modules .LongcatFlashMLA.": partial(
        made, LongcatFlashConfig, LongcatFlashForCausalLM, **LONGCAT, zero_expert_num=2, moe_topk=2
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_other_attention_over_latents_is_refused_by_name(said):
    refused(said, describe, REFUSED[said]())


def another(**changes):
    model = tiny_model("deepseek_v3")
    attention = model.model.layers[1].self_attn
    for name, value in changes.items():
        setattr(model.config if name == "model_type" else attention, name, value)
    return model


def test_latents_of_another_layout_are_refused():
    unknown = "DeepseekV3Attention has latent attention .kv_lora_rank 12., .* add a row for 'someone_elses'"
    refused(unknown, describe, another(model_type="someone_elses"))
    refused("`kv_b_proj` gives 64 features, not 68", describe, another(qk_nope_head_dim=7))
    refused("`kv_b_proj` has a bias", describe, another(kv_b_proj=torch.nn.Linear(R, HEADS * (N + V))))
    refused("`kv_a_proj_with_mqa` gives 16 features, not 17", describe, another(qk_rope_head_dim=5))


class Press:
    def score(self, *args):
        raise AssertionError("it is not to be asked")


def test_what_is_not_understood_of_latents_is_refused_by_name():
    model = attached("deepseek_v3")
    latent = r"layer 0 \(DeepseekV3Attention\) has latent attention"
    gates = retain.new_gates(tiny_model("deepseek_v3"), family="linear")
    refused(f"{latent}, where one row .* a correction changes values", _filled, "merge", gates=gates)
    refused(f"{latent}, and adapters of lookahead", lookahead_gates, model)
    refused(
        f"{latent}, and a soft gate",
        SoftGated(model, retain.new_gates(model), protected=2),
        torch.ones(1, 4).long(),
    )
    refused(f"{latent}, and Press looks for keys", press_score, model, Press())
    cache = Cache(model, policy=None).prefill(tiny_batch((0,))[0], evict=False)
    keep = [torch.ones(1, 1, 40, dtype=torch.bool)] * 2
    refused("a correction changes values", partial(cache.evict_with, correction=Merge()), keep)


def test_a_row_that_is_key_and_value_takes_no_precision():
    model = tiny_model("deepseek_v3")
    for asked in ({"policy": "snapkv", "keep_ratio": 0.5}, {"policy": "full"}):
        with pytest.raises(
            ValueError, match="has latent attention, .* precision packs keys and values apart"
        ):
            retain.Cache(model, **asked, precision={"bits": 4})

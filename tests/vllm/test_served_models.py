"""Models of other families and shapes, in vLLM's own classes and in those of transformers; and refusals."""

import pytest
import torch

from tests.refused import refused
from tests.vllm.engine import PAGE, Run
from tests.vllm.test_served_policies import case_of, check_all

# GQA of 1, 4 and 8; a bias of q, k and v; a sliding window in some layers.
SHAPES = {
    "llama-1": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}),
    "llama-4": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}),
    "llama-8": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}),
    "qwen2": ("qwen2", {"head_dim": None, "hidden_size": 128}),
    "mistral": ("mistral", {"head_dim": 64}),
    "gemma3": ("gemma3", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}),
}
LENGTHS = (20, 260, 288, 333, 401, 512)
RETAIN = {
    "snapkv": {"policy": "snapkv", "keep_ratio": 0.3},
    "fused": {"policy": "fused", "gates": "mlp", "keep_ratio": 0.3},
    "criticalkv": {"policy": "criticalkv", "keep_ratio": 0.3},
}


@pytest.fixture(scope="module")
def models(oracle, tmp_path_factory) -> dict[str, str]:
    made = {}
    for name, (family, settings) in SHAPES.items():
        folder = str(tmp_path_factory.mktemp(name))
        given = {"hidden_size": 96, "tie_word_embeddings": True, **settings}
        given = {key: value for key, value in given.items() if value is not None}
        oracle.ask_one({"make": "tiny", "family": family, "settings": given, "folder": folder})
        made[name] = folder
    return made


def make_prompts() -> list[list[int]]:
    """Random tokens: what repeats itself gives equal scores."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(2, 97, (length,), generator=draw).tolist() for length in LENGTHS]


def settings_of(name: str, model: str, new_gates) -> dict:
    own = dict(RETAIN[name])
    if "gates" in own:
        own["gates"] = new_gates(model, own["gates"])
    return own


@pytest.mark.parametrize("impl", ["vllm", "transformers"])
@pytest.mark.parametrize("policy", RETAIN)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_and_entries_are_those_of_the_cache(oracle, engines, models, new_gates, shape, policy, impl):
    model = models[shape]
    retain = settings_of(policy, model, new_gates)
    run = Run(
        engines.get(model, retain, model_impl=impl, skip_tokenizer_init=True, max_num_batched_tokens=200)
    )
    prompts = make_prompts()
    for i, prompt in enumerate(prompts):
        run.add(str(i), prompt, 12, detokenize=False)
    run.finish()
    assert len(run.kept) >= 4
    check_all(run, oracle, [case_of(model, retain, own, 12) for own in prompts], f"{shape} {policy} {impl}")


def refuses(says: str, engines, model: str, retain: dict, **settings) -> None:
    """The engine does not start, and says why."""
    refused(f"(?s){says}", engines.get, model, retain, **settings)
    engines.stop()


@pytest.mark.parametrize(
    ("retain", "settings", "says"),
    [
        ({"policy": "snapvk", "keep_ratio": 0.2}, {}, "did you mean.*snapkv"),
        ({"policy": "h2o", "keep_ratio": 0.2}, {}, "take 'snapkv'"),
        ({"policy": "fused", "keep_ratio": 0.2}, {}, "add 'gates'"),
        (
            {"policy": "snapkv", "keep_ratio": 0.2},
            {"kv_cache_dtype": "int8_per_token_head"},
            "quantises its cache .kv_cache_dtype 'int8_per_token_head'.: take 'auto'",
        ),
        (
            {"policy": "snapkv", "keep_ratio": 0.2},
            {"kv_cache_dtype": "fp8"},
            "quantises its cache .kv_cache_dtype 'fp8'.: take 'auto'",
        ),
        ({"policy": "snapkv", "keep_ratio": 0.2}, {"pipeline_parallel_size": 2}, "pipeline and context"),
        (
            {"policy": "snapkv", "keep_ratio": 0.2},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
            "speculative decoding was not tested",
        ),
    ],
    ids=["unknown", "cannot", "no gates", "int8", "fp8", "pipeline", "speculative"],
)
def test_what_cannot_be_served_is_refused_at_the_start(engines, reference, retain, settings, says):
    refuses(says, engines, reference, retain, **settings)


def test_gates_of_another_model_are_refused(engines, reference, models, new_gates):
    gates = new_gates(models["llama-4"], "linear")
    retain = {"policy": "gate", "gates": gates, "keep_ratio": 0.2}
    refuses("trained on another model .*model_type 'llama' -> 'qwen3'", engines, reference, retain)


def test_gates_that_look_at_the_stream_are_refused(engines, reference, new_gates):
    retain = {"policy": "gate", "gates": new_gates(reference, "dms"), "keep_ratio": 0.2}
    refuses("'dms' look at stream", engines, reference, retain)


def test_an_engine_that_does_not_ask_is_as_ever(engines, reference):
    run = Run(engines.get(reference, None, model_impl="vllm"))
    assert type(run.scheduler.connector) is type(None)
    run.add("0", list(range(5, 5 + 2 * PAGE)), 3)
    run.finish()
    assert len(run.answers["0"]) == 3 and run.held == 0

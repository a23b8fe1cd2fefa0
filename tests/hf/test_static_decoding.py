"""Steps that transformers compiles: one graph for all prompts, tokens and entries as of steps as written."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, MaxLengthCriteria

from retain.hf.cache import static_decoding
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import _room
from retain.hf.version_names import CACHE
from retain.presets import load_policy
from tests.hf.masked import positions_of
from tests.hf.regime_runs import FEW, gates_of
from tests.tiny import attached, tiny_batch

FAMILIES = ("llama", "qwen3", "gemma3", "olmo2", "gpt_oss")
# Equal rows, ragged rows, entries that stand for others; and the last two held in fewer bits.
POLICIES = ("snapkv", "layer_defensivekv", "merge", "packed_ragged", "packed_merged")
PACKED = {"packed_ragged": ("layer_defensivekv", 8), "packed_merged": ("merge", 4)}
PADS = {1: (0,), 3: (0, 9, 23)}


def compiling(backend: str = "aot_eager") -> CompileConfig:
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    return config


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def model_of(family: str) -> Any:
    model = attached(family)
    model.__dict__.pop("_compiled_call", None)
    if family == "gpt_oss":  # as written, its experts are a loop over those that were asked
        model.set_experts_implementation("batched_mm")
    return model


def cache_of(model: Any, policy: str, **how: Any) -> Cache:
    if policy in PACKED:
        policy, bits = PACKED[policy]
        how = {"precision": {"bits": bits, "recent": 8}, **how}
    gates = {"gates": gates_of(model).float()} if load_policy(policy).learned else {}
    return Cache(model, policy, **{"keep_ratio": 0.4, "protection": FEW, **gates, **how})


def answer(cache: Cache, ids: torch.Tensor, mask: torch.Tensor, tokens: int, **how: Any) -> torch.Tensor:
    given = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, **how}
    return cache.model.generate(ids, attention_mask=mask, **{CACHE: cache}, **given)


def assert_same_entries(one: Cache, other: Cache) -> None:
    """The same entries in every layer, as equal as sums in another order are; of codes one in a hundred may
    be the next one, where a number lay between the two."""
    for a, b in zip(one.state.ragged, other.state.ragged, strict=True):
        (keys, values, *places), (others, other_values, *other_places) = a.store.flat(), b.store.flat()
        assert all(torch.equal(*pair) for pair in zip(places, other_places, strict=True))
        codec = None if a.store.packed is None else a.store.packed.codec
        for mine, theirs in ((keys, others), (values, other_values)):
            if codec is not None:
                step = float(mine.max() - mine.min()) / (2**codec.bits - 1)
                assert float((mine - theirs).abs().max()) <= 1.1 * step
                close = torch.isclose(mine, theirs, rtol=1e-3, atol=1e-4)
                assert float(close.float().mean()) > 0.99
                continue
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def assert_accounts(cache: Cache) -> None:
    """The report allocates what storages take, each once."""
    report = cache.report()
    assert report.decoded is not None and report.decoded.endswith("tokens in one graph")
    columns = [item for store in cache.state.stores for part in store.parts for item in part.storages()]
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in columns}
    assert report.total.bytes_allocated == sum(storages.values())


def as_written_and_compiled(
    model: Any, policy: str, batch: int, tokens: int = 20, backend: str = "aot_eager", **how: Any
) -> None:
    """Asks both ways, and again at a turn behind it; what comes, and what is held, is equal."""
    plain, static = cache_of(model, policy), cache_of(model, policy)
    ids, mask = tiny_batch(PADS[batch], 60)
    tokens += 20 * (policy in PACKED)  # so that some are packed on the way
    for _ in range(2):
        want = answer(plain, ids, mask, tokens, **how)
        got = answer(static, ids, mask, tokens, compile_config=compiling(backend), **how)
        assert torch.equal(got, want) and static.num_seen == plain.num_seen
        assert_same_entries(static, plain)
        assert_accounts(static)
        new, new_mask = tiny_batch((0,) * batch, 5, seed=7)
        ids, mask = torch.cat([want, new], 1), torch.cat([mask, mask.new_ones(batch, tokens), new_mask], 1)


@pytest.mark.parametrize(
    ("device", "said", "room"),
    [
        ("cuda", {"max_new_tokens": 7}, 7),
        ("cuda", {"max_new_tokens": 7, "num_beams": 2}, 0),
        ("cuda", {"max_new_tokens": 7, "disable_compile": True}, None),
        ("cpu", {"max_new_tokens": 7}, None),
        ("cpu", {"max_length": 67, "compile_config": compiling()}, 7),
        ("cpu", {"max_new_tokens": 7, "compile_config": CompileConfig()}, None),
    ],
)
def test_steps_are_compiled_by_themselves_on_a_gpu(device, said, room):
    model = SimpleNamespace(device=torch.device(device))
    assert _room(model, said, {}, torch.zeros(1, 60)) == room


def test_a_criterion_of_the_caller_stays_with_the_one_that_counts_tokens(monkeypatch):
    model, (ids, mask), heard = model_of("llama"), tiny_batch((0,), 60), {}
    monkeypatch.setattr(type(model), "generate", lambda self, inputs=None, **given: heard.update(given))
    given = {"compile_config": compiling(), "stopping_criteria": [MaxLengthCriteria(66)]}
    answer(cache_of(model, "snapkv"), ids, mask, 4, **given)
    assert heard["stopping_criteria"][:-1] == given["stopping_criteria"]


def one_graph_and_the_same_tokens(family: str, policy: str, batch: int) -> None:
    model, (ids, mask) = model_of(family), tiny_batch(PADS[batch], 60)
    answer(cache_of(model, policy), ids, mask, 40, compile_config=compiling())
    assert graphs() == 1 and not counters["graph_break"]
    as_written_and_compiled(model, policy, batch)


def the_same_by_inductor(family: str) -> None:
    as_written_and_compiled(model_of(family), "merge", 3, backend="inductor")


def further_prompts_make_no_graph(policies: tuple[str, ...]) -> None:
    model = model_of("llama")
    for number, tokens in enumerate((60, 60, 57, 52, 49, 61)):
        ids, mask = tiny_batch((0,), tokens, seed=number)
        cache = cache_of(model, policies[number % len(policies)])
        new = 34 if policies[0] in PACKED else 12  # so that some are packed; and in rooms of one size
        answer(cache, ids, mask, new, compile_config=compiling())
        assert graphs() == 1 and cache.entries_held < cache.report().total.entries_seen


def more_tokens_than_rooms_were_given() -> None:
    """Rows are given places for so many tokens at once; then rooms are laid out anew."""
    static_decoding.MOST_ROOM = 8
    as_written_and_compiled(model_of("llama"), "layer_defensivekv", 3, tokens=100)


def evictions_while_decoding(policy: str, every: int) -> None:
    """A step as written evicts by what the graph has shown, and the same graph goes on behind it."""
    model, (ids, mask) = model_of("llama"), tiny_batch(PADS[3], 60)
    how = {"when": "prefill+decode", "every": every, "tokens_per_head": 20, "keep_ratio": None}
    if policy not in ("h2o", "gate"):
        how["observed_settings"] = {"window": 4}
    plain, static = (cache_of(model, policy, **how) for _ in range(2))
    want = answer(plain, ids, mask, 40)
    got = answer(static, ids, mask, 40, compile_config=compiling())
    assert torch.equal(got, want) and static.evictions == plain.evictions > 3
    assert graphs() == 1 and static.report().decoded == f"{39 - 39 // every} tokens in one graph"
    assert_same_entries(static, plain)


def sequences_that_end_before_others() -> None:
    model, (ids, mask) = model_of("llama"), tiny_batch(PADS[3], 60)
    want = answer(cache_of(model, "snapkv"), ids, mask, 20)
    how = {"eos_token_id": [int(want[0, 63]), int(want[1, 70])], "min_new_tokens": 0}
    plain, static = (cache_of(model, "snapkv") for _ in range(2))
    want = answer(plain, ids, mask, 20, **how)
    got = answer(static, ids, mask, 20, compile_config=compiling(), **how)
    assert torch.equal(got, want) and bool((want[:, 60:] == 0).any())
    assert plain.num_seen == static.num_seen and torch.equal(plain.state.valid_BT, static.state.valid_BT)
    assert_same_entries(static, plain)


class Breaks:
    """A streamer that breaks off at the sixth call."""

    count = 0

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        if self.count == 6:
            raise RuntimeError("no more")

    def end(self) -> None: ...


def an_error_between_steps_leaves_a_whole_cache() -> None:
    model, (ids, mask) = model_of("llama"), tiny_batch((0,), 60)
    plain, static = (cache_of(model, "snapkv") for _ in range(2))
    for cache, how in ((plain, {}), (static, {"compile_config": compiling()})):
        with pytest.raises(RuntimeError, match="no more"):
            answer(cache, ids, mask, 20, streamer=Breaks(), **how)
    assert not static.engine.is_static and static.num_seen == plain.num_seen > 60
    assert_same_entries(static, plain)


def a_crop_comes_back_to_the_graph(policy: str) -> None:
    model, (ids, mask) = model_of("llama"), tiny_batch((0,), 60)
    plain, static = (cache_of(model, policy) for _ in range(2))
    want = answer(plain, ids, mask, 12)
    got = answer(static, ids, mask, 12, compile_config=compiling())
    for cache in (plain, static):
        cache.crop(65)
    again = torch.cat([want[:, :65], tiny_batch((0,), 3, seed=5)[0]], 1)
    more = torch.ones_like(again)
    want, got = answer(plain, again, more, 12), answer(static, again, more, 12, compile_config=compiling())
    assert torch.equal(got, want) and graphs() == 1
    assert_same_entries(static, plain)


def what_is_not_static_runs_as_written() -> None:
    model, (ids, mask) = model_of("llama"), tiny_batch((0,), 60)
    cache, plain = (cache_of(model, "snapkv") for _ in range(2))
    got = answer(cache, ids, mask, 12, compile_config=compiling(), num_beams=2)
    assert torch.equal(got, answer(plain, ids, mask, 12, num_beams=2)) and graphs() == 0
    assert "as written: beams" in str(cache.report()) and plain.report().decoded is None
    answer(cache_of(model, "snapkv"), ids, mask, 12)
    assert graphs() == 0
    answer(cache_of(model, "snapkv"), ids, mask, 12, compile_config=compiling())
    answer(cache_of(model, "snapkv"), ids, mask, 12, compile_config=compiling(), num_beams=2)
    answer(cache_of(model, "snapkv"), ids, mask, 12, compile_config=compiling())
    assert graphs() == 1


@torch.no_grad()
def a_model_that_the_caller_compiles_runs_the_cache_outside_of_graphs() -> None:
    """No token behind the first two compiles anything."""
    model = model_of("gemma3")
    plain, cache = (cache_of(model, "snapkv", when="prefill+decode", every=5) for _ in range(2))
    found = []
    for forward, one in ((model, plain), (torch.compile(model, backend="eager"), cache)):
        ids, mask = tiny_batch((0, 3))
        given = {"position_ids": positions_of(mask), CACHE: one}
        out = model(input_ids=ids, attention_mask=mask, **given).logits[:, -1:]
        for number in range(24):
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            given = {"attention_mask": mask, "position_ids": positions_of(mask)[:, -1:], CACHE: one}
            with torch.compiler.set_stance("fail_on_recompile" if one is cache and number > 1 else "default"):
                out = forward(input_ids=out.argmax(-1), **given).logits
            found.append(out)
    assert graphs() > 5 and cache.evictions == plain.evictions == 5  # something was compiled
    torch.testing.assert_close(torch.cat(found[24:]), torch.cat(found[:24]), rtol=1e-3, atol=1e-4)


FEW_CHECKS = [
    (a_model_that_the_caller_compiles_runs_the_cache_outside_of_graphs, ()),
    (one_graph_and_the_same_tokens, ("llama", "merge", 3)),
    (one_graph_and_the_same_tokens, ("gemma3", "layer_defensivekv", 3)),
    (one_graph_and_the_same_tokens, ("llama", "packed_merged", 1)),
    (further_prompts_make_no_graph, (("snapkv", "layer_defensivekv"),)),
    (more_tokens_than_rooms_were_given, ()),
    (evictions_while_decoding, ("snapkv", 12)),
    (evictions_while_decoding, ("h2o", 8)),
    (evictions_while_decoding, ("learned", 8)),
    (a_crop_comes_back_to_the_graph, ("snapkv",)),
    (sequences_that_end_before_others, ()),
    (an_error_between_steps_leaves_a_whole_cache, ()),
    (what_is_not_static_runs_as_written, ()),
]
ALL_CHECKS = [
    *((one_graph_and_the_same_tokens, item) for item in itertools.product(FAMILIES, POLICIES, PADS)),
    (evictions_while_decoding, ("criticalkv", 12)),
    *((further_prompts_make_no_graph, ((policy,),)) for policy in ("merge", *PACKED)),
    (a_crop_comes_back_to_the_graph, ("packed_merged",)),
    (the_same_by_inductor, ("llama",)),
    (the_same_by_inductor, ("gemma3",)),
]


def run_checks(checks: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    for check, given in checks:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        check(*given)
        print("passed:", check.__name__, *given, flush=True)


def in_a_process(checks: str) -> None:
    """Without the wrappers by which tests check shapes: those would be traced too."""
    code = f"from tests.hf import test_static_decoding as own; own.run_checks(own.{checks})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert run.stdout.count("passed:") == len(globals()[checks])


@pytest.mark.always
def test_compiled_steps() -> None:
    in_a_process("FEW_CHECKS")


@pytest.mark.slow
def test_compiled_steps_of_every_family() -> None:
    in_a_process("ALL_CHECKS")

"""torch.compile of an attached model: what the cache does stays outside of graphs, so no token compiles
anything.

The checks run in one process of their own, without the wrappers by which tests check shapes: those would be
traced too.
"""

import subprocess
import sys

import torch
import torch._dynamo

import retain
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from tests.close import MODEL, assert_close
from tests.hf.masked import positions_of
from tests.hf.moments import policy
from tests.tiny import tiny_batch, tiny_model

WARM = 2  # tokens after which lengths are known to change


@torch.no_grad()
def decoded(model, forward, cache, num_tokens=24):
    """Logits of a greedy continuation: the prompt as it is, the tokens through `forward`, the last ones
    forbidden to compile."""
    ids, mask = tiny_batch((0, 3))
    where = positions_of(mask)
    out = model(input_ids=ids, attention_mask=mask, position_ids=where, **{CACHE: cache}).logits[:, -1:]
    logits = []
    for number in range(num_tokens):
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        given = {"input_ids": out.argmax(-1), "attention_mask": mask, CACHE: cache}
        stance = "fail_on_recompile" if number >= WARM and forward is not model else "default"
        with torch.compiler.set_stance(stance):
            out = forward(position_ids=positions_of(mask)[:, -1:], **given).logits
        logits.append(out)
    return torch.cat(logits, dim=1)


def decoding_compiles_no_token_after_the_first_two(family, when):
    model = tiny_model(family)
    with retain.attach(model):
        want = decoded(model, model, Cache(model, policy=policy, when=when, every=5))
        cache = Cache(model, policy=policy, when=when, every=5)
        got = decoded(model, torch.compile(model, backend="eager"), cache)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 5  # the control: something was compiled
    assert_close(got, want, ops=MODEL)
    assert cache.evictions == (1 if when == "prefill" else 5) and cache.report().total.entries_evicted > 0


def one_graph_without_our_cache():
    model = tiny_model("llama")
    ids, mask = tiny_batch((0, 3))
    want = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    with retain.attach(model), torch.no_grad():
        whole = torch.compile(model, backend="eager", fullgraph=True)
        assert_close(whole(input_ids=ids, attention_mask=mask, use_cache=False).logits, want, ops=MODEL)


CHECKS = [
    (decoding_compiles_no_token_after_the_first_two, ("llama", "prefill")),
    (decoding_compiles_no_token_after_the_first_two, ("gemma3", "prefill+decode")),
    (one_graph_without_our_cache, ()),
]


def run_checks() -> None:
    for check, given in CHECKS:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        check(*given)
        print("passed:", check.__name__, *given, flush=True)


def test_compiled_models():
    code = "from tests.hf.test_compile import run_checks; run_checks()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("passed:") == len(CHECKS)

"""Rows of engines, with a `retain.Cache` in the place of each engine: those of the caches themselves.

Engines of vLLM are asked in `tests/vllm/test_compare.py`.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from retain.budget.statement import LayerShape
from retain.eval.config import FULL, find_policy
from retain.eval.run import engines
from retain.eval.run.answers import respond
from retain.eval.run.cells import positions_held
from retain.eval.run.checks import check
from retain.eval.run.engine import FIRST, About, Served
from retain.eval.run.engines import Engines, opening_of
from retain.eval.run.evaluated_model import Unit, load_evaluated, plan
from retain.eval.run.runner import run_unit
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from tests.eval.stub import MORE_STUB, stub_config
from tests.refused import refused

PAGE = 8
SETTINGS = {"regimes": ("served",), "page": PAGE, "keep_ratios": (0.6, 0.75)}


class CacheEngine:
    """Serves requests one by one with a cache, as an engine that evicts behind the prompt."""

    def __init__(self, model, policy, gates):
        self.model, self.policy, self.gates, self.asked = model, policy, gates, 0
        self.about = About("none", PAGE, (LayerShape(2, 2 * 16 * 4),) * 3)

    def ask(self, requests):
        self.asked += len(requests)
        return [self.serve(one) for one in requests]

    def serve(self, one):
        own = {name.removeprefix("retain."): value for name, value in one.extra.items() if name != FIRST}
        off = own.pop("off", False)
        seed = own.pop("seed", 0)
        how = {} if off else {**own, "page": PAGE, "gates": self.gates, "seeds": [seed], "capacity": None}
        cache = Cache(self.model, FULL if off else self.policy, **how)
        cache.prefill(torch.tensor([one.prompt]))
        keep = None
        if not off:
            keep = [[own.tolist() for own in heads] for heads in positions_held(cache, 0)]
        ids = torch.tensor([[*one.prompt, one.first]])
        (answer,) = respond(
            self.model,
            cache,
            ids,
            torch.ones_like(ids),
            new_tokens=one.new_tokens,
            end_ids=one.end_ids,
        )
        return Served(answer.generated, keep)


@pytest.fixture
def cached(monkeypatch):
    """Engines are caches from here on; those that were opened, by line."""
    opened = {}

    def of(self, line):
        if line.name not in opened:
            model = self.suite.load_model(self.seed)
            attach(model)
            policy = find_policy(self.config, line.policy, line.protection)
            gates = None
            if policy.learned:
                gates = load_evaluated(replace(self.config, engine="hf"), self.suite, self.seed).sets["gates"]
            opened[line.name] = CacheEngine(model, policy, gates)
        return opened[line.name]

    monkeypatch.setattr(Engines, "of", of)
    return opened


@pytest.mark.parametrize("task", ["copy", "odd", "open", "ragged"])
def test_rows_of_engines_are_those_of_caches(stub_gates, cached, task):
    config = stub_config(
        stub_gates, policies=("snapkv", "fused", "random"), tokens_per_head=(50,), batch_items=3, **SETTINGS
    )
    unit = Unit(0, task, 0, 3)
    rows = [
        run_unit(own, MORE_STUB, load_evaluated(own, MORE_STUB, 0), unit).rows
        for own in (replace(config, engine="vllm"), config)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 3 * (1 + 3 * 3)
    # The full cache is one engine's own, and nothing is asked twice.
    assert [engine.asked for engine in cached.values()] == [3 * 4, 3 * 3, 3 * 3]


def test_an_engine_that_holds_what_no_budget_states_stops_the_run(stub_gates, cached, monkeypatch):
    config = stub_config(stub_gates, policies=("snapkv",), engine="vllm", **SETTINGS)
    serve = CacheEngine.serve
    monkeypatch.setattr(CacheEngine, "serve", lambda self, one: replace(serve(self, one), places_LH=None))
    with pytest.raises(RuntimeError, match="in seed0/copy/0-2, served, snapkv at 0.6.*the request in full"):
        run_unit(config, MORE_STUB, load_evaluated(config, MORE_STUB, 0), plan(config, MORE_STUB)[0])


def test_an_engine_is_told_policy_changes_gates_and_page(stub_gates, tmp_path):
    variants = {"mine": ("fused", "protection.recent=4")}
    config = stub_config(
        stub_gates,
        policies=("mine",),
        variants=variants,
        protections={"least": ("protection.sinks=0",)},
        engine="vllm",
        engine_settings={"max_num_seqs": 3, "dtype": "bfloat16"},
        **SETTINGS,
    )
    model = engines.served_model(config, MORE_STUB, 0)
    assert engines.served_model(config, MORE_STUB, 0) == model  # written once
    line = engines.Line("mine+least", "mine", "least")
    made = opening_of(config, line, 0, model)
    assert made.retain == {
        "policy": "fused",
        "overrides": ["protection.recent=4", "protection.sinks=0"],
        "keep_ratio": 0.6,
        "gates": config.gates_of(0),
    }
    assert made.settings["block_size"] == PAGE and made.settings["dtype"] == "bfloat16"
    assert made.settings["max_num_seqs"] == 3 and made.settings["model_impl"] == "transformers"


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_what_to_install_is_said_before_work_starts(stub_gates):
    config = stub_config(stub_gates, policies=("snapkv",), engine="vllm", tasks=("turns",), **SETTINGS)
    install = (
        r"needs the package vllm, which is not installed: pip install 'retain-kv\[vllm\]'.*docs/serving.md"
    )
    asked = "task 'turns' asks 3 questions on one context"
    refused(f"(?s)engine=vllm {install}.*{asked}", check, config, MORE_STUB)

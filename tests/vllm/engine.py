"""An engine in this process, and what it answers."""

import gc
import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

PAGE = 32
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "block_size": PAGE,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_batched_tokens": 4096,
    "disable_log_stats": True,
    "model_impl": "transformers",
    "async_scheduling": False,
}


def places_of(keeps: Sequence[Any]) -> list[list[list[int]]]:
    """The places that each head of each layer keeps, of masks `[H, T]`."""
    return [[head.nonzero()[:, 0].tolist() for head in keep_HT] for keep_HT in keeps]


class Engines:
    """The one engine that this process can have at a time."""

    def __init__(self) -> None:
        self.asked: Any = None
        self.llm: Any = None

    def get(self, model: str, retain: dict[str, Any] | None, **settings: Any) -> Any:
        """The last engine if it is alike, else one of a model in a folder, with settings of the plug-in and
        of vLLM."""
        if self.asked != (model, retain, settings):
            from vllm import LLM

            self.stop()
            additional = {} if retain is None else {"retain": retain}
            self.llm = LLM(model=model, additional_config=additional, **(ENGINE | settings))
            self.asked = model, retain, settings
        return self.llm

    def stop(self) -> None:
        """End the engine, and forget the process's connector and groups, which one that did not start leaves
        too."""
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        self.asked = self.llm = None
        gc.collect()


class Run:
    """Requests through an engine, step by step.

    Attributes:
        answers: request id -> tokens.
        outputs: request id -> its last output.
        kept: request id -> places that each head of each layer keeps.
        steps, most_running, most_held: steps, and the most requests at once and blocks held in any.
        preempted: ids of requests that lost their blocks while they answered.
    """

    def __init__(self, llm: Any):
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free = self.pool.get_num_free_blocks()
        self.answers: dict[str, list[int]] = {}
        self.outputs: dict[str, Any] = {}
        self.kept: dict[str, list[list[list[int]]]] = {}
        self.preempted: set[str] = set()
        self.steps = self.most_running = self.most_held = 0
        self.worker = getattr(get_kv_transfer_group(), "worker", None) if has_kv_transfer_group() else None
        if self.worker is not None:
            self.worker.watch = self._watch

    def _watch(self, request_id: str, keeps: Any) -> None:
        self.kept[request_id.rpartition("-")[0]] = places_of(keeps)  # the engine appends to ids

    @property
    def held(self) -> int:
        """Blocks that are not free."""
        return int(self.free - self.pool.get_num_free_blocks())

    def add(self, request_id: str, prompt: Sequence[int], new: int, **sampling: Any) -> None:
        """Send a request."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(**{"temperature": 0, "max_tokens": new, "ignore_eos": True, **sampling})
        self.engine.add_request(request_id, TokensPrompt(prompt_token_ids=list(prompt)), params)

    def step(self) -> None:
        """Run a step."""
        for output in self.engine.step():
            if output.finished:
                self.outputs[output.request_id] = output
                self.answers[output.request_id] = list(output.outputs[0].token_ids)
        self.steps += 1
        self.most_running = max(self.most_running, len(self.scheduler.running))
        self.most_held = max(self.most_held, self.held)
        for request in self.scheduler.requests.values():
            if request.num_preemptions and request.num_output_tokens:
                self.preempted.add(request.request_id)

    def finish(self) -> None:
        """Step until all are answered."""
        while self.engine.has_unfinished_requests():
            self.step()

    def answer(self, prompts: Sequence[Sequence[int]], new: int, **sampling: Any) -> None:
        """Requests `0`, `1`, ... at once, to their ends."""
        for i, prompt in enumerate(prompts):
            self.add(str(i), prompt, new, **sampling)
        self.finish()

    def check_empty(self) -> None:
        """Nothing is left of requests once all have ended: no block, and nothing that the plug-in knows. The
        workers hear of the last ones in a later step."""
        self.add("last", [5, 6, 7], 1)
        self.finish()
        assert self.worker is not None
        assert (self.held, self.scheduler.connector.manager.asked) == (0, {})
        assert not self.worker.prompts and not self.worker.starts

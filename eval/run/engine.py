"""Asks an engine of vLLM, which lives in a process of its own with the plug-in `retain.vllm`.

One engine serves one policy: policy and gates are settings of an engine, the budget is one of a request. The
process is its own because vLLM changes the classes of transformers wherever it runs, and because the plug-in
has one worker a process. vLLM is imported there and nowhere else.

A request is a prompt, and the token behind it: the engine reads the prompt, evicts, and is made to go on with
that token, so that all of the answer comes from what was kept (`FirstToken`). Without it an engine gives the
first token of every answer before it evicts, and an answer of one token would say nothing of its policy.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retain.budget.statement import LayerShape
from retain.eval.run.processes import end_with
from retain.process.extras import require

# Extra argument of a request: the token that its answer begins with.
FIRST = "first_token"
# What an engine's process starts with: `worker.watch` is looked at, so that the engine's core runs in it.
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines that all bind to the first cores would share them
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Opening:
    """What an engine is started with.

    Attributes:
        model: Folder or hub name.
        retain: Settings of the plug-in; None: vLLM as it is.
        settings: Keyword arguments of `vllm.LLM`, beside these.
    """

    model: str
    retain: Mapping[str, Any] | None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """A prompt, the token behind it, and how the answer is generated.

    Attributes:
        prompt: Token ids that are read and evicted from.
        first: Token id behind them.
        new_tokens: Most tokens to generate behind that.
        end_ids: Tokens that end an answer; none: exactly `new_tokens` are generated.
        extra: Extra arguments: `retain.keep_ratio` and the like.
    """

    prompt: tuple[int, ...]
    first: int
    new_tokens: int
    end_ids: tuple[int, ...]
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class Served:
    """An answer, with the end token if one came, and the places of the prompt that were kept, by layer and
    head, as the plug-in decided; None where the request was served in full."""

    tokens: tuple[int, ...]
    places_LH: list[list[list[int]]] | None


@dataclass(frozen=True)
class About:
    """An engine, as it was opened.

    Attributes:
        version: Of vLLM.
        page: Entries of a block.
        shapes: Of the layers that evict; none without the plug-in.
    """

    version: str
    page: int
    shapes: tuple[LayerShape, ...]


class Engine:
    """A handle on an engine.

    Raises:
        ValueError: What vLLM or the plug-in refuses.
    """

    def __init__(self, opening: Opening):
        # A process that was forked after torch had started its threads may hang.
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, initializer=_start, initargs=(os.getpid(),))
        self.about: About = self.call(_open, opening)

    def ask(self, requests: Sequence[Request]) -> list[Served]:
        """Serves requests together; their answers, in order."""
        served: list[Served] = self.call(_ask, requests)
        return served

    def call(self, function: Callable[[Any], Any], given: Any) -> Any:
        """Calls a function of a module in the engine's process, where `here` has the engine.

        Raises:
            ValueError, RuntimeError: What goes wrong there.
        """
        return self.pool.submit(_told, function, given).result()

    def close(self) -> None:
        """Ends the process."""
        self.pool.shutdown(wait=True, cancel_futures=True)


# ---- in the engine's process ----

# The engine (`llm`), the plug-in's `worker`, and the model's end tokens (`eos`).
here: dict[str, Any] = {}


def _start(parent: int) -> None:
    os.environ.update(_ENVIRONMENT)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()


def _told(call: Callable[[Any], Any], given: Any) -> Any:
    """Calls, and hands on what goes wrong as text: many of vLLM's errors do not come through a pipe."""
    try:
        return call(given)
    except ValueError as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _open(opening: Opening) -> About:
    require("vllm", "vllm", what="an engine")
    import vllm
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    settings = {"skip_tokenizer_init": True, "disable_log_stats": True, **opening.settings}
    extra = {} if opening.retain is None else {"retain": dict(opening.retain)}
    llm = vllm.LLM(opening.model, additional_config=extra, logits_processors=[_first_token()], **settings)
    page = llm.llm_engine.vllm_config.cache_config.block_size
    eos = getattr(llm.model_config.hf_text_config, "eos_token_id", None)
    here.update(llm=llm, worker=None, eos=eos if isinstance(eos, list) else [] if eos is None else [eos])
    if opening.retain is None:
        return About(vllm.__version__, page, ())
    worker = here["worker"] = (
        getattr(get_kv_transfer_group(), "worker", None) if has_kv_transfer_group() else None
    )
    if worker is None:
        raise ValueError(
            "the engine does not run with the plug-in in one process: install retain beside vLLM, and leave "
            "tensor_parallel_size and data_parallel_size at 1 (docs/serving.md)."
        )
    rules = worker.rules
    shapes = tuple(LayerShape(heads, rules.entry_bytes) for heads in rules.heads_L)
    return About(vllm.__version__, page, shapes)


def as_asked(prompt: Sequence[int], **sampling: Any) -> tuple[Any, Any]:
    """A prompt, and how its answer is sampled, as vLLM takes them: greedily, and whatever comes."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **sampling)
    return TokensPrompt(prompt_token_ids=[*prompt]), params


def _ask(requests: Sequence[Request]) -> list[Served]:
    kept: dict[str, Any] = {}
    # An engine puts digits of its own behind the name of a request.
    here["worker"].watch = lambda name, _, places_LH: kept.setdefault(name.partition("-")[0], places_LH)
    asked = [
        as_asked(
            one.prompt,
            max_tokens=one.new_tokens + 1,
            # As `retain.eval.run.answers.respond`: without end tokens of its own, an answer that has its
            # full length, and none of the model's end tokens in it.
            stop_token_ids=[*(one.end_ids or here["eos"])],
            min_tokens=0 if one.end_ids else one.new_tokens + 1,
            extra_args={**one.extra, FIRST: one.first},
        )
        for one in requests
    ]
    prompts, params = zip(*asked, strict=True)
    outputs = here["llm"].generate([*prompts], [*params], use_tqdm=False)
    served = []
    for one, output in zip(requests, outputs, strict=True):
        first, *answer = output.outputs[0].token_ids
        assert first == one.first, f"the engine began with token {first}, and {one.first} was asked for"
        served.append(Served(tuple(answer), kept.get(output.request_id.partition("-")[0])))
    return served


def _first_token() -> type:
    """The class of a logits processor of vLLM, which gives a request the first token that it asks for."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class FirstToken(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            token = (params.extra_args or {}).get(FIRST)
            return None if token is None else partial(_begin_with, token)

    return FirstToken


def _begin_with(token: int, output_ids: Sequence[int], logits_V: Tensor) -> Tensor:
    if output_ids:
        return logits_V
    return torch.full_like(logits_V, float("-inf")).index_fill_(0, torch.tensor([token]), 0.0)

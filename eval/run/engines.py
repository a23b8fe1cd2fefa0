"""Opens the engines that serve a model, one for each line of a comparison.

What an engine is told follows from the config: the policy is a preset with changes, the gates are a folder, a
block has `page` entries. A reference model is written to a folder of the run once, since it comes in a form
of its own; any other name or folder goes to vLLM as it is.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retain.eval.config import (
    CONTROLS,
    HF,
    PRESET,
    SERVED,
    CompareConfig,
    Line,
    all_lines,
    find_policy,
    gate_users,
    indices_of,
    with_all_tasks,
)
from retain.eval.run.engine import Engine, Opening
from retain.eval.tasks.suite import Suite
from retain.head_tables import TABLES
from retain.hf.model.named import reference_seed
from retain.process.extras import MissingExtra, require
from retain.vllm.settings import problems_of_policy


class Engines:
    """The engines of one seed's model; each is opened when it is first asked for.

    Args:
        config: Of a comparison with `engine=vllm`.
        suite: Whose model answers.
        seed: Of the model.
    """

    def __init__(self, config: CompareConfig, suite: Suite, seed: int):
        self.config, self.suite, self.seed = config, suite, seed
        self.opened: dict[str, Engine] = {}

    def of(self, line: Line) -> Engine:
        """The engine of a line.

        Raises:
            ValueError: What vLLM or the plug-in refuses.
        """
        if line.name not in self.opened:
            model = served_model(self.config, self.suite, self.seed)
            self.opened[line.name] = Engine(opening_of(self.config, line, self.seed, model))
        return self.opened[line.name]

    def close(self) -> None:
        """Ends all of them."""
        for engine in self.opened.values():
            engine.close()
        self.opened.clear()


def opening_of(config: CompareConfig, line: Line, seed: int, model: str) -> Opening:
    """What the engine of a line is started with; `engine_settings` stand above all that is not the line's."""
    from transformers import AutoConfig

    parts = config.variants.get(line.policy) or (line.policy,)
    changes = () if line.protection == PRESET else config.protections[line.protection]
    retain: dict[str, Any] = {"policy": parts[0], "overrides": [*parts[1:], *changes]}
    retain |= stated(config.budgets[0])  # an engine wants one; every request states its own
    if (name := gate_users(config).get(line.policy)) is not None:
        retain["gates"] = str(Path(config.gates_of(seed, name)).absolute())
    text = config.text
    own = {"revision": text.revision, "trust_remote_code": text.trust_remote_code} if _by_name(config) else {}
    # vLLM's "auto" halves float32.
    dtype = text.dtype if text.dtype != "auto" else AutoConfig.from_pretrained(model, **own).dtype
    settings = {
        "dtype": str(dtype or "float32").removeprefix("torch."),
        # vLLM's own class of the reference models has no place for one of their biases.
        "model_impl": "auto" if _by_name(config) else "transformers",
        **own,
        **config.engine_settings,
        "block_size": config.page,
    }
    return Opening(model, retain, settings)


def stated(budget: float) -> dict[str, Any]:
    """A budget as rows name it, as the plug-in takes it."""
    return {"keep_ratio": budget} if budget <= 1 else {"tokens_per_head": int(budget)}


def _by_name(config: CompareConfig) -> bool:
    """Whether vLLM finds the model by the name in the config."""
    return config.suite == "text" and reference_seed(config.model) is None


def served_model(config: CompareConfig, suite: Suite, seed: int) -> str:
    """Name or folder of the model that an engine loads; a suite's own is written once, and whole."""
    if _by_name(config):
        return config.model
    folder = config.folder / (f"model-seed{seed}" if suite.seeds is not None else "model")
    if not folder.is_dir():
        beside = folder.with_name(f"{folder.name}.part{os.getpid()}")
        suite.load_model(seed).save_pretrained(beside)
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    return str(folder.absolute())


# Why an engine is not asked in these regimes.
_WHY = {
    "context_only": "a context that is evicted from before its question is known is a shared document, which "
    "engines are not asked for here yet",
    "query_aware": "its scores observe the question's last token, which is read behind the eviction, and an "
    "engine's observe what they evict from",
}
# What every engine is told already.
_OWN = ("model", "additional_config", "block_size", "logits_processors")


def problems_of_engines(
    config: CompareConfig, suite: Suite, processes: int = 1
) -> Iterator[tuple[object, str]]:
    """Yields what may be wrong with a comparison through engines: whether it is, and the message."""
    if config.engine == HF:
        text = "`engine_settings` are those of vLLM's engines: add engine=vllm, or leave them out"
        yield config.engine_settings, text
        return
    try:
        require("vllm", "vllm", what="engine=vllm")
    except MissingExtra as error:
        yield True, f"{error} On a CPU it is another package (docs/serving.md)"
    for regime in config.regimes:
        why = _WHY.get(regime, "engines evict once, behind the prompt")
        text = f"engine=vllm serves regime {SERVED!r} alone, got {regime!r} ({why})"
        yield regime != SERVED, f"{text}: take regimes=[{SERVED}]"
    yield config.temperature, "engine=vllm is asked for the likeliest tokens alone: take temperature=0"
    yield config.page is None, "engine=vllm evicts whole blocks: state their entries, such as page=32"
    alone = (
        "engine=vllm has processes of its own, an engine each: take workers=0, without `accelerate launch`"
    )
    yield config.workers > 0 or processes > 1, alone
    own = [name for name in config.engine_settings if name in _OWN]
    yield own, f"`engine_settings` names {', '.join(own)}, which the comparison states (blocks: `page`)"
    for name in with_all_tasks(config, suite):
        for index in indices_of(config, suite, name)[:1]:
            asked = suite.item(name, config.seeds[0], index, config.context_tokens).asked
            text = f"task {name!r} asks {len(asked)} questions on one context, and an engine is given prompts"
            yield len(asked) > 1, f"{text}: leave the task out"
    for line in all_lines(config):
        yield from ((True, f"policy {line.name!r} cannot be served: {own}") for own in _misfits(config, line))


def _misfits(config: CompareConfig, line: Line) -> list[str]:
    """Why the policy of a line is none for an engine; what is no policy at all is said elsewhere."""
    if line.policy in CONTROLS:
        return ["it is a control, which no one has at inference: leave it out"]
    try:
        policy = find_policy(config, line.policy, line.protection)
        name = gate_users(config).get(line.policy)
        source = None if name is None else config.source_of(name)
    except (KeyError, ValueError):
        return []
    problems = problems_of_policy(policy, None if source is None else source.folder)
    if source is not None and source.control != "none":
        problems.append(f"its gates are of control {source.control!r}, which lie in no folder")
    for kind in policy.tables:
        problems.append(f"it reads {TABLES[kind].what}, which an engine is not given here")
    return problems

"""lm-evaluation-harness with an evicting cache: the model class `retain`.

    retain lm-eval -- --model retain --model_args pretrained=NAME,policy=snapkv,keep_ratio=0.25 --tasks ...

A score of this class is a score under eviction, or there is none: log-likelihoods, which lm-eval computes in
one forward without a cache, are refused, and so is its store of answers, which does not know the policy;
prompts are never cut; and a run in which nothing was evicted warns. lm-eval shows a model one prompt, so its
question is known when entries are evicted: `retain compare` measures the other case.

Written for lm_eval 0.4.13 (EleutherAI/lm-evaluation-harness; it has no plug-ins, so `retain lm-eval` imports
this file first) and its main branch, which finds the class through the entry point `lm_eval.models`.
"""

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

import retain
from retain.config import leaves
from retain.eval.config import gates_identity, policy_settings
from retain.eval.run.table import digest
from retain.eviction import When
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.model.identity import identity_of
from retain.hf.version_names import CACHE
from retain.models.named import REFERENCE, load
from retain.models.named_gates import load_gates
from retain.presets import Policy, load_policy
from retain.process.extras import require
from retain.process.provenance import code_state
from retain.process.removed import hint_of

with require("lm-eval", "lm_eval", what="retain.eval.harness.model"):
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

# Of a cache's report; entries are (layer, KV head, token) triples, generated tokens among them.
COUNTED = ("entries_seen", "entries_held", "bytes_full", "bytes_held")
# Fields of a policy that model_args may replace.
FIELDS = {field.name for field in fields(Policy)} - {"name", "when", "paper", "variants"}


@register_model("retain")
class RetainLM(HFLM):
    """lm-eval's Hugging Face model, answering from a `retain.Cache`; docs/lm_eval.md says more of arguments.

    Args:
        pretrained: Hub id, local folder, `reference:0`, or a loaded model (then pass its tokenizer too).
        policy: Preset, variant of one, or path to a YAML.
        keep_ratio, tokens_per_head, bytes: Budget; exactly one.
        when, every: When to evict, as `retain.Cache` takes it: prefill, decode or prefill+decode.
        gates: For learned policies, a folder or a hub id.
        allow_other_weights: Take gates whose base has other weights than the model, as for a fine-tune of it.
        seeds: Of policies that draw. Each prompt draws by this and its tokens, so that neither the batch
            nor the order changes what it keeps.
        device: None: the GPU if there is one.
        **others: Fields of the policy to replace, one dot a section (`protection.recent=8`), and whatever
            lm-eval's `hf` takes.

    Raises:
        ValueError: The request cannot be met, or holds names that look like misspelt ones.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        policy: str | Path = "merge",
        keep_ratio: float | None = None,
        tokens_per_head: int | None = None,
        bytes: int | None = None,
        when: str = "prefill",
        every: int = 32,
        gates: str | Path | None = None,
        allow_other_weights: bool = False,
        seeds: int = 0,
        device: str | None = None,
        **others: Any,
    ) -> None:
        changes, others = sorted_out(others)
        if "chunk" in When(when).parts:
            raise ValueError(f"when={when!r} reads in chunks, which `retain compare` measures.")
        if others.get("truncation"):
            raise ValueError("truncation=True would cut prompts at their end, where the question is.")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        origin = pretrained if isinstance(pretrained, str) else type(pretrained).__name__
        if origin == REFERENCE:
            pretrained, its_tokenizer = load(origin, dtype=str(others.get("dtype", "auto")))
            pretrained = pretrained.to(device)
            others.setdefault("tokenizer", its_tokenizer)
        super().__init__(pretrained, device=device, **others)
        if self.backend != "causal":
            raise ValueError(f"{origin} is an encoder-decoder model: retain evicts from decoders only.")
        self.seed = seeds
        self.retain_handle = attach(self.model)
        rule = load_policy(policy, changes)
        loaded = load_gates(gates, self.model, allow_other_weights=allow_other_weights) if gates else None
        budget = {"keep_ratio": keep_ratio, "tokens_per_head": tokens_per_head, "bytes": bytes}
        budget = {name: value for name, value in budget.items() if value is not None}
        self._request: dict[str, Any] = {"policy": rule, "when": when, "every": every, "gates": loaded}
        self._request |= budget
        self._cache()  # a wrong request is refused before anything is read
        self.keeps_all = rule.keeps_all or keep_ratio == 1
        self.evicted = Counter(dict.fromkeys(("sequences", *COUNTED), 0))
        self.asked: dict[str, Any] = {
            "question": "known",
            "policy": {"name": rule.name, **policy_settings(rule)},
            "budget": budget,
            "when": when,
            "every": every if "decode" in when else None,
            "gates": gates_identity(loaded),
            "seeds": seeds,
            "model": {"name": origin, "dtype": str(self.model.dtype), **identity_of(self.model, head=True)},
            "retain": retain.__version__,
            "commit": code_state(Path(__file__).parent)["commit"],
        }

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers. The shortest prompt is read first: a run begins with the longest, and a budget that cannot
        hold what is protected would show at its end."""
        prompts = [request.args[0] for request in requests]
        if prompts and not self.keeps_all:
            ids_1T, _ = self.tok_batch_encode([min(prompts, key=len)])
            try:
                self._cache(ids_1T.tolist()).prefill(ids_1T.to(self.device))
            except ValueError as error:
                raise ValueError(
                    f"the shortest prompt has {ids_1T.shape[1]} tokens, and cannot be evicted from as asked: "
                    f"{error}"
                ) from error
        return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Raises a ValueError: lm-eval computes log-likelihoods without a decoding cache."""
        names = {str(name) for one in requests if (name := getattr(one, "task_name", None))}
        raise ValueError(
            f"task {', '.join(sorted(names)) or '?'} asks for log-likelihoods, which lm-eval computes "
            "without a decoding cache: nothing would be evicted. Take tasks that generate, or `retain "
            "diagnose --text`, which evicts before it scores, or --model hf for the full cache."
        )

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Raises a ValueError, as `loglikelihood` does."""
        self.loglikelihood(requests)
        return []

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """As HFLM's, which cuts long prompts with a line in the log; here they are refused.

        Raises:
            ValueError: a prompt is too long.
        """
        ids_BT, mask_BT = super().tok_batch_encode(list(strings), padding_side, None, truncation)
        length = ids_BT.shape[1]
        if left_truncate_len is not None and length > left_truncate_len:
            raise ValueError(
                f"a prompt of {length} tokens does not fit: max_length is {self.max_length}, of which its "
                f"answer may take {self.max_length - left_truncate_len}. Pass max_length="
                f"{length + self.max_length - left_truncate_len} in model_args if the model reads that far."
            )
        return ids_BT, mask_BT

    def _cache(self, rows: Sequence[Sequence[int]] = ()) -> Cache:
        """Makes a cache, for prompts of these tokens, by which policies draw."""
        seeds = [int(digest([self.seed, list(row)])[:8], 16) for row in rows]
        return Cache(self.model, **self._request, seeds=seeds or None, short="raise")

    def _model_generate(
        self, context: Int[Tensor, "B T"], max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        """Generates for a batch, with its cache."""
        masks = generation_kwargs["attention_mask"]
        cache = self._cache([row[mask == 1].tolist() for row, mask in zip(context, masks, strict=True)])
        how = {"max_length": max_length, "stop": stop, CACHE: cache}
        output = super()._model_generate(context, **how, **generation_kwargs)
        total = cache.report().total
        counts = {name: getattr(total, name) for name in COUNTED}
        self.evicted.update({"sequences": len(context), **counts})
        return output

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Raises a ValueError: lm-eval's store hashes what was asked alone, so that two policies would share
        answers."""
        raise ValueError("--use_cache stores answers under keys that do not know the policy: leave it out.")

    def get_model_info(self) -> dict[str, Any]:
        """HFLM's, and under `retain` what was asked for and what the caches of this process held."""
        held, seen, warning = self.evicted["entries_held"], self.evicted["entries_seen"], None
        if held == seen > 0 and not self.keeps_all:
            warning = f"nothing was evicted from any of {self.evicted['sequences']} sequences: the budget "
            warning += f"{self.asked['budget']} holds all of them, so these scores are the full cache's."
            warnings.warn(warning, stacklevel=2)
        evicted = {**self.evicted, "keep_ratio_achieved": held / max(1, seen)}
        more = {"evicted": evicted, "processes": self.world_size, "warning": warning}
        return {**super().get_model_info(), "retain": {**self.asked, **more}}


def sorted_out(others: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Splits the arguments that `RetainLM` does not name into changes of the policy (`protection.recent=8`),
    and arguments for lm-eval, which hands names that it does not know to the model's constructor, where they
    may vanish. ValueError: a name that looks like a misspelt one of ours."""
    ours = {*signature(RetainLM.__init__).parameters, *FIELDS} - {"self", "others"}
    changes, left = [], {}
    for name, value in others.items():
        section, dot, _ = name.partition(".")
        near = get_close_matches(section, ours, n=1, cutoff=0.75)
        if section in FIELDS:
            changes += [f"{path}={json.dumps(leaf)}" for path, leaf in leaves({name: value}).items()]
        elif dot or near or name == "context_marker":
            hint = f" (did you mean {near[0]!r}?)" if near else hint_of(name)
            raise ValueError(
                f"unknown model_args {name!r}{hint}. Known next to those of lm-eval's hf: "
                f"{', '.join(sorted(ours))}, sections with a dot (protection.recent=8)."
            )
        else:
            left[name] = value
    return changes, left

"""lm-evaluation-harness with an evicting cache: the model class `retain`.

    retain lm-eval -- --model retain --model_args pretrained=NAME,policy=snapkv,keep_ratio=0.25 --tasks ...

A score of this class is a score under eviction, or there is none: log-likelihoods, which lm-eval computes in
one forward without a cache, are refused unless `evict_context` is asked for; prompts are not cut unless that
is asked for; answers of another policy are never taken from a cache of answers; and a run in which nothing
was evicted warns. lm-eval shows a model one prompt, so its question is known when entries are evicted; with
`context_marker`, all up to that string is read and evicted from first.

Written for lm_eval 0.4.13 (EleutherAI/lm-evaluation-harness; it has no plug-ins, so `retain lm-eval` imports
this file first) and its main branch, which finds the class through the entry point `lm_eval.models`.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import log_softmax
from torch.nn.utils.rnn import pad_sequence

import retain
from retain.eval.config import policy_settings
from retain.eval.harness.arguments import EVICT_CONTEXT, REPLACEABLE, check, sorted_out
from retain.hf.cache.cache import Cache
from retain.hf.cache.regime import Regime
from retain.hf.intercept.attach import attach
from retain.hf.model.gates import load_gates
from retain.hf.model.identity import identity_of
from retain.hf.version_names import CACHE
from retain.models.named import REFERENCE, load
from retain.presets import Policy
from retain.process.extras import require
from retain.process.provenance import code_state

with require("lm-eval", "lm_eval", what="retain.eval.harness.model"):
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

# Arguments of lm-eval's that change an answer.
OF_HARNESS = (
    *("revision", "subfolder", "peft", "delta", "dtype", "softmax_dtype", "mixed_precision_dtype"),
    *("add_bos_token", "prefix_token_id", "think_end_token", "enable_thinking", "chat_template_args"),
)
# Of gates' metadata: decides their scores.
OF_GATES = ("sha256", "family", "layers", "inputs", "unit")


@dataclass
class Evicted:
    """Contents of a run's caches, summed over sequences when each was done with.

    An entry is a (layer, KV head, token) triple; generated tokens count, padding does not. Bytes are those of
    keys and values.
    """

    sequences: int = 0
    sequences_evicted: int = 0
    entries_seen: int = 0
    entries_held: int = 0
    bytes_full: int = 0
    bytes_held: int = 0

    def add_(self, cache: Cache) -> None:
        """Count a cache that is done with."""
        total, seen_B = cache.report().total, cache.state.valid_BT.sum(-1).cpu()
        heads = sum(spec.num_kv_heads for spec in cache.state.specs)
        self.sequences += len(seen_B)
        self.sequences_evicted += int((cache.entries_by_head().sum((1, 2)) < seen_B * heads).sum())
        for name in ("entries_seen", "entries_held", "bytes_full", "bytes_held"):
            setattr(self, name, getattr(self, name) + getattr(total, name))


@register_model("retain")
class RetainLM(HFLM):
    """lm-eval's Hugging Face model, answering from a `retain.Cache`; docs/lm_eval.md says more of arguments.

    Args:
        pretrained: Hub id, local folder, `reference:0`, or a loaded model (then pass its tokenizer too).
        policy: Preset, variant of one, or path to a YAML.
        keep_ratio, tokens_per_head, bytes: Budget; exactly one.
        regime, every: When to evict, as `retain.Cache` takes it.
        chunk: Tokens that a prompt is read in at a time; None: at once. All but its last token then.
        gates: For learned policies, a folder or a hub id.
        allow_other_weights: Take gates whose base has other weights than the model, as for a fine-tune of it.
        seeds: Of policies that draw. Each prompt draws by this and its tokens, so that neither the batch
            nor the order changes what it keeps.
        context_marker: The question begins behind the last place where this string stands in a prompt.
        loglikelihood: `evict_context`: a context is read but for its last token and evicted from; that token
            and the continuation are then scored from what is held.
        overlong: Of a prompt that, with its answer, is longer than max_length: `error`, or `truncate` (its
            beginning is cut, as lm-eval does).
        device: None: the GPU if there is one.
        max_length: Tokens of prompt and answer; None: what the model's config says.
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
        regime: str = "prefill",
        every: int = 32,
        chunk: int | None = None,
        gates: str | Path | None = None,
        allow_other_weights: bool = False,
        seeds: int = 0,
        context_marker: str | None = None,
        loglikelihood: str | None = None,
        overlong: str = "error",
        device: str | None = None,
        max_length: int | None = None,
        **others: Any,
    ) -> None:
        overrides, others = sorted_out(others)
        check(regime, chunk, context_marker, loglikelihood, overlong, others)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        origin = pretrained
        if isinstance(pretrained, str) and pretrained.startswith(REFERENCE):
            pretrained, its_tokenizer = load(pretrained, dtype=str(others.get("dtype", "auto")))
            pretrained = pretrained.to(device)
            others.setdefault("tokenizer", its_tokenizer)
        if "chunked" in Regime(regime).parts:
            # In a padded batch the chunks of a prompt would end elsewhere than alone.
            others["batch_size"] = 1
        super().__init__(pretrained, device=device, max_length=max_length, **others)
        if self.backend != "causal":
            raise ValueError(f"{origin} is an encoder-decoder model: retain evicts from decoders only.")
        self.marker, self.chunk, self.seed = context_marker, chunk, seeds
        self.scores_evicted, self.overlong = loglikelihood == EVICT_CONTEXT, overlong
        self.retain_handle = attach(self.model)
        loaded = (
            None if gates is None else load_gates(gates, self.model, allow_other_weights=allow_other_weights)
        )
        budget = {"keep_ratio": keep_ratio, "tokens_per_head": tokens_per_head, "bytes": bytes}
        budget = {name: value for name, value in budget.items() if value is not None}
        asked = {"policy": str(policy), "regime": regime, "every": every, "gates": loaded}
        self._request: dict[str, Any] = {**asked, **budget, **overrides}
        # A wrong request is refused before anything is read.
        rule = self._cache().state.bound_policy
        self.keeps_all = rule.keeps_all or keep_ratio == 1
        self.evicted = Evicted()
        self._contexts: list[int] = []  # of the batch at hand: tokens up to its marker
        tokenizer = self.tokenizer
        self.identity: dict[str, Any] = {
            "policy": {"name": rule.name} if rule.policy is None else _decisive(rule.policy),
            "budget": budget,
            "regime": regime,
            "every": every if "decode" in regime else None,
            "chunk": chunk,
            "gates": None if loaded is None else {name: loaded.metadata.get(name) for name in OF_GATES},
            "seeds": seeds,
            "context_marker": context_marker,
            "loglikelihood": loglikelihood,
            "overlong": overlong,
            "max_length": self.max_length,
            "model": identity_of(self.model, head=True),
            "name": origin if isinstance(origin, str) else type(origin).__name__,
            "dtype": str(self.model.dtype),
            "tokenizer": _sha(tokenizer.backend_tokenizer.to_str())
            if tokenizer.is_fast
            else tokenizer.name_or_path,
            **{f"lm_eval.{name}": str(others[name]) for name in OF_HARNESS if name in others},
            "retain": retain.__version__,
            "commit": code_state(Path(__file__).parent)["commit"],
        }
        self.identity_sha = _sha(self.identity)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers; the shortest prompt is tried first, since a budget below what is protected shows there."""
        self._try_shortest([request.args[0] for request in requests])
        with self._warning_if_nothing_went():
            return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations, from an evicted context, where that was asked for."""
        if not self.scores_evicted:
            raise ValueError(
                f"{_tasks_of(requests)} asks for log-likelihoods, which lm-eval computes without a decoding "
                "cache: nothing would be evicted. Take tasks that generate (generate_until); or pass "
                f"loglikelihood={EVICT_CONTEXT} in model_args, which reads each context, evicts, and scores "
                "the continuation from what is held; or take --model hf for the full cache."
            )
        with self._warning_if_nothing_went():
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Refused: there is nothing to evict from before scoring begins."""
        raise ValueError(
            f"{_tasks_of(requests)} asks for the likelihood of whole documents (loglikelihood_rolling): "
            "there is no context to evict from before scoring begins. Take `retain diagnose --continuation "
            "given`, which evicts before it scores, or --model hf for the full cache."
        )

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """As HFLM's, which cuts long prompts with a line in the log; here they are refused, or counted.

        Raises:
            ValueError: a prompt is too long, or lacks the marker.
        """
        ids_BT, mask_BT = super().tok_batch_encode(list(strings), padding_side, None, truncation)
        lengths = mask_BT.sum(1).tolist()
        room = left_truncate_len or max(lengths)
        if max(lengths) > room and self.overlong == "error":
            raise ValueError(
                f"a prompt of {max(lengths)} tokens does not fit: max_length is {self.max_length}, of which "
                f"its answer may take {self.max_length - room}. Pass max_length="
                f"{max(lengths) + self.max_length - room} in model_args if the model can read that far, or "
                "overlong=truncate to have its beginning cut."
            )
        self._contexts = []
        for string, length in zip(strings, lengths, strict=True):
            count = length if self.marker is None else self._context_tokens(string)
            count -= max(0, length - room)
            if count < 1:
                raise ValueError(
                    f"context_marker {self.marker!r} stands before anything that is left to evict from, in "
                    f"the prompt {string!r:.80}: take another marker, or a larger max_length."
                )
            self._contexts.append(min(count, min(length, room) - 1))
        return ids_BT[:, -room:], mask_BT[:, -room:]

    def _context_tokens(self, string: str, context: str | None = None) -> int:
        """Tokens of a prompt up to its marker; `context` is its part in which the marker is looked for."""
        assert self.marker is not None
        place = (string if context is None else context).rfind(self.marker)
        if place < 0:
            raise ValueError(
                f"context_marker {self.marker!r} is not in the prompt {string[:60]!r} ... {string[-60:]!r}: "
                "pass a string that every prompt of the task has, or leave it out."
            )
        stop = place + len(self.marker)
        # Special tokens as HFLM has them added to a prompt.
        begun = self.tokenizer.bos_token is not None and string.startswith(self.tokenizer.bos_token)
        special = False if begun else self.add_bos_token
        how = {} if special is None else {"add_special_tokens": special}
        places = self.tokenizer(string, return_offsets_mapping=True, **how).offset_mapping
        # A token that reaches into the question belongs to it.
        return next((count for count, (_, end) in enumerate(places) if end > stop), len(places))

    def _cache(self, rows: Sequence[Sequence[int]] = ()) -> Cache:
        """A new cache, for prompts of these tokens."""
        seeds = [int(_sha([self.seed, list(row)])[:8], 16) for row in rows]
        return Cache(self.model, **self._request, seeds=seeds or None, short="raise")

    def _model_generate(
        self, context: Int[Tensor, "B T"], max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        """Generate for a batch, with its cache."""
        mask_BT = generation_kwargs.pop("attention_mask")
        rows = [row[mask == 1].tolist() for row, mask in zip(context, mask_BT, strict=True)]
        cache, ids_BT = self._cache(rows), context
        if self.marker is not None or self.chunk is not None:
            first = [row[:count] for row, count in zip(rows, self._contexts, strict=True)]
            rest = [row[count:] for row, count in zip(rows, self._contexts, strict=True)]
            (ids, mask), (more, more_mask) = self._padded(first), self._padded(rest)
            self._read(cache, ids, mask)
            ids_BT, mask_BT = torch.cat([ids, more], 1), torch.cat([mask, more_mask], 1)
        output = super()._model_generate(
            ids_BT,
            max_length=max_length + ids_BT.shape[1] - context.shape[1],
            stop=stop,
            attention_mask=mask_BT,
            **{CACHE: cache},
            **generation_kwargs,
        )
        self.evicted.add_(cache)
        return torch.cat([context, output[:, ids_BT.shape[1] :]], dim=1)

    def _precision(self) -> Any:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def _padded(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Token ids, left-padded, and their mask."""
        widths = [torch.ones(len(row), dtype=torch.long) for row in rows]
        pairs = ([torch.tensor(list(row), dtype=torch.long) for row in rows], widths)
        return [pad_sequence(each, batch_first=True, padding_side="left").to(self.device) for each in pairs]

    def _read(self, cache: Cache, ids: Tensor, mask: Tensor) -> Cache:
        """Prefill a cache with what it evicts from."""
        with self._precision():
            return cache.prefill(ids, mask, chunk_size=self.chunk)

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Log-probabilities of continuations, each scored from a fork of its evicted context.

        `sum_k log p(cont_k | context, cont_<k)`, where all attention of the context's last token and of the
        continuation is over what was kept. The last context token is held back because its logits are the
        first continuation token's: read with the rest, a continuation of one token would be the full cache's.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (strings, context, continuation) in enumerate(requests):
            count = self._to_evict(strings, context, continuation)
            groups.setdefault(tuple(context[:count]), []).append(index)
        answers: dict[int, tuple[float, bool]] = {}
        for first, members in sorted(groups.items(), key=lambda item: -len(item[0])):
            base = None
            if first:
                base = self._read(self._cache([first]), *self._padded([first]))
                self.evicted.add_(base)
            for index in members:
                strings, context, continuation = requests[index]
                answers[index] = self._score(base, [*context[len(first) :]], continuation)
                if strings is not None:
                    self.cache_hook.add_partial("loglikelihood", strings, answers[index])
        return [answers[index] for index in range(len(requests))]

    def _to_evict(
        self, strings: tuple[str, str] | None, context: Sequence[int], continuation: Sequence[int]
    ) -> int:
        """Tokens of a context that are read before it is evicted from."""
        total = len(context) + len(continuation)
        if total > self.max_length + 1:
            raise ValueError(
                f"a context of {len(context)} tokens and its continuation of {len(continuation)} do not fit "
                f"into max_length {self.max_length}, and what is evicted from is never cut: pass "
                f"max_length={total} in model_args if the model can read that far."
            )
        count = len(context) - 1
        if self.marker is not None and strings is not None:
            count = min(count, self._context_tokens("".join(strings), strings[0]))
        return count

    @torch.no_grad()
    def _score(
        self, base: Cache | None, rest: Sequence[int], continuation: Sequence[int]
    ) -> tuple[float, bool]:
        """Log-probability of a continuation behind `rest`, and whether greedy search would write it."""
        cache = None if base is None else base.fork()
        ids = torch.tensor([[*rest, *continuation][:-1]], device=self.device)
        with self._precision():
            logits = self.model(input_ids=ids, use_cache=cache is not None, **{CACHE: cache}).logits
        logits_KV = log_softmax(logits[0, -len(continuation) :], dim=-1, dtype=self.softmax_dtype)
        wanted = torch.tensor(continuation, device=self.device)
        chosen = logits_KV.gather(1, wanted[:, None])
        return float(chosen.sum()), bool((logits_KV.argmax(1) == wanted).all())

    def _try_shortest(self, prompts: Sequence[str]) -> None:
        """Read the shortest prompt: if its budget cannot hold what is protected, better now than at the end
        of a run, which reads the longest first."""
        if not prompts or self.keeps_all:
            return
        ids, _ = self.tok_batch_encode([min(prompts, key=len)], left_truncate_len=None)
        whole = self.marker is None and self.chunk is None
        count = ids.shape[1] if whole else self._contexts[0]
        try:
            self._read(self._cache([ids[0].tolist()]), *self._padded([ids[0, :count].tolist()]))
        except ValueError as error:
            raise ValueError(
                f"the shortest prompt has {ids.shape[1]} tokens, of which {count} are read before an "
                f"eviction, and cannot be evicted from as asked: {error}"
            ) from error

    @contextmanager
    def _warning_if_nothing_went(self) -> Iterator[None]:
        before = replace(self.evicted)
        yield
        sequences = self.evicted.sequences - before.sequences
        evicted = self.evicted.sequences_evicted - before.sequences_evicted
        if sequences and not evicted and not self.keeps_all:
            warnings.warn(
                f"nothing was evicted from any of {sequences} sequences: the budget "
                f"{self.identity['budget']} holds all of them, so these scores are the full cache's.",
                stacklevel=4,
            )

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take the hook of `--use_cache`, and put this model's identity into the keys of its database:
        lm-eval's hash what was asked alone, so that two policies would share answers. ValueError: this
        lm-eval stores answers in some other way."""
        super().set_cache_hook(cache_hook)
        database: Any = getattr(cache_hook, "dbdict", None)
        if not callable(getattr(database, "encode_key", None)):
            raise ValueError(
                "--use_cache stores answers under keys that do not know the policy: leave out --use_cache, "
                "or install lm_eval 0.4.13 with sqlitedict 2."
            )
        prefix = f"retain-{self.identity_sha}-"
        database.encode_key = lambda key: f"{prefix}{key}"
        database.decode_key = lambda key: key.removeprefix(prefix)

    def get_model_info(self) -> dict[str, Any]:
        """HFLM's, and under `retain` what was asked for and what the caches of this process held; answers
        that `--use_cache` had are not counted."""
        evicted = self.evicted
        achieved = evicted.entries_held / max(1, evicted.entries_seen)
        nothing = evicted.sequences > 0 and evicted.sequences_evicted == 0 and not self.keeps_all
        return {
            **super().get_model_info(),
            "retain": {
                "question": "known" if self.marker is None else "unknown",
                "identity_sha": self.identity_sha,
                **self.identity,
                "evicted": {**asdict(evicted), "keep_ratio_achieved": achieved},
                "processes": self.world_size,
                "warning": "nothing was evicted: these are the full cache's scores" if nothing else None,
            },
        }


def _decisive(policy: Policy) -> dict[str, Any]:
    """Settings of a policy that decide which entries it keeps, and not where it comes from."""
    settings = policy_settings(policy)
    return {name: settings[name] for name in ("name", *REPLACEABLE)}


def _tasks_of(requests: Sequence[Any]) -> str:
    """The tasks of some requests, for a message."""
    names = sorted({str(name) for one in requests if (name := getattr(one, "task_name", None))})
    return f"task {', '.join(names)}" if names else "a task"


def _sha(value: Any) -> str:
    """First 16 hex digits of the sha256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]

"""Sorts the model_args of the model class `retain`: ours, the policy's, and those of lm-eval's class.

lm-eval's class hands names that it does not know to the model's constructor, which may swallow them, so a
name that looks like a misspelt one of ours is refused.
"""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from retain.hf.cache.regime import Regime
from retain.presets import Policy

EVICT_CONTEXT = "evict_context"
OVERLONG = ("error", "truncate")
# Fields of a policy that model_args may replace; `regime` is when to evict, as `retain.Cache` calls it.
REPLACEABLE = tuple(
    field.name for field in fields(Policy) if field.name not in ("name", "regime", "paper", "variants")
)
OWN = (
    *("policy", "keep_ratio", "tokens_per_head", "bytes", "regime", "every", "chunk", "gates", "seeds"),
    *("allow_other_weights", "context_marker", "loglikelihood", "overlong", *REPLACEABLE),
)


def sorted_out(others: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments that `RetainLM` does not name into fields of the policy to replace, as nested
    sections (a dot stands before a section's field), and arguments for lm-eval.

    Raises:
        ValueError: Names that look like misspelt ones of ours; all at once.
    """
    overrides: dict[str, Any] = {}
    left: dict[str, Any] = {}
    problems = []
    for name, value in others.items():
        section, *inner = name.split(".")
        near = get_close_matches(section, OWN, n=1, cutoff=0.75)
        if section in REPLACEABLE:
            target, (*sections, last) = overrides, (section, *inner)
            for part in sections:
                target = target.setdefault(part, {})
            target[last] = value
        elif near or inner:
            hint = f" (did you mean {'.'.join([near[0], *inner])!r}?)" if near else ""
            problems.append(f"{name!r}{hint}")
        else:
            left[name] = value
    if problems:
        raise ValueError(
            f"unknown model_args: {', '.join(problems)}. Known next to those of lm-eval's hf: "
            f"{', '.join(OWN)}, sections with a dot (protection.recent=8)."
        )
    return overrides, left


def check(
    regime: str,
    chunk: int | None,
    marker: str | None,
    loglikelihood: str | None,
    overlong: str,
    others: Mapping[str, Any],
) -> None:
    """Refuse, in one message, arguments of `RetainLM` that do not go together; `others` are lm-eval's."""
    parts = Regime(regime).parts
    whole = chunk is None or (isinstance(chunk, int) and not isinstance(chunk, bool) and chunk >= 1)
    wrong = {
        f"regime {regime!r} evicts after every chunk: say how long one is, as in chunk=1024": (
            "chunked" in parts and chunk is None
        ),
        f"chunk is {chunk!r}: wanted a whole number of tokens, at least 1": not whole,
        "context_marker is empty: pass the string behind which the question begins": marker == "",
        f"loglikelihood is {loglikelihood!r}: wanted {EVICT_CONTEXT}, or leave it out": (
            loglikelihood not in (None, EVICT_CONTEXT)
        ),
        f"loglikelihood={EVICT_CONTEXT} evicts once, behind the context, and regime {regime!r} while "
        "decoding: take regime=prefill": loglikelihood is not None and "decode" in parts,
        f"overlong is {overlong!r}: wanted {' or '.join(OVERLONG)}": overlong not in OVERLONG,
        "truncation=True cuts prompts at their end, where the question is: overlong=truncate": (
            bool(others.get("truncation"))
        ),
    }
    if problems := [said for said, found in wrong.items() if found]:
        raise ValueError(f"model_args: {'; '.join(problems)}.")

"""Tries the settings of a score on a made-up layer, before any token is read.

The score itself is run on a layer of one head and a few entries: its result shows the unit and optional
fields, its errors are the problems of the settings. So no second list of rules is kept.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from retain.attention.rotary import Rotary
from retain.evidence import Evidence
from retain.process.registry import suggest
from retain.process.removed import hint_of
from retain.scores import SCORES, Score
from retain.scores.value_norm import value_norms

# Settings that are numbers of entries, and the most of them that the made-up layer is tried with (odd).
LENGTHS = ("window", "pool_size", "page_size", "lag")
LONGEST = 63
# Settings that name a file about a model, which says nothing about the made-up layer.
FILES = ("centres",)
MOST_ENTRIES = 2**20  # of whatever is counted in entries, and may be made as a tensor


def try_settings(name: str, settings: Mapping[str, Any]) -> tuple[Score | None, list[str]]:
    """Score a made-up layer.

    Args:
        name: of a score in `SCORES`.
        settings: as a policy states them.

    Returns:
        the score and no problem, or None and all problems that can be known.
    """
    parameters = inspect.signature(SCORES[name].function).parameters
    known = [key for key in parameters if key not in ("evidence", "seeds_B")]
    hints = {key: hint_of(f"{name}.{key}") or suggest(key, known) for key in settings if key not in known}
    problems = [
        f"score {name!r} has no setting {key!r}{hint}, known: {', '.join(known) or 'none'}"
        for key, hint in hints.items()
    ]
    for key in LENGTHS:
        value = settings.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{key} is a whole number of at least 1, got {value!r}")
    problems += [
        f"{key} is at most {MOST_ENTRIES:,}, got {value!r}"
        for key, value in settings.items()
        if isinstance(value, int) and value > MOST_ENTRIES and key != "seed"
    ]
    problems += [
        f"{key} is the path of a file, or null, got {settings[key]!r}"
        for key in FILES
        if not isinstance(settings.get(key), str | None)
    ]
    if problems:
        return None, problems
    tried = {key: value for key, value in settings.items() if key not in FILES}
    for key in (*LENGTHS, "sinks"):
        # A few entries are enough to try any length, odd or even.
        if isinstance(value := tried.get(key), int) and value > LONGEST:
            tried[key] = LONGEST - (value + 1) % 2
    try:
        score = _tried(name, json.dumps(tried, sort_keys=True))
        stated = score.window and "window" in settings
        return replace(score, window=settings["window"]) if stated else score, []
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].removesuffix(".")
        return None, [f"score {name!r} does not take {dict(settings)}: {reason}"]


@cache
def _tried(name: str, text: str) -> Score:
    settings = json.loads(text)
    with torch.inference_mode():
        return SCORES[name].function(_made_up(name, settings), **settings)


def entries_read(name: str, settings: Mapping[str, Any]) -> frozenset[str]:
    """Which of `keys`, `values` and `output_weight` a score reads, if norms and statistics of entries are
    cached.

    The score is computed again for each of them, with NaN in its place.

    Args:
        name: of a score in `SCORES`.
        settings: as a policy states them, known to be good.
    """
    tried = {key: value for key, value in settings.items() if key not in FILES}
    return _read(name, json.dumps(tried, sort_keys=True))


@cache
def _read(name: str, text: str) -> frozenset[str]:
    settings, read = json.loads(text), set()
    with torch.inference_mode():
        evidence = _made_up(name, settings)
        evidence = SCORES[name].counted(replace(evidence, value_norm_BQT=value_norms(evidence)), settings)
        score = SCORES[name].function(evidence, **settings)
        no_weight_QDE = torch.full_like(evidence.output_weight_QDE, float("nan"))
        without = {
            "keys": replace(evidence, keys_BHTD=torch.full_like(evidence.keys_BHTD, float("nan"))),
            "values": replace(evidence, values_BHTD=torch.full_like(evidence.values_BHTD, float("nan"))),
            "output_weight": replace(evidence, output_weight_QDE=no_weight_QDE, value_norm_BQT=None),
        }
        for what, blank in without.items():
            try:
                other = SCORES[name].function(blank, **settings)
            except ValueError:
                read.add(what)
                continue
            for part in ("values_BHT", "first_BHT", "layer_weight_B"):
                one, two = getattr(score, part), getattr(other, part)
                if one is not None and not torch.equal(one, two):
                    read.add(what)
    return frozenset(read)


def _made_up(name: str, settings: Mapping[str, Any]) -> Evidence:
    """A layer of one head and a few entries."""
    parameters = inspect.signature(SCORES[name].function).parameters
    stated = {key: one.default for key, one in parameters.items() if key in ("window", "lag", "sinks")}
    stated.update((key, settings[key]) for key in stated if key in settings)
    # Longer than its window; where blocks are compared, two of them.
    T, D = stated.get("window", 1) + 8, 2
    T += 2 * stated["lag"] + max(0, stated["sinks"]) if "lag" in stated else 0
    numbers_TD = torch.sin(torch.arange(T * D).float() ** 1.5).view(T, D)
    return Evidence(
        layer_idx=0,
        queries_BQSD=numbers_TD.expand(1, 2, T, D),
        keys_BHTD=numbers_TD.expand(1, 1, T, D),
        values_BHTD=numbers_TD.expand(1, 1, T, D),
        output_weight_QDE=numbers_TD[:2].expand(2, D, D),
        scaling=1.0,
        positions_BT=torch.arange(T)[None],
        valid_BT=torch.ones(1, T, dtype=torch.bool),
        hidden_BTE=numbers_TD[None],
        rotary=Rotary(torch.ones(1)),
    )

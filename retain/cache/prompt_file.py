"""One prompt that was evicted from once, as the file of a conversation (`retain.cache.file_format`).

It is what engines exchange: `retain.Cache.prefill(ids)` with `save`, and an engine that compresses a document
for all requests that begin with it. Beside the entries it says whose they are (the model's fingerprint), how
they were chosen (policy, budget, gates) and of which tokens. It needs nothing of transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.budget.statement import Budget
from retain.cache.file_format import (
    BESIDE,
    CODES,
    NAMED,
    LayerSizes,
    check_model,
    peek_file,
    read_file,
    within,
    write_file,
    wrong_counters,
    wrong_tensors,
)
from retain.cache.store import LOG_WEIGHT, SLACK

IDS = "history.ids"


@dataclass(frozen=True, eq=False)
class Claim:
    """What a file says that it holds.

    Args:
        length: tokens of the prompt that was evicted from.
        tokens_T: ids of the tokens seen, which begin with it.
        policy: the policy as a mapping.
        budget: as it was stated.
        gates: sha256 of the gates' artifact; None without.
    """

    length: int
    tokens_T: Int[Tensor, " T"]
    policy: Mapping[str, Any]
    budget: Budget
    gates: str | None


@dataclass(frozen=True, eq=False)
class HeldPrompt:
    """Entries of a prompt that stayed: layer by layer, inside a layer head by head.

    Args:
        counts_LH: of each KV head of each layer.
        keys_ND, values_ND: the entries.
        positions_N: the token of each.
    """

    counts_LH: Int[Tensor, "L H"]
    keys_ND: Float[Tensor, "N D"]
    values_ND: Float[Tensor, "N D"]
    positions_N: Int[Tensor, " N"]

    def below(self, position: int) -> "HeldPrompt":
        """Entries of the tokens before one."""
        here_N = self.positions_N < position
        L, H = self.counts_LH.shape
        rows_N = torch.arange(L * H).repeat_interleave(self.counts_LH.flatten().long())
        counts = torch.bincount(rows_N[here_N], minlength=L * H).view(L, H)
        return HeldPrompt(counts, self.keys_ND[here_N], self.values_ND[here_N], self.positions_N[here_N])


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer that evicts, as `retain.cache.file_format.LayerSizes`."""

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    dtype: torch.dtype


def write_prompt(
    path: Path,
    held: HeldPrompt,
    tokens_T: Int[Tensor, " T"],
    *,
    rule: Mapping[str, Any],
    seed: int,
    fingerprint: Mapping[str, Any],
    layers: Sequence[int],
) -> None:
    """Write a prompt so that `retain.Cache.load` goes on with it.

    Args:
        path: of the file.
        held: what stayed of it.
        tokens_T: ids of all its tokens.
        rule: `retain.cache.file_format.named_rule`.
        seed: of the draw.
        fingerprint: of the model.
        layers: indices of the layers that evict.

    Raises:
        OSError: the disk takes no more; names the file.
    """
    T = len(tokens_T)
    header = {
        "fingerprint": dict(fingerprint),
        "dtype": str(held.keys_ND.dtype),
        "rule": dict(rule),
        "regime": {"regime": "prefill", "every": 32},
        "slack": SLACK,
        "short": ["keep", 256],
        "held_whole": [],
        "seeds": [seed],
        "pinned": None,
        "width": None,
        "prompt_B": [T],
        "moments": [T],
        "noted": 0,
        "evictions": 1,
        "evicted_at": T,
    }
    tensors = {
        "history.valid": torch.ones(1, T, dtype=torch.bool),
        "history.positions": torch.arange(T)[None],
        "history.last": torch.tensor([T - 1]),
        IDS: tokens_T[None].long(),
    }
    counts_L = held.counts_LH.sum(-1).tolist()
    columns = (
        held.keys_ND.split(counts_L),
        held.values_ND.split(counts_L),
        held.positions_N.int().split(counts_L),
        held.counts_LH.int(),
    )
    for layer_idx, *own in zip(layers, *columns, strict=True):
        names = ("keys", "values", "positions", "lengths")
        tensors |= {f"layer.{layer_idx}.store.{name}": one for name, one in zip(names, own, strict=True)}
    write_file(path, header, tensors.items())


def peek_prompt(path: Path) -> Claim:
    """What a file claims to hold, unchecked.

    Raises:
        ValueError: it cannot be opened, or holds no prompt that was evicted from once.
    """
    header, tensors = peek_file(path, (IDS,))
    return _claimed(header, tensors, path)


def read_prompt(
    path: Path, fingerprint: Mapping[str, Any], layers: Sequence[LayerSizes]
) -> tuple[Claim, HeldPrompt]:
    """A sound file of the model at hand.

    Raises:
        ValueError: it is cut, changed, of another model or precision, or holds no prompt that was evicted
            from once.
        FileNotFoundError: there is none.
    """
    header, tensors = read_file(path)
    try:
        # An engine reads how positions turn from the model's config, and knows no more of it.
        turns = {name: own for name, own in header["fingerprint"].items() if name == "rotary"}
        check_model(header, {**fingerprint, **turns}, layers[0].dtype, path)
        claim = _claimed(header, tensors, path)
        wrong = [*wrong_counters(header, 1), *wrong_tensors(tensors, layers)]
        T = len(claim.tokens_T)
        if not bool(tensors["history.valid"].all()):
            wrong.append("padding")
        if any(name.endswith(BESIDE + LOG_WEIGHT) for name in tensors):
            wrong.append("log weights of entries, which engines do not add to logits")
        if not torch.equal(tensors["history.positions"], torch.arange(T)[None]):
            wrong.append("positions that do not count its tokens")
        if wrong:
            raise ValueError(f"{path} holds {wrong[0]}: save one sequence, without padding or merges.")
        stores = [within(tensors, f"layer.{spec.layer_idx}.store.") for spec in layers]
        held = HeldPrompt(
            torch.stack([store["lengths"] for store in stores]),
            *(torch.cat([store[name] for store in stores]) for name in ("keys", "values", "positions")),
        )
    except ValueError as error:
        raise error if str(path) in str(error) else ValueError(f"{path}: {error}") from None
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, OverflowError) as error:
        raise _unknown(path, error) from error
    return claim, held


def _claimed(header: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> Claim:
    """The claim in a header."""
    try:
        rule, prompts = header["rule"], header["prompt_B"]
        lengths = prompts or [0]
        wrong = {
            "entries in few bits, and vLLM holds entries as they are (no precision=, no bits=)": (
                bool(CODES & header.keys())
            ),
            "no ids of its tokens": IDS not in tensors,
            "several sequences": len(lengths) != 1,
            "no policy that can be made again": rule["kind"] != NAMED,
            "pinned spans": header["pinned"] is not None,
            f"regime {header['regime']['regime']!r}": header["regime"]["regime"] != "prefill",
            "a prompt that nothing was evicted from": (
                header["evictions"] != 1 or header["evicted_at"] != lengths[0] or bool(header["held_whole"])
            ),
        }
        if found := [text for text, holds in wrong.items() if holds]:
            raise ValueError(
                f"{path} holds {found[0]}: save one prompt after cache.prefill(ids), evicted from by a named "
                "policy in regime 'prefill'."
            )
        (tokens_T,) = tensors[IDS]
        if len(tokens_T) < lengths[0]:
            raise ValueError(f"{path} holds {len(tokens_T)} ids of {lengths[0]} tokens: save it again.")
        return Claim(lengths[0], tokens_T, rule["policy"], Budget(**rule["budget"]), rule["gates"])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise _unknown(path, error) from error


def _unknown(path: Path, error: Exception) -> ValueError:
    """A file that is whole by its digest, which whoever writes other things into it can make too."""
    return ValueError(
        f"{path} does not hold what cache.save writes ({type(error).__name__}: {error}): it was changed, or "
        "another program wrote it."
    )

"""Compares the entries that our policies keep with those that the field's main library (kvpress) keeps.

    python -m retain.eval.studies.parity --peer-python PEER/bin/python [--models Llama Qwen3 reference]
    [--tokens 40 300] [--keep-ratios 0.2 0.5] [--methods snapkv ...] [--folder EXCHANGE]

It prints, for each method, model, prompt length, ratio and layer, how much of what the library's own
`compress` keeps is kept here by `retain.Cache` too, on the same model and tokens; its status is 1 unless they
agree. The library runs in its own environment (`retain.eval.speed.peers`). The models are small random ones
and the reference model.

`NAME:released` is compared under its own name, with nothing set otherwise: the release's protection, rounding
and layer budgets are part of it, and both sides get the same ratio. `NAME:code`, the release's score under
the protection and exact budget that our presets share, stands beside it. Two kinds of difference are told
apart: a *tie*, where an entry that only one side keeps has a score within rounding of the score at the cut,
so that neither order is wrong; and everything else, which fails.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from retain.budget.largest_remainder import exact
from retain.eval.speed.peers import INSTALL, LIBRARY, PRESSES, WINDOW, Peer, Press, write_exchange
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.process.command import WRONG, command
from retain.reference import load_model
from retain.registry import lookup

# A difference within so much of the score at the cut is rounding: both sides compute in float32.
TIE = 1e-4
PROMPTS, LENGTHS = 3, (40, 60, 200, 1000)
MODELS = {"Llama": (LlamaConfig, LlamaForCausalLM), "Qwen3": (Qwen3Config, Qwen3ForCausalLM)}

# Each of these presets is compared as it was released (`NAME:released`), with the press that that is.
METHODS: dict[str, Press] = {
    **PRESSES,
    "pyramidkv": Press("PyramidKVPress", {"window_size": WINDOW}),
    "h2o": Press("ObservedAttentionPress", attentions=True),
    "lagkv": Press("LagKVPress"),
}


@dataclass(frozen=True)
class Overlap:
    """Counts of the entries of one layer that both sides keep, that they keep and that we keep; of those that
    one side keeps alone (`alone`) the ones within rounding of the cut (`ties`); and the smallest share that
    is kept by both, of any sequence and head (`least`)."""

    both: int
    theirs: int
    ours: int
    ties: int
    alone: int
    least: float

    @property
    def share(self) -> float:
        """Entries that both keep, over those that the larger side keeps."""
        return self.both / max(1, self.theirs, self.ours)


def overlap_of(theirs: Mapping[str, Tensor], ours_BHT: Bool[Tensor, "B H T"]) -> Overlap:
    """Compare keep masks of one layer.

    An entry `i` of a head that one side keeps alone is a tie where `|s_i - c| <= TIE * max(|c|, tiny)`, with
    `s` their score and `c` the lowest score that they keep; of a press of two stages also where that holds of
    the first stage's scores, `c` being the lowest score in that stage; and where heads share a budget, `s` is
    the score that they compete by and `c` the lowest that any head keeps.

    Args:
        theirs: `kept`, bool `[B, H, T]`; `score`, and `first` of a press that wraps another, where it has
            some.
        ours_BHT: True where kept.
    """
    kept_BHT = theirs["kept"].bool()
    both_BHT, alone_BHT = kept_BHT & ours_BHT, kept_BHT ^ ours_BHT
    tied_BHT = torch.zeros_like(alone_BHT)
    if "score" in theirs:
        tied_BHT |= _near_cut(theirs["score"], kept_BHT, -1)
        if "first" in theirs:
            # Entries of the first stage are marked by the largest number that there is.
            forced_BHT = theirs["score"] >= torch.finfo(torch.float32).max
            tied_BHT |= _near_cut(theirs["first"], forced_BHT, -1)
    elif "first" in theirs:  # heads compete for one budget, by the scores of another
        tied_BHT |= _near_cut(theirs["first"], kept_BHT, (1, 2))
    larger_BH = torch.maximum(kept_BHT.sum(-1), ours_BHT.sum(-1)).clamp_min(1)
    return Overlap(
        both=int(both_BHT.sum()),
        theirs=int(kept_BHT.sum()),
        ours=int(ours_BHT.sum()),
        ties=int((alone_BHT & tied_BHT).sum()),
        alone=int(alone_BHT.sum()),
        least=float((both_BHT.sum(-1) / larger_BH).min()),
    )


def _near_cut(score_BHT: Tensor, kept_BHT: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Entries whose score is within rounding of the lowest kept one along some dimensions."""
    cut = score_BHT.masked_fill(~kept_BHT, float("inf")).amin(dim, keepdim=True)
    return (score_BHT - cut).abs() <= TIE * cut.abs().clamp_min(torch.finfo(torch.float32).tiny)


def kept_here(model: Any, ids_BT: Tensor, policy: str, keep_ratio: float) -> list[Tensor]:
    """Read off a cache's own positions the entries that it holds after a prefill of prompts without padding:
    bool `[B, H, T]` a layer."""
    with torch.no_grad(), attach(model):
        cache = Cache(model, policy, keep_ratio=keep_ratio, short="raise").prefill(ids_BT)
    masks = []
    for layer in cache.state.ragged:
        store = layer.store
        assert store is not None
        B, H = store.lengths_BH.shape
        mask_BHT = torch.zeros(B, H, ids_BT.shape[1], dtype=torch.bool)
        for b in range(B):
            for h in range(H):
                mask_BHT[b, h, store.row(b, h)[2].cpu()] = True
        masks.append(mask_BHT)
    return masks


@dataclass(frozen=True)
class Line:
    """One method on one model, at one length of prompts and stated ratio: the overlap of each layer, and the
    share that `NAME:code` keeps alike, least of the layers (None: its protection does not fit the budget)."""

    method: str
    model: str
    tokens: int
    keep_ratio: float
    layers: tuple[Overlap, ...]
    code: float | None

    @property
    def share(self) -> float:
        """Of the layer that agrees least."""
        return min(layer.share for layer in self.layers)

    @property
    def agrees(self) -> bool:
        """Whether nothing but ties tells the two sides apart."""
        return all(layer.alone == layer.ties for layer in self.layers)


def compare_kept(peer: Any, name: str, model: Any, ids_BT: Tensor, method: str, keep_ratio: float) -> Line:
    """Ask both sides for the entries that they keep.

    Args:
        peer: The other side, which has this model and these prompts.
        name: Of the model.
        model: The same here.
        ids_BT: The prompts, as long as both read them.
        method: A name in `METHODS`.
        keep_ratio: Kept / seen.
    """
    tokens = ids_BT.shape[1]
    theirs = peer.kept(METHODS[method], float(1 - exact(keep_ratio)), tokens)
    ours = kept_here(model, ids_BT, f"{method}:released", keep_ratio)
    layers = tuple(overlap_of(one, other) for one, other in zip(theirs, ours, strict=True))
    try:
        plain = kept_here(model, ids_BT, f"{method}:code", keep_ratio)
        code = min(overlap_of(one, other).share for one, other in zip(theirs, plain, strict=True))
    except ValueError:
        code = None
    return Line(method, name, tokens, keep_ratio, layers, code)


def show(lines: Sequence[Line]) -> str:
    """Lines as a table, a column a layer."""
    rows = [
        f"{'method':<19} {'model':<10} {'tokens':>6} {'ratio':>5} {'theirs':<32} "
        f"{'kept alike, layer by layer':<28} {'worst head':>10} {'alone':>6} {'ties':>5} {'code':>6}"
    ]
    for line in lines:
        shares = " ".join(f"{layer.share:.1%}" for layer in line.layers)
        code = "-" if line.code is None else f"{line.code:.1%}"
        verdict = "" if line.agrees else "  DIFFERS"
        rows.append(
            f"{line.method:<19} {line.model:<10} {line.tokens:>6} {line.keep_ratio:>5g} "
            f"{METHODS[line.method]!s:<32} {shares:<28} {min(layer.least for layer in line.layers):>10.1%} "
            f"{sum(x.alone for x in line.layers):>6} {sum(x.ties for x in line.layers):>5} {code:>6}{verdict}"
        )
    return "\n".join(
        [
            *rows,
            "kept alike: entries that both keep, over all that a side keeps. alone: entries that one side "
            f"keeps alone; ties: of those, within {TIE:g} of the score at the cut (rounding decides).",
            "code: NAME:code, the same score under the presets' common protection, least of the layers.",
            "",
        ]
    )


def random_models() -> dict[str, Any]:
    """The random models, by name: attention that is sharp, so that scores differ."""
    models = {}
    for name, (config_class, model_class) in MODELS.items():
        torch.manual_seed(0)
        config = config_class(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
        model = model_class(config).eval()
        for weight in model.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
        models[name] = model
    return models


def run(given: argparse.Namespace) -> int:
    """Compare keep sets; 0 where nothing but ties differs."""
    for name in given.methods:
        lookup(name, METHODS, what="method")
    if any(not 0 < ratio < 1 for ratio in given.keep_ratios):
        raise ValueError(f"parity: keep_ratios lie between 0 and 1, got {given.keep_ratios}.")
    if min(given.tokens) <= WINDOW:
        raise ValueError(
            f"parity: a prompt has more tokens than the window of {WINDOW} that presses observe; got "
            f"--tokens {given.tokens}."
        )
    known = {**MODELS, "reference": None}
    for name in given.models:
        lookup(name, known, what="model")
    with torch.random.fork_rng():
        models = random_models()
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.models:
            model: Any = load_model(0) if name == "reference" else models[name]
            draw = torch.Generator().manual_seed(0)
            longest = max(given.tokens)
            ids_BT = torch.randint(1, model.config.vocab_size, (PROMPTS, longest), generator=draw)
            folder = Path(given.folder or scratch) / name
            write_exchange(folder, model, ids_BT, tokens=longest)
            with Peer(given.peer_python, folder) as peer:
                versions = peer.versions()
                if versions.get(LIBRARY) is None:
                    raise ValueError(
                        f"{given.peer_python} has no {LIBRARY}: pass the interpreter of an environment where "
                        f"it is installed ({INSTALL})."
                    )
                if not lines:
                    said = ", ".join(f"{what} {version}" for what, version in versions.items())
                    print(f"theirs: {said}; {PROMPTS} prompts of random tokens each, float32")
                for tokens, ratio, method in product(given.tokens, given.keep_ratios, given.methods):
                    lines.append(compare_kept(peer, name, model, ids_BT[:, :tokens], method, ratio))
    print(show(lines), end="")
    failed = [line for line in lines if not line.agrees]
    if failed:
        named = ", ".join(
            f"{line.method} on {line.model} ({line.keep_ratio:g} of {line.tokens})" for line in failed
        )
        print(f"error: what is kept differs by more than ties: {named}", file=sys.stderr)
        return 1
    print(
        f"{', '.join(dict.fromkeys(line.method for line in lines))}: the same entries are kept, ties apart."
    )
    return 0


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; 1 where the two differ, 2 where the library is not there."""
    parser = argparse.ArgumentParser(
        prog="python -m retain.eval.studies.parity",
        description=f"Compare the entries that {LIBRARY} keeps with those that are kept here.",
    )
    parser.add_argument("--peer-python", required=True, help=f"interpreter of {LIBRARY}'s environment")
    parser.add_argument("--models", nargs="+", default=[*MODELS, "reference"], metavar="NAME")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="NAME")
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=list(LENGTHS), metavar="N", help="lengths of prompts"
    )
    parser.add_argument("--keep-ratios", nargs="+", type=float, default=[0.25, 0.5], metavar="RATIO")
    parser.add_argument(
        "--folder", help="where models and answers are exchanged; default: one that goes away"
    )
    try:
        return run(parser.parse_args(arguments))
    except RuntimeError as error:  # the other side failed
        print(f"error: {error}", file=sys.stderr)
        return WRONG


if __name__ == "__main__":
    sys.exit(main())

"""Describes a model from its config alone: what would evict, and what full and kept caches take.

    retain describe Qwen/Qwen3-8B
    retain describe runs/my-model --tokens 8192,131072 --keep-ratio 0.1 --policy snapkv
    retain describe config.json

No weights are read, so that a model can be looked at before it is fetched.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from retain.gates import build_gates, dims_for
from retain.hf.model.decoder import base_model, layout_of
from retain.hf.model.footprint import Footprint, footprint
from retain.hf.model.layout import Layout
from retain.models.catalogue import CATALOGUE
from retain.models.named import reference_seed
from retain.models.unloaded import meta_model_of, named_config, named_precision
from retain.presets import load_policy
from retain.process.command import command

TOKENS = (8192, 32768, 131072)
# One that needs neither training nor bytes beside entries.
POLICY = "keydiff"
# Of a config that names no precision, as of checkpoints whose weights are packed.
UNSTATED = torch.bfloat16


@dataclass(frozen=True, eq=False)
class ModelDescription:
    """What a config says of a model.

    Args:
        name: by which it was asked for.
        model_type: of its decoder; where it is refused, of the config.
        refusal: why it cannot be used; None: it can.
        whole: why only its text decoder is described; None: it is the model itself.
        dtype: of weights and entries.
        stated: whether that was said, by the config or the caller.
        parameters: of the model.
        layout: its layers, on the meta device; None: it is refused.
        gates: family of gates that are counted.
        gate_parameters: of all layers' gates of this family.
        positions: that it was made for; None: its config does not say.
        policy: whose budget is kept.
        learned: whether that one needs gates.
        keep_ratio: of that budget.
        footprints: one a length.
    """

    name: str
    model_type: str
    refusal: str | None = None
    whole: str | None = None
    dtype: torch.dtype = UNSTATED
    stated: bool = True
    parameters: int = 0
    layout: Layout | None = None
    gates: str = "mlp"
    gate_parameters: int = 0
    positions: int | None = None
    policy: str = ""
    learned: bool = False
    keep_ratio: float = 1.0
    footprints: tuple[Footprint, ...] = ()

    @property
    def evicting(self) -> dict[str, list[int]]:
        """Layers that evict, by what they are in words."""
        kinds: dict[str, list[int]] = {}
        for spec in self.layout.evicting if self.layout else ():
            window = "" if spec.window is None else f", inside a window of {spec.window:,} tokens"
            of = f"{spec.num_kv_heads} KV heads of width {spec.head_dim}, {spec.num_heads} query heads"
            kinds.setdefault(of + window, []).append(spec.layer_idx)
        return kinds

    @property
    def alone(self) -> dict[str, list[int]]:
        """Layers that are left alone, by what they are in words."""
        kinds: dict[str, list[int]] = {}
        for idx, left in self.layout.alone.items() if self.layout else ():
            window = "" if left.window is None else f" of {left.window:,} tokens"
            kinds.setdefault(left.kind + window, []).append(idx)
        return kinds

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Labels, and what is said."""
        rows = [("model_type", self.model_type)]
        if self.layout is None:
            return [*rows, ("refused", str(self.refusal))]
        if self.whole is not None:
            rows.append(("text decoder", f"what follows is of it alone. As a whole: {self.whole}"))
        precision = str(self.dtype).removeprefix("torch.")
        how = "" if self.stated else " (taken: its config names no precision)"
        rows.append(("weights", f"{self.parameters / 1e9:.4g} B parameters in {precision}{how}"))
        rows += [("layers evict", f"{len(own)} ({ranges(own)}): {of}") for of, own in self.evicting.items()]
        rows += [("left alone", f"{len(own)} ({ranges(own)}): {of}") for of, own in self.alone.items()]
        sizes = {", ".join(f"{name} {n}" for name, n in spec.sizes.items()) for spec in self.layout.evicting}
        family = f"{self.gate_parameters:,} parameters of family {self.gates!r}"
        rows.append(("gates", f"{family}, of layers with {' or '.join(sorted(sizes))}"))
        for own in self.footprints:
            alone = f", and {size(own.alone)} left alone" if self.layout.alone else ""
            needs = ", which needs gates" if self.learned else ""
            kept = f"{size(own.kept)} kept at keep_ratio {self.keep_ratio:g} by {self.policy!r}{needs}"
            beyond = ""
            if self.positions is not None and own.tokens > self.positions:
                beyond = f" (more than the {self.positions:,} positions of its config)"
            rows.append((f"{own.tokens:,} tokens", f"full cache {size(own.full)}; {kept}{alone}{beyond}"))
        return rows

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.rows)
        lines = [f"  {label.ljust(width)}  {text}" for label, text in self.rows]
        return "\n".join([f"model: {self.name}", *lines])


def size(num_bytes: int | None) -> str:
    """Bytes in words."""
    if num_bytes is None:
        return "a state of unknown size"
    return f"{num_bytes / 2**30:,.3f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def describe_model(
    name: str,
    tokens: Sequence[int] | None = None,
    *,
    keep_ratio: float = 0.2,
    policy: str = POLICY,
    gates: str = "mlp",
    dtype: str = "auto",
) -> ModelDescription:
    """Describe a model by its config.

    Args:
        name: `reference:0`, a local folder, a config.json, or a hub name.
        tokens: lengths at which caches are measured; None: those of `TOKENS` that the model has positions
            for, or, where it has fewer, as many as it has.
        keep_ratio: kept / seen.
        policy: whose budget it is; what stands beside entries is paid for out of it.
        gates: the family whose parameters are counted.
        dtype: of weights and entries; `auto`: as its config says.

    Raises:
        ValueError: the config cannot be read; or a length, ratio, policy or family is none.
    """
    chosen = load_policy(policy)
    config: Any = named_config(name)
    text = config.get_text_config()
    named = torch.float32 if reference_seed(name) is not None else named_precision(config)
    precision = (named or UNSTATED) if dtype == "auto" else getattr(torch, dtype)
    whole = None
    try:
        model, layout = _on_meta(config, precision)
    except ValueError as error:
        if text is config:
            return ModelDescription(name, config.model_type, refusal=str(error))
        whole = str(error)
        try:
            model, layout = _on_meta(text, precision)
        except ValueError as inner:
            return ModelDescription(name, config.model_type, refusal=str(inner))
    positions: Any = getattr(text, "max_position_embeddings", None)
    if tokens is None:
        tokens = [own for own in TOKENS if positions is None or own <= positions] or [positions]
    sizes = {spec.layer_idx: spec.sizes for spec in layout.evicting}
    with torch.device("meta"):
        built = build_gates(gates, dims_for(gates, sizes))
    return ModelDescription(
        name,
        base_model(model).config.model_type,
        whole=whole,
        dtype=precision,
        stated=dtype != "auto" or named is not None,
        parameters=sum(one.numel() for one in model.parameters()),
        layout=layout,
        gates=gates,
        gate_parameters=sum(one.numel() for one in built.parameters()),
        positions=positions,
        policy=chosen.name,
        learned=chosen.learned,
        keep_ratio=keep_ratio,
        footprints=tuple(
            footprint(model, layout, own, policy=chosen, keep_ratio=keep_ratio) for own in tokens
        ),
    )


def _on_meta(config: Any, dtype: torch.dtype) -> tuple[nn.Module, Layout]:
    """The model and its layers; ValueError: it is not supported."""
    model = meta_model_of(config, dtype)
    return model, layout_of(model, on_meta=True)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs of them joined."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(own[0][1], own[-1][1]) for own in (list(run) for _, run in runs)]
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and print; 1 where the model is refused."""
    parser = argparse.ArgumentParser(prog="retain describe", description="Describe a model by its config.")
    parser.add_argument(
        "model", help=f"hub name, local folder, config.json, {', '.join(CATALOGUE)}, or reference:0"
    )
    usual = ",".join(map(str, TOKENS))
    parser.add_argument(
        "--tokens", help=f"lengths, joined by commas (default {usual}, up to the positions of the model)"
    )
    parser.add_argument("--keep-ratio", type=float, default=0.2, help="kept / seen (default 0.2)")
    parser.add_argument("--policy", default=POLICY, help=f"whose budget (default {POLICY})")
    parser.add_argument("--gates", default="mlp", help="family of gates that is counted (default mlp)")
    precisions = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", default="auto", choices=precisions, help="of weights and entries")
    given = parser.parse_args(arguments)
    lengths = None if given.tokens is None else given.tokens.replace("_", "").split(",")
    if lengths is not None and not all(own.strip().isdigit() and int(own) for own in lengths):
        raise ValueError(f"--tokens {given.tokens}: pass whole numbers of tokens, joined by commas.")
    found = describe_model(
        given.model,
        None if lengths is None else [*map(int, lengths)],
        keep_ratio=given.keep_ratio,
        policy=given.policy,
        gates=given.gates,
        dtype=given.dtype,
    )
    print(found)
    return 0 if found.refusal is None else 1


if __name__ == "__main__":
    sys.exit(main())

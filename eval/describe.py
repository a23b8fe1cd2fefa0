"""`retain describe`: a model by its config alone. `retain doctor`: what this installation can do.

    retain describe Qwen/Qwen3-8B
    retain describe runs/my-model --tokens 8192 131072 --keep-ratio 0.1
    retain doctor

`describe` reads no weights, so that a model can be looked at before it is fetched: which layers evict, what
full and kept caches take, and what a step of training gates takes. Each line of `doctor` is `ok` or `WRONG`
(the library cannot be trusted to work).
"""

import argparse
import itertools
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

import torch
from packaging.requirements import Requirement

import retain
from retain.hf.model.decoder import base_model, layout_of
from retain.hf.model.layout import Layout
from retain.kernels.backend import why_reference
from retain.kernels.build import OPS
from retain.models.catalogue import CATALOGUE
from retain.models.named import REFERENCE, dtype_of, meta_model_of, named_config, named_precision
from retain.process.command import command
from retain.process.provenance import version_of
from retain.reference import load_model as load_reference

TOKENS = (8192, 32768, 131072)
# Of a config that names no precision, as of checkpoints whose weights are packed.
UNSTATED = torch.bfloat16

# The name under which packages are installed; that of the import belongs to another project.
DISTRIBUTION = "retain-kv"
GIB = 2**30


class Footprint(NamedTuple):
    """Bytes of one sequence: full and kept of layers that evict, and of layers that are left alone (None: one
    has a recurrent state, whose size is not computed); and `training_step`."""

    tokens: int
    full: int
    kept: int
    alone: int | None
    flops: float
    peak: float


def footprint(model: Any, layout: Layout, tokens: int, keep_ratio: float) -> Footprint:
    """Bytes of entries alone; of a window of W tokens, a later query can see W - 1."""
    spec = layout.evicting[0]  # heads are alike in all layers
    width = spec.num_kv_heads * spec.entry_width * spec.dtype.itemsize
    full, kept = (len(layout.evicting) * width * entries for entries in (tokens, round(keep_ratio * tokens)))
    windows = [left.window for left in layout.alone.values() if left.window is not None]
    alone = sum(min(tokens, window - 1) * width for window in windows)
    known = alone if len(windows) == len(layout.alone) else None
    return Footprint(tokens, full, kept, known, *training_step(model, layout, tokens))


@dataclass(frozen=True, eq=False)
class ModelDescription:
    """Facts of a model that its config says.

    Args:
        model, layout: the model, or its text decoder, and its layers, on the meta device.
        whole: why only the text decoder is described.
        keep_ratio: kept / seen.
        footprints: one a length.
    """

    name: str
    model: Any
    layout: Layout
    whole: str | None
    keep_ratio: float
    footprints: tuple[Footprint, ...]

    def __str__(self) -> str:
        rows = [("model_type", base_model(self.model).config.model_type)]
        if self.whole is not None:
            rows.append(("text decoder", f"what follows is of it alone. As a whole: {self.whole}"))
        count, dtype = sum(one.numel() for one in self.model.parameters()), self.layout.evicting[0].dtype
        rows.append(("weights", f"{count / 1e9:.4g} B parameters in {str(dtype).removeprefix('torch.')}"))
        rows += layer_rows(self.layout)
        for one in self.footprints:
            text = f"full cache {size(one.full)}; {size(one.kept)} kept at keep_ratio {self.keep_ratio:g}"
            alone = "" if one.alone == 0 else f", and {size(one.alone)} left alone"
            rows.append((f"{one.tokens:,} tokens", text + alone))
            rows.append(("", f"a step of training: {one.flops / 1e12:,.3g} TFLOP, about {size(one.peak)}"))
        width = max(len(label) for label, _ in rows)
        return "\n".join([f"model: {self.name}", *(f"  {label:<{width}}  {text}" for label, text in rows)])


def training_step(model: Any, layout: Layout, tokens: int) -> tuple[float, float]:
    """Operations and peak bytes of training gates (`stage: local`) by a document of N tokens, on one device.

        operations  2 P N (frozen forward) + 2 Q D N^2 a layer (attention), and again where a layer evicts
        bytes       weights + 2 N E b (hidden states) + N b (E + 4 (Q + H) D) (a layer's attention)

    P parameters in layers that a token meets; Q query and H KV heads of width D; E the hidden state's width;
    b bytes of an element; `m x k` by `k x n` counts `2 m k n`. The gates, a thousandth of it, do not count.
    """
    base, spec = base_model(model), layout.evicting[0]
    text, layers = base.config, base.layers
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    met = getattr(text, "num_experts_per_tok", 1) / experts if experts else 1.0
    sizes = ((path, one.numel()) for path, one in layers.named_parameters())
    parameters = sum(count * (met if ".experts." in path else 1.0) for path, count in sizes)
    E, Q, H, D, b = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.dtype.itemsize
    flops = 2.0 * parameters * tokens + 2.0 * Q * D * tokens**2 * (len(layers) + len(layout.evicting))
    weights = sum(one.nbytes for one in model.parameters())
    return flops, weights + float(tokens) * b * (3 * E + 4 * (Q + H) * D)


def layer_rows(layout: Layout) -> list[tuple[str, str]]:
    """Lines on the layers that evict and on those that are left alone; layers of one kind share a line."""
    kinds = defaultdict(list)
    for spec in layout.evicting:
        heads = f"{spec.num_kv_heads} KV heads of width {spec.head_dim}, {spec.num_heads} query heads"
        kinds["layers evict", heads].append(spec.layer_idx)
    for idx, left in layout.alone.items():
        window = "" if left.window is None else f" of {left.window:,} tokens"
        kinds["left alone", left.name + window].append(idx)
    return [(label, f"{len(one)} ({ranges(one)}): {of}") for (label, of), one in kinds.items()]


def size(num_bytes: int | float | None) -> str:
    """Bytes in words."""
    if num_bytes is None:
        return "a state of unknown size"
    return f"{num_bytes / GIB:,.3f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:,.1f} MiB"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs of them joined."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(one[0][1], one[-1][1]) for one in (list(run) for _, run in runs)]
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)


def describe_model(
    name: str,
    tokens: Sequence[int] | None = None,
    *,
    keep_ratio: float = 0.2,
    dtype: str = "auto",
) -> ModelDescription:
    """Describes a model by its config.

    Args:
        name: `reference:0`, a local folder, a config.json, or a hub name.
        tokens: lengths at which caches are measured; None: those of `TOKENS` that the model has positions
            for, or, if it has fewer, as many as it has.
        keep_ratio: kept / seen.
        dtype: of weights and entries; `auto`: as its config says.

    Raises:
        ValueError: the config cannot be read, the model cannot be used; or a ratio is none.
    """
    if not 0 < keep_ratio <= 1:
        raise ValueError(f"keep_ratio is {keep_ratio}: pass a number above 0, at most 1.")
    config: Any = named_config(name)
    text = config.get_text_config()
    named = torch.float32 if name == REFERENCE else named_precision(config)
    precision = (named or UNSTATED) if dtype == "auto" else dtype_of(dtype)
    whole = None
    for part in (config, text):
        try:
            model: Any = meta_model_of(part, precision)
            layout = layout_of(model, on_meta=True)
            break
        except ValueError as error:
            if part is text:
                raise
            whole = str(error)
    positions: Any = getattr(text, "max_position_embeddings", None)
    if tokens is None:
        tokens = [one for one in TOKENS if positions is None or one <= positions] or [positions]
    footprints = tuple(footprint(model, layout, one, keep_ratio) for one in tokens)
    return ModelDescription(name, model, layout, whole, keep_ratio, footprints)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Describes a model."""
    parser = argparse.ArgumentParser(prog="retain describe", description="Describe a model by its config.")
    names = f"hub name, local folder, config.json, {', '.join(CATALOGUE)}, or reference:0"
    parser.add_argument("name", metavar="MODEL", help=names)
    about = f"lengths (default: of {', '.join(map(str, TOKENS))} those that the model has positions for)"
    parser.add_argument("--tokens", type=int, nargs="+", help=about)
    parser.add_argument("--keep-ratio", type=float, default=0.2, help="kept / seen (default 0.2)")
    parser.add_argument("--dtype", default="auto", help="of weights and entries, as torch calls it")
    print(describe_model(**vars(parser.parse_args(arguments))))
    return 0


def findings() -> Iterator[tuple[bool, str]]:
    """Lines of `retain doctor`, each with whether it is as it must be: installed packages against the ranges
    that this installation of retain states, and which path the ops take on each device."""
    yield True, f"python {platform.python_version()}, {platform.platform()}"
    if (other := version_of("retain")) is not None:
        text = f"the package 'retain' {other} is another project under the same import name: "
        yield False, f"{text}pip uninstall retain, then install {DISTRIBUTION} again"
    try:
        stated = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        stated = []
        yield True, f"{DISTRIBUTION} is used from a folder: versions are not checked"
    for one in map(Requirement, stated):
        # Neither of an extra nor of another platform.
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            found = version_of(one.name) or "not installed"
            fits = found[0].isdigit() and one.specifier.contains(found, prereleases=True)
            yield fits, f"{one.name} {found} (wanted: {one.specifier})"
    for device in devices():
        name = "" if device == "cpu" else f" ({torch.cuda.get_device_name(device)})"
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        reason = why_reference(torch.zeros(1, dtype=dtype, device=device))
        path = "Triton kernels" if reason is None else f"the reference in PyTorch: {reason}"
        yield True, f"ops on {device}{name}: {path} ({', '.join(OPS)})"


def devices() -> list[str]:
    """The CPU, and the GPUs that torch sees."""
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def trial(device: str) -> str:
    """The reference model reads a prompt and answers from a cache that evicts: what was held."""
    model = load_reference().to(device)
    retain.attach(model)
    begin = time.perf_counter()
    cache = retain.Cache(model, policy="defensivekv", keep_ratio=0.2)
    ids = torch.arange(2, 1002, device=device)[None] % model.config.vocab_size
    model.generate(ids, cache=cache, max_new_tokens=4, do_sample=False)
    total, seconds = cache.report().total, time.perf_counter() - begin
    held = f"{total.entries_held:,} of {total.entries_seen:,} entries held"
    return f"trial on {device}: {held}, {seconds:.1f} s"


@command
def doctor(arguments: Sequence[str] | None = None) -> int:
    """Prints every finding, and a trial on each device, which raises what does not work there; 1 if a finding
    is wrong."""
    about = "Report versions, devices and kernels."
    argparse.ArgumentParser(prog="retain doctor", description=about).parse_args(arguments)
    wrong = 0
    for fine, text in findings():
        print(f"{'ok' if fine else 'WRONG':<5}  {text}", flush=True)
        wrong += not fine
    for device in devices():
        print(f"ok     {trial(device)}", flush=True)
    print(f"{wrong} wrong: retain may not work here." if wrong else "Nothing is wrong.")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""`retain describe`: a model by its config alone. `retain doctor`: what this installation can do.

    retain describe Qwen/Qwen3-8B
    retain describe runs/my-model --tokens 8192,131072 --keep-ratio 0.1
    retain doctor

`describe` reads no weights, so that a model can be looked at before it is fetched: which layers evict, what
full and kept caches take, and what a step of training its gates takes. Each line of `doctor` is `ok`, a
`note` (something that some commands need is missing) or `WRONG` (the library cannot be trusted to work).
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
from retain.gates import build_gates, dims_for
from retain.hf.model.decoder import base_model, layout_of
from retain.hf.model.layout import Layout
from retain.kernels.backend import why_reference
from retain.kernels.build import OPS
from retain.models.catalogue import CATALOGUE
from retain.models.named import dtype_of, reference_seed
from retain.models.unloaded import meta_model_of, named_config, named_precision
from retain.process.command import command

TOKENS = (8192, 32768, 131072)
# Of a config that names no precision, as of checkpoints whose weights are packed.
UNSTATED = torch.bfloat16
# A parameter, its gradient and AdamW's two moments, in float32.
TRAINED_BYTES = 16

OK, NOTE, WRONG = "ok", "note", "WRONG"
# The name under which packages are installed; that of the import belongs to another project.
DISTRIBUTION = "retain-kv"
GIB = 2**30


class Footprint(NamedTuple):
    """Bytes of one sequence: full and kept of layers that evict, and of layers that are left alone (None: one
    has a recurrent state, whose size is not computed)."""

    tokens: int
    full: int
    kept: int
    alone: int | None


def footprint(layout: Layout, tokens: int, keep_ratio: float) -> Footprint:
    """Bytes of entries alone; of a window of W tokens, a later query can see W - 1."""

    def held(window: int | None, entries: int) -> int:
        spec = layout.evicting[0]  # heads are alike in all layers
        most = entries if window is None else min(entries, window - 1)
        return most * spec.num_kv_heads * spec.entry_width * spec.dtype.itemsize

    kept = round(keep_ratio * tokens)
    evicting, alone = [spec.window for spec in layout.evicting], [one.window for one in layout.alone.values()]
    full_kept = (sum(held(window, entries) for window in evicting) for entries in (tokens, kept))
    return Footprint(tokens, *full_kept, None if None in alone else sum(held(one, tokens) for one in alone))


@dataclass(frozen=True, eq=False)
class ModelDescription:
    """Facts of a model that its config says.

    Args:
        model_type: of its decoder; if it is refused, of the config.
        refusal, whole: why it cannot be used, or why only its text decoder is described.
        dtype: of weights and entries.
        layout: its layers, on the meta device; None: it is refused.
        gate_parameters: of `mlp` gates in all layers.
        positions: that it was made for; None: its config does not say.
        keep_ratio: kept / seen.
        footprints, steps: caches, and operations and bytes of `training_step`, one a length.
    """

    name: str
    model_type: str
    refusal: str | None = None
    whole: str | None = None
    dtype: torch.dtype = UNSTATED
    parameters: int = 0
    layout: Layout | None = None
    gate_parameters: int = 0
    positions: int | None = None
    keep_ratio: float = 1.0
    footprints: tuple[Footprint, ...] = ()
    steps: tuple[tuple[float, float], ...] = ()

    @property
    def evicting(self) -> dict[str, list[int]]:
        """Layers that evict, by their heads and window in words."""
        kinds = defaultdict(list)
        for spec in self.layout.evicting if self.layout else ():
            window = "" if spec.window is None else f", inside a window of {spec.window:,} tokens"
            heads = f"{spec.num_kv_heads} KV heads of width {spec.head_dim}, {spec.num_heads} query heads"
            kinds[heads + window].append(spec.layer_idx)
        return kinds

    @property
    def alone(self) -> dict[str, list[int]]:
        """Layers that are left alone, by their kind and window in words."""
        kinds = defaultdict(list)
        for idx, left in self.layout.alone.items() if self.layout else ():
            kinds[left.name + ("" if left.window is None else f" of {left.window:,} tokens")].append(idx)
        return kinds

    def __str__(self) -> str:
        rows = [("model_type", self.model_type)]
        if self.refusal is not None:
            rows.append(("refused", self.refusal))
        if self.whole is not None:
            rows.append(("text decoder", f"what follows is of it alone. As a whole: {self.whole}"))
        if self.layout is not None:
            precision = str(self.dtype).removeprefix("torch.")
            rows.append(("weights", f"{self.parameters / 1e9:.4g} B parameters in {precision}"))
            for label, kinds in (("layers evict", self.evicting), ("left alone", self.alone)):
                rows += [(label, f"{len(one)} ({ranges(one)}): {of}") for of, one in kinds.items()]
            rows.append(("gates", f"{self.gate_parameters:,} parameters of family 'mlp'"))
        for one, (flops, peak) in zip(self.footprints, self.steps, strict=True):
            text = f"full cache {size(one.full)}; {size(one.kept)} kept at keep_ratio {self.keep_ratio:g}"
            text += f", and {size(one.alone)} left alone" if self.alone else ""
            if self.positions is not None and one.tokens > self.positions:
                text += f" (more than the {self.positions:,} positions of its config)"
            rows.append((f"{one.tokens:,} tokens", text))
            cost = f"{flops / 1e12:,.3g} TFLOP, about {size(int(peak))}"
            rows.append(("training", f"{cost} for a step on a document of {one.tokens:,} tokens"))
        width = max(len(label) for label, _ in rows)
        return "\n".join([f"model: {self.name}", *(f"  {label:<{width}}  {text}" for label, text in rows)])


def training_step(model: Any, layout: Layout, tokens: int, gate_parameters: int) -> tuple[float, float]:
    """Operations and peak bytes of training gates by one document (`stage: local`, one device, one document a
    step). A product of `m x k` and `k x n` counts `2 m k n`.

        operations  2 P N (frozen forward) + 2 Q D N^2 a layer (attention), and again a layer that evicts
                    (targets) + 2 Q D E N a layer that evicts (norms of values) + 6 g N
        bytes       weights + 16 g + 2 N E b (hidden states) + the largest of attention N b (E + 4 (Q + H) D),
                    targets N (b (E + (Q + 2 H) D) + 16 Q) and feed-forward N b (2 E + 3 F)

    N tokens; P parameters in layers that a token meets; g the gates' parameters; Q query and H KV heads of
    width D; E and F the widths of the hidden state and the feed-forward part; b bytes of an element. Device
    context, libraries and what an allocator leaves unused come on top.
    """
    base, specs = base_model(model), layout.evicting
    text, layers = base.config, base.layers
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    chosen = int(getattr(text, "num_experts_per_tok", None) or 1) if experts else 1
    met = sum(
        one.numel() * (chosen / experts if experts and ".experts." in path else 1.0)
        for path, one in layers.named_parameters()
    )
    E, Q, H, D = specs[0].hidden_size, specs[0].num_heads, specs[0].num_kv_heads, specs[0].head_dim
    F = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 0
    F *= chosen
    attention = 2.0 * Q * D * tokens**2 * (len(layers) + len(specs))
    flops = attention + tokens * (2.0 * met + 2.0 * Q * D * E * len(specs) + 6.0 * gate_parameters)
    b = specs[0].dtype.itemsize
    phases = b * (E + 4 * (Q + H) * D), b * (E + (Q + 2 * H) * D) + 16 * Q, b * (2 * E + 3 * F)
    held = sum(one.nbytes for one in model.parameters()) + TRAINED_BYTES * gate_parameters
    return flops, held + float(tokens) * (2 * E * b + max(phases))


def size(num_bytes: int | None) -> str:
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
        ValueError: the config cannot be read; or a ratio is none.
    """
    if not 0 < keep_ratio <= 1:
        raise ValueError(f"keep_ratio is {keep_ratio}: pass a number above 0, at most 1.")
    config: Any = named_config(name)
    text = config.get_text_config()
    named = torch.float32 if reference_seed(name) is not None else named_precision(config)
    precision = (named or UNSTATED) if dtype == "auto" else dtype_of(dtype)
    refusals: list[str] = []
    for part in [config] if text is config else [config, text]:
        try:
            model: Any = meta_model_of(part, precision)
            layout = layout_of(model, on_meta=True)
            break
        except ValueError as error:
            refusals.append(str(error))
    else:
        return ModelDescription(name, config.model_type, refusal=refusals[-1])
    positions: Any = getattr(text, "max_position_embeddings", None)
    if tokens is None:
        tokens = [one for one in TOKENS if positions is None or one <= positions] or [positions]
    with torch.device("meta"):
        built = build_gates("mlp", dims_for("mlp", {spec.layer_idx: spec.sizes for spec in layout.evicting}))
    trained = sum(one.numel() for one in built.parameters())
    return ModelDescription(
        name,
        base_model(model).config.model_type,
        whole=refusals[0] if refusals else None,
        dtype=precision,
        parameters=sum(one.numel() for one in model.parameters()),
        layout=layout,
        gate_parameters=trained,
        positions=positions,
        keep_ratio=keep_ratio,
        footprints=tuple(footprint(layout, one, keep_ratio) for one in tokens),
        steps=tuple(training_step(model, layout, one, trained) for one in tokens),
    )


def _lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Describes a model; 1 if it is refused."""
    parser = argparse.ArgumentParser(prog="retain describe", description="Describe a model by its config.")
    names = f"hub name, local folder, config.json, {', '.join(CATALOGUE)}, or reference:0"
    parser.add_argument("name", metavar="MODEL", help=names)
    usual = ",".join(map(str, TOKENS))
    about = f"lengths, joined by commas (default {usual}, up to the positions of the model)"
    parser.add_argument("--tokens", type=_lengths, help=about)
    parser.add_argument("--keep-ratio", type=float, default=0.2, help="kept / seen (default 0.2)")
    parser.add_argument("--dtype", default="auto", help="of weights and entries, as torch calls it")
    found = describe_model(**vars(parser.parse_args(arguments)))
    print(found)
    return 0 if found.refusal is None else 1


class Finding(NamedTuple):
    """A line of `retain doctor`: `ok`, `note` or `WRONG`, what it is about, and what was found."""

    state: str
    about: str
    text: str


def versions() -> Iterator[Finding]:
    """Installed packages, against the ranges that this installation of retain states."""
    yield Finding(OK, "python", f"{platform.python_version()}, {platform.platform()}")
    if (other := _installed("retain")) is not None:
        text = (
            f"the package 'retain' {other} is installed, which is another project under the import name of "
        )
        text += f"this one ({DISTRIBUTION}): pip uninstall retain, then install {DISTRIBUTION} again"
        yield Finding(WRONG, "retain", text)
    try:
        stated = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        yield Finding(NOTE, DISTRIBUTION, "used from a folder, not installed: versions are not checked")
        return
    yield Finding(OK, DISTRIBUTION, metadata.version(DISTRIBUTION))
    for one in stated:
        if one.marker is None or one.marker.evaluate(
            {"extra": ""}
        ):  # not of an extra, nor of another platform
            found, wanted = _installed(one.name), str(one.specifier)
            fits = found is not None and one.specifier.contains(found, prereleases=True)
            yield Finding(OK if fits else WRONG, one.name, f"{found or 'not installed'} (wanted: {wanted})")


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def devices() -> Iterator[Finding]:
    """GPUs, and on each device which path the ops take, and a trial."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if not gpus:
        yield Finding(NOTE, "cuda", f"torch {torch.__version__} sees no GPU")
    for gpu in gpus:
        free, total = (count / GIB for count in torch.cuda.mem_get_info(gpu))
        capability = ".".join(map(str, torch.cuda.get_device_capability(gpu)))
        text = f"{torch.cuda.get_device_name(gpu)}, compute capability {capability}"
        yield Finding(OK, gpu, f"{text}, {free:.1f} of {total:.1f} GiB free")
    for device in ("cpu", *gpus):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        reason = why_reference(torch.zeros(1, dtype=dtype, device=device))
        path = "Triton kernels" if reason is None else f"the reference in PyTorch: {reason}"
        slow = device != "cpu" and reason is not None
        yield Finding(NOTE if slow else OK, f"ops on {device}", f"{path} ({', '.join(OPS)})")
        yield trial(device)


def trial(device: str) -> Finding:
    """The reference model reads a prompt and answers from a cache that evicts."""
    from retain.reference import load_model

    try:
        model = load_model(0).to(device)
        retain.attach(model)
        begin = time.perf_counter()
        cache = retain.Cache(model, policy="defensivekv", keep_ratio=0.2)
        ids = torch.arange(2, 1002, device=device)[None] % model.config.vocab_size
        model.generate(ids, cache=cache, max_new_tokens=4, do_sample=False)
        total = cache.report().total
    except Exception as error:  # of any kind: to find it is what this command is for
        return Finding(WRONG, f"trial on {device}", f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - begin
    held = f"{total.entries_held:,} of {total.entries_seen:,} entries held"
    return Finding(OK, f"trial on {device}", f"{held}, {seconds:.1f} s")


@command
def doctor(arguments: Sequence[str] | None = None) -> int:
    """Prints every finding; 1 if one is wrong."""
    about = "Report versions, devices and kernels."
    argparse.ArgumentParser(prog="retain doctor", description=about).parse_args(arguments)
    wrong = 0
    for finding in itertools.chain(versions(), devices()):
        print(f"{finding.state:<5}  {finding.about:<20}  {finding.text}", flush=True)
        wrong += finding.state == WRONG
    print(f"{wrong} wrong: retain may not work here." if wrong else "Nothing is wrong.")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

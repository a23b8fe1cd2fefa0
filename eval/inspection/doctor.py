"""Reports what this installation can do: versions, extras, devices, kernels, memory, the hub.

    retain doctor

A line is `ok`, a `note` (something that some commands need is not there) or `WRONG` (the library cannot be
trusted to work). Nothing is written, and of the network only the hub's address is asked for, once.
"""

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import httpx
import torch
from huggingface_hub import constants, get_token
from packaging.requirements import Requirement

from retain.kernels.backend import why_reference
from retain.kernels.build import OPS
from retain.process.command import command

State = Literal["ok", "note", "WRONG"]
OK: State = "ok"
NOTE: State = "note"
WRONG: State = "WRONG"
GIB = 2**30
# The name under which packages are installed; that of the import belongs to another project.
DISTRIBUTION = "retain-kv"
# Seconds after which the hub counts as out of reach.
PATIENCE = 5.0
# Tokens that the reference model reads, and the share of them that it keeps.
TOKENS, KEEP_RATIO = 1000, 0.2


class Finding(NamedTuple):
    """One line: how it stands, what it is about, and what was found."""

    state: State
    about: str
    text: str


def versions() -> Iterator[Finding]:
    """What is installed, against the ranges that this installation of retain states."""
    yield Finding(OK, "python", f"{platform.python_version()}, {platform.platform()}")
    if (other := _installed("retain")) is not None:
        yield Finding(
            WRONG,
            "retain",
            f"the package 'retain' {other} is installed, which is another project under the import name of "
            f"this one ({DISTRIBUTION}): pip uninstall retain, then install {DISTRIBUTION} again",
        )
    try:
        stated = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        yield Finding(NOTE, DISTRIBUTION, "used from a folder, not installed: versions are not checked")
        return
    yield Finding(OK, DISTRIBUTION, metadata.version(DISTRIBUTION))
    extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    missing: dict[str, list[str]] = {}
    for one in stated:
        extra = next((name for name in extras if one.marker and one.marker.evaluate({"extra": name})), None)
        if one.marker is not None and extra is None and not one.marker.evaluate({"extra": ""}):
            continue  # of another platform
        found, wanted = _installed(one.name), str(one.specifier)
        fits = found is not None and one.specifier.contains(found, prereleases=True)
        if extra is not None:
            missing.setdefault(extra, []).extend([] if fits else [f"{one.name} {wanted} (here: {found})"])
        else:
            yield Finding(OK if fits else WRONG, one.name, f"{found or 'not installed'} (wanted: {wanted})")
    for extra, absent in missing.items():
        text = (
            f"not complete: {', '.join(absent)}; pip install 'retain-kv[{extra}]'" if absent else "complete"
        )
        yield Finding(NOTE if absent else OK, f"extra {extra}", text)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def devices() -> Iterator[Finding]:
    """Cores, GPUs and free memory."""
    yield Finding(OK, "cpu", f"{os.cpu_count()} cores, {_free_memory()}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        built = torch.version.cuda and f"built for CUDA {torch.version.cuda}, and sees no GPU"
        yield Finding(NOTE, "cuda", f"torch {torch.__version__} is {built or 'a build without CUDA'}")
    for index in range(torch.cuda.device_count()):
        free, total = (count / GIB for count in torch.cuda.mem_get_info(index))
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        text = f"{name}, compute capability {major}.{minor}, {free:.1f} of {total:.1f} GiB free"
        yield Finding(OK, f"cuda:{index}", text)


def _free_memory() -> str:
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(lines[name].split()[0]) / 2**20 for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return "free memory not known"
    return f"{free:.1f} of {total:.1f} GiB free"


def paths() -> Iterator[Finding]:
    """Which path the ops take on each device, and why; a reference on a GPU is slow."""
    for device in _devices():
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        reason = why_reference(torch.zeros(1, dtype=dtype, device=device))
        path = "Triton kernels" if reason is None else f"the reference in PyTorch: {reason}"
        state = NOTE if device != "cpu" and reason is not None else OK
        yield Finding(state, f"ops on {device}", f"{path} ({', '.join(OPS)})")


def _devices() -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def trial() -> Iterator[Finding]:
    """A reference model reads a prompt and answers from a cache that evicts, on each device."""
    import retain
    from retain.reference import load_model

    for device in _devices():
        try:
            model = load_model(0).to(device)
            retain.attach(model)
            begin = time.perf_counter()
            cache = retain.Cache(model, policy="defensivekv", keep_ratio=KEEP_RATIO)
            ids = torch.arange(2, 2 + TOKENS, device=device)[None] % model.config.vocab_size
            model.generate(ids, cache=cache, max_new_tokens=4, do_sample=False)
            total = cache.report().total
        except Exception as error:  # of any kind: to find it is what this command is for
            yield Finding(WRONG, f"trial on {device}", f"{type(error).__name__}: {error}")
            continue
        seconds = time.perf_counter() - begin
        text = f"{total.entries_held:,} of {total.entries_seen:,} entries held, {seconds:.1f} s"
        yield Finding(OK, f"trial on {device}", text)


def hub() -> Iterator[Finding]:
    """The hub's address, whether it answers, and the folder that keeps what was fetched."""
    folder = Path(constants.HF_HUB_CACHE)
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free / GIB
    yield Finding(OK, "hub's cache", f"{folder} ({free:.0f} GiB free on its disk)")
    yield Finding(OK, "hub's token", "one is set" if get_token() else "none: no private repositories")
    if constants.HF_HUB_OFFLINE:
        yield Finding(NOTE, "hub", "not asked: HF_HUB_OFFLINE is set, and only what is in the cache is found")
        return
    try:
        begin = time.perf_counter()
        status = httpx.head(constants.ENDPOINT, timeout=PATIENCE, follow_redirects=True).status_code
        text = f"{constants.ENDPOINT} answers ({status}) in {time.perf_counter() - begin:.1f} s"
        yield Finding(OK if status < 500 else NOTE, "hub", text)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = f"{constants.ENDPOINT} does not answer ({type(error).__name__}: {error})"
        yield Finding(NOTE, "hub", f"{reason}; models and gates load from folders and the cache")


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints every finding; the status is 1 where one is wrong."""
    typed = sys.argv[1:] if arguments is None else [*arguments]
    if typed:
        print("usage: retain doctor\n\nReport versions, devices, kernels, free memory and the hub.")
        return 0 if typed in (["-h"], ["--help"]) else 2
    wrong = 0
    for look in (versions, devices, paths, trial, hub):
        for finding in look():
            print(f"{finding.state:<5}  {finding.about:<20}  {finding.text}", flush=True)
            wrong += finding.state == WRONG
    print(f"{wrong} wrong: retain may not work here." if wrong else "Nothing is wrong.")
    return int(wrong > 0)

"""Which path an op takes, said once: Triton on CUDA, the plain reference elsewhere.

In: an op's name, its tensors, and what of the call its kernel cannot do. Out: `triton` or `reference`. The
one decision taken here: the choice is a function of the call alone (device, precision, what was asked for),
so that the same call takes the same path every time, and a caller can ask without running anything. Tests
and benchmarks force a path with `using`; Triton's interpreter, which runs kernels on the CPU, is only ever
reached that way.
"""

import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

Path = Literal["triton", "reference"]
Given = ParamSpec("Given")
Found = TypeVar("Found")

# Versions of Triton that the kernels are written for, as pyproject.toml has them: from, and below.
OLDEST, TOO_NEW = (3, 6), (3, 9)
# What kernels take; float64 is the references' own.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_log = logging.getLogger("retain.kernels")
_forced: ContextVar[Path | None] = ContextVar("retain_kernels_path", default=None)
_said: dict[tuple[str, str, str], None] = {}  # in the order in which it was said


@contextmanager
def using(path: Path) -> Iterator[None]:
    """Inside, every op takes this path: `reference` anywhere, `triton` on CUDA or in Triton's interpreter.

    A forced kernel that cannot do what is asked for raises instead of stepping aside.
    """
    if path not in ("triton", "reference"):
        raise ValueError(f"a path is 'triton' or 'reference'; got {path!r}.")
    token = _forced.set(path)
    try:
        yield
    finally:
        _forced.reset(token)


def path_for(op: str, *tensors: Tensor, unsupported: str | None = None) -> Path:
    """The path that a call takes; which one, and why not the other, is logged once per op and reason.

    Args:
        op: name of the op.
        tensors: floating-point inputs, on one device, at least one; of an op that moves numbers of any type,
            some tensor of whole numbers.
        unsupported: what of this call the op's kernel cannot do, as the end of a sentence ("a head width of
            512"); None: nothing.

    Raises:
        ValueError: `using("triton")` asks for a kernel that cannot run here, or the tensors are on several
            devices.
    """
    check_devices(op, *tensors)
    forced = _forced.get()
    why = _why_not(tensors, unsupported, anywhere=forced == "triton" and interpreting())
    if forced == "triton":
        if why is not None:
            raise ValueError(f"{op}: the Triton path was forced, but {why}; leave the choice to the op.")
        return "triton"
    if forced == "reference":
        return "reference"
    path: Path = "triton" if why is None else "reference"
    _say(op, path, why, warn=tensors[0].is_cuda)
    return path


def check_devices(op: str, *tensors: Tensor | None) -> None:
    """Refuse tensors of several devices (None is no tensor): a kernel would read one at another's address.

    Raises:
        ValueError: they are not on one device.
    """
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        places = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{op}: the tensors lie on {places}; move them to one device.")


def which(*tensors: Tensor, unsupported: str | None = None) -> Path:
    """The path that `path_for` would choose for such tensors, for whoever only wants to say it: nothing is
    logged, and nothing is raised where a forced kernel could not run."""
    forced = _forced.get()
    if forced is not None:
        return forced
    return "triton" if _why_not(tensors, unsupported, anywhere=False) is None else "reference"


def _why_not(tensors: tuple[Tensor, ...], unsupported: str | None, *, anywhere: bool) -> str | None:
    """What keeps a call from the kernel; `anywhere`: kernels are interpreted, on whatever device."""
    assert tensors, "a path is chosen by the device and precision of tensors; none was given"
    if not anywhere and not all(tensor.is_cuda for tensor in tensors):
        return "the tensors are not on CUDA"
    for tensor in tensors:
        if tensor.dtype.is_floating_point and tensor.dtype not in DTYPES:
            return (
                f"kernels take float32, float16 and bfloat16, not {str(tensor.dtype).removeprefix('torch.')}"
            )
    missing = _missing()
    if missing is not None:
        return missing
    if tensors[0].is_cuda:
        major, minor = torch.cuda.get_device_capability(tensors[0].device)
        if major < 8:
            return f"this GPU's compute capability is {major}.{minor}, and kernels need 8.0 or later"
    return unsupported


def _say(op: str, path: str, why: str | None, *, warn: bool) -> None:
    key = (op, path, why or "")
    if key in _said:
        return
    _said[key] = None
    # On a GPU the reference is a fallback, which somebody will want to know of; on a CPU it is the path.
    level = logging.WARNING if warn and path == "reference" else logging.INFO
    _log.log(level, "%s runs as %s%s", op, path, f": {why}" if why else "")


def said() -> tuple[tuple[str, str, str], ...]:
    """What has been logged so far in this process: op, path, and why not the other (empty: no reason)."""
    return tuple(_said)


@cache
def _missing() -> str | None:
    """What is wrong with the Triton that is installed."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'retain[kernels]')"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a build under another name
        return None
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not OLDEST <= found < TOO_NEW:
        return (
            f"Triton {version} is installed, and kernels are written for "
            f"{'.'.join(map(str, OLDEST))} or later, below {'.'.join(map(str, TOO_NEW))}"
        )
    return None


def without_autocast(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """Run a function outside of `torch.autocast`: it says itself in which precision it multiplies.

    Under autocast products of float32 tensors come back in half precision, which is neither what a score is
    defined by nor what the tensors beside them are of.
    """

    @wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        with ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return run


def architecture(tensor: Tensor) -> int:
    """Which tables of tiles a launch reads: 90 for Hopper and the interpreter, 80 for every other GPU.

    Tiles of the latter are small enough for GPUs with 99 KiB of shared memory a block (8.6, 8.9, 12.0).
    """
    if not tensor.is_cuda:
        return 90
    return 90 if torch.cuda.get_device_capability(tensor.device) == (9, 0) else 80


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU: read when a kernel's module is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of `tl.dot` for operands of this type.

    float32 operands are multiplied as such, never as tf32. For half precision the word means nothing to the
    result, but any other than the default keeps Triton (3.7) from Hopper's wgmma instructions.
    """
    return "ieee" if dtype == torch.float32 else "tf32"


def upcast(dtype: torch.dtype) -> bool:
    """Whether operands must be made float32 before `tl.dot`: the interpreter multiplies bfloat16 wrongly."""
    return interpreting() and dtype == torch.bfloat16


def block_of(width: int) -> int:
    """The power of two, 16 at least, that covers a head width: how wide a tile is, the rest masked."""
    return max(16, 1 << (width - 1).bit_length())

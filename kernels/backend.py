"""Chooses the path of an op and logs it once: Triton on CUDA, the plain reference elsewhere.

The choice depends on the call alone (device, precision, options), so that the same call takes the same path
every time and a caller can ask without running anything. Tests and benchmarks force a path with `using`;
Triton's interpreter, which runs kernels on the CPU, is only reached that way.
"""

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache, wraps
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

Path = Literal["triton", "reference"]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Precisions of kernels, by their names in signatures; float64 is for references only.
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
DTYPES = tuple(TYPES)
LOG2E = 1.4426950408889634

_log = logging.getLogger("retain.kernels")
_forced: ContextVar[Path | None] = ContextVar("retain_kernels_path", default=None)
_target: ContextVar[int | None] = ContextVar("retain_kernels_target", default=None)
_said: dict[tuple[str, str, str], None] = {}  # in the order in which it was logged


@contextmanager
def using(path: Path) -> Iterator[None]:
    """Forces a path: `reference` anywhere, `triton` on CUDA or in Triton's interpreter.

    A forced kernel that cannot do a call raises instead of stepping aside.
    """
    if path not in ("triton", "reference"):
        raise ValueError(f"a path is 'triton' or 'reference'; got {path!r}.")
    token = _forced.set(path)
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Forces kernels with the tiles of such a GPU (90: of 9.0), wherever tensors lie: `build` compiles so."""
    token = _target.set(capability)
    try:
        with using("triton"):
            yield
    finally:
        _target.reset(token)


def path_for(op: str, *tensors: Tensor, unsupported: str | None = None) -> Path:
    """The path that a call takes; it is logged once per op and reason.

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
    anywhere = forced == "triton" and (interpreting() or _target.get() is not None)
    why = why_reference(*tensors, unsupported=unsupported, anywhere=anywhere)
    if forced == "triton" and why is not None:
        raise ValueError(f"{op}: the Triton path was forced, but {why}; leave the choice to the op.")
    if forced is not None:
        return forced
    path: Path = "triton" if why is None else "reference"
    if (op, path, why or "") not in _said:
        _said[op, path, why or ""] = None
        # On a GPU the reference is a fallback, which a user will want to know of; on a CPU it is the path.
        level = logging.WARNING if tensors[0].is_cuda and path == "reference" else logging.INFO
        _log.log(level, "%s runs as %s%s", op, path, f": {why}" if why else "")
    return path


def check_devices(op: str, *tensors: Tensor | None) -> None:
    """Refuses tensors of several devices (None is no tensor): a kernel would read one at another's address.

    Raises:
        ValueError: they are not on one device.
    """
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        places = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{op}: the tensors lie on {places}; move them to one device.")


def forced() -> Path | None:
    """The path that `using` forces here; None: none."""
    return _forced.get()


def which(*tensors: Tensor, unsupported: str | None = None) -> Path:
    """The path that `path_for` would choose for such tensors. Nothing is logged, and nothing is raised where
    a forced kernel could not run."""
    asked = _forced.get()
    if asked is not None:
        return asked
    return "triton" if why_reference(*tensors, unsupported=unsupported) is None else "reference"


def why_reference(*tensors: Tensor, unsupported: str | None = None, anywhere: bool = False) -> str | None:
    """The reason why a call with such tensors takes the reference, if no path is forced; None: it takes the
    kernel. `anywhere`: kernels are interpreted, or only compiled, on any device."""
    assert tensors, "a path is chosen by the device and precision of tensors; none was given"
    if not anywhere and not all(tensor.is_cuda for tensor in tensors):
        return "the tensors are not on CUDA"
    for tensor in tensors:
        if tensor.dtype.is_floating_point and tensor.dtype not in DTYPES:
            return f"kernels take float32, float16 and bfloat16, not {dtype_name(tensor.dtype)}"
    if not _has_triton():
        return "Triton is not installed (pip install 'retain-kv[kernels]')"
    if tensors[0].is_cuda:
        major, minor = torch.cuda.get_device_capability(tensors[0].device)
        if major < 8:
            return f"this GPU's compute capability is {major}.{minor}, and kernels need 8.0 or later"
    return unsupported


def said() -> tuple[tuple[str, str, str], ...]:
    """Everything logged so far in this process: op, path, and why not the other (empty: no reason)."""
    return tuple(_said)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def without_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Runs a function outside of `torch.autocast`: it chooses itself in which precision it multiplies.

    Under autocast products of float32 tensors come back in half precision, which is neither what a score is
    defined by nor what the tensors beside them are of.
    """

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return run


def architecture(tensor: Tensor) -> int:
    """Architecture whose tables of tiles a launch reads: 90 for Hopper and the interpreter, else 80.

    Tiles of the latter are small enough for GPUs with 99 KiB of shared memory a block (8.6, 8.9, 12.0).
    """
    if (target := _target.get()) is not None:
        return 90 if target == 90 else 80
    return 90 if not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) == (9, 0) else 80


@lru_cache
def multiprocessors(device: torch.device, interpreted: int) -> int:
    """Multiprocessors of a GPU; `interpreted` where there is none."""
    if device.type != "cuda":
        return interpreted
    return torch.cuda.get_device_properties(device).multi_processor_count


def interpreting() -> bool:
    """Tells whether Triton interprets kernels on the CPU: read when a kernel's module is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of `tl.dot` for operands of this type.

    float32 operands are multiplied as such, never as tf32. For half precision the word means nothing to the
    result, but any other than the default keeps Triton (3.7) from Hopper's wgmma instructions.
    """
    return "ieee" if dtype == torch.float32 else "tf32"


def upcast(dtype: torch.dtype) -> bool:
    """Tells whether operands must be float32 in `tl.dot`: the interpreter multiplies bfloat16 wrongly."""
    return interpreting() and dtype == torch.bfloat16


def block_of(width: int) -> int:
    """The power of two, 16 at least, that covers a head width: how wide a tile is, the rest masked."""
    return max(16, 1 << (width - 1).bit_length())


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" and the like."""
    return str(dtype).removeprefix("torch.")

"""Builds the C++ of the step on a CPU, once for a machine and a version of torch."""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("step.cpp")
# Sums may be reordered, but not by -ffast-math: that makes a whole process take denormals for nothing.
_MATH = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
FLAGS = ("-O3", "-march=native", "-fopenmp", *_MATH, "-std=c++20", "-shared", "-fPIC")
logger = logging.getLogger("retain.kernels")
_loaded: list[Path] = []


def folder() -> Path:
    """Where what was built is kept: `RETAIN_BUILD`, or a folder of the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    return Path(os.environ.get("RETAIN_BUILD", Path(home) / "retain" / "build"))


def compiler() -> str | None:
    """The C++ compiler that torch.compile takes too: `CXX`, else g++, else clang++; None: there is none."""
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@cache
def load() -> bool:
    """Build the step, unless it is there, and let torch have it.

    Returns:
        whether it was; else, where no compiler is or it fails, plain PyTorch runs, which a log line says.
    """
    found = compiler()
    if found is None:
        logger.warning("there is no C++ compiler (CXX, g++, clang++), so decoding steps run in plain PyTorch")
        return False
    library = _library(found)
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Beside the place and then renamed, so that two processes may build at once.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            done = subprocess.run(_command(found, made), capture_output=True, text=True, check=False)
            if done.returncode:
                said = done.stderr[-2000:]
                logger.warning("decoding steps run in plain PyTorch, since %s failed: %s", found, said)
                return False
            made.replace(library)
    torch.ops.load_library(library)
    _loaded.append(library)
    return True


def is_there() -> bool:
    """Tells whether the step runs in C++ without building anything: it was built before, by any process."""
    return bool(_loaded) or _is_kept() and load()


@cache
def _is_kept() -> bool:
    found = compiler()
    return found is not None and _library(found).is_file()


def _library(compiler: str) -> Path:
    return folder() / f"decode_step-{_key(compiler)}.so"


def _command(compiler: str, library: Path) -> list[str]:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    home = Path(torch.__file__).parent
    paths = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include", f"-L{home}/lib"]
    return [compiler, *FLAGS, abi, *paths, str(SOURCE), "-o", str(library), "-ltorch_cpu", "-lc10"]


def _key(compiler: str) -> str:
    """Tells builds apart: by the source, torch, the compiler and the processor."""
    model = next((line for line in _lines("/proc/cpuinfo") if line.startswith(("model name", "flags"))), "")
    parts = (SOURCE.read_text(), torch.__version__, compiler, platform.machine(), model, *FLAGS)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []

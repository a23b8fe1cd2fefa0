"""Device of kernels' tests: the GPU where there is one, else the CPU, where Triton interprets kernels.

A test builds every input on `DEVICE` and forces a path with `backend.using`, so that the same test runs in
the interpreter and on a device. Whether kernels are interpreted is fixed when their module is imported
(tests/conftest.py sets `TRITON_INTERPRET` where there is no GPU), so where there is a GPU a tensor on the
CPU never reaches one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from retain.kernels import backend

DEVICE = "cpu" if backend.interpreting() else "cuda"


@contextmanager
def never_waiting() -> Iterator[None]:
    """Inside, it is an error to wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")

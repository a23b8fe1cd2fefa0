"""Where tests of kernels put their tensors: on the GPU where there is one, else on the CPU, where Triton
interprets kernels.

In: nothing; tests/conftest.py has set `TRITON_INTERPRET` where there is no GPU. Out: `DEVICE`. The one
decision taken here: a test builds every input on `DEVICE` and forces a path with `backend.using`, so that the
same test runs in the interpreter here and on the device there. Whether kernels are interpreted is fixed when
their module is imported, so where there is a GPU a tensor on the CPU can never reach one.
"""

from retain.kernels import backend

DEVICE = "cpu" if backend.interpreting() else "cuda"

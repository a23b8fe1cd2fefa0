"""Fast ops for ragged caches: one folder an op, `retain.kernels.<op>`.

Each op's folder holds `reference` (the definition, in plain PyTorch), `kernel` (Triton), `launch` (launcher
and builds) and `cases` (named shapes). This file stays light: Triton is imported by `kernel` files.

From the repository root this folder is also reachable under the top-level name `kernels`, the name of another
distribution that transformers looks for when it is imported. Reached under that name, the module hands over
to the real distribution if there is one. Else it has a version that is older than any that transformers takes
(transformers 5.4 fails over a module without one).
"""

if __name__ == "kernels":
    import importlib.machinery
    import importlib.util
    import os
    import sys

    _here = os.path.realpath(__file__)
    _elsewhere = [
        entry
        for entry in sys.path
        if os.path.realpath(os.path.join(entry or os.getcwd(), "kernels", "__init__.py")) != _here
    ]
    _spec = importlib.machinery.PathFinder.find_spec("kernels", _elsewhere)
    if _spec is not None and _spec.loader is not None:
        _module = importlib.util.module_from_spec(_spec)
        sys.modules["kernels"] = _module
        _spec.loader.exec_module(_module)
    else:
        __version__ = "0"

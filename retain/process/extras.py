"""Names the extra that installs a missing package, in one sentence for the whole project.

The core runs on the dependencies of every installation; training, evaluation and Chinese texts need more
(`pip install 'retain-kv[eval]'`, which finds the retain that is installed, from a wheel or a checkout). A
package used in one place is imported there, behind `require`. A module that cannot be read without it
(annotations, many uses) imports it at its top inside of `deferred`, so that the module can be imported, and
its `--help` printed, without the package.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["MissingExtra", "deferred", "require"]


class MissingExtra(ImportError, ValueError):
    """Error for a missing package of an extra."""


def require(
    extra: str, *packages: str, what: str, otherwise: str | None = None
) -> AbstractContextManager[None]:
    """Check that packages are installed. The result is an empty context, for imports at a module's top.

    Args:
        extra: of `pyproject.toml`, that brings them.
        packages: as they are imported.
        what: needs them, in the singular: begins the message.
        otherwise: an alternative.

    Raises:
        MissingExtra: one is not installed; says which, and what to install.

    Examples:
        >>> require("eval", "no_such_package", what="the report")
        Traceback (most recent call last):
        retain.process.extras.MissingExtra: the report needs the package no_such_package, which is not
        installed: ...
    """
    absent = [package for package in packages if not _installed(package)]
    if absent:
        raise MissingExtra(_message_of(extra, absent, what, otherwise))
    return nullcontext()


@contextmanager
def deferred(extra: str, *modules: str, what: str) -> Iterator[None]:
    """Context in which imports of missing modules give stand-ins; the first use of one raises `MissingExtra`.

    Args:
        extra: of `pyproject.toml`, that brings them.
        modules: every module that is imported inside, `package` and `package.part` each.
        what: as in `require`.
    """
    absent = [name for name in modules if not _installed(name.partition(".")[0])]
    before = {name: sys.modules[name] for name in absent if name in sys.modules}
    for name in absent:
        sys.modules[name] = _AbsentModule(name, _message_of(extra, [name.partition(".")[0]], what))
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
        sys.modules.update(before)


def _message_of(extra: str, absent: Sequence[str], what: str, otherwise: str | None = None) -> str:
    packages, are = ("packages", "are") if len(absent) > 1 else ("package", "is")
    step = f"pip install 'retain-kv[{extra}]'" + (f", or {otherwise}" if otherwise else "")
    return f"{what} needs the {packages} {', '.join(absent)}, which {are} not installed: {step}."


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # hidden by an import hook, or imported without a spec
        return sys.modules.get(package) is not None


class _AbsentModule(ModuleType):
    """Stand-in for a module."""

    def __init__(self, name: str, message: str):
        super().__init__(name)
        self._message = message
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {"_message": self._message})


class _Absent(type):
    """Stand-in for a class, a function or a submodule: a class, so that annotations may name it."""

    _message: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingExtra(cls._message)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MissingExtra(cls._message)

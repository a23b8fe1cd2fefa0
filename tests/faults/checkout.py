"""Keeps a temporary copy of the tree, with an interpreter that imports `retain` from the copy alone.

An editable install maps `retain.eval` and its siblings to the tree that was installed, whatever the current
folder is. So the copy has a virtual environment of its own: the copy is installed into it, and every other
package comes from the environment that runs this. `check_imports` asks the copy's interpreter where each
module lies.

Bytecode is cached between runs. A changed line may leave a file's size and the second of its change as they
were, and Python would then run the old bytecode: `apply` and `restore` remove it, and `apply` verifies that
what the import system loads is what was written.
"""

import contextlib
import importlib.machinery
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.draw import Fault

# What `make test` exports: one thread a process, nothing from the network.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
_NOT_PASSED_ON = ("PYTEST_", "GIT_", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")

_ORIGINS = """
import importlib.util, json, sys
found = {}
for name in json.loads(sys.argv[1]):
    spec = importlib.util.find_spec(name)
    found[name] = spec and spec.origin
print(json.dumps(found))
"""


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, without the user's hooks and signatures."""
    settings = {"core.hooksPath": os.devnull, "commit.gpgsign": "false", "core.autocrlf": "false"}
    settings |= {"user.name": "faults", "user.email": "faults@localhost", "init.defaultBranch": "copy"}
    flags = [flag for name, value in settings.items() for flag in ("-c", f"{name}={value}")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", *flags, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout


def tracked(root: Path) -> list[str]:
    """Return the files of a tree that git tracks or would add, as they lie in the working tree."""
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return sorted({name for name in listed if name and os.path.lexists(root / name)})


@dataclass(frozen=True)
class Finished:
    """A command that ended: its exit status (None: it was killed at its time limit), seconds and output."""

    status: int | None
    seconds: float
    output: str


@dataclass
class Checkout:
    """A copy of the tree at `folder`, and the interpreter of its environment."""

    folder: Path
    python: Path
    scratch: Path
    running: set[subprocess.Popen] = field(default_factory=set)

    def run(self, command: Iterable[str], limit: float, cwd: Path | None = None) -> Finished:
        """Run a command in the copy, its processes in a session of their own that the limit ends."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}
        path = os.pathsep.join([str(self.python.parent), kept.get("PATH", os.defpath)])
        own = {"PATH": path, "VIRTUAL_ENV": str(self.python.parents[1]), "TMPDIR": str(self.scratch)}
        arguments = [str(self.python) if part == "python" else part for part in command]
        start = time.monotonic()
        # To a file: a grandchild that outlives the command would hold a pipe open.
        with tempfile.TemporaryFile() as out:
            process = subprocess.Popen(
                arguments,
                cwd=cwd or self.folder,
                env=kept | ENVIRONMENT | own,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.running.add(process)
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                self.kill()
            seconds = time.monotonic() - start
            out.seek(0)
            return Finished(status, seconds, out.read().decode(errors="replace"))

    def kill(self) -> None:
        """End what still runs of the copy's commands."""
        for process in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.running.discard(process)

    def check_imports(self, faults: Iterable[Fault]) -> None:
        """Raise unless the interpreter finds the module of every fault in the copy, from two folders.

        Raises:
            RuntimeError: A module would be imported from elsewhere, so its fault would not be run.
        """
        files = {fault.module: (self.folder / fault.file).resolve() for fault in faults}
        command = ("python", "-c", _ORIGINS, json.dumps(sorted(files)))
        for cwd in (self.folder, self.folder.parent):
            done = self.run(command, 300, cwd=cwd)
            if done.status != 0:
                raise RuntimeError(f"the copy's modules cannot be found from {cwd}:\n{done.output}")
            origins = json.loads(done.output.splitlines()[-1])
            wrong = {n: o for n, o in origins.items() if o is None or Path(o).resolve() != files[n]}
            if wrong:
                name, origin = min(wrong.items())
                raise RuntimeError(
                    f"from {cwd}, {name} is imported from {origin}, not from the copy's {files[name]} "
                    f"({len(wrong)} of {len(files)} modules): its fault would not be run"
                )

    def apply(self, fault: Fault) -> None:
        """Write a fault into the copy.

        Raises:
            ValueError: The line is not what it was when the fault was drawn.
            RuntimeError: The import system does not load what was written.
        """
        path = self.folder / fault.file
        text = path.read_text(encoding="utf-8")
        check_line(fault, text)
        lines = text.split("\n")
        lines[fault.line - 1] = fault.after
        text = "\n".join(lines)
        path.write_text(text, encoding="utf-8")
        self._forget_bytecode(path)
        loaded = importlib.machinery.SourceFileLoader(fault.module, str(path)).get_code(fault.module)
        if loaded != compile(text, str(path), "exec", dont_inherit=True):
            raise RuntimeError(f"{path} is loaded from bytecode that is not the written file's")

    def restore(self, fault: Fault) -> None:
        """Undo a fault and remove what tests left; the bytecode of other files stays."""
        self.clean()
        check_line(fault, (self.folder / fault.file).read_text(encoding="utf-8"))
        self._forget_bytecode(self.folder / fault.file)

    def clean(self) -> None:
        """Bring the copy back to the committed tree."""
        git(self.folder, "reset", "--quiet", "--hard")
        git(self.folder, "clean", "-fdqx", "-e", "/.venv", "-e", "__pycache__")

    def _forget_bytecode(self, path: Path) -> None:
        for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            cached.unlink()


def check_line(fault: Fault, source: str) -> None:
    """Raise ValueError unless the fault's line is in the file as it was drawn."""
    lines = source.split("\n")
    found = lines[fault.line - 1] if fault.line <= len(lines) else None
    if found != fault.before:
        raise ValueError(
            f"{fault.file} line {fault.line} is {found!r}, but {fault.before!r} when fault {fault.id} was "
            "drawn: draw again for this tree"
        )


def make_checkout(root: Path, folder: Path) -> Checkout:
    """Copy the tree at `root` into the new folder `folder`, and make an environment that imports the copy."""
    target = folder / "tree"
    for name in tracked(root):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target / name, follow_symlinks=False)
    git(target, "init", "--quiet")
    git(target, "add", "--all", "--force")
    git(target, "commit", "--quiet", "--message", "The tree under test")
    environment = target / ".venv"
    venv.EnvBuilder(symlinks=True).create(environment)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (environment / "lib" / version / "site-packages" / "others.pth").write_text("\n".join(others) + "\n")
    python = environment / "bin" / "python"
    install = [
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--editable",
        str(target),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), *install],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the copy could not be installed:\n{done.stdout}{done.stderr}")
    _copy_scripts(Path(sys.executable).parent, python)
    checkout = Checkout(target, python, folder / "scratch")
    checkout.clean()
    return checkout


def _copy_scripts(source: Path, python: Path) -> None:
    """Give the copy's environment the commands of other packages, run by its own interpreter."""
    for script in source.iterdir():
        target = python.parent / script.name
        if (
            target.exists()
            or not script.is_file()
            or script.name.startswith(("python", "activate", "Activate"))
        ):
            continue
        content = script.read_bytes()
        first, newline, rest = content.partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            content = b"#!" + os.fsencode(python) + newline + rest
        target.write_bytes(content)
        target.chmod(target.stat().st_mode | stat.S_IXUSR)

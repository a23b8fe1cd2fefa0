"""Runs the field's main library (kvpress) in a process of its own: starts it, asks it, ends it.

A folder of plain files and lines of JSON are all that is shared with that process (`peer_side.py`). So its
pins (another transformers, another pandas) are no concern of ours, and its import, which wraps every
attention function of transformers, happens elsewhere.
"""

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

SIDE = Path(__file__).with_name("peer_side.py")
LIBRARY = "kvpress"
INSTALL = (
    f"python -m venv PEER && PEER/bin/pip install torch=={torch.__version__.partition('+')[0]} "
    f"{LIBRARY}==0.5.5, then --peer-python PEER/bin/python"
)


@dataclass(frozen=True)
class Press:
    """One of the library's methods.

    Args:
        name: of its class.
        settings: of it, its ratio apart.
        inner: the scorer that it wraps.
        attentions: whether it wants the attention matrix, and so eager attention.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    inner: "Press | None" = None
    attentions: bool = False

    def __str__(self) -> str:
        return self.name if self.inner is None else f"{self.name}({self.inner})"


WINDOW = 32
_SNAPKV = Press("SnapKVPress", {"window_size": WINDOW})
# Presets that the library has too, and what it calls them; a window is as long there as here.
PRESSES: dict[str, Press] = {
    "snapkv": _SNAPKV,
    "tova": Press("TOVAPress"),
    "streaming_llm": Press("StreamingLLMPress", {"n_sink": 4}),
    "criticalkv": Press("CriticalKVPress", inner=_SNAPKV),
    "knorm": Press("KnormPress"),
    "keydiff": Press("KeyDiffPress"),
    "expected_attention": Press("ExpectedAttentionPress"),
    "adakv": Press("AdaKVPress", inner=_SNAPKV),
    "ada_criticalkv": Press("CriticalAdaKVPress", inner=_SNAPKV),
}


def write_exchange(
    folder: Path,
    model: nn.Module,
    ids_BT: Int[Tensor, "B T"],
    *,
    tokens: int,
    threads: int = 1,
    dtype: str = "float32",
    device: str = "cpu",
) -> None:
    """Writes what the other side reads: weights, token ids, how to run.

    Args:
        folder: made where it is not there.
        model: of transformers.
        ids_BT: prompts without padding, and what is decoded behind them.
        tokens: of each row, how many are prompt.
        threads: CPU threads.
        dtype: of weights and cache.
        device: where it runs.

    Raises:
        ValueError: there are no such prompts.
    """
    if not 0 < tokens <= ids_BT.shape[1]:
        raise ValueError(f"exchange: {tokens} tokens of prompt in rows of {ids_BT.shape[1]}.")
    folder.mkdir(parents=True, exist_ok=True)
    # What `save_pretrained` writes and they read, without what it asks of accelerators on the way.
    (folder / "model").mkdir(exist_ok=True)
    config: Any = model.config
    config.save_pretrained(folder / "model")
    save_model(model, str(folder / "model" / "model.safetensors"), metadata={"format": "pt"})
    save_file({"ids": ids_BT.cpu().contiguous()}, folder / "ids.safetensors")
    how = {"tokens": tokens, "threads": threads, "dtype": dtype, "device": device}
    (folder / "request.json").write_text(json.dumps(how, indent=2) + "\n", encoding="utf-8")


class Peer:
    """A process of the other side; a context manager.

    Args:
        python: interpreter of the environment where the library is installed.
        folder: that `write_exchange` wrote.
        environment: variables to add to this process's own.
        timeout: seconds that an answer may take.

    Raises:
        ValueError: there is no such interpreter.
    """

    def __init__(
        self,
        python: str | Path,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        timeout: float = 1800.0,
    ) -> None:
        found = shutil.which(str(python))
        if found is None:
            raise ValueError(
                f"--peer-python {str(python)!r} is no interpreter: pass that of an environment where "
                f"{LIBRARY} is installed ({INSTALL})."
            )
        self.folder, self.timeout = folder, timeout
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the process is
        # Nothing of ours is on the path of their environment.
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self._process = subprocess.Popen(
            [found, str(SIDE), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**own, **(environment or {})},
            text=True,
        )

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._errors.close()

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """One request, one answer.

        Raises:
            RuntimeError: the other side failed, ended, or takes too long; says what it said.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        start, limit = time.monotonic(), threading.Timer(self.timeout, self._process.kill)
        limit.start()
        try:
            with suppress(BrokenPipeError):
                print(json.dumps({"do": what, **more}), file=stdin, flush=True)
            line = stdout.readline()
        finally:
            limit.cancel()
        if not line and time.monotonic() - start >= self.timeout:
            raise RuntimeError(f"{LIBRARY}'s side gave no answer in {self.timeout:g} s: it was ended.")
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            last = (self._errors.read().strip() or "it said nothing").splitlines()[-1]
            raise RuntimeError(f"{LIBRARY}'s side ended with status {code}: {last}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{LIBRARY}'s side could not {what}: {answer['error']}")
        return answer

    def versions(self) -> dict[str, str | None]:
        """Versions of what runs there; the library's is None where it is not installed."""
        return self.ask("versions")

    def kept(self, press: Press, ratio: float, tokens: int) -> list[dict[str, Tensor]]:
        """Masks of what a press keeps, a layer a row: `kept`, bool `[B, H, T]`, and its scores where it has
        some.

        Args:
            press: theirs.
            ratio: theirs, of what goes.
            tokens: of each prompt, how many are read.
        """
        answer = self.ask("kept", press=asdict(press), ratio=ratio, tokens=tokens)
        layers: list[dict[str, Tensor]] = [{} for _ in range(answer["layers"])]
        for name, tensor in load_file(self.folder / answer["file"]).items():
            what, _, layer = name.rpartition(".")
            layers[int(layer)][what] = tensor
        return layers

    def life(self, press: Press | None, kept: int, batch: int, *, watch: bool = False) -> dict[str, Any]:
        """Milliseconds and bytes of one prompt and answer; without a press, of plain transformers there."""
        asked = None if press is None else asdict(press)
        return self.ask("life", press=asked, kept=kept, batch=batch, watch=watch)

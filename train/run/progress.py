"""Shows a run's progress: one bar, and one of accelerate's trackers if it was asked for."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from retain.config import leaves

# Tracker -> the packages of which one must be there.
TRACKERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard", "tensorboardX"),
}

# Steps over which a rate is taken.
_STEPS = 20


class Progress(AbstractContextManager["Progress"]):
    """The bar of a run, from the step `start` on; `bar` is passed on to tqdm. Its rate is that of this
    process's last steps."""

    def __init__(
        self,
        total_steps: int,
        start: int,
        show: bool,
        *,
        clock: Callable[[], float] = time.perf_counter,
        **bar: Any,
    ) -> None:
        self.clock = clock
        self.held_out: float | None = None
        # (time, tokens of this process's steps until then), the newest last.
        self._marks: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=_STEPS + 1)
        options: dict[str, Any] = {"mininterval": 0.5, "dynamic_ncols": True, **bar}
        self._bar = tqdm(
            total=total_steps, initial=start, desc="distill", unit="step", disable=not show, **options
        )

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    @property
    def tokens_per_second(self) -> float | None:
        """Returns the rate of the last steps; None before the first."""
        (first, before), (last, after) = self._marks[0], self._marks[-1]
        return (after - before) / (last - first) if last > first else None

    def step(self, tokens: int, loss: float, held_out: float | None = None) -> None:
        """Counts one step of so many tokens (documents and branches, of all processes); `held_out` is the
        overlap of a look at the held-out documents, None where there was none since."""
        self._marks.append((self.clock(), self._marks[-1][1] + tokens))
        self.held_out = self.held_out if held_out is None else held_out
        rate = self.tokens_per_second
        speed = "?" if rate is None else f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.0f}"
        shown = {"tokens/s": speed, "loss": f"{loss:.3f}"}
        if self.held_out is not None:
            shown["held-out"] = f"{self.held_out:.3f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()


def check_tracker(name: str) -> None:
    """Raises ValueError for an unknown tracker, or one whose package is missing; says how to get it."""
    if name not in TRACKERS:
        raise ValueError(f"tracker={name!r} is not known: choose one of {', '.join(TRACKERS)}.")
    packages = TRACKERS[name]
    if packages and not any(find_spec(package) for package in packages):
        raise ValueError(
            f"tracker={name} needs the package {packages[0]!r}, which is not installed: "
            f'pip install "retain-kv[{name}]", or leave tracker=none (the log is in log.jsonl anyway).'
        )


def tracker_options(name: str, folder: Path) -> dict[str, Any]:
    """Returns arguments of `accelerate.Accelerator` for a tracker of `TRACKERS`, after `check_tracker`.

    tensorboard writes to `tracker/` in the run's folder; wandb reads its own environment: with
    `WANDB_MODE=offline` it writes below its folder and sends nothing.
    """
    check_tracker(name)
    if name == "none":
        return {}
    return {"log_with": name, "project_dir": str(folder / "tracker")}


def tracked(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a log record under flat names, `held_out/loss` say, but for its step."""
    return {
        name: value
        for name, value in leaves(record, "/").items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }

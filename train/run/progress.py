"""Shows a run's progress: one bar, and one of accelerate's trackers if it was asked for."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from retain.config import leaves
from retain.train.run.parallel import Accelerator

# Tracker -> the packages of which one must be there.
TRACKERS: dict[str, tuple[str, ...]] = {
    **{"none": (), "wandb": ("wandb",), "tensorboard": ("tensorboard", "tensorboardX")}
}


class Progress(tqdm):
    """The bar of a run, from the step `start` on."""

    def __init__(self, total_steps: int, start: int, show: bool, **bar: Any) -> None:
        options: dict[str, Any] = {"mininterval": 0.5, "dynamic_ncols": True, **bar}
        super().__init__(
            total=total_steps, initial=start, desc="distill", unit="step", disable=not show, **options
        )
        self.numbers: dict[str, str] = {}

    def step(self, tokens: int, loss: float, held_out: float | None = None) -> None:
        """Counts one step of so many tokens (documents and branches, of all processes); `held_out` is the
        overlap of a look at the held-out documents, None where there was none since."""
        self.numbers |= {"tokens": f"{tokens:,}", "loss": f"{loss:.3f}"}
        if held_out is not None:
            self.numbers["held-out"] = f"{held_out:.3f}"
        self.set_postfix(self.numbers, refresh=False)
        self.update()


def tracker_options(name: str, folder: Path) -> dict[str, Any]:
    """Returns arguments of `accelerate.Accelerator` for a tracker of `TRACKERS`.

    tensorboard writes to `tracker/` in the run's folder; wandb reads its environment: with
    `WANDB_MODE=offline` it writes below its folder and sends nothing.

    Raises:
        ValueError: its package is missing; says how to get it.
    """
    packages = TRACKERS[name]
    if packages and not any(find_spec(package) for package in packages):
        raise ValueError(
            f"tracker={name} needs the package {packages[0]!r}, which is not installed: "
            f'pip install "retain-kv[{name}]", or leave tracker=none (the log is in log.jsonl anyway).'
        )
    return {"log_with": name, "project_dir": str(folder / "tracker")} if packages else {}


def make_accelerator(tracker: str, output: str | None = None) -> Accelerator:
    """Makes the accelerator; ValueError where the launcher started several processes that would each train
    alone, or the tracker's package is missing."""
    accelerator = Accelerator(**tracker_options(tracker, Path(output or ".")))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != accelerator.num_processes:
        raise ValueError(
            f"the launcher started {world} processes, and accelerate sees {accelerator.num_processes}: "
            "without a GPU, set "
            "ACCELERATE_USE_CPU=true in the environment (see train/README.md)."
        )
    return accelerator


def start_tracker(accelerator: Accelerator, name: str, output: str, config: Mapping[str, Any]) -> None:
    """Starts the tracker, if one was asked for, with the config as `{"a.b": value}`."""
    if name == "none":
        return
    values = {
        key: value if isinstance(value, int | float | str) else str(value)
        for key, value in leaves(config).items()
    }
    # wandb's default is a folder `wandb` where one stands, which Python would then import.
    accelerator.init_trackers("retain-distill", config=values, init_kwargs={"wandb": {"dir": output}})


def tracked(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a log record under flat names, `held_out/loss` say, but for its step."""
    return {
        name: value
        for name, value in leaves(record, "/").items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }

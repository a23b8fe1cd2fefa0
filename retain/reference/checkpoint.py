"""Saves and restores the state of an unfinished training run in one file.

The file holds everything that decides the run's numbers; a run with other settings is refused, so that no
curve mixes two runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class Checkpoint:
    """File with the state of a training run.

    Args:
        path: The file.
        settings: Those that decide the run's numbers, as JSON values.

    Attributes:
        found: Whether a run was saved there before.
        phase_idx: Its phase.
        step: Finished steps of that phase.

    Raises:
        ValueError: The file is another run's, or damaged.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        # As JSON gives it back: tuples are lists there.
        self.settings = json.loads(json.dumps(settings))
        self.found, self.phase_idx, self.step = path.exists(), 0, 0
        if not self.found:
            return
        again = "remove it to begin again"
        try:
            with safe_open(path, framework="pt") as file:
                saved = json.loads((file.metadata() or {})["run"])
        except (SafetensorError, KeyError, OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} holds no unfinished run ({error}): {again}") from error
        before, now = saved["told"], self.settings
        names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        if names:
            raise ValueError(
                f"{path} is an unfinished run of another {', '.join(names)}: pass another --output, "
                f"or {again}"
            )
        self.phase_idx, self.step = saved["phase_idx"], saved["step"]

    def save(
        self, phase_idx: int, step: int, model: nn.Module, optimisers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Write the state after `step` steps of a phase: beside, then renamed."""
        tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in model.named_parameters()}
        for number, optimiser in enumerate(optimisers):
            for index, state in optimiser.state_dict()["state"].items():
                tensors |= {f"stepper.{number}.{index}.{name}": value for name, value in state.items()}
        partial = self.path.with_suffix(".partial")
        save_file(
            {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()},
            partial,
            metadata={"run": json.dumps({"told": self.settings, "phase_idx": phase_idx, "step": step})},
        )
        partial.replace(self.path)

    @torch.no_grad()
    def restore(self, phase_idx: int, model: nn.Module, optimisers: Sequence[torch.optim.Optimizer]) -> int:
        """Restore what was saved in a phase, if anything; return the finished steps of it."""
        if not self.found or phase_idx != self.phase_idx:
            return 0
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimisers]
        parameters = dict(model.named_parameters())
        for key, value in load_file(self.path).items():
            kind, _, rest = key.partition(".")
            if kind == "model":
                parameters[rest].copy_(value)
            else:
                number, index, name = rest.split(".")
                states[int(number)].setdefault(int(index), {})[name] = value
        for optimiser, state in zip(optimisers, states, strict=True):
            optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
        return self.step

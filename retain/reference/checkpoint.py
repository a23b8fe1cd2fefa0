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
from torch import Tensor, nn


class Checkpoint:
    """File with the state of a training run.

    Args:
        path: The file.
        told: Settings that decide the run's numbers, as JSON values.

    Attributes:
        found: Whether a run was saved there before.
        phase_idx: Its phase.
        step: Finished steps of that phase.

    Raises:
        ValueError: The file is another run's, or damaged.
    """

    def __init__(self, path: Path, told: Mapping[str, Any]) -> None:
        self.path = path
        # As JSON gives it back: tuples are lists there.
        self.told = json.loads(json.dumps(told))
        self.found, self.phase_idx, self.step = path.exists(), 0, 0
        if self.found:
            self._look()

    def _look(self) -> None:
        from safetensors import SafetensorError, safe_open

        again = "remove it to begin again"
        try:
            with safe_open(self.path, framework="pt") as file:
                held = json.loads((file.metadata() or {})["run"])
        except (SafetensorError, KeyError, OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{self.path} holds no unfinished run ({error}): {again}") from error
        if held["told"] != self.told:
            names = sorted(
                name for name in {*held["told"], *self.told} if held["told"].get(name) != self.told.get(name)
            )
            raise ValueError(
                f"{self.path} is an unfinished run of another {', '.join(names)}: pass another --output, "
                f"or {again}"
            )
        self.phase_idx, self.step = held["phase_idx"], held["step"]

    def save(
        self, phase_idx: int, step: int, model: nn.Module, steppers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Write the state after `step` steps of a phase: beside, then renamed."""
        from safetensors.torch import save_file

        held: dict[str, Tensor] = {f"model.{name}": value for name, value in model.named_parameters()}
        for number, stepper in enumerate(steppers):
            for index, own in stepper.state_dict()["state"].items():
                held |= {f"stepper.{number}.{index}.{name}": value for name, value in own.items()}
        partial = self.path.with_suffix(".partial")
        save_file(
            {name: value.detach().cpu().clone().contiguous() for name, value in held.items()},
            partial,
            metadata={"run": json.dumps({"told": self.told, "phase_idx": phase_idx, "step": step})},
        )
        partial.replace(self.path)

    @torch.no_grad()
    def restore(self, phase_idx: int, model: nn.Module, steppers: Sequence[torch.optim.Optimizer]) -> int:
        """Restore what was saved in a phase.

        Args:
            phase_idx: Phase that begins.
            model: Gets the weights.
            steppers: Get their states.

        Returns:
            Finished steps of the phase; 0 if it was not saved in this phase (nothing was set).
        """
        if not self.found or phase_idx != self.phase_idx:
            return 0
        from safetensors.torch import load_file

        held = load_file(self.path)
        for name, parameter in model.named_parameters():
            parameter.copy_(held[f"model.{name}"])
        for number, stepper in enumerate(steppers):
            state: dict[int, dict[str, Tensor]] = {}
            for key, value in held.items():
                match key.split("."):
                    case ["stepper", own, index, name] if int(own) == number:
                        state.setdefault(int(index), {})[name] = value
            stepper.load_state_dict({**stepper.state_dict(), "state": state})
        return self.step

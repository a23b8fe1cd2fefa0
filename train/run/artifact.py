"""Completes a finished run: calibrates the gates and collects the artifact's metadata.

Only held-out documents are used: half of them are fitted to, and the report is of the other half. The last
step's checkpoint stays until all of this is saved, so a signal, an error or a full disk in this phase costs
no training: the same command resumes here, also with another `calibration`.

Processes share the documents; where the frozen model is sharded, all look at each. One process fits, and all
get what it fitted, to the last bit.
"""

import copy
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm import tqdm

from retain.config import to_mapping
from retain.evidence import Evidence
from retain.gates import GateSet
from retain.hf.intercept.observe import observe_ahead
from retain.process.provenance import code_state, environment
from retain.train.calibration.fit import LayerLook, Look, calibrate_, look_at
from retain.train.data.branches import readings_of
from retain.train.data.document import Document
from retain.train.objectives.targets import TargetSettings, layer_target, target_unit
from retain.train.recipe import DistillConfig
from retain.train.run.parallel import Accelerator, gather_object, is_sharded, on_main_process
from retain.train.run.signals import Signals
from retain.train.teacher import Frozen, View, walk

Found = TypeVar("Found")


def reports_of(
    config: DistillConfig, gates: GateSet, frozen: Frozen, corpus: Any, accelerator: Accelerator
) -> dict[str, Any]:
    """Calibrates the gates once training is over (its last checkpoint is on disk), on every process
    alike; calibrators are put in. Returns `calibration` (None: none was wanted).

    Raises:
        ValueError: on every process, if it cannot be done; says that training is not lost.
        StopRequested: a signal asked for it.
    """
    reports: dict[str, Any] = {"calibration": None}
    if not corpus.held_out:
        return reports
    promise = "finishing this document (training is over, and its last checkpoint is on disk)"
    with _not_lost(config), Signals(accelerator, Path(config.output), promise) as signals:
        if config.calibration.wanted:
            together = is_sharded(frozen.model)
            looks = _of_each(
                config,
                together,
                accelerator,
                signals,
                corpus.held_out,
                lambda document: _look(config, gates, frozen, document),
            )
            accelerator.print(
                f"calibration: fitting {config.calibration.kind!r} to {len(corpus.held_out)} documents"
            )
            reports["calibration"] = _fitted(config, gates, looks, accelerator)
    return reports


@contextmanager
def _not_lost(config: DistillConfig) -> Iterator[None]:
    """Inside, an error also says that the run need not be trained again."""
    note = (
        f"Training is over: all {config.training.steps} steps are in the last checkpoint of {config.output}, "
        "and the same command, also with other calibration.* (kind=none leaves it out), goes on from there "
        "without training again."
    )
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error} {note}") from error
    except Exception as error:
        error.add_note(note)
        raise


def _of_each(
    config: DistillConfig,
    together: bool,
    accelerator: Accelerator,
    signals: Signals,
    documents: Sequence[Document],
    ask: Callable[[Document], Found],
) -> list[Found]:
    """The finding of each document, in order, on the first process; elsewhere nothing is kept.

    A document a process and round (or, `together`, all of them the same one); after each round the processes
    compare notes on signals and errors.
    """
    each = 1 if together else accelerator.num_processes
    place = 0 if together else accelerator.process_index
    kept: list[Found] = []
    show = accelerator.is_main_process
    with tqdm(total=len(documents), desc="calibration", unit="doc", disable=not show) as bar:
        for start in range(0, len(documents), each):
            mine: tuple[Found | None, str | None] = (None, None)
            try:
                if start + place < len(documents):
                    mine = (ask(documents[start + place]), None)
            except ValueError as error:
                if each == 1:
                    raise
                mine = (None, str(error))
            everyone = [mine] if each == 1 else gather_object([mine])
            if problems := [said for _, said in everyone if said is not None]:
                raise ValueError(problems[0])
            found = [one for one, _ in everyone if one is not None]
            kept += found if show else []
            bar.update(len(found))
            if signals.requested:
                bar.close()
                signals.stop(config.training.steps)
    return kept


def _look(config: DistillConfig, gates: GateSet, frozen: Frozen, document: Document) -> Look:
    """Each layer's look at one document.

    The unit is risk, whatever the gates learned: their own target where it is one, else the default's.
    """
    settings, target = config.calibration, config.target
    if target_unit(target) != "risk" or config.stage != "local":
        target = TargetSettings(horizon=target.horizon, chunk=target.chunk)
    own: dict[int, LayerLook] = {}
    shown: dict[int, Evidence] = {}
    if gates.extension is not None:
        ids_BT = torch.tensor([document.context_ids], device=frozen.model.device)
        shown = {layer.layer_idx: layer for layer in observe_ahead(frozen.model, gates, ids_BT)}

    def see(views: list[View]) -> None:
        for view in views:
            target_HT, reached_HT = layer_target(view, target)
            evidence = shown.get(view.layer_idx, view.document)
            own[view.layer_idx] = look_at(
                gates, evidence, target_HT, reached_HT.any(0), settings, key=document.key
            )

    walk(frozen, readings_of([document], target, frozen), see, wanted=gates.inputs)
    return own


def _fitted(
    config: DistillConfig, gates: GateSet, looks: Sequence[Look], accelerator: Accelerator
) -> dict[str, Any]:
    """The record, and the calibrators in the gates: fitted by the first process, handed to the others."""

    def fit() -> tuple[Any, nn.ModuleDict]:
        calibrate_(gates, looks, config.calibration)
        return gates.metadata.get("calibration"), copy.deepcopy(gates.calibrators).cpu()

    record, calibrators = on_main_process(accelerator, fit)
    if not accelerator.is_main_process:
        gates.calibrators = nn.ModuleDict(
            {layer: calibrator.to(gates[int(layer)].device) for layer, calibrator in calibrators.items()}
        )
        gates.metadata["calibration"] = record
    return record


def metadata_of(
    config: DistillConfig, summary: dict[str, Any], corpus: Any, gates: GateSet, commit: str | None = None
) -> dict[str, Any]:
    """The artifact's record of its making; `commit` is that of a base model of the hub."""
    mapping = to_mapping(config)
    used = corpus.num_documents
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "base_model": config.model,
        "base_revision": commit or config.revision,
        "stage": config.stage,
        "gate": mapping["gate"],
        "target": mapping["target"],
        "protected_window": config.soft.protected if config.stage == "end_to_end" else config.target.horizon,
        "loss": mapping["loss"] if config.stage == "local" else None,
        "soft": mapping["soft"] if config.stage == "end_to_end" else None,
        "data": {
            **mapping["data"],
            "documents_used": used if used is not None else sum(summary["documents_of_process"]),
            "held_out_used": len(corpus.held_out),
            "sha256": corpus.describe(),
            "commit": corpus.commit,
        },
        "training": {
            **mapping["training"],
            **summary,
            "seed": config.seed,
            "parameters": sum(one.numel() for one in gates.parameters() if one.requires_grad),
        },
        "config": mapping,
        "command": command_line(),
        "provenance": {**code_state(Path(__file__)), **environment(device, torch.get_num_threads())},
    }


def command_line() -> str:
    """The command that started this process, as one types it."""
    return "accelerate launch " + shlex.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])

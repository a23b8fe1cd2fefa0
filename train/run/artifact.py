"""Completes a finished run: calibrates the gates and collects the artifact's metadata.

Only held-out documents are used: half of them are fitted to, and the report is of the other half. The last
step's checkpoint stays until all of this is saved, so a signal, an error or a full disk in this phase costs
no training: the same command resumes here.

Processes share the documents; where the frozen model is sharded, all look at each. One process fits, and all
get what it fitted, to the last bit.
"""

import copy
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from retain.config import to_mapping
from retain.evidence import Evidence
from retain.gates import GateSet
from retain.hf.intercept.observe import observe
from retain.process.provenance import code_state, environment
from retain.train.calibration.fit import LayerLook, Look, calibrate_, look_at
from retain.train.data.branches import readings_of
from retain.train.data.document import Document
from retain.train.objectives.targets import TargetSettings, layer_target, target_unit
from retain.train.recipe import DistillConfig
from retain.train.run.parallel import Accelerator, gather_object, is_sharded, on_main_process
from retain.train.teacher import Frozen, View, walk


def calibration_of(
    config: DistillConfig, gates: GateSet, frozen: Frozen, corpus: Any, accelerator: Accelerator
) -> dict[str, Any] | None:
    """Calibrates the gates once training is over (its last checkpoint is on disk), on every process alike;
    calibrators are put in. Returns the record (None: none was wanted)."""
    if not corpus.held_out or config.calibration.kind == "none":
        return None
    together = is_sharded(frozen.model)
    each, place = (1, 0) if together else (accelerator.num_processes, accelerator.process_index)
    bar = tqdm(
        corpus.held_out[place::each], desc="calibration", unit="doc", disable=not accelerator.is_main_process
    )
    looks = [_look(config, gates, frozen, document) for document in bar]
    everyone = gather_object([[] if together and not accelerator.is_main_process else looks])

    def fit() -> tuple[Any, nn.ModuleDict]:
        whole = [everyone[number % each][number // each] for number in range(len(corpus.held_out))]
        calibrate_(gates, whole)
        return gates.metadata["calibration"], copy.deepcopy(gates.calibrators).cpu()

    record, calibrators = on_main_process(accelerator, fit)
    if not accelerator.is_main_process:
        gates.calibrators = nn.ModuleDict(
            {layer: calibrator.to(gates[int(layer)].device) for layer, calibrator in calibrators.items()}
        )
        gates.metadata["calibration"] = record
    return record


def _look(config: DistillConfig, gates: GateSet, frozen: Frozen, document: Document) -> Look:
    """Each layer's look at one document.

    The unit is risk, whatever the gates learned: their target where it is one, else the default's.
    """
    target = config.target
    if target_unit(target) != "risk" or config.stage != "local":
        target = TargetSettings(horizon=target.horizon)
    looks: dict[int, LayerLook] = {}
    shown: dict[int, Evidence] = {}
    if gates.extension is not None:
        ids_BT = torch.tensor([document.context_ids], device=frozen.model.device)
        shown = {layer.layer_idx: layer for layer in observe(frozen.model, ids_BT, ahead=gates)}

    def see(views: list[View]) -> None:
        for view in views:
            target_HT, reached_HT = layer_target(view, target)
            evidence = shown.get(view.layer_idx, view.document)
            counted_T = reached_HT.any(0)
            looks[view.layer_idx] = look_at(gates, evidence, target_HT, counted_T, key=document.key)

    walk(frozen, readings_of([document], target, frozen), see, wanted=gates.inputs)
    return looks


def metadata_of(
    config: DistillConfig, summary: dict[str, Any], corpus: Any, gates: GateSet, commit: str | None = None
) -> dict[str, Any]:
    """The artifact's record of its making; `commit` is that of a base model of the hub."""
    mapping = to_mapping(config)
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
            "documents_used": corpus.num_documents or config.training.steps * config.training.batch_documents,
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
    program, *rest = sys.argv
    started = program if program == "retain train" else f"accelerate launch {os.path.relpath(program)}"
    return f"{started} {shlex.join(rest)}"

"""What a finished run says of itself: what was fitted after training, and how it all came about.

In: trained gates, the frozen model, held-out documents. Out: calibrators in the gate set, and plain values
for the artifact's JSON. The one decision taken here: nothing of this is done on a document that was trained
on; half of the held-out ones are fitted to, and what is reported is found on the other half.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import torch

from retain.config import to_mapping
from retain.evidence import Evidence
from retain.gates import GateSet
from retain.hf.lookahead import observe_ahead
from retain.train.branches import readings_of
from retain.train.calibration import LayerLook, calibrate_, look_at
from retain.train.data import Document
from retain.train.noop import noop_report
from retain.train.provenance import provenance
from retain.train.recipe import DistillConfig
from retain.train.targets import TargetSettings, layer_target, target_unit
from retain.train.teacher import Frozen, View, walk

# Documents on which a finished soft stage is asked whether its gates do anything.
NOOP_DOCUMENTS = 8


def reports_of(config: DistillConfig, gates: GateSet, frozen: Frozen, corpus: Any) -> dict[str, Any]:
    """What is fitted and asked once training is over: every process does the same, so that a sharded model
    walks in step."""
    reports: dict[str, Any] = {"calibration": None}
    if config.stage == "end_to_end" and corpus.held_out:
        reports["noop"] = noop_report(gates, frozen, corpus.held_out[:NOOP_DOCUMENTS], config.soft)
    if config.calibration.wanted and corpus.held_out:
        reports["calibration"] = _calibrate_(config, gates, frozen, corpus.held_out)
    return reports


def _calibrate_(
    config: DistillConfig, gates: GateSet, frozen: Frozen, documents: Sequence[Document]
) -> dict[str, Any]:
    """Fit on held-out documents what makes scores comparable.

    The unit is risk, whatever the gates learned: their own target where it is one, else the default's.
    """
    settings, target = config.calibration, config.target
    if target_unit(target) != "risk" or target.granularity != "head" or config.stage != "local":
        target = TargetSettings(horizon=target.horizon, chunk=target.chunk)
    looks = []
    for document in documents:
        own: dict[int, LayerLook] = {}
        shown: dict[int, Evidence] = {}
        if gates.extension is not None:
            ids_BT = torch.tensor([document.context_ids], device=frozen.model.device)
            shown = {layer.layer_idx: layer for layer in observe_ahead(frozen.model, gates, ids_BT)}

        def see(views: list[View], own: dict[int, LayerLook] = own, shown: Any = shown) -> None:
            for view in views:
                target_HT, reached_HT = layer_target(view, target)
                evidence = shown.get(view.layer_idx, view.document)
                own[view.layer_idx] = look_at(gates, evidence, target_HT, reached_HT.any(0), settings)

        walk(frozen, readings_of([document], target, frozen), see, wanted=gates.inputs)
        looks.append(own)
    return calibrate_(gates, looks, settings)


def metadata_of(config: DistillConfig, summary: dict[str, Any], corpus: Any) -> dict[str, Any]:
    """What the artifact says about its making."""
    mapping = to_mapping(config)
    used = corpus.num_documents
    return {
        "base_model": config.model,
        "base_revision": config.revision,
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
        },
        "training": {**mapping["training"], **summary, "seed": config.seed},
        "config": mapping,
        "command": command_line(),
        "provenance": provenance(),
    }


def command_line() -> str:
    """How this process was started, as one types it."""
    return "accelerate launch " + shlex.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])

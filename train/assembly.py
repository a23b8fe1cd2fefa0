"""Assembles a run from its config: documents, frozen model, gates, and the objective of its stage."""

from typing import Any

import torch

from retain.gates import GateSet
from retain.hf.model.decoder import describe
from retain.models.named import Precision, named_config, named_precision
from retain.process.half_precision import multiplies
from retain.train.data.branches import row_tokens
from retain.train.data.corpus import AnyCorpus, load_corpus
from retain.train.local_stage import LayerLocal
from retain.train.lookahead_stage import Lookahead
from retain.train.loop import Lesson
from retain.train.objectives.fit import check_unit
from retain.train.recipe import DistillConfig, check_reading, document_check
from retain.train.run import parallel
from retain.train.run.parallel import Accelerator, is_sharded
from retain.train.soft_stage import EndToEnd
from retain.train.stage import Stage
from retain.train.teacher import Frozen, load_frozen, load_unread


def corpus_of(config: DistillConfig, accelerator: Accelerator) -> AnyCorpus:
    """The documents, each of them checked against what the model's config says."""
    unread = load_unread(config.model, **_origin(config))
    return load_corpus(
        config.data,
        shortest=config.target.horizon,
        seed=config.seed,
        batch_documents=config.training.batch_documents,
        encode=unread.encode,
        chat=unread.chat,
        check=document_check(config, unread),
        progress=accelerator.is_main_process,
    )


def frozen_of(config: DistillConfig, accelerator: Accelerator) -> Frozen:
    """The frozen model, whole, on the CPU or where `device_map` puts it."""
    placed: dict[str, Any] = {"device_map": config.device_map, "quantization": config.quantization}
    dtype = _dtype(config, accelerator)
    return load_frozen(config.model, dtype=dtype, **_origin(config), **placed)


def lesson_of(
    config: DistillConfig, frozen: Frozen, gates: GateSet, corpus: AnyCorpus, accelerator: Accelerator
) -> Lesson:
    """All that the loop needs; the model and the gates move to their devices."""
    layers = describe(frozen.model)
    parallel.shard_frozen_(frozen.model, accelerator)
    sharded = is_sharded(frozen.model)
    check_reading(config, frozen, sharded=sharded)
    for spec in layers:
        gates[spec.layer_idx].to(spec.device)
    seeded: dict[str, Any] = {"seed": config.seed}
    if config.stage == "end_to_end":
        objective: Stage = EndToEnd(gates, frozen, config.soft, steps=config.training.steps, **seeded)
    elif config.stage == "lookahead":
        objective = Lookahead(gates, frozen, config.target, **seeded)
    else:
        objective = LayerLocal(gates, frozen, config.target, config.loss, **seeded)
    return Lesson(
        objective,
        corpus,
        config.training,
        config.data.pack_tokens,
        lambda document: row_tokens(document, config.target),
        lockstep=sharded,
    )


def score_unit_of(config: DistillConfig, gates: GateSet) -> str | None:
    """Unit of the score before a calibrator, where it is not the family's own; ValueError: `check_unit`."""
    if config.stage == "local":
        return check_unit(gates[gates.layers[0]], config.target)
    if config.stage == "end_to_end" and gates.unit == "risk":
        return "rank"  # gates that are trained to an openness order entries, whatever their unit was
    return None


def _dtype(config: DistillConfig, accelerator: Accelerator) -> Precision:
    """Precision of the frozen model: as stated; with `auto` the checkpoint's, where this device has
    instructions for it, and else float32."""
    if config.dtype != "auto" or accelerator.device.type != "cpu" or config.quantization is not None:
        return config.dtype
    stored = named_precision(named_config(config.model, **_origin(config))) or torch.float32
    return "auto" if multiplies(accelerator.device, stored) else "float32"


def _origin(config: DistillConfig) -> dict[str, Any]:
    """The settings of a model's origin, beside its name."""
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}

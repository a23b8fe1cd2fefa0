"""Calibrates on every process of a launched test; the launching test compares the results.

    torchrun --nproc_per_node 2 tests/train/two_looks.py CONFIG FOLDER

Writes `PROCESS-of-PROCESSES.pt` into the folder: the documents that each process looked at and the gates that
it ended with, for a model that is whole and one that is taken for sharded; and the errors that each reported
when one of them failed.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from retain.config import load
from retain.train.data.corpora import load_corpus
from retain.train.distill import _fresh_gates
from retain.train.recipe import DistillConfig
from retain.train.run import artifact
from retain.train.teacher import load_frozen


def main() -> None:
    config, folder = load(sys.argv[1], DistillConfig), Path(sys.argv[2])
    accelerator = Accelerator(cpu=True)
    frozen = load_frozen(config.model, dtype="float32")
    corpus: Any = load_corpus(
        config.data, shortest=8, seed=0, batch_documents=4, encode=frozen.encode, chat=frozen.chat
    )
    outcome: dict[str, Any] = {}
    look: Any = artifact._look
    for how in ("shared", "lockstep"):
        artifact.is_sharded = lambda model, how=how: how == "lockstep"
        looked = []

        def noted(*arguments: Any, looked: list[int] = looked) -> Any:
            looked.append(arguments[-1].key)
            return look(*arguments)

        artifact._look = noted
        gates = _fresh_gates(config, frozen.model)
        reports = artifact.reports_of(config, gates, frozen, corpus, accelerator)
        assert reports["calibration"] == gates.metadata["calibration"]
        state = {name: tensor.clone() for name, tensor in gates.state_dict().items()}
        outcome[how] = {"looked": looked, "state": state, "record": json.dumps(reports["calibration"])}
    artifact.is_sharded = lambda model: False

    def failing(*arguments: Any, **settings: Any) -> Any:
        if arguments[-1].key != corpus.held_out[accelerator.num_processes - 1].key:
            return look(*arguments)
        raise ValueError("one document is bad.")

    def no_curve(*arguments: Any, **settings: Any) -> Any:
        raise ArithmeticError("no curve")

    fit: Any = artifact.calibrate_
    for what, own_look, own_fit in (("looking", failing, fit), ("fitting", look, no_curve)):
        artifact._look, artifact.calibrate_ = own_look, own_fit
        gates = _fresh_gates(config, frozen.model)
        try:
            artifact.reports_of(config, gates, frozen, corpus, accelerator)
        except (ValueError, ArithmeticError) as error:
            outcome[what] = " ".join([str(error), *getattr(error, "__notes__", [])])
    torch.save(outcome, folder / f"{accelerator.process_index}-of-{accelerator.num_processes}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()

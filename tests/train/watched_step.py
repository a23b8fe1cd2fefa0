"""The memory of a training step, planned and held: `python -m tests.train.watched_step TOKENS ...`.

Each length is a row `{"tokens", "bytes", "planned"}`: the most that preparing and two steps of a random model
hold beyond model, gates and libraries, and the plan of the same. The process is to be started with
`GIVES_BACK`, so that its allocator gives back what is freed.
"""

import gc
import json
import sys

import torch

from retain.eval.speed import VOCABULARY, Setting, random_model, watch_peak
from retain.hf.model.gates import new_gates
from retain.train.data.document import Document
from retain.train.data.settings import DataSettings
from retain.train.local_stage import LayerLocal
from retain.train.objectives.case import LossSettings
from retain.train.objectives.targets import TargetSettings
from retain.train.recipe import DistillConfig
from retain.train.run.device import Device
from retain.train.run.model_shape import model_shape
from retain.train.run.plan import PROCESS_BYTES, plan_of
from retain.train.run.schedule import TrainingSettings
from retain.train.run.workload import work_of
from retain.train.teacher import Frozen

# Tokens of the question and answer behind the document.
APPENDIX = 64


class Step:
    """One optimiser step on a row of random tokens."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.model = random_model(Setting(model="random", tokens=tokens))
        gates = new_gates(self.model, "mlp", seed=0)
        ids = torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        self.document = Document(tuple(ids[:-APPENDIX]), tuple(ids[-APPENDIX:]))
        self.objective = LayerLocal(
            gates, Frozen(self.model, None, 0), TargetSettings(), LossSettings(), seed=0
        )
        self.parameters = self.objective.parameters()
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        self.steps = 0

    def train(self) -> None:
        """One whole step."""
        self.optimizer.zero_grad()
        self.objective.accumulate_([self.document], self.steps, 1.0)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.steps += 1

    def planned_bytes(self) -> float:
        """The planned bytes, without the process itself and the weights."""
        training = TrainingSettings(steps=1, batch_documents=1, micro_batch=1)
        config = DistillConfig(output="", data=DataSettings(held_out=0), training=training)
        work = work_of(config, self.objective.gates, [(self.tokens - APPENDIX, APPENDIX)], 1)
        plan = plan_of(model_shape(self.model, "random"), work, Device("cpu", "", 1.0, None, 0.4, ""))
        weights = next(line.num_bytes for line in plan.lines if line.name == "frozen weights")
        return plan.peak_bytes - weights - PROCESS_BYTES["cpu"]


def main() -> None:
    """Print a row for each length."""
    torch.set_num_threads(1)
    # Libraries are loaded, thread pools started and pools filled, by a short row.
    short = Step(1024)
    short.objective.prepare_([short.document])
    short.train()
    del short
    for tokens in map(int, sys.argv[1:]):
        step = Step(tokens)
        gc.collect()
        peak_beyond = watch_peak("cpu")
        step.objective.prepare_([step.document])
        step.train()
        step.train()  # the optimiser's states are there now
        print(json.dumps({"tokens": tokens, "bytes": peak_beyond(), "planned": step.planned_bytes()}))
        del step


if __name__ == "__main__":
    main()

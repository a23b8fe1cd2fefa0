"""The schedule: warm-up, cosine, and what is refused."""

import math
from typing import Any

from retain.train.run.schedule import TrainingSettings, learning_rate


def test_learning_rate_warms_up_and_falls() -> None:
    settings = TrainingSettings(steps=30, warmup_steps=10, lr=1.0, final_lr=0.1)
    rates = [learning_rate(step, settings) for step in range(30)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False)) and rates[-1] > 0.1
    assert math.isclose(rates[20], 0.55)
    assert learning_rate(0, TrainingSettings(warmup_steps=0, lr=1.0)) == 1.0


def test_each_schedule_falls_as_it_says() -> None:
    common = {"steps": 50, "warmup_steps": 10, "lr": 1.0, "final_lr": 0.1}

    def rates(schedule: Any) -> list[float]:
        return [learning_rate(step, TrainingSettings(schedule=schedule, **common)) for step in range(50)]

    assert set(rates("constant")[9:]) == {1.0}
    assert rates("halving")[9:] == [1.0] * 21 + [0.5] * 10 + [0.25] * 10
    stable = rates("decay")
    assert set(stable[9:47]) == {1.0} and math.isclose(stable[48], 1 - 0.9 * 0.5)
    for schedule in ("cosine", "constant", "halving", "decay"):
        assert rates(schedule)[:10] == [(step + 1) / 10 for step in range(10)]

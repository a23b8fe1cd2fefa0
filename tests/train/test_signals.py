"""A request to stop: signals, the file, the second signal, and handlers that are put back."""

import os
import signal
from pathlib import Path

import pytest
from accelerate import Accelerator

from retain.train.run.signals import EXIT_CODE, NUMBERS, STOP_FILE, Signals, StopRequested
from tests.train.runs import python


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_a_signal_waits_for_the_end_of_the_step(
    tmp_path: Path, accelerator: Accelerator, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    with Signals(accelerator, tmp_path) as signals:
        assert not signals.requested
        os.kill(os.getpid(), number)
        assert signals.requested and signals.received == number.name
        assert f"{number.name}: finishing this step, then a checkpoint" in capfd.readouterr().err
        with pytest.raises(StopRequested) as raised:
            signals.stop(7)
    assert raised.value.code == EXIT_CODE == 143
    assert "stopped on request after step 7" in (said := capfd.readouterr().err)
    assert f"{tmp_path}, and the same command (without overwrite=true) goes on" in said
    assert signal.getsignal(number) == before


def test_the_file_asks_too(tmp_path: Path, accelerator: Accelerator) -> None:
    (tmp_path / STOP_FILE).touch()
    with Signals(accelerator, tmp_path) as signals:
        assert signals.requested, "asked while the model was loaded"
        with pytest.raises(StopRequested):
            signals.stop(1)
    assert not (tmp_path / STOP_FILE).exists()


def test_the_second_signal_ends_the_process(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from accelerate import Accelerator\n"
        "from retain.train.run.signals import Signals\n"
        "with Signals(Accelerator(cpu=True), Path(sys.argv[1])):\n"
        "    os.kill(os.getpid(), signal.SIGTERM); print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM); print('too late', flush=True)\n"
    )
    done = python("-c", code, str(tmp_path), fine=False)
    assert done.returncode == -signal.SIGTERM and done.stdout == "still here\n"

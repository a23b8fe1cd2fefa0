"""Being asked to stop: notes, the file, the second signal, and handlers that are put back."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from accelerate import Accelerator

from retain.train.run.signals import (
    EXIT_CODE,
    LAUNCHER_GONE,
    NUMBERS,
    STOP_FILE,
    Signals,
    StopRequested,
    forget_,
)
from tests.launch import launch_environment
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
    assert f"{tmp_path}. The same command goes on" in said
    assert signal.getsignal(number) == before


def test_the_file_asks_too_and_an_old_one_is_forgotten(
    tmp_path: Path, accelerator: Accelerator, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / STOP_FILE).touch()
    forget_(tmp_path)
    forget_(tmp_path)
    with Signals(accelerator, tmp_path) as signals:
        assert not signals.requested, "somebody asked an earlier run"
    (tmp_path / STOP_FILE).touch()
    (tmp_path / "config.yaml").write_text("overwrite: true\n")
    with Signals(accelerator, tmp_path) as signals:
        assert signals.requested, "asked while the model was loaded"
        with pytest.raises(StopRequested):
            signals.stop(1)
    assert not (tmp_path / STOP_FILE).exists()
    assert "The same command without overwrite=true goes on from there" in capsys.readouterr().err


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


def test_the_end_of_the_launcher_is_no_second_signal(
    tmp_path: Path, accelerator: Accelerator, capfd: pytest.CaptureFixture[str]
) -> None:
    with Signals(accelerator, tmp_path) as signals:
        for number in (signal.SIGTERM, LAUNCHER_GONE, LAUNCHER_GONE):  # a scheduler signals both
            os.kill(os.getpid(), number)
        assert signals.requested and signals.received == "SIGTERM"
    with Signals(accelerator, tmp_path) as signals:
        os.kill(os.getpid(), LAUNCHER_GONE)
        assert signals.requested
    assert "the launcher has ended: finishing this step, then a checkpoint" in capfd.readouterr().err


@pytest.mark.always
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells of a parent's end")
def test_a_run_does_not_outlive_its_launcher() -> None:
    """`accelerate launch` of one process ends at SIGTERM without a word to the process that it started."""
    # Blocked, the signal waits until it is asked for: `pause` would sleep for ever if it came just before.
    trainer = (
        "import signal; from retain.train.run.signals import LAUNCHER_GONE, follow_launcher_\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [LAUNCHER_GONE])\n"
        "follow_launcher_()\n"
        "print('training', flush=True)\n"
        "if signal.sigtimedwait([LAUNCHER_GONE], 60): print('asked to stop', flush=True)\n"
    )
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {trainer!r}])"
    command = [sys.executable, "-c", launcher, "accelerate", "launch"]
    with subprocess.Popen(command, env=launch_environment(), stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "training\n"
        started.terminate()
        # To its end: until the process that was started has gone too.
        assert started.stdout.read() == "asked to stop\n"
    assert started.returncode == -signal.SIGTERM


def test_outside_the_main_thread_only_the_file_is_heard(tmp_path: Path, accelerator: Accelerator) -> None:
    found = []

    def run() -> None:
        with Signals(accelerator, tmp_path) as signals:
            (tmp_path / STOP_FILE).touch()
            found.append((signals.requested, signals._before))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(True, {})]

"""Ctrl-C, SIGTERM and SIGHUP end every command alike."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headrace._interrupts import (
    SIGNALS,
    SignalInterrupt,
    delay_signals,
    exit_code,
    hold_signals,
    interruptible,
    signal_name,
)

ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1"}
# a recorder and worker processes: all that a signal could leave half done
PROGRAM = """
import sys, torch
from importlib import import_module
from headrace import bridge
from headrace.recording import EpisodeRecorder

def work(arguments):
    env = bridge("CartPole-v1", 2, executor="processes", workers=2)
    with EpisodeRecorder(sys.argv[1]) as recorder:
        env.attach(recorder)
        env.reset(seed=0)
        print("pids", *env.backend.pids, flush=True)
        try:
            while True:
                env.step(torch.zeros(2, dtype=torch.int64))
                if recorder.report.finished == 5:
                    print("recorded", flush=True)
        finally:
            env.close()

if __name__ == "__main__":
    cli = import_module("headrace.cli.main")
    parser = cli.build_parser()
    parser.set_defaults(handler=work)
    cli.build_parser = lambda only: parser
    sys.exit(cli.main([]))
"""


# one of SIGNALS in processes; all of them raise alike, below
@pytest.mark.parametrize("number", [signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_to_the_process_group_ends_a_command_in_order(tmp_path: Path, number: signal.Signals) -> None:
    from headrace.recording import EpisodeDataset, verify_dataset

    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "d")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    ) as process:
        assert process.stdout
        workers = [int(pid) for pid in process.stdout.readline().split()[1:]]
        assert len(workers) == 2
        process.stdout.readline()
        os.killpg(process.pid, number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    assert said.splitlines()[-1] == f"interrupted by {number.name}"
    assert "Traceback" not in said
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(EpisodeDataset(tmp_path / "d")) >= 5
    assert verify_dataset(tmp_path / "d").problems == ()


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_raises_in_the_block_and_is_as_before_after_it(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SignalInterrupt) as caught, interruptible():
        os.kill(os.getpid(), number)
    assert (caught.value.number, exit_code(caught.value)) == (number, 128 + number)
    assert signal.getsignal(number) is before


def test_a_plain_keyboard_interrupt_is_ctrl_c() -> None:
    assert (signal_name(KeyboardInterrupt()), exit_code(KeyboardInterrupt())) == ("Ctrl-C", 130)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        with hold_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_comes_while_signals_are_held_back_is_raised_after_the_block() -> None:
    done = False
    with pytest.raises(SignalInterrupt) as caught, hold_signals():  # noqa: PT012  (the block goes on)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        done = True
    assert done
    assert caught.value.number == signal.SIGTERM


def test_a_delayed_signal_is_delivered_after_the_block_and_a_second_one_at_once() -> None:
    reached: list[int] = []
    with pytest.raises(SignalInterrupt) as caught, interruptible(), delay_signals() as came:  # noqa: PT012  (the block goes on)
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append(1)
        assert came == [signal.SIGTERM]
    assert reached == [1]
    assert caught.value.number == signal.SIGTERM
    with pytest.raises(SignalInterrupt) as caught, interruptible(), delay_signals():  # noqa: PT012  (the block is left)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        reached.append(2)
    assert reached == [1]
    assert caught.value.number == signal.SIGHUP


def test_a_signal_while_mujoco_is_imported_waits_until_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.sim import mujoco_api as _mujoco_api

    whole: list[str] = []

    def interrupted(name: str) -> object:
        os.kill(os.getpid(), signal.SIGHUP)
        whole.append(name)
        return sys.modules[name]

    _mujoco_api.load_model("<mujoco/>")
    _mujoco_api._library.cache_clear()
    monkeypatch.setattr(_mujoco_api.importlib, "import_module", interrupted)
    with pytest.raises(SignalInterrupt), interruptible():
        _mujoco_api._library()
    assert whole == ["mujoco"]


def test_other_threads_may_enter_the_blocks() -> None:
    entered: list[bool] = []

    def run() -> None:
        with interruptible(), hold_signals(), delay_signals():
            entered.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert entered

"""How far the calls of users walk through the code: files and functions of headrace that they enter.

``python scripts/walks.py`` prints a table; docs/architecture.md holds the figures and their limits. Only public names
and commands are called, so that ``PYTHONPATH=OTHER_CHECKOUT/src python scripts/walks.py`` measures another version.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import headrace

_HOME = str(Path(headrace.__file__).parent)


@contextlib.contextmanager
def _trace() -> Iterator[set[tuple[str, str]]]:
    """Collect the (file, function) pairs of headrace that are entered inside the block, in every thread."""
    entered: set[tuple[str, str]] = set()

    def enter(frame: FrameType, event: str, _arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_HOME) and code.co_name != "<module>":
            entered.add((code.co_filename, code.co_qualname))

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _evaluate() -> Callable[[], object]:
    """Prepare a second evaluation: the first one imports, and imports run code of every class."""

    def play() -> object:
        return headrace.evaluate("pusher-solid", episodes=4, num_envs=2, progress=False)

    play()
    return play


def _extend_and_sample() -> Callable[[], object]:
    """Prepare an ``extend`` of a store that has some steps, and the first ``sample``."""
    from headrace.replay import ReplayBuffer

    env = headrace.make("cartpole", 4, seed=0)
    store = ReplayBuffer(4_000, 4, env.single_observation_space, env.single_action_space)
    obs, _ = env.reset()
    action = torch.zeros(4, 1)
    for _ in range(8):
        step = env.step(action)
        store.extend(obs, action, step)
        obs = step.obs
    step = env.step(action)

    def call() -> None:
        store.extend(obs, action, step)
        store.sample(8)

    return call


def _step(env: Any) -> Callable[[], object]:
    actions = torch.zeros(4, *env.single_action_space.shape)
    env.reset()
    env.step(actions)
    return lambda: env.step(actions)


def _train() -> Callable[[], object]:
    """Prepare a training from the command line."""
    from headrace.__main__ import main

    words = ["train", "cartpole", "--num-envs", "8", "--iterations", "1", "--output", tempfile.mkdtemp()]

    def run() -> None:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown), contextlib.suppress(SystemExit):
            main(words)

    return run


WALKS: dict[str, Callable[[], Callable[[], object]]] = {
    '`headrace.evaluate("pusher-solid")`': _evaluate,
    "`extend` + `sample` of a replay store": _extend_and_sample,
    "one `cartpole-camera` step": lambda: _step(headrace.make("cartpole-camera", 4, seed=0)),
    "one `ant` step": lambda: _step(headrace.make("ant", 4, seed=0)),
    "`headrace train`": _train,
    "`headrace train` once more": _train,
}
"""In this order: the first training also runs what importing modules runs that the walks before did not import."""


if __name__ == "__main__":
    print("| walk | files | functions |\n|---|---|---|")
    for name, prepare in WALKS.items():
        call = prepare()
        with _trace() as entered:
            call()
        print(f"| {name} | {len({file for file, _ in entered})} | {len(entered)} |")

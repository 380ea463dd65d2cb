"""How far one call of each kind walks through the code: files and functions of headrace that it enters.

``python scripts/walks.py`` prints a table; docs/architecture.md holds the figures of each release.
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

import torch

import headrace

_HOME = str(Path(headrace.__file__).parent)


@contextlib.contextmanager
def _traced() -> Iterator[set[tuple[str, str]]]:
    """The (file, function) pairs of headrace that are entered inside the block, in every thread."""
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


def _step() -> Callable[[], object]:
    env = headrace.make("ant", 4, seed=0)
    env.reset()
    actions = torch.zeros(4, 8)
    env.step(actions)
    return lambda: env.step(actions)


def _picture() -> Callable[[], object]:
    env = headrace.make("cartpole-camera", 4, seed=0)
    env.reset()
    env.step(torch.zeros(4, 1), observe=torch.zeros(4, dtype=torch.bool))
    env.observe([1])
    env.step(torch.zeros(4, 1), observe=torch.zeros(4, dtype=torch.bool))
    return lambda: env.observe([2])


def _sample() -> Callable[[], object]:
    from headrace.replay import ReplayBuffer

    env = headrace.make("cartpole", 4, seed=0)
    buffer = ReplayBuffer(4_000, 4, env.single_observation_space, env.single_action_space)
    obs, _ = env.reset()
    for _ in range(20):
        active, action = env.active, torch.zeros(4, 1)
        step = env.step(action)
        buffer.extend(obs, action, step, active)
        obs = step.obs
    buffer.sample(8)
    return lambda: buffer.sample(8)


def _evaluation() -> Callable[[], object]:
    from headrace.rollout import evaluate, load_chunk_policy

    env = headrace.make("pusher-solid", 4, autoreset="disabled", final_obs=False)
    policy = load_chunk_policy("pusher-solid")
    return lambda: evaluate(env, policy, episodes=4, execute=16, seed=1, progress=False)


def _training() -> Callable[[], object]:
    from headrace.__main__ import main

    folder = tempfile.mkdtemp()
    words = ["train", "cartpole", "--num-envs", "8", "--iterations", "1", "--output", folder]

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main(words)

    return run


WALKS: dict[str, Callable[[], Callable[[], object]]] = {
    "one `ant` step": _step,
    "one camera observation": _picture,
    "one replay sample": _sample,
    "one chunked `evaluate`": _evaluation,
    "one `train` iteration from the command line": _training,
}


if __name__ == "__main__":
    print("| walk | files | functions |\n|---|---|---|")
    for name, prepare in WALKS.items():
        call = prepare()
        with _traced() as entered:
            call()
        print(f"| {name} | {len({file for file, _ in entered})} | {len(entered)} |")

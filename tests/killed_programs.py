"""Programs that tests kill at random moments. Run as a program, it forks one of them for each line of its input.

Everything is imported once: ``FUNCTION JSON`` starts a function of this file with those arguments in a process of its
own, and the answer is its process id. What it prints goes to the file ``log`` among its arguments.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent / "policies/serving"))

import headrace

TRAINED = 60
"""Iterations of the undisturbed training."""


class Programs:
    """The process that forks."""

    def __enter__(self) -> Programs:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def start(self, function: str, **arguments: Any) -> int:
        """Start a program; returns a handle of its process, to be killed and awaited by."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{function} {json.dumps(arguments)}\n")
        self._process.stdin.flush()
        return os.pidfd_open(int(self._process.stdout.readline()))


def train(output: str, iterations: int, resume: str | None, log: str) -> None:
    """Train a small policy, and save it after every iteration."""
    from headrace.learning.ppo import PPOCfg
    from headrace.libraries.training import CheckpointKeeper

    note = CheckpointKeeper.note

    def note_and_save(keeper: CheckpointKeeper, *told: Any) -> None:
        keeper._due = 0.0
        note(keeper, *told)

    CheckpointKeeper.note = note_and_save  # type: ignore[method-assign]
    headrace.train(
        "cartpole",
        iterations=iterations,
        num_envs=4,
        seed=3,
        threads=1,
        ppo=PPOCfg(hidden=(8,), steps=16, minibatches=2, epochs=2, seed=3),
        resume_from=resume,
        run=headrace.RunCfg(output=Path(output)),
    )


def serve(port: int, log: str) -> None:
    """Serve a policy until killed."""
    from served_policies import STRICT, Denoiser

    from headrace.policies import PolicyServer, ServeCfg

    with PolicyServer(Denoiser(4, 1), ServeCfg(port=port, batching=STRICT)) as server:
        Path(log).with_suffix(".address").write_text(server.address)
        server.wait()


def play(address: str | None, journal: str, episodes: int, log: str) -> None:
    """Evaluate the policy of a server, or the same one here."""
    from served_policies import STRICT, Denoiser

    from headrace.evaluation import JournalCfg, PlayCfg
    from headrace.policies import RemoteCfg

    recipe = headrace.EnvRecipe("cartpole", num_envs=3, seed=11, threads=1, overrides={"episode_length": 60})
    where = Denoiser(4, 1) if address is None else RemoteCfg(address, reconnect=60.0)
    cfg = PlayCfg(execute=8, policy_id="denoiser", **({"batching": STRICT} if address is None else {}))
    keep = JournalCfg(path=Path(journal), resume=True)
    headrace.evaluate(recipe, where, episodes=episodes, play=cfg, journal=keep, progress=False)


def _import_all() -> None:
    import headrace.bench.measured.train
    import headrace.envs.batch_env
    import headrace.envs.tasks.cartpole
    import headrace.evaluation.player
    import headrace.learning.collecting
    import headrace.libraries.training
    import headrace.policies.serving._server  # noqa: F401


if __name__ == "__main__":
    _import_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    for line in sys.stdin:
        name, _, told = line.partition(" ")
        given = json.loads(told)
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            handle = os.open(given["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            try:
                globals()[name](**given)
                print("done", flush=True)
            except BaseException:  # noqa: BLE001  (whatever it is, the test that started it shows it)
                traceback.print_exc()
            os._exit(0)
        print(process, flush=True)

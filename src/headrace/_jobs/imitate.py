"""``headrace.imitate``: record an expert, clone it into a chunk policy, and say how good the clone is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.chunking import ChunkPolicy
    from headrace.envs import BatchEnv
    from headrace.rollout import Demonstrations, Evaluation
    from headrace.rollout._act_policy import ActPolicy

_HELD_OUT = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationResult:
    """What imitating an expert gave."""

    path: Path
    """The checkpoint of the policy."""
    sha256: str
    policy: ActPolicy
    demonstrations: int
    """Successful episodes that it learned from."""
    attempted: int
    """Episodes that the expert played for them."""
    evaluations: Mapping[str, Evaluation]
    """``trained``, and what it must beat: ``untrained`` and ``mean action``; fewer after Ctrl-C."""

    @property
    def interrupt(self) -> KeyboardInterrupt | None:
        """What ended the evaluation early, such as Ctrl-C."""
        return next((found.interrupt for found in self.evaluations.values() if found.interrupt is not None), None)


def _ignore(stage: str, done: int, total: int) -> None:
    del stage, done, total


def imitate(
    task: str,
    output: str | Path,
    *,
    demos: int = 2000,
    updates: int = 8000,
    num_envs: int = 128,
    seed: int = 0,
    episodes: int = 300,
    execute: int = 16,
    on_progress: Callable[[str, int, int], None] = _ignore,
) -> ImitationResult:
    """Record successful episodes of a task's expert, train a small action-chunking transformer on them, save it.

    It is then evaluated on episodes that it has not seen, compared with the same model untrained and with the expert's
    mean action.

    Args:
        task: a task with an expert, such as ``pusher-solid``.
        output: file of the checkpoint.
        demos: successful episodes to learn from.
        updates: steps of the optimizer.
        num_envs: environments in the batch.
        seed: of episodes, weights and batches.
        episodes: to evaluate with.
        execute: actions that are played of each chunk there.
        on_progress: called with a stage (``recording``; ``training, loss …``), what is done of it, and its total.
    """
    from headrace.envs import make
    from headrace.rollout import CloneCfg, clone, record_demonstrations
    from headrace.rollout._act_policy import save_policy
    from headrace.rollout.experts import disturbance_for, expert_for

    expert, path = expert_for(task), Path(output)
    _check(path, execute, demos=demos, updates=updates, episodes=episodes)
    # model and rows are small: more threads would only wait for each other
    with closing(make(task, num_envs, autoreset="disabled", final_obs=False)) as env, _torch_threads(1):
        found = record_demonstrations(
            env,
            expert,
            demos,
            seed=seed,
            noise=disturbance_for(task),
            progress=lambda done: on_progress("recording", done, demos),
        )
        policy = clone(
            found,
            CloneCfg(updates=updates, seed=seed),
            progress=lambda done, loss: on_progress(f"training, loss {loss:.3f}", done, updates),
        )
        digest = save_policy(policy, path, task=task)
        results = _evaluate(env, found, policy, seed, episodes, execute)
    return ImitationResult(
        path=path,
        sha256=digest,
        policy=policy,
        demonstrations=len(found.episode_ids),
        attempted=found.attempted,
        evaluations=results,
    )


def _check(path: Path, execute: int, **counts: int) -> None:
    """What would fail only after minutes of work."""
    from headrace.rollout._act_policy import ActCfg

    if path.is_dir():
        raise ConfigError(f"output (--output): expected a file to write, got the directory {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output (--output): expected a place for a file, got {path}: {error.strerror}") from error
    if not 1 <= execute <= ActCfg.horizon:
        raise ConfigError(f"execute (--execute): expected 1 to {ActCfg.horizon} actions of a chunk, got {execute}")
    for name, count in counts.items():
        if count <= 0:
            raise ConfigError(f"{name} (--{name}): expected more than 0, got {count}")


@contextmanager
def _torch_threads(count: int) -> Generator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _evaluate(
    env: BatchEnv, demos: Demonstrations, policy: ActPolicy, seed: int, episodes: int, execute: int
) -> dict[str, Evaluation]:
    """The policy and what it must beat, on episodes of another seed than the demonstrations."""
    from headrace.rollout import evaluate
    from headrace.rollout._imitation import MeanAction, untrained

    contestants: dict[str, ChunkPolicy] = {
        "trained": policy,
        "untrained": untrained(demos, seed=seed),
        "mean action": MeanAction(demos.actions.mean(dim=0), policy.horizon),
    }
    results: dict[str, Evaluation] = {}
    for name, contestant in contestants.items():
        results[name] = evaluate(env, contestant, episodes=episodes, execute=execute, seed=seed + _HELD_OUT)
        if results[name].status == "interrupted":  # Ctrl-C is meant for the whole, not for one contestant
            break
    return results

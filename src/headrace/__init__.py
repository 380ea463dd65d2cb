"""headrace: the data path between batched robot simulation and policy.

Importing it registers the Gymnasium ids (``headrace/Ant-v0``, …) and does nothing else: heavy libraries load on use.
The packages have export lists of their own: ``headrace.envs``, ``headrace.replay``, ``headrace.evaluation``, …
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._gymnasium_ids import register_ids
from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace import (
        bench,
        bridges,
        compat,
        envs,
        evaluation,
        history,
        imitation,
        learning,
        libraries,
        policies,
        recording,
        replay,
        sim,
        testing,
        viewing,
    )
    from headrace._kernels.threads import kernel_threads, set_kernel_threads
    from headrace.bench.comparing import compare
    from headrace.bench.measured.play import play
    from headrace.bench.measured.run_cfg import RunCfg
    from headrace.bench.measured.train import train
    from headrace.bridges.make import bridge
    from headrace.envs.batch_env import BatchEnv
    from headrace.envs.recipe import EnvRecipe
    from headrace.envs.registry import TaskEntry, make, register_task, task_names
    from headrace.envs.task import Rows, Task, TaskCfg
    from headrace.envs.term_task import TermTask, TermTaskCfg
    from headrace.evaluation.evaluating import evaluate
    from headrace.policies.load_policy import load_policy
    from headrace.types import EpisodeEnds, StackSpec, Step

__version__ = "0.2.0"

__all__ = [
    "BatchEnv",
    "EnvRecipe",
    "EpisodeEnds",
    "Rows",
    "RunCfg",
    "StackSpec",
    "Step",
    "Task",
    "TaskCfg",
    "TaskEntry",
    "TermTask",
    "TermTaskCfg",
    "__version__",
    "bench",
    "bridge",
    "bridges",
    "compare",
    "compat",
    "envs",
    "evaluate",
    "evaluation",
    "history",
    "imitation",
    "kernel_threads",
    "learning",
    "libraries",
    "load_policy",
    "make",
    "play",
    "policies",
    "recording",
    "register_task",
    "replay",
    "set_kernel_threads",
    "sim",
    "task_names",
    "testing",
    "train",
    "viewing",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)

register_ids()

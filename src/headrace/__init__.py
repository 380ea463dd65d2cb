"""headrace: the data path between batched robot simulation and policy.

Importing it registers the Gymnasium ids (``headrace/Ant-v0``, …) and does nothing else: heavy libraries load on use.
The stages have their own export lists: ``headrace.sim``, ``headrace.envs``, ``headrace.vision``, ``headrace.buffers``,
``headrace.replay``, ``headrace.learning``, ``headrace.recording``, ``headrace.chunking``, ``headrace.rollout``,
``headrace.adapters``, ``headrace.serving``, ``headrace.distributed``, ``headrace.bench``, ``headrace.compat``,
``headrace.testing``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._gymnasium_ids import register_ids
from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace._jobs.comparing import compare, report, sweep
    from headrace._jobs.demo import demo
    from headrace._jobs.evaluate import evaluate, merge
    from headrace._jobs.imitate import imitate
    from headrace._jobs.picture import picture
    from headrace._jobs.play import PlayResult, play
    from headrace._jobs.request import RunOptions, RunResult
    from headrace._jobs.run import run
    from headrace._jobs.runtime import runtime, startup
    from headrace._jobs.serve import serve
    from headrace._jobs.suite import evaluate_suite
    from headrace._jobs.train import TrainingResult, train
    from headrace._jobs.view import view
    from headrace._kernels.threads import kernel_threads, set_kernel_threads
    from headrace.envs._batch_env import BatchEnv
    from headrace.envs._recipe import EnvRecipe
    from headrace.envs._registry import TaskEntry, make, register_task, task_names
    from headrace.envs._rows import Rows
    from headrace.envs._task import Task, TaskCfg
    from headrace.envs._term_task import TermTask
    from headrace.envs._terms import TermTaskCfg
    from headrace.envs.bridges._make import bridge
    from headrace.types import EpisodeEnds, StackSpec, Step

__version__ = "0.2.0"

__all__ = [
    "BatchEnv",
    "EnvRecipe",
    "EpisodeEnds",
    "PlayResult",
    "Rows",
    "RunOptions",
    "RunResult",
    "StackSpec",
    "Step",
    "Task",
    "TaskCfg",
    "TaskEntry",
    "TermTask",
    "TermTaskCfg",
    "TrainingResult",
    "__version__",
    "bridge",
    "compare",
    "demo",
    "evaluate",
    "evaluate_suite",
    "imitate",
    "kernel_threads",
    "make",
    "merge",
    "picture",
    "play",
    "register_task",
    "report",
    "run",
    "runtime",
    "serve",
    "set_kernel_threads",
    "startup",
    "sweep",
    "task_names",
    "train",
    "view",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "headrace._jobs.comparing": ("compare", "report", "sweep"),
        "headrace._jobs.demo": ("demo",),
        "headrace._jobs.evaluate": ("evaluate", "merge"),
        "headrace._jobs.suite": ("evaluate_suite",),
        "headrace._jobs.runtime": ("runtime", "startup"),
        "headrace._jobs.imitate": ("imitate",),
        "headrace._jobs.run": ("run",),
        "headrace._jobs.serve": ("serve",),
        "headrace._jobs.view": ("view",),
        "headrace._jobs.picture": ("picture",),
        "headrace._jobs.play": ("PlayResult", "play"),
        "headrace._jobs.request": ("RunOptions", "RunResult"),
        "headrace._jobs.train": ("TrainingResult", "train"),
        "headrace._kernels.threads": ("kernel_threads", "set_kernel_threads"),
        "headrace.envs._batch_env": ("BatchEnv",),
        "headrace.envs._recipe": ("EnvRecipe",),
        "headrace.envs._registry": ("TaskEntry", "make", "register_task", "task_names"),
        "headrace.envs._rows": ("Rows",),
        "headrace.envs._task": ("Task", "TaskCfg"),
        "headrace.envs._term_task": ("TermTask",),
        "headrace.envs._terms": ("TermTaskCfg",),
        "headrace.envs.bridges._make": ("bridge",),
        "headrace.types": ("EpisodeEnds", "StackSpec", "Step"),
    },
)

register_ids()

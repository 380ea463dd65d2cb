"""headrace: the data path between batched robot simulation and policy.

Importing it registers the Gymnasium ids (``headrace/Ant-v0``, …) and does nothing else: heavy libraries load on use.
The stages have their own export lists: ``headrace.sim``, ``headrace.vision``, ``headrace.replay``,
``headrace.learning``, ``headrace.recording``, ``headrace.chunking``, ``headrace.rollout``, ``headrace.testing``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._gymnasium_ids import register_ids
from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace._jobs.comparing import ComparisonResult, ReportResult, SweepResult, compare, report, sweep
    from headrace._jobs.demo import DemoResult, demo
    from headrace._jobs.evaluate import evaluate, merge
    from headrace._jobs.imitate import ImitationResult, imitate
    from headrace._jobs.picture import PictureResult, picture
    from headrace._jobs.play import PlayResult, play
    from headrace._jobs.request import RunOptions, RunResult
    from headrace._jobs.run import SteppingResult, run
    from headrace._jobs.runtime import runtime, startup
    from headrace._jobs.serve import serve
    from headrace._jobs.suite import SuiteResult, SuiteTask, evaluate_suite, read_suite
    from headrace._jobs.train import TrainingResult, train
    from headrace._jobs.view import view
    from headrace._kernels.threads import kernel_threads, set_kernel_threads
    from headrace.envs import (
        BatchEnv,
        EnvRecipe,
        Rows,
        Task,
        TaskCfg,
        TaskEntry,
        TermTask,
        TermTaskCfg,
        make,
        register_task,
        task_names,
    )
    from headrace.envs.bridges import bridge
    from headrace.types import EpisodeEnds, StackSpec, Step

__version__ = "0.1.0"

__all__ = [
    "BatchEnv",
    "ComparisonResult",
    "DemoResult",
    "EnvRecipe",
    "EpisodeEnds",
    "ImitationResult",
    "PictureResult",
    "PlayResult",
    "ReportResult",
    "Rows",
    "RunOptions",
    "RunResult",
    "StackSpec",
    "Step",
    "SteppingResult",
    "SuiteResult",
    "SuiteTask",
    "SweepResult",
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
    "read_suite",
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
        "headrace._jobs.comparing": ("ComparisonResult", "ReportResult", "SweepResult", "compare", "report", "sweep"),
        "headrace._jobs.demo": ("DemoResult", "demo"),
        "headrace._jobs.evaluate": ("evaluate", "merge"),
        "headrace._jobs.suite": ("SuiteResult", "SuiteTask", "evaluate_suite", "read_suite"),
        "headrace._jobs.runtime": ("runtime", "startup"),
        "headrace._jobs.imitate": ("ImitationResult", "imitate"),
        "headrace._jobs.run": ("SteppingResult", "run"),
        "headrace._jobs.serve": ("serve",),
        "headrace._jobs.view": ("view",),
        "headrace._jobs.picture": ("PictureResult", "picture"),
        "headrace._jobs.play": ("PlayResult", "play"),
        "headrace._jobs.request": ("RunOptions", "RunResult"),
        "headrace._jobs.train": ("TrainingResult", "train"),
        "headrace._kernels.threads": ("kernel_threads", "set_kernel_threads"),
        "headrace.envs": (
            *("BatchEnv", "EnvRecipe", "Rows", "Task", "TaskCfg", "TaskEntry", "TermTask", "TermTaskCfg"),
            *("make", "register_task", "task_names"),
        ),
        "headrace.envs.bridges": ("bridge",),
        "headrace.types": ("EpisodeEnds", "StackSpec", "Step"),
    },
)

register_ids()

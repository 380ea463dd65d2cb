"""Exports that load on use: importing a package costs nothing until one of its names is read."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

_TO_BENCH = ("report", "run", "runtime", "startup", "sweep")
_PLACES = {
    "bench.benchmark": ("Benchmark", "RunSettings"),
    "bench.builders": ("PlayBuilder", "RuntimeBuilder", "TrainingBuilder"),
    "bench.capture": ("describe_library",),
    "bench.figures": ("Form", "Metric", "metrics", "register_metrics", "summary_text"),
    "bench.reporting.page": ("Film", "Story"),
    "bench.schema": ("EpisodePlan", "PlayBundle", "RunConfig", "RuntimeBundle", "StartupBundle", "TrainingBundle"),
    "envs.recipe": ("with_overrides",),
    "envs.registry": ("make_task",),
    "evaluation.scheduling": (*("Admission", "Greedy", "Immediate", "QueueState", "Synchronized", "WholeBatchOnAny"),),
    "learning.actor_critic": ("Policy", "load_actor_critic", "save_actor_critic"),
    "learning.collecting": ("Collector",),
    "libraries.learner": ("InferencePolicy", "LearnerEnv"),
    "libraries.registry": ("libraries", "library"),
    "libraries.training": ("CheckpointMeta",),
    "policies.engines": ("Engine", "InlineEngine", "Reply", "Request"),
    "policies.foreign": ("ProcessEngine",),
    "policies.protocol": ("ChunkContext", "ChunkPolicy", "EpisodeRows"),
    "recording.dataset": ("Episode",),
    "recording.playback": ("replay_dataset",),
    "recording.show": ("episode_table",),
    "replay.forms": ("from_delta", "reconstruct_next", "to_delta"),
    "testing.episodes": (
        *("check_autoreset", "check_episodes_do_not_depend_on_the_batch", "check_snapshot_round_trip"),
        "check_suspend_is_exact",
    ),
    "sim.camera.appearance": ("Appearance", "AppearanceSpec"),
    "sim.camera.camera": ("Camera", "CameraFrames", "PoseReader"),
    "sim.camera.names": ("make_camera", "register_camera"),
}
"""Modules of packages, and the names that their packages exported in 0.2."""
MOVED = {
    "headrace.RunOptions": "headrace.RunCfg",
    "headrace.adapters": (
        "headrace.libraries, headrace.libraries.learner, headrace.libraries.registry, headrace.libraries.training, and "
        "OwnLearner headrace.libraries.learner.OwnLearner"
    ),
    "headrace.buffers": "headrace.history",
    "headrace.chunking": (
        "headrace.policies, headrace.policies.engines, headrace.policies.foreign, headrace.policies.protocol, "
        "headrace.evaluation and headrace.evaluation.scheduling"
    ),
    "headrace.demo": "headrace.bench.story.demo",
    "headrace.distributed": "headrace.evaluate(…, workers=…) and headrace.learning",
    "headrace.envs.bridges": "headrace.bridges, headrace.bridges.interpreter",
    "headrace.evaluate_suite": "headrace.evaluation.evaluate_suite",
    "headrace.imitate": "headrace.imitation.imitate",
    "headrace.merge": "headrace.evaluation.merge",
    "headrace.picture": "headrace.viewing.picture",
    "headrace.rollout": (
        "headrace.evaluate, headrace.evaluation, headrace.learning, headrace.policies, headrace.imitation, "
        "headrace.imitation.cloning, headrace.imitation.demonstrations, headrace.learning.actor_critic, "
        "headrace.learning.collecting, "
        "headrace.policies.load_policy, headrace.recording, headrace.recording.playback, and load_chunk_policy "
        "headrace.load_policy"
    ),
    "headrace.serve": "headrace.policies.serve",
    "headrace.serving": (
        "headrace.policies, headrace.policies.engines, headrace.policies.observation_map, WireMapping "
        "headrace.policies.ObservationMap"
    ),
    "headrace.testing.check_resume_continues_exactly": (
        "headrace.testing.episodes.check_episodes_do_not_depend_on_the_batch"
    ),
    "headrace.view": "headrace.viewing.view",
    "headrace.vision": "headrace.history",
    "headrace.PlayResult": "headrace.bench.measured.play.PlayResult",
    "headrace.RunResult": "headrace.bench.benchmark.RunResult",
    "headrace.TrainingResult": "headrace.bench.measured.train.TrainingResult",
    **{f"headrace.{name}": f"headrace.bench.{name}" for name in _TO_BENCH},
    **{
        f"headrace.{place.partition('.')[0]}.{name}": f"headrace.{place}.{name}"
        for place, names in _PLACES.items()
        for name in names
    },
}
"""Public names of 0.2, and where they are now. Those of a package that has gone keep their names in its successors."""


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the module-level ``__getattr__`` and ``__dir__`` of a package, and set its ``__all__``.

    Its names are those that the ``if TYPE_CHECKING:`` block of the package's own file imports, each from its home, so
    that type checkers and the interpreter read one list. A name that is imported from the package itself is one of its
    packages.

    Args:
        package: the package's ``__name__``.
        file: the package's ``__file__``.
    """
    home_of: dict[str, str] = {}
    for block in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for line in block.body:
                if isinstance(line, ast.ImportFrom) and line.module is not None:
                    home_of.update((alias.name, line.module) for alias in line.names)

    def get(name: str) -> object:
        if name not in home_of:
            place = MOVED.get(f"{package}.{name}")
            moved = "" if place is None else f"; it is {place} now"
            raise AttributeError(f"module {package!r} has no attribute {name!r}{moved}")
        if home_of[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)  # found without this function from now on
        return value

    names = sorted(home_of)
    vars(sys.modules[package])["__all__"] = names
    return get, lambda: list(names)

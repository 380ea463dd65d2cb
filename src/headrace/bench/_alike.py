"""What the runs of a comparison must share, and what about them a reader should be told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from headrace.bench._schema import Bundle, PlayBundle, RuntimeBundle, StartupBundle, TrainingBundle
from headrace.errors import ConfigError, DataError

Difference = Literal["hardware", "task", "settings", "timing", "library"]
DIFFERENCES: tuple[Difference, ...] = get_args(Difference)


def usable(runs: Sequence[Bundle], side: str, notes: list[str]) -> list[Bundle]:
    """The completed runs of a side; those that are not are named in ``notes``."""
    if not runs:
        raise DataError(f"side {side}: expected at least one bundle, got none")
    kinds = {run.kind for run in runs}
    if len(kinds) > 1:
        raise DataError(f"side {side}: expected bundles of one kind, got {', '.join(sorted(kinds))}")
    ids = [run.run.run_id for run in runs]
    twice = sorted({run_id for run_id in ids if ids.count(run_id) > 1})
    if twice:
        raise DataError(f"side {side}: expected every run once, got {', '.join(twice)} more than once")
    for run in runs:
        if run.run.status != "completed":
            notes.append(f"side {side}: {run.run.run_id} is left out: {run.run.status} ({run.run.status_reason})")
    done = [run for run in runs if run.run.status == "completed"]
    if not done:
        raise DataError(f"side {side}: expected a completed run, got {len(runs)} that did not complete")
    return done


def check_alike(runs: Sequence[Bundle], allow: frozenset[Difference]) -> None:
    """Refuse runs whose numbers do not mean the same."""
    reference = _traits(runs[0])
    for run in runs[1:]:
        for difference, traits in _traits(run).items():
            if difference in allow or traits == reference[difference]:
                continue
            names = [name for name, value in traits.items() if value != reference[difference].get(name)]
            told = "; ".join(f"{name}: {reference[difference].get(name)} and {traits[name]}" for name in names)
            raise ConfigError(
                f"compare: expected runs with the same {difference}, got {told} "
                f"({runs[0].run.run_id} and {run.run.run_id}); pass --allow {difference} to compare them all the same"
            )


def _traits(bundle: Bundle) -> dict[Difference, dict[str, object]]:
    """What two runs must share for their numbers to mean the same."""
    run, hardware = bundle.run, bundle.hardware
    timing = None if isinstance(bundle, StartupBundle) else bundle.runtime.environment_step_timing
    settings: dict[str, object] = {"num_envs": run.num_envs, "max_iterations": run.max_iterations}
    settings |= run.config.model_dump()
    if isinstance(bundle, RuntimeBundle):
        settings["num_steps"] = bundle.runtime.iterations_completed
    if isinstance(bundle, TrainingBundle) and bundle.library is not None:
        settings["hyper-parameters"] = bundle.library.settings
    if isinstance(bundle, PlayBundle) and bundle.plan is not None:
        settings |= bundle.plan.model_dump(include={"kind", "num_steps", "max_episode_length"})
    if isinstance(bundle, (TrainingBundle, PlayBundle)):
        settings["filmed"] = bundle.video_path is not None
    return {
        "task": {"kind": bundle.kind, "task": run.task},
        "library": {"library": run.framework},
        "settings": settings,
        "timing": {"measurement_mode": None if timing is None else timing.measurement_mode},
        "hardware": {
            "cpu_name": hardware.cpu_name,
            "cpu_count": hardware.cpu_count,
            "cpu_usable": hardware.cpu_usable,
            "ram_gb": hardware.ram_gb and round(hardware.ram_gb),
            "cpu_governor": hardware.cpu_governor,
            "gpus": [gpu.name for gpu in hardware.gpu_devices],
        },
    }


def circumstances(before: Sequence[Bundle], after: Sequence[Bundle]) -> list[str]:
    """What speaks against trusting the comparison."""
    notes: list[str] = []
    if {run.run.seed for run in before} != {run.run.seed for run in after}:
        notes.append("the sides used different seeds; give both the same")
    machines = [run.hardware for run in (*before, *after)]
    loads = [(machine.load_average or (0.0,))[0] / (machine.cpu_count or 1) for machine in machines]
    busy = sum(load > 1.0 for load in loads)
    if busy:
        notes.append(f"{busy} of {len(loads)} runs began on a machine with more work than cores")
    return notes

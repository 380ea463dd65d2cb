"""The names of LIBERO's suites and tasks."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import ConfigError, UnknownNameError

LIBERO = "libero_"
"""What the name of a task begins with."""
SUITES = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
"""Suite → how many tasks it has, named ``libero_spatial/0`` and so on in the benchmark's order."""
HORIZONS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Suite → steps of an episode, as openpi and OpenVLA-OFT count them."""

PERTURBATIONS = ("camera", "light", "texture", "init", "instruction")
"""Axes of LIBERO-Plus and LIBERO-PRO: the camera's place, strength and direction of lights, tints of all surfaces, the
arm and the things at the start, the words of the instruction."""


def check_perturbations(names: Sequence[str]) -> None:
    """Refuse a name that is none of :data:`PERTURBATIONS`."""
    for name in names:
        if name not in PERTURBATIONS:
            raise UnknownNameError("perturbation", name, PERTURBATIONS)


def libero_names(suite: str | None = None) -> list[str]:
    """Return the names of all tasks, or of those of a suite."""
    if suite is not None and suite not in SUITES:
        raise UnknownNameError("LIBERO suite", suite, list(SUITES))
    return [f"{name}/{i}" for name in ([suite] if suite else SUITES) for i in range(SUITES[name])]


def split_name(name: str) -> tuple[str, int]:
    """Return suite and index of a task's name; a name that there is not is an error."""
    suite, _, index = name.partition("/")
    if suite not in SUITES:
        raise UnknownNameError("LIBERO suite", suite, list(SUITES))
    if not index.isdigit() or int(index) >= SUITES[suite]:
        raise ConfigError(f"task {name!r}: expected {suite}/0 to {suite}/{SUITES[suite] - 1}")
    return suite, int(index)

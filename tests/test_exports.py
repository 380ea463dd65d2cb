"""What the package shows to the outside, and what importing it costs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import gymnasium
import pytest

import headrace

STAGES = (
    "adapters",
    "bench",
    "buffers",
    "chunking",
    "compat",
    "compat.isaaclab",
    "distributed",
    "envs",
    "envs.bridges",
    "envs.terms",
    "learning",
    "recording",
    "replay",
    "rollout",
    "serving",
    "sim",
    "testing",
    "vision",
)


def test_the_export_list_is_sorted_and_complete() -> None:
    assert headrace.__all__ == sorted(headrace.__all__)
    assert dir(headrace) == headrace.__all__


@pytest.mark.parametrize("name", headrace.__all__)
def test_every_exported_name_can_be_reached(name: str) -> None:
    assert getattr(headrace, name) is not None


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_an_export_list_of_names_that_exist(stage: str) -> None:
    module = importlib.import_module(f"headrace.{stage}")
    assert len(module.__all__) == len(set(module.__all__))
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_every_object_is_exported_in_one_place() -> None:
    packages = [headrace, *(importlib.import_module(f"headrace.{stage}") for stage in STAGES)]
    places: dict[int, list[str]] = {}
    for package in packages:
        for name in package.__all__:
            places.setdefault(id(getattr(package, name)), []).append(f"{package.__name__}.{name}")
    twice = [names for names in places.values() if len(names) > 1]
    assert twice == []
    assert sum(len(package.__all__) for package in packages) < 243  # add a name only if users call it


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ReplayBufer'"):
        _ = headrace.ReplayBufer  # pyright: ignore[reportAttributeAccessIssue]  # wrong on purpose


def test_importing_registers_the_gymnasium_ids_and_loads_nothing_heavy() -> None:
    heavy = ("mujoco", "numba", "tensordict", "rich", "h5py", "warp", "headrace.envs", "headrace.sim")
    code = f"import sys, headrace; print([m for m in {heavy!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    assert "headrace/Ant-v0" in gymnasium.registry
    assert "headrace/Cartpole-v0" in gymnasium.registry


def test_every_gymnasium_id_names_a_registered_task_and_every_task_has_one() -> None:
    from headrace._gymnasium_ids import IDS

    # in a process of its own: other tests register tasks
    code = "import headrace; print(*headrace.task_names())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(IDS.values()) == run.stdout.split()
    assert [env_id for env_id, task in IDS.items() if env_id != f"headrace/{task.title().replace('-', '')}-v0"] == []

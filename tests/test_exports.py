"""What the package shows to the outside, and what importing it costs."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import types

import gymnasium
import pytest

import headrace

STAGES = (
    "bench",
    "bridges",
    "compat",
    "compat.isaaclab",
    "envs",
    "envs.terms",
    "evaluation",
    "history",
    "imitation",
    "learning",
    "libraries",
    "policies",
    "recording",
    "replay",
    "sim",
    "testing",
    "viewing",
)


def test_the_export_list_is_sorted_and_complete() -> None:
    assert headrace.__all__ == sorted(headrace.__all__)
    assert dir(headrace) == headrace.__all__
    assert sum(not isinstance(getattr(headrace, name), types.ModuleType) for name in headrace.__all__) <= 24


def test_packages_are_attributes_and_a_moved_one_is_named() -> None:
    code = "import headrace; print(headrace.replay.ReplayBuffer.__name__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "ReplayBuffer"
    # in a process of its own: checkpoints of 0.2 import the old package, which makes it an attribute
    code = "import headrace; headrace.adapters"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "AttributeError: module 'headrace' has no attribute 'adapters'; it is headrace.libraries" in run.stderr


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
    count = sum(not isinstance(getattr(p, name), types.ModuleType) for p in packages for name in p.__all__)
    assert count <= 165  # add a name only if users call it


def test_a_public_function_has_at_most_twelve_parameters() -> None:
    packages = [headrace, *(importlib.import_module(f"headrace.{stage}") for stage in STAGES)]
    functions = {name: getattr(package, name) for package in packages for name in package.__all__}
    wide = [
        name
        for name, function in functions.items()
        if inspect.isfunction(function) and len(inspect.signature(function).parameters) > 12
    ]
    assert wide == []


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

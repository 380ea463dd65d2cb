"""Tasks that others bring: by name, by module, by an installed package."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import headrace
from headrace import errors
from headrace.envs.registry import make_task

MODULE = """
from headrace import TaskEntry, register_task
home = "headrace.envs.tasks.cartpole"
REACH = TaskEntry(name="reach", task=f"{home}:Cartpole", cfg=f"{home}:CartpoleCfg", summary="a task of a package")
register_task(TaskEntry(name="push", task=f"{home}:Cartpole", cfg=f"{home}:CartpoleCfg", summary="registered"))
"""


def run(code: str, path) -> str:
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # of compiled kernels
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join([str(path), *sys.path]), "HOME": str(path), "XDG_CACHE_HOME": cache},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def package(tmp_path):
    (tmp_path / "my_robots.py").write_text(MODULE)
    info = tmp_path / "my_robots-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-robots\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[headrace.tasks]\nreach = my_robots:REACH\nbroken = my_robots:NOTHING\nwrong = my_robots:home\n"
        "unlicensed = sold_robots:TASK\n"
    )
    (tmp_path / "sold_robots.py").write_text("raise RuntimeError('the license has expired')\n")
    return tmp_path


def test_a_task_of_an_installed_package_is_found_by_its_name(package) -> None:
    code = """
    import headrace, sys
    from headrace.envs.registry import task_cfg
    assert "reach" in headrace.task_names() and "my_robots" not in sys.modules
    print(task_cfg("reach").episode_length, headrace.make("reach", 2).recipe.source)
    """
    assert run(code, package).split() == ["300", "reach"]


def test_a_recipe_imports_the_package_of_its_task_so_that_its_renderers_are_known(package) -> None:
    code = """
    import headrace, sys
    recipe = headrace.EnvRecipe("ant").resolve()
    print(recipe.source, "headrace.envs.registry" in sys.modules)
    recipe = headrace.EnvRecipe("reach").resolve()
    print(recipe.source, "my_robots" in sys.modules)
    """
    assert run(code, package).split() == ["ant", "False", "reach", "True"]


def test_a_task_of_a_module_is_found_by_module_and_name(package) -> None:
    code = """
    import headrace
    for name in ("my_robots:REACH", "my_robots:push"):
        env = headrace.EnvRecipe(name, num_envs=2).make()
        print(env.reset()[0]["policy"].shape[0], env.recipe.source)
    """
    assert run(code, package).split() == ["2", "my_robots:REACH", "2", "my_robots:push"]


def test_a_task_that_cannot_be_loaded_says_whose_it_is(package) -> None:
    messages = {
        "broken": "cannot be loaded",
        "wrong": "expected a TaskEntry, got str",
        "nothing:x": "cannot be imported",
        "unlicensed": "cannot be loaded: RuntimeError: the license has expired",
    }
    code = f"""
    import headrace
    from headrace.errors import ConfigError
    for name in {list(messages)!r}:
        try:
            headrace.make(name)
        except ConfigError as error:
            print(str(error).replace(chr(10), " "))
    """
    said = run(code, package).splitlines()
    assert len(said) == len(messages)
    for message, line in zip(messages.values(), said, strict=True):
        assert message in line


def test_a_gymnasium_source_is_refused_by_make_with_what_to_do() -> None:
    with pytest.raises(errors.ConfigError, match="EnvRecipe"):
        headrace.make("gym:CartPole-v1")


def test_rows_are_what_a_tasks_functions_see() -> None:
    env = headrace.make(make_task("cartpole"), 4, seed=1)
    with pytest.raises(errors.LifecycleError, match="reset"):
        env.rows()
    obs, _ = env.reset()
    assert torch.equal(env.task.observe(env.rows())["policy"].float(), obs["policy"])
    some = env.rows([3, 1])
    assert some.ids.tolist() == [1, 3]
    assert torch.equal(env.task.observe(some)["policy"].float(), obs["policy"][[1, 3]])
    with pytest.raises(errors.IdError):
        env.rows([4])
    env.close()

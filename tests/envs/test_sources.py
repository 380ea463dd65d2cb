"""Names of environments: every spelling means one thing, and an unknown one is answered with the nearest."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace
from headrace import EnvRecipe
from headrace.envs.recipe import resolve_source
from headrace.errors import ConfigError, UnknownNameError

OWN = (
    "from headrace import TaskEntry, register_task\n"
    "home = 'headrace.envs.tasks.cartpole'\n"
    "register_task(TaskEntry(name='mine', task=f'{home}:Cartpole', cfg=f'{home}:CartpoleCfg', summary=''))\n"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("antt", "did you mean 'ant'"),
        ("gym:CartPool-v1", "CartPole-v1"),
        ("no_such_module:task", "cannot be imported"),
    ],
)
def test_an_unknown_environment_is_refused_with_a_suggestion(text: str, message: str) -> None:
    for ask in (resolve_source, lambda text: EnvRecipe(text).resolve()):
        with pytest.raises(ConfigError, match=message):
            ask(text)


def test_a_task_of_the_users_own_is_found_in_the_directory_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.envs import registry

    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_bench_tasks.py").write_text(OWN)
    assert resolve_source("my_bench_tasks:mine") == "my_bench_tasks:mine"
    with pytest.raises(UnknownNameError, match="did you mean 'mine'"):
        resolve_source("my_bench_tasks:mime")


@pytest.mark.parametrize(
    "name", ["headrace/Cartpole-v0", "cartpole-Play", "Isaac/cartpole", "headrace/Cartpole-Play-v0"]
)
def test_tasks_may_have_a_namespace_and_a_play_suffix_wherever_they_are_named(name: str) -> None:
    assert resolve_source(name) == "cartpole"
    env = headrace.make(name)
    assert type(env.task).__name__ == "Cartpole"
    env.close()

"""Environments in another interpreter: the same numbers, clear errors, nobody left behind."""

from __future__ import annotations

import ast
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces

import headrace.testing
from headrace.bridges import BridgeEnv, child, interpreter
from headrace.bridges.interpreter import CHILD_FILE, Channel, space_from_json
from headrace.bridges.make import bridge
from headrace.errors import ConfigError, DataError, DtypeError, EnvError, LifecycleError, UnsupportedError

TOY = Path(__file__).parent / "foreign" / "toy_simulator.py"


@pytest.fixture(scope="session")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with numpy alone: neither headrace nor Gymnasium can be imported there."""
    home = tmp_path_factory.mktemp("other") / "env"
    venv.create(home, with_pip=False, symlinks=True)
    site = next((home / "lib").glob("python*/site-packages"))
    package = Path(np.__file__).parent
    for name in (package.name, f"{package.name}.libs"):
        if (package.parent / name).exists():
            (site / name).symlink_to(package.parent / name)
    python = str(home / "bin" / "python")
    command = [
        python,
        "-c",
        "import numpy, importlib.util as u; print(u.find_spec('headrace'), u.find_spec('gymnasium'))",
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=_plain_environment())
    assert found.stdout.strip() == "None None"
    return python


@pytest.fixture(autouse=True)
def _no_path_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _foreign(python: str, name: str = "Walk", num_envs: int = 3, **settings: Any) -> BridgeEnv:
    return bridge(python=python, entry=f"{TOY}:{name}", num_envs=num_envs, **settings)


def _played(env: BridgeEnv, episodes: set[int], pauses: np.random.Generator | None = None) -> dict[int, Any]:
    """Every observation and reward of some episodes, under actions that are a function of episode and step."""
    env.reset()
    steps: dict[int, list[Any]] = {}
    done: dict[int, Any] = {}
    while not episodes <= done.keys():
        ids = env.episode_ids.tolist()
        lengths = [len(steps.get(id, ())) for id in ids]
        actions = torch.tensor([[np.sin(id + t), np.cos(3.0 * id - t)] for id, t in zip(ids, lengths, strict=True)])
        if pauses is not None:
            resting = pauses.random(env.num_envs) < 0.4
            env.resume(torch.from_numpy(~resting))
            env.suspend(torch.from_numpy(resting))
        acting, told = env.active.clone(), env.instructions()
        step = env.step(actions.float())
        final = step.info.get("final_obs", step.obs)
        ended = step.terminated | step.truncated
        for i in torch.nonzero(acting).flatten().tolist():
            source = final if ended[i] else step.obs
            seen = {group: rows[i].numpy().tobytes() for group, rows in source.items()}
            steps.setdefault(ids[i], []).append((seen, float(step.reward[i]), told[i]))
            if ended[i]:
                done[ids[i]] = steps[ids[i]]
    env.close()
    return {id: done[id] for id in episodes}


@pytest.mark.usefixtures("nobody_left")
def test_episodes_are_the_same_for_any_number_of_environments_workers_and_pauses(other_python: str) -> None:
    wanted = set(range(6))
    alone = _played(_foreign(other_python, num_envs=1, workers=1), wanted)
    assert alone[3][0][2].startswith("walk for ")
    many = _played(_foreign(other_python, num_envs=4, workers=2), wanted, np.random.default_rng(1))
    assert many == alone


@pytest.mark.usefixtures("nobody_left")
def test_episodes_are_those_of_the_same_class_stepped_by_hand(other_python: str) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("toy_simulator", TOY)
    assert spec is not None
    assert spec.loader is not None
    toy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    from headrace.bridges.bridge_env import episode_seeds

    played = _played(_foreign(other_python, num_envs=2, seed=4), {1})[1]
    walk = toy.Walk()
    walk.reset(seed=episode_seeds(4, torch.tensor([1]))[0])
    for t, (seen, reward, _) in enumerate(played):
        obs, expected, *_ = walk.step(np.array([np.sin(1 + t), np.cos(3.0 - t)], dtype=np.float32))
        assert seen["policy"] == obs["policy"].astype(np.float32).tobytes()
        assert seen["camera"] == obs["camera"].tobytes()
        assert reward == np.float32(expected)


@pytest.mark.usefixtures("nobody_left")
def test_the_contract_holds(other_python: str) -> None:
    def make(num_envs: int, **settings: Any) -> BridgeEnv:
        return _foreign(other_python, num_envs=num_envs, workers=1, **settings)

    headrace.testing.check_env(make)


@pytest.mark.usefixtures("nobody_left")
@pytest.mark.parametrize("remote", [False, True])
def test_pictures_on_demand_are_drawn_when_they_are_read_and_only_then(
    other_python: str, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN", "open sesame")
    command = [other_python, str(CHILD_FILE), "--listen", "127.0.0.1:0", "--entry", f"{TOY}:LateWalk", "--once"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listening:
        try:
            assert listening.stdout is not None
            port = re.search(r"port (\d+)", listening.stdout.readline())
            assert port is not None
            settings: dict[str, Any] = {"num_envs": 3, "autoreset": "disabled", "final_obs": False}
            address = f"tcp://127.0.0.1:{port[1]}"
            env = bridge(address=address, **settings) if remote else _foreign(other_python, "LateWalk", **settings)
            unread = torch.zeros(3, dtype=torch.bool)
            env.reset(options={"observe": unread})

            def draws() -> list[int]:
                pictures = env.render_each()
                assert pictures is not None
                return [int(picture[0, 0, 0]) for picture in pictures]

            assert draws() == [0, 0, 0]
            for _ in range(2):
                env.step(torch.zeros(3, 2), observe=unread)
            assert draws() == [0, 0, 0]
            one = unread.clone()
            one[1] = True
            step = env.step(torch.zeros(3, 2), observe=one)
            assert draws() == [0, 1, 0]
            assert step.obs["camera"][1].unique().tolist() == [3]
            assert step.obs["policy"][:, 1].tolist() == [3, 3, 3]
            assert env.observe(torch.tensor([2, 1]))["camera"][:, 0, 0, 0].tolist() == [3, 3]
            assert draws() == [0, 1, 1]
            assert env.observe()["camera"][:, 0, 0, 0].tolist() == [3, 3, 3]
            env.observe()
            assert draws() == [1, 1, 1]
            assert env.frames_drawn == 3
            env.close()
        finally:
            listening.kill()
    dark = _foreign(other_python, "LateWalk", env_kwargs={"fault": "draw"})
    with pytest.raises(EnvError, match=r"raised ValueError in draw: no light"):
        dark.reset()
    dark.close()


@pytest.mark.usefixtures("nobody_left")
def test_over_a_socket_the_numbers_are_the_same_and_the_child_serves_the_next_client(
    other_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN", "open sesame")
    command = [other_python, str(CHILD_FILE), "--listen", "127.0.0.1:0", "--entry", f"{TOY}:Walk"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listening:
        try:
            assert listening.stdout is not None
            port = re.search(r"port (\d+)", listening.stdout.readline())
            assert port is not None
            address = f"tcp://127.0.0.1:{port[1]}"
            reference = _played(_foreign(other_python, num_envs=2, workers=1), {0, 1, 2})
            late = _foreign(other_python, "LateWalk", num_envs=2, workers=1)
            assert _played(late, {0, 1, 2}, np.random.default_rng(1)) == reference
            for _ in range(2):
                assert _played(bridge(address=address, num_envs=2), {0, 1, 2}, np.random.default_rng(2)) == reference
            env = bridge(address=address)
            env.reset()
            with pytest.raises(UnsupportedError, match="a child that headrace started itself"):
                env.state_dict()
            env.close()
            monkeypatch.setenv("HEADRACE_TOKEN", "guessed")
            with pytest.raises(ConfigError, match="token: expected the one"):
                bridge(address=address)
        finally:
            listening.kill()
    monkeypatch.delenv("HEADRACE_TOKEN")
    with pytest.raises(ConfigError, match="HEADRACE_TOKEN"):
        bridge(address=address)
    monkeypatch.setenv("HEADRACE_TOKEN", "open sesame")
    with pytest.raises(EnvError, match=r"expected child\.py --listen there"):
        bridge(address=address)


@pytest.mark.usefixtures("nobody_left")
def test_pictures_and_snapshots_cross(other_python: str) -> None:
    env = _foreign(other_python, num_envs=3, workers=2, seed=4)
    env.reset()
    env.step(torch.ones(3, 2))
    drawn = env.render_each()
    assert drawn is not None
    assert [int(image[0, 0, 0]) for image in drawn] == [1, 1, 1]
    saved = env.state_dict()
    first = [env.step(torch.ones(3, 2)) for _ in range(12)]
    env.load_state_dict(saved)
    again = [env.step(torch.ones(3, 2)) for _ in range(12)]
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.obs["policy"], other.obs["policy"])
        assert torch.equal(one.reward, other.reward)
    env.close()


@pytest.mark.usefixtures("nobody_left")
def test_a_recipe_of_another_interpreter_survives_json_and_is_evaluated_by_name(
    other_python: str, tmp_path: Path
) -> None:
    env = _foreign(other_python, num_envs=2, env_kwargs={"size": 6}, seed=5)
    recipe = env.recipe
    assert recipe is not None
    assert headrace.EnvRecipe.from_json(recipe.to_json()) == recipe
    first = {group: rows[:1] for group, rows in env.reset()[0].items()}
    again = recipe.resolve().make(num_envs=1)
    assert all(torch.equal(rows, first[group]) for group, rows in again.reset()[0].items())
    env.close()
    again.close()
    for bad in ({"python": None}, {"source": "cartpole"}):
        with pytest.raises(ConfigError, match="python: expected an interpreter"):
            recipe.replace(**bad)


@pytest.mark.usefixtures("nobody_left")
def test_a_recipe_says_how_long_its_simulator_may_take(other_python: str) -> None:
    env = _foreign(other_python, num_envs=1, timeout=600.0)
    recipe = env.recipe
    env.close()
    assert recipe is not None
    assert recipe.timeout == 600.0
    assert "timeout" not in recipe.identity(), "it decides no episode"
    with pytest.raises(EnvError, match=r"within 0\.01 s"):
        recipe.replace(timeout=0.01).make()
    with pytest.raises(ConfigError, match="timeout: expected more than 0 seconds, got '5'"):
        recipe.replace(timeout="5")
    with pytest.raises(ConfigError, match="timeout: expected none with 'cartpole'"):
        headrace.EnvRecipe("cartpole", timeout=5.0)


@pytest.mark.usefixtures("nobody_left")
def test_what_the_simulator_prints_never_reaches_the_protocol(other_python: str) -> None:
    reference = _played(_foreign(other_python, num_envs=1), {0, 1})
    loud = _played(_foreign(other_python, num_envs=1, env_kwargs={"fault": "print"}), {0, 1})
    assert loud == reference


@pytest.mark.usefixtures("nobody_left")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", r"environment 0 raised ValueError in step: the gripper is stuck[\s\S]*toy_simulator\.py"),
        ("kill", r"environments 0 was ended by signal 9 \(SIGKILL\)[\s\S]*during step"),
        ("exit", r"ended with exit code 3, after printing:[\s\S]*the license server is gone[\s\S]*during step"),
        ("hang", r"no answer to step within 2 s"),
        ("close_pipe", r"environments 0 .*"),
        ("garbage", r"answered step with garbage: .*b'Segmentation fa"),
        ("kill_forked", r"environments 0 was ended by signal 9 \(SIGKILL\)[\s\S]*during step"),
    ],
)
def test_a_simulator_that_fails_is_a_clear_error(other_python: str, fault: str, message: str) -> None:
    env = _foreign(other_python, num_envs=1, env_kwargs={"fault": fault, "at": 1}, timeout=2.0)
    env.reset()
    with pytest.raises(EnvError, match=message):
        env.step(torch.zeros(1, 2))
    if fault == "raise":
        env.reset()
    else:
        with pytest.raises(LifecycleError):
            env.reset()
    env.close()


@pytest.mark.usefixtures("nobody_left")
def test_an_interpreter_by_name_is_the_one_on_the_path(
    other_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = Path(other_python)
    monkeypatch.setenv("PATH", str(python.parent), prepend=os.pathsep)
    file = tmp_path / "toy.yaml"
    file.write_text(f"source: entry:{TOY}:Walk\npython: {python.name}\nnum_envs: 1\n")
    env = headrace.EnvRecipe.load(file).make()
    env.reset()
    assert env.num_envs == 1
    env.close()
    with pytest.raises(ConfigError, match="python: expected an interpreter with a source entry:module:name"):
        headrace.EnvRecipe(f"entry:{TOY}:Walk")


@pytest.mark.usefixtures("nobody_left")
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"python": "/no/such/python"}, ConfigError, "expected the path of a Python interpreter"),
        ({"python": os.devnull}, ConfigError, "expected the path of a Python interpreter"),
        ({"entry": "no_such_module:make"}, EnvError, "ModuleNotFoundError: No module named 'no_such_module'"),
        ({"entry": f"{TOY}:NoSuchClass"}, ConfigError, "has no 'NoSuchClass'"),
        ({"entry": "/no/such/file.py:make"}, ConfigError, "found none at /no/such/file.py"),
        ({"entry": "make"}, ConfigError, "expected module:name"),
        ({"env_kwargs": {"fault": "make"}}, EnvError, "OSError: no such robot"),
        ({"env_kwargs": {"fault": "object"}}, ConfigError, "space: expected box"),
        ({"env_kwargs": {"unheard": 1}}, EnvError, "unexpected keyword argument 'unheard'"),
        ({"entry": f"{TOY}:Fickle", "workers": 1}, ConfigError, "expected the spaces of environment 0"),
        ({"entry": None}, ConfigError, "entry: expected module:name"),
        ({"address": "tcp://localhost:1"}, ConfigError, "expected python= or address="),
        ({"python": None}, ConfigError, "for this interpreter pass python=sys.executable"),
        ({"timeout": 0.0}, ConfigError, "expected more than 0 seconds"),
        ({"num_envs": 1.5}, ConfigError, "num_envs: expected an integer"),
        ({"source": "CartPole-v1"}, ConfigError, "expected no source"),
        ({"seed": "one"}, DtypeError, "seed: expected an integer"),
        ({"episode_stride": 0}, ConfigError, "episode_stride: expected at least 1"),
        ({"timeout": "5"}, ConfigError, "timeout: expected more than 0 seconds"),
        ({"env_kwargs": {"size": np.float32(4)}}, ConfigError, "env_kwargs: expected names and values that JSON"),
        ({"env_kwargs": ["size"]}, ConfigError, "env_kwargs: expected names and values that JSON"),
        ({"python": ""}, ConfigError, "python: expected a text"),
        ({"entry": 3}, ConfigError, "entry: expected a text"),
        ({"executor": "threads"}, ConfigError, "executor: expected none with another interpreter"),
        ({"python": None, "entry": None, "address": []}, ConfigError, "address: expected tcp://host:port, one"),
        ({"python": None, "entry": None, "address": 5}, ConfigError, "address: expected tcp://host:port, one"),
    ],
)
def test_bad_settings_are_refused(other_python: str, settings: Any, error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"python": other_python, "entry": f"{TOY}:Walk", "num_envs": 2, "timeout": 20.0}
    with pytest.raises(error, match=re.escape(message)):
        bridge(**{**given, **settings})


@pytest.mark.usefixtures("nobody_left")
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("WrongRow", ConfigError, "expected float32 (3,)"),
        ("Old", ConfigError, "give (obs, info)"),
        ("BrokenStart", EnvError, "environments [1] in reset: expected an observation of finite numbers"),
    ],
)
def test_rows_that_do_not_fit_are_refused(other_python: str, name: str, error: type[Exception], message: str) -> None:
    env = _foreign(other_python, name, num_envs=2, workers=1)
    with pytest.raises(error, match=re.escape(message)):
        env.reset()
    with pytest.raises(LifecycleError):
        env.step(torch.zeros(2, 2))
    env.close()


@pytest.mark.usefixtures("nobody_left")
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("draw_floats", ConfigError, "expected render() to give a picture uint8 (H, W, 3), got float64 (4, 4, 3)"),
        ("draw_list", EnvError, "environment 0 in render: expected a picture uint8 (H, W, 3), got uint8 (1, 4, 4, 3)"),
    ],
)
def test_pictures_that_are_none_are_refused(
    other_python: str, fault: str, error: type[Exception], message: str
) -> None:
    env = _foreign(other_python, num_envs=1, env_kwargs={"fault": fault, "at": 0})
    env.reset()
    with pytest.raises(error, match=re.escape(message)):
        env.render_each()
    env.close()


@pytest.mark.usefixtures("nobody_left")
def test_an_endless_time_out_and_a_path_are_taken(other_python: str) -> None:
    env = bridge(python=Path(other_python), entry=f"{TOY}:Pair", timeout=math.inf)
    assert env.recipe is not None
    assert env.recipe.python == other_python
    obs, _ = env.reset()
    assert {name: tuple(rows.shape) for name, rows in obs.items()} == {"policy/0": (1, 3), "policy/1": (1,)}
    env.step(torch.zeros(1, 2))
    env.close()


def test_a_child_whose_parent_is_killed_ends_itself_and_what_it_started_also_while_it_hangs(other_python: str) -> None:
    program = (
        "import os, torch, headrace, sys\n"
        f"env = headrace.bridge(python={other_python!r}, entry={str(TOY) + ':Walk'!r}, "
        "env_kwargs={'fault': 'hang', 'at': 1})\n"
        "env.reset(); print(env.backend.pids[0], flush=True); env.step(torch.zeros(1, 2))\n"
    )
    source = str(Path(headrace.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": source}
    ) as parent:
        assert parent.stdout is not None
        child_process = psutil.Process(int(parent.stdout.readline()))
        deadline = time.monotonic() + 20
        while not (started := child_process.children()):  # of the simulator, which then hangs
            assert time.monotonic() < deadline
            time.sleep(0.05)
        parent.send_signal(signal.SIGKILL)
    for process in (child_process, *started):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_entry_of_the_page_on_bridges_works(tmp_path: Path, other_python: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "bridges.md").read_text()
    shown = re.search(r'```python title="walk.py"\n(.*?)```', page, re.DOTALL)
    assert shown is not None
    (tmp_path / "walk.py").write_text(shown[1])
    env = bridge(python=other_python, entry=f"{tmp_path / 'walk.py'}:Walk", num_envs=2, workers=1)
    obs, _ = env.reset()
    assert obs["camera"].shape == (2, 84, 84, 3)
    assert env.instructions() == ("walk to the door",) * 2
    env.step(torch.ones(2, 2))
    env.close()


def test_another_protocol_is_refused(tmp_path: Path, other_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "child.py"
    old.write_text(CHILD_FILE.read_text().replace("PROTOCOL = 1\n", "PROTOCOL = 7\n"))
    monkeypatch.setattr(interpreter, "CHILD_FILE", old)
    with pytest.raises(ConfigError, match="expected protocol 1, got 7"):
        bridge(python=other_python, entry=f"{TOY}:Walk")


def test_the_child_is_one_file_of_python_3_8_with_the_standard_library_and_numpy() -> None:
    tree = ast.parse(CHILD_FILE.read_text(), feature_version=(3, 8))
    imported = {
        name.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    imported |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported - set(sys.stdlib_module_names) == {"numpy"}


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, 1.0, (2, 3), np.float64),
        spaces.Box(np.array([0, -4], dtype=np.int16), np.array([7, 9], dtype=np.int16)),
        spaces.Box(0, 255, (480, 640, 3), np.uint8),
        spaces.Box(2.0, 3.0, (), np.float32),
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[0, 1], [2, 3]])),
        spaces.MultiBinary((2, 2)),
        spaces.Text(30),
        spaces.Dict({"b": spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]), "a": spaces.Box(-1, 1, (1,))}),
    ],
)
def test_spaces_survive_the_way_through_json(space: spaces.Space[Any]) -> None:
    import json

    text = json.dumps(child.space_to_json(space))
    assert len(text) < 1000
    assert space_from_json(json.loads(text)) == space


def test_frames_that_are_none_are_refused_and_large_ones_arrive_whole() -> None:
    ours, theirs = socket.socketpair()
    channel, other = Channel(*[os.dup(ours.fileno())] * 2), Channel(*[os.dup(theirs.fileno())] * 2)
    import threading

    body = os.urandom(5_000_000)
    sender = threading.Thread(target=channel.send, args=({"call": "x"}, body), kwargs={"timeout": 30.0})
    sender.start()
    assert other.receive(timeout=30.0) == ({"call": "x"}, body)
    sender.join()
    with pytest.raises(TimeoutError):
        other.receive(timeout=0.05)
    head = child.FRAME.pack(b"HRC1", 1 << 31, 0)
    for junk in (
        b"GET / HTTP/1.1\r\n\r\n",
        head,
        child.FRAME.pack(b"HRC1", 3, 0) + b"{]}",
        child.FRAME.pack(b"HRC1", 2, 0) + b"[]",
    ):
        mine, yours = socket.socketpair()
        mine.sendall(junk)
        with pytest.raises(DataError):
            Channel(*[os.dup(yours.fileno())] * 2).receive(timeout=5.0)
        mine.close()
        yours.close()
    channel.close()
    ours.close()
    with pytest.raises(EOFError):
        other.receive(timeout=5.0)
    other.close()
    theirs.close()

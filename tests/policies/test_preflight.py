"""Preflight: what a policy states and what an environment gives are compared before the first episode."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from headrace.cli import main
from headrace.errors import ConfigError, DataError
from headrace.evaluation import PlayCfg, preflight
from headrace.policies import LeRobotPolicy, ObservationMap, PolicyServer, RemoteEngine, ServeCfg
from headrace.policies.preflight import FeatureSpec, Preflight
from headrace.types import Obs

CAMERA = "observation.images.top"


class Robot:
    """As a LeRobot policy: says what it reads in its ``config``."""

    def __init__(self, width: int = 1, **features: tuple[int, ...]) -> None:
        names = {"top": CAMERA, "wrist": "observation.images.wrist", "state": "observation.state"}
        self.config = SimpleNamespace(
            input_features={names[key]: SimpleNamespace(shape=shape) for key, shape in features.items()},
            output_features={"action": SimpleNamespace(shape=(width,))},
            chunk_size=3,
            n_obs_steps=1,
        )

    def predict_action_chunk(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.zeros(len(batch["observation.state"]), 3, 1)


def _same(_: object, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch


def first(obs: Obs) -> Tensor:
    return next(iter(obs.values()))[:, :1]


def pipeline(**means: list[float]) -> Any:
    """A processor with the statistics of a dataset."""
    steps = [SimpleNamespace(stats={f"observation.{key}": {"mean": mean} for key, mean in means.items()})]
    return type("Pipeline", (), {"steps": steps, "__call__": _same})()


def lines(found: Preflight) -> dict[str, tuple[str, str]]:
    return {row.name: (row.verdict, row.environment) for row in found.rows}


def test_every_input_the_action_and_the_chunk_have_a_line() -> None:
    mapping = ObservationMap(keys={CAMERA: "policy", "observation.state": "critic[0:2] + critic[2:3]"})
    policy = LeRobotPolicy(Robot(top=(6, 48, 48), state=(3,)))
    found = preflight("cartpole-camera", policy, play=PlayCfg(mapping=mapping, latency=1))
    assert lines(found) == {
        CAMERA: ("mapped", "policy: uint8 (48, 48, 6)"),
        "observation.state": ("mapped", "critic[0:2] + critic[2:3]: float32 (3,)"),
        "action": ("same", "float32 (1,) in [-1, 1]"),
        "chunk": ("same", "2 rows from row 0 on, 1 steps late"),
    }
    assert not found.refused
    found.check()
    plain = lines(preflight("cartpole-camera", first))
    assert plain["policy"] == ("not stated", "policy: uint8 (48, 48, 6)")
    shipped = preflight("pusher-solid")
    assert [row.verdict for row in shipped.rows] == ["same"] * 3
    assert "normalized" in shipped.rows[0].policy


def test_what_does_not_fit_is_refused_before_the_first_episode_all_of_it_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    policy = LeRobotPolicy(Robot(top=(3, 64, 64), state=(9,)), groups={CAMERA: "policy", "observation.state": "critic"})
    found = preflight("cartpole-camera", policy)
    assert [row.name for row in found.refused] == [CAMERA, "observation.state"]
    env = headrace.make("cartpole-camera", 2, autoreset="disabled", final_obs=False)
    env.step = None  # type: ignore[method-assign, assignment]  # no step may be taken
    with pytest.raises(ConfigError, match=r"\(3, 64, 64\), got \(48, 48, 6\)(.|\n)*\(9,\), got \(4,\)"):
        headrace.evaluate(env, policy, episodes=2, progress=False)
    refused = preflight("cartpole", first, play=PlayCfg(mapping=ObservationMap(keys={"x": "camera"})))
    assert "expected a group of the environment, ['policy'], got 'camera'" in refused.refused[0].note
    assert main(["evaluate", "pusher-solid", "--preflight"]) == 0
    assert main(["evaluate", "pusher-solid", "--preflight", "--map", "policy=policy[0:3]"]) == 1
    out = capsys.readouterr().out
    assert "refused" in out
    assert "episodes, completed" not in out


def test_statistics_of_other_units_are_warned_about_and_cameras_have_an_order() -> None:
    groups = {CAMERA: "policy", "observation.state": "critic", "observation.images.wrist": "policy"}
    robot = Robot(top=(6, 48, 48), wrist=(6, 48, 48), state=(4,))
    means = {"images.top": [0.5] * 6, "images.wrist": [127.0] * 6, "state": [0.0] * 4}
    rows = preflight("cartpole-camera", LeRobotPolicy(robot, groups=groups, preprocessor=pipeline(**means))).rows
    found = {row.name: row for row in rows}
    assert found[CAMERA].verdict == "converted"
    assert found[CAMERA].note == "float32 (6, 48, 48)"
    assert found["observation.images.wrist"].verdict == "warned"
    assert "in 6 of 6 numbers" in found["observation.images.wrist"].note
    assert found["cameras"].policy == f"{CAMERA}, observation.images.wrist"
    short = LeRobotPolicy(robot, groups=groups, preprocessor=pipeline(state=[0.0] * 3))
    assert "statistics of 'observation.state' have 3 numbers" in preflight("cartpole-camera", short).refused[0].note


def test_a_server_states_what_its_policy_reads() -> None:
    policy = LeRobotPolicy(Robot(state=(7,)))
    env = headrace.make("cartpole", 1, autoreset="disabled", final_obs=False)
    with PolicyServer(policy, ServeCfg(port=0)) as server, RemoteEngine(server.address) as engine:
        assert engine.feature_specs == policy.feature_specs
        found = preflight(env, engine.policy, play=PlayCfg(engine=engine))
    assert "(7,), got (4,)" in found.refused[0].note
    spec = FeatureSpec(groups=("a", "b"), shape=(3,), dtype="uint8", convert="picture", mean=(0.5,))
    assert FeatureSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    for damaged in (3, {"shape": 3}, {"shape": ["x"]}, {"size": [3]}, {"dtype": 4}, {"convert": "round"}):
        with pytest.raises(DataError, match="features: "):
            FeatureSpec.from_json(damaged)

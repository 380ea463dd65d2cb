"""Measurements of ``benchmarks/aloha.py``, where what they need is installed: JSON in, a line of JSON for each.

``peer``: LeRobot's own loop on the genuine gym-aloha (.venv-aloha). ``ours``: headrace plays the same policy
(.venv-lerobot). ``physics``: steps without pictures and without a policy, of either.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("MUJOCO_GL", "egl")
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np

START = [0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.1] * 2


class Clock:
    """Adds up the time inside a function, and its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds, self.calls = function, 0.0, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self.function(*arguments, **named)
        finally:
            self.seconds += time.perf_counter() - begin
            self.calls += 1


@functools.cache
def name_operators() -> object:
    """torchvision's operators are built for another torch; LeRobot imports torchvision but calls none of these."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def make_act(chunk: int) -> tuple[Any, Any, Any]:
    """LeRobot's ACT of default size with random weights, and its processors; plays ``chunk`` of its 100 actions."""
    import torch

    name_operators()
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.factory import make_pre_post_processors

    torch.manual_seed(0)
    config = ACTConfig(
        input_features={
            "observation.state": PolicyFeature(FeatureType.STATE, (14,)),
            "observation.images.top": PolicyFeature(FeatureType.VISUAL, (3, 480, 640)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (14,))},
        chunk_size=100,
        n_action_steps=chunk,
        pretrained_backbone_weights=None,
        device="cpu",
    )
    policy = ACTPolicy(config)
    policy.eval()
    policy.predict_action_chunk = Clock(policy.predict_action_chunk)
    return policy, *make_pre_post_processors(config)


def peer(chunk: int, size: int, steps: int) -> dict[str, float]:
    """LeRobot's ``rollout`` on gym-aloha, all episodes at once in this process."""
    import torch

    policy, preprocessor, postprocessor = make_act(chunk)
    from lerobot.envs.configs import AlohaEnv
    from lerobot.envs.factory import make_env, make_env_pre_post_processors
    from lerobot.scripts import lerobot_eval

    clock = patch()
    config = AlohaEnv(task="AlohaTransferCube-v0", episode_length=steps)
    env = make_env(config, n_envs=size, use_async_envs=False)["aloha"][0]
    processors = make_env_pre_post_processors(config, policy.config)
    with torch.inference_mode():
        warm(policy, size)
    # the first picture builds a context
    env.reset(seed=[0] * size)
    clock.seconds, clock.calls = 0.0, 0
    begin = time.perf_counter()
    lerobot_eval.rollout(env, policy, *processors, preprocessor, postprocessor, seeds=list(range(size)))
    seconds = time.perf_counter() - begin
    # of each step, of the reset before the first and, as LeRobot's vector environments restart at once, after the last
    pictures = size * (steps + 2)
    assert clock.calls == pictures, (clock.calls, pictures)
    env.close()
    inferred = policy.predict_action_chunk
    rows = {"calls": inferred.calls, "rows": inferred.calls * size, "rows_per_row": 1.0}
    return {"seconds": seconds, "policy": inferred.seconds, "pictures": pictures, "render": clock.seconds, **rows}


def warm(policy: Any, rows: int) -> None:
    """The first call of a model is slower."""
    import torch

    batch = {"observation.state": torch.zeros(rows, 14), "observation.images.top": torch.zeros(rows, 3, 480, 640)}
    policy.predict_action_chunk(batch)
    policy.predict_action_chunk.seconds, policy.predict_action_chunk.calls = 0.0, 0


@functools.cache
def genuine_render() -> Callable[..., Any]:
    """dm-control's own, before anything was put in its place."""
    from dm_control.mujoco import Physics

    return Physics.render


def patch() -> Clock:
    """Time gym-aloha's pictures, and draw those alone that it returns."""
    from dm_control.mujoco import Physics

    clock = Clock(genuine_render())
    nothing = np.zeros((1, 1, 3), np.uint8)

    def render(self: Any, **options: Any) -> Any:
        return clock(self, **options) if options["camera_id"] == "top" else nothing

    Physics.render = render
    return clock


def ours(renderer: str, chunk: int, episodes: int, steps: int) -> dict[str, float]:
    """The same policy through headrace's evaluation."""
    import torch

    policy, preprocessor, postprocessor = make_act(chunk)
    import headrace
    from headrace import evaluate
    from headrace.evaluation import PlayCfg
    from headrace.policies import LeRobotPolicy

    settings = {"episode_length": steps, "renderer": renderer}
    env = headrace.make("aloha-transfer-cube", episodes, autoreset="disabled", final_obs=False, overrides=settings)
    adapted = LeRobotPolicy(policy, preprocessor=preprocessor, postprocessor=postprocessor)
    with torch.inference_mode():
        warm(policy, episodes)
    # kernels are compiled and the first picture builds a context
    env.reset()
    env.step(torch.tensor(START).expand(episodes, -1))
    drawn = env.frames_drawn
    begin = time.perf_counter()
    found = evaluate(env, adapted, episodes=episodes, play=PlayCfg(execute=chunk), progress=False)
    seconds = time.perf_counter() - begin
    assert found.counters.env_steps == episodes * steps, "an episode of random weights ended early"
    stages = found.counters.stages
    env.close()
    return {
        "seconds": seconds,
        "policy": policy.predict_action_chunk.seconds,
        "render": stages.get("render", 0.0) + stages.get("observe", 0.0),
        "physics": stages["physics"],
        "pictures": env.frames_drawn - drawn,
        "calls": policy.predict_action_chunk.calls,
        "rows": found.counters.rows_inferred,
        "rows_per_row": found.rows_per_row,
    }


def commands(count: int, num_envs: int) -> np.ndarray:
    """Arms that swing around their start, (count, num_envs, 14)."""
    phase = np.arange(count)[:, None, None] * 0.05 + np.arange(num_envs)[:, None] * 0.7 + np.arange(14) * 0.9
    return (np.array(START) + 0.15 * np.sin(phase)).astype(np.float32)


def physics(who: str, num_envs: int, steps: int) -> dict[str, float]:
    """Env-steps per second without pictures."""
    actions = commands(steps + 10, num_envs)
    if who == "ours":
        import torch

        import headrace

        env: Any = headrace.make("aloha-transfer-cube-state", num_envs, overrides={"episode_length": steps + 20})
        rows = [torch.from_numpy(row) for row in actions]
    else:
        import gym_aloha  # noqa: F401  # registers its environments
        import gymnasium
        from dm_control.mujoco import Physics

        nothing = np.zeros((480, 640, 3), np.uint8)
        genuine_render()
        Physics.render = lambda *_, **__: nothing
        kind = "sync" if who == "genuine" else "async"
        env = gymnasium.make_vec(
            "gym_aloha/AlohaTransferCube-v0",
            num_envs=num_envs,
            vectorization_mode=kind,
            obs_type="pixels_agent_pos",
            max_episode_steps=steps + 20,
        )
        rows = list(actions)
    env.reset(seed=0)
    for row in rows[:10]:
        env.step(row)
    begin = time.perf_counter()
    for row in rows[10:]:
        env.step(row)
    rate = num_envs * steps / (time.perf_counter() - begin)
    env.close()
    return {"rate": rate}


if __name__ == "__main__":
    for job, *values in json.loads(sys.argv[1]):
        print("FOUND", json.dumps({"peer": peer, "ours": ours, "physics": physics}[job](*values)), flush=True)

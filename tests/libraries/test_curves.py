"""Curves that the libraries log themselves, read back from their own TensorBoard files."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import DataError
from headrace.learning import PPOCfg
from headrace.libraries import library as spec_of
from headrace.libraries import read_curves
from headrace.libraries.learner import LearnerEnv
from headrace.libraries.torch_state import library_run

ENVS, STEPS, ITERATIONS = 8, 24, 3
SHORT = PPOCfg(steps=STEPS, epochs=1, minibatches=2, hidden=(16,))


def _rsl_rl(core: LearnerEnv, folder: Path) -> None:
    from rsl_rl.runners import OnPolicyRunner

    from headrace.libraries.rsl_rl import RslRlEnv
    from headrace.libraries.rsl_rl._learner import runner_config

    OnPolicyRunner(RslRlEnv(core), runner_config(SHORT, core), log_dir=str(folder)).learn(ITERATIONS)


def _rl_games(core: LearnerEnv, folder: Path) -> None:
    from rl_games.algos_torch.a2c_continuous import A2CAgent

    from headrace.libraries.rl_games import RlGamesEnv
    from headrace.libraries.rl_games._learner import agent_params

    params = agent_params(SHORT, RlGamesEnv(core), str(folder))
    params["config"] |= {"max_epochs": ITERATIONS}
    agent: Any = A2CAgent("run", params)
    agent.train()
    agent.writer.close()


def _skrl(core: LearnerEnv, folder: Path) -> None:
    from skrl.agents.torch.ppo import PPO
    from skrl.memories.torch import RandomMemory
    from skrl.trainers.torch import SequentialTrainer

    from headrace.libraries.skrl import SkrlEnv
    from headrace.libraries.skrl._learner import Actor, Critic, Interface, agent_config

    env = SkrlEnv(core)
    interface = Interface(
        observation_space=env.observation_space,
        state_space=env.state_space,
        action_space=env.action_space,
        device=core.device,
    )
    cfg: Any = agent_config(SHORT, env)
    cfg.experiment = {"directory": str(folder), "write_interval": STEPS}
    agent = PPO(
        models={"policy": Actor(interface, SHORT), "value": Critic(interface, SHORT)},
        memory=RandomMemory(memory_size=STEPS, num_envs=ENVS, device=core.device),
        **interface,
        cfg=cfg,
    )
    options: Any = {"timesteps": ITERATIONS * STEPS, "disable_progressbar": True, "close_environment_at_exit": False}
    options |= {"headless": True}
    SequentialTrainer(env=env, agents=agent, cfg=options).train()
    agent.writer.close()


def _sb3(core: LearnerEnv, folder: Path) -> None:
    from stable_baselines3 import PPO

    from headrace.libraries.sb3 import Sb3Env

    model = PPO("MlpPolicy", Sb3Env(core), n_steps=STEPS, batch_size=ENVS * STEPS, tensorboard_log=str(folder))
    model.learn(ITERATIONS * STEPS * ENVS)


TRAINERS: dict[str, Callable[[LearnerEnv, Path], None]] = {
    "rsl_rl": _rsl_rl,
    "rl_games": _rl_games,
    "skrl": _skrl,
    "sb3": _sb3,
}


@pytest.mark.parametrize("library", TRAINERS)
def test_the_curve_a_library_logs_is_found_and_is_the_one_counted_here(library: str, tmp_path: Path) -> None:
    """The library's own trainer and log over our environment: its last point is the mean of the episodes that ended."""
    with library_run(seed=1), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the libraries' own, of their loggers
        core = LearnerEnv(headrace.make("cartpole", ENVS, seed=5, threads=1), reward_scale=None)
        TRAINERS[library](core, tmp_path)
        finished = core.finished()
    curves = read_curves(tmp_path, library)
    assert len(curves.at) == len(curves.reward) == len(curves.length) >= 2
    per_iteration = {"iterations": 1, "steps": STEPS, "frames": STEPS * ENVS}[spec_of(library).curves.axis]
    assert curves.at[-1] - curves.at[-2] == per_iteration
    # all four average over the last 100 episodes; fewer have ended. rl_games keeps a running mean in float32, skrl the
    # mean over the steps since it wrote last, in which the average moved
    assert len(finished) <= 100
    within = 0.35 if library == "skrl" else 1e-3
    assert curves.reward[-1] == pytest.approx(float(finished.returns.mean()), rel=within)
    assert curves.length[-1] == pytest.approx(float(finished.lengths.double().mean()), rel=within)


def test_of_several_runs_the_newest_is_read(tmp_path: Path) -> None:
    import os

    from torch.utils.tensorboard.writer import SummaryWriter

    for name, value, moment in (("PPO_2", 5.0, 2_000.0), ("PPO_10", 7.0, 3_000.0), ("PPO_1", 3.0, 1_000.0)):
        with SummaryWriter(str(tmp_path / name)) as writer:
            writer.add_scalar(spec_of("sb3").curves.reward, value, 64)
            writer.add_scalar(spec_of("sb3").curves.length, 2 * value, 64)
        for file in (tmp_path / name).iterdir():
            os.utime(file, (moment, moment))
    curves = read_curves(tmp_path, "sb3")
    assert (curves.at, curves.reward, curves.length) == ([64], [7.0], [14.0])


def test_a_folder_without_the_curve_says_what_it_has(tmp_path: Path) -> None:
    from torch.utils.tensorboard.writer import SummaryWriter

    with pytest.raises(DataError, match="got none"):
        read_curves(tmp_path, "sb3")
    writer = SummaryWriter(str(tmp_path / "one"))
    writer.add_scalar("loss", 1.0, 0)
    writer.close()
    with pytest.raises(DataError, match="'rollout/ep_rew_mean' of sb3, got \\['loss'\\]"):
        read_curves(tmp_path, "sb3")

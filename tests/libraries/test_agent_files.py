"""Libraries' own configurations: passed through whole, trained, resumed without a trace, and played."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.bench import read_bundle
from headrace.cli.main import main
from headrace.errors import ConfigError, DataError
from headrace.libraries.registry import check_agent, library, make_learner, read_agent
from headrace.libraries.training import library_run

MLP = {"class_name": "MLPModel", "hidden_dims": [16], "activation": "elu", "obs_normalization": True}
GAUSSIAN = {"class_name": "GaussianDistribution", "init_std": 1.0}
RSL_RL: dict[str, Any] = {
    "num_steps_per_env": 12,
    "max_iterations": 1500,
    "experiment_name": "cartpole",
    "algorithm": {
        "class_name": "PPO",
        "num_learning_epochs": 2,
        "num_mini_batches": 2,
        "learning_rate": 1e-3,
        "schedule": "adaptive",
        "desired_kl": 0.01,
        "rnd_cfg": {
            "num_outputs": 1,
            "predictor_hidden_dims": [8],
            "target_hidden_dims": [8],
            "state_normalization": True,
            "reward_normalization": True,
            "weight": 10.0,
            "weight_schedule": {"mode": "linear", "initial_step": 0, "final_step": 60, "final_value": 0.0},
        },
    },
    "actor": {**MLP, "distribution_cfg": GAUSSIAN},
    "critic": MLP,
}
RL_GAMES: dict[str, Any] = {
    "params": {
        "seed": 42,
        "algo": {"name": "a2c_continuous"},
        "model": {"name": "continuous_a2c_logstd"},
        "network": {
            "name": "actor_critic",
            "separate": False,
            "space": {
                "continuous": {
                    "mu_activation": "None",
                    "sigma_activation": "None",
                    "mu_init": {"name": "default"},
                    "sigma_init": {"name": "const_initializer", "val": 0},
                    "fixed_sigma": True,
                }
            },
            "mlp": {"units": [16], "activation": "elu", "d2rl": False, "initializer": {"name": "default"}},
        },
        "load_checkpoint": False,
        "config": {
            "name": "cartpole",
            "normalize_input": True,
            "normalize_value": True,
            "value_bootstrap": True,
            "reward_shaper": {"scale_value": 0.1},
            "normalize_advantage": True,
            "gamma": 0.99,
            "tau": 0.95,
            "learning_rate": 3e-4,
            "lr_schedule": "adaptive",
            "kl_threshold": 0.008,
            "score_to_win": 20000,
            "max_epochs": 150,
            "grad_norm": 1.0,
            "entropy_coef": 0.0,
            "truncate_grads": True,
            "e_clip": 0.2,
            "horizon_length": 12,
            "minibatch_size": 24,
            "mini_epochs": 2,
            "critic_coef": 4,
            "clip_value": True,
            "bounds_loss_coef": 0.0001,
        },
    }
}
LAYERS = {"name": "net", "input": "OBSERVATIONS", "layers": [16], "activations": "elu"}
BOTH = {**LAYERS, "input": "concatenate([OBSERVATIONS, ACTIONS])"}
CRITIC = {"class": "DeterministicMixin", "network": [BOTH], "output": "ONE"}
GAUSSIAN_MIXIN = {"class": "GaussianMixin", "network": [LAYERS], "initial_log_std": 0.0}
SKRL_PPO: dict[str, Any] = {
    "seed": 42,
    "models": {
        "separate": False,
        "policy": {**GAUSSIAN_MIXIN, "clip_actions": False, "output": "ACTIONS"},
        "value": {"class": "DeterministicMixin", "network": [LAYERS], "output": "ONE"},
    },
    "memory": {"class": "RandomMemory", "memory_size": -1},
    "agent": {
        "class": "PPO",
        "rollouts": 12,
        "learning_epochs": 2,
        "mini_batches": 2,
        "learning_rate": 3e-4,
        "learning_rate_scheduler": "KLAdaptiveLR",
        "learning_rate_scheduler_kwargs": {"kl_threshold": 0.008},
        "observation_preprocessor": "RunningStandardScaler",
        "observation_preprocessor_kwargs": None,
        "value_preprocessor": "RunningStandardScaler",
        "value_preprocessor_kwargs": None,
        "rewards_shaper_scale": 0.1,
        "experiment": {"directory": "cartpole", "write_interval": "auto"},
    },
    "trainer": {"class": "SequentialTrainer", "timesteps": 2400},
}
SKRL_SAC: dict[str, Any] = {
    "models": {
        "separate": True,
        "policy": {**GAUSSIAN_MIXIN, "clip_actions": True, "output": "tanh(ACTIONS)"},
        **dict.fromkeys(("critic_1", "critic_2", "target_critic_1", "target_critic_2"), CRITIC),
    },
    "memory": {"class": "RandomMemory", "memory_size": 100},
    "agent": {"class": "SAC", "batch_size": 16, "learning_starts": 20, "random_timesteps": 10},
    "trainer": {"class": "SequentialTrainer"},
}
OFF_POLICY = {"buffer_size": 400, "learning_starts": 100, "batch_size": 16, "train_freq": 5, "gradient_steps": -1}
AGENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "rsl_rl": ("rsl_rl", RSL_RL),
    "sb3 PPO": ("sb3", {"n_steps": 12, "batch_size": 24, "n_epochs": 2, "policy_kwargs": {"activation_fn": "nn.ELU"}}),
    "sb3 SAC": ("sb3", {"algorithm": "SAC", "policy_kwargs": {"net_arch": [16]}, **OFF_POLICY}),
    "sb3 TD3": ("sb3", {"algorithm": "TD3", "policy_kwargs": {"net_arch": [16]}, **OFF_POLICY}),
    "sb3 DQN": (
        "sb3",
        {"algorithm": "DQN", "total_timesteps": 600, "target_update_interval": 50, "policy_kwargs": {"net_arch": [16]}}
        | OFF_POLICY,
    ),
    "rl_games": ("rl_games", RL_GAMES),
    "skrl PPO": ("skrl", SKRL_PPO),
    "skrl SAC": ("skrl", SKRL_SAC),
}
TASKS = {"sb3 DQN": "cartpole-discrete"}
STEPS = {"sb3 SAC": 35, "sb3 TD3": 35, "sb3 DQN": 35, "skrl SAC": 32}
"""Of an iteration: 32 at least, in whole turns."""
EVERY = pytest.mark.parametrize("name", AGENTS)


def train(name: str, output: Path, iterations: int, **more: Any) -> headrace.bench.schema.TrainingBundle:
    library, agent = AGENTS[name]
    more = {"agent": agent, "num_envs": 4, "seed": 3, "threads": 1} | more
    run = headrace.RunCfg(output=output)
    return headrace.train(TASKS.get(name, "cartpole"), library=library, iterations=iterations, run=run, **more).bundle


def tensors(found: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return {path: found}
    items = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, (list, tuple)) else ()
    return {key: value for name, each in items for key, value in tensors(each, f"{path}/{name}").items()}


def weights(run: Path) -> dict[str, torch.Tensor]:
    path = next((run / "checkpoints").glob("last.*"))
    if path.suffix != ".zip":
        return tensors(torch.load(path, weights_only=True))
    with zipfile.ZipFile(path) as archive:
        files = [name for name in archive.namelist() if name.endswith(".pth") and archive.getinfo(name).file_size]
        return {
            key: value
            for name in files
            for key, value in tensors(torch.load(archive.open(name), weights_only=True), name).items()
        }


@EVERY
def test_a_resumed_training_equals_one_without_a_break_and_plays(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _library, agent = AGENTS[name]
    bundle = train(name, tmp_path / "whole", 4)
    assert bundle.library is not None
    assert bundle.library.settings == agent, "passed through whole"
    assert bundle.library.algorithm == (name.partition(" ")[2] or "PPO")
    assert bundle.runtime.steps_per_iteration == STEPS.get(name, 12) * 4
    train(name, tmp_path / "half", 2)
    rest = train(name, tmp_path / "rest", 2, agent=None, resume_from=tmp_path / "half")
    assert rest.library is not None
    assert rest.library.settings == agent, "inherited from the run"
    assert rest.run.resumed_from is not None
    assert rest.run.resumed_from.changed == {}
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "rest")
    assert one.keys() == other.keys()
    assert len(one) > 4
    for key in one:
        assert torch.equal(one[key], other[key]), key
    play = [
        "play",
        TASKS.get(name, "cartpole"),
        "--num-envs",
        "4",
        "--episodes",
        "4",
        "--policy",
        str(tmp_path / "rest"),
    ]
    assert main([*play, "--output", str(tmp_path / "p")]) == 0
    capsys.readouterr()
    with pytest.raises(ConfigError, match="trained with an agent configuration"):
        train(name, tmp_path / "b", 1, agent=None, ppo=headrace.learning.PPOCfg(), resume_from=tmp_path / "half")


@EVERY
def test_settings_reach_the_library_and_unknown_ones_are_its_own_error(name: str) -> None:
    spec, agent = AGENTS[name]
    env = headrace.make(TASKS.get(name, "cartpole"), 4, seed=0, threads=1)
    with library_run(seed=0):
        if name == "rsl_rl":
            runner = make_learner(spec, env, agent=agent).runner  # type: ignore[attr-defined]  # of this library
            assert (runner.alg.schedule, runner.alg.desired_kl, runner.alg.rnd is None) == ("adaptive", 0.01, False)
            wrong = {**agent, "algorithm": {**agent["algorithm"], "clip": 0.1}}
        elif name == "rl_games":  # which ignores what it does not know
            made = make_learner(spec, env, agent=agent).agent  # type: ignore[attr-defined]  # of this library
            assert (made.is_adaptive_lr, made.normalize_value, made.minibatch_size) == (True, True, 24)
            return
        elif spec == "skrl":
            made = make_learner(spec, env, agent=agent).agent  # type: ignore[attr-defined]  # of this library
            assert type(made).__name__ == name[5:]
            wrong = {**agent, "agent": {**agent["agent"], "clip": 0.1}}
        else:
            model = make_learner(spec, env, agent=agent).model  # type: ignore[attr-defined]  # of this library
            assert (model.batch_size, type(model).__name__) == (agent["batch_size"], name[4:])
            wrong = {**agent, "clip": 0.1}
        with pytest.raises(ConfigError, match=r"refused it: TypeError: .*'clip'"):
            make_learner(spec, env, agent=wrong)
        assert agent == AGENTS[name][1], "not changed by the library"


def test_what_no_library_can_take_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = headrace.make("cartpole", 4, seed=0, threads=1)
    with pytest.raises(ConfigError, match=r"headrace takes no configuration of its own here.*OnPolicyRunner.*SAC"):
        make_learner("headrace", env, agent={})
    with library_run(seed=0), pytest.raises(ConfigError, match="expected one of PPO, SAC, TD3, DQN as algorithm"):
        make_learner("sb3", env, agent={"algorithm": "A2C"})
    with library_run(seed=0), pytest.raises(ConfigError, match=r"refused it: AssertionError.*Box"):
        make_learner("sb3", env, agent={"algorithm": "DQN"})
    with library_run(seed=0), pytest.raises(ConfigError, match="expected one of ppo, sac"):
        make_learner("skrl", env, agent={**SKRL_PPO, "agent": {"class": "TD3"}})
    one = headrace.make("cartpole", 1, seed=0, threads=1)
    with library_run(seed=0), pytest.raises(ConfigError, match="expected a number of steps, got episodes"):
        make_learner("sb3", one, agent={"algorithm": "SAC", "train_freq": [1, "episode"]})
    file = tmp_path / "agent.yaml"
    file.write_text("learning_rate: 3e-4\nn_steps: 8\nbatch_size: 16\n")
    assert read_agent(file) == {"learning_rate": 3e-4, "n_steps": 8, "batch_size": 16}
    with pytest.raises(ConfigError, match="as in a file"):
        read_agent({"policy": object})
    arguments = ["train", "cartpole", "--library", "sb3", "--agent", str(file), "--output", str(tmp_path / "run")]
    assert main([*arguments, "--ppo", "steps=4"]) == 2
    assert "expected one of them, got both" in " ".join(capsys.readouterr().err.split())
    assert main([*arguments, "--num-envs", "4", "--iterations", "1"]) == 0
    assert read_bundle(tmp_path / "run" / "training.json").library.settings["learning_rate"] == 3e-4


def test_a_checkpoint_that_names_code_of_others_needs_trust(tmp_path: Path) -> None:
    for agent in (RSL_RL, SKRL_PPO, SKRL_SAC, RL_GAMES):
        check_agent(agent, "file")
    for name in ("os:system", "os.system", "a(b)"):
        with pytest.raises(DataError, match="--trust-checkpoint"):
            check_agent({"algorithm": {"hooks": [[{"class_name": name}]]}}, "file")
    train("sb3 PPO", tmp_path / "run", 1)
    path = tmp_path / "run" / "checkpoints" / "last.zip"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    meta = json.loads(members["headrace.json"])
    meta["agent"]["policy"] = "my_package:Policy"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**members, "headrace.json": json.dumps(meta).encode()}.items():
            archive.writestr(name, content)
    env = headrace.make("cartpole", 4, seed=0, threads=1)
    with pytest.raises(DataError, match="can execute arbitrary code"):
        headrace.load_policy(path, env)
    assert library("sb3").agent is not None

"""Each library's environment beside a twin that is stepped directly: what a library is told is what happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from headrace.learning import PPOCfg
from headrace.libraries import make_learner
from headrace.libraries.learner import CheckpointMeta, LearnerEnv
from headrace.libraries.registry import library as spec_of
from headrace.libraries.training import library_run
from headrace.types import Step

ENVS, LIMIT, STEPS, SCALE = 4, 14, 60, 0.1
PUSH = torch.tensor([[5.0], [-5.0], [0.0], [0.01]])
"""Beyond -1 to 1 in two environments, which fall; the others last until they are cut off."""


def _twins() -> tuple[LearnerEnv, headrace.BatchEnv]:
    env, twin = (
        headrace.make("cartpole", ENVS, seed=5, threads=1, overrides={"episode_length": LIMIT}) for _ in range(2)
    )
    twin.reset()
    return LearnerEnv(env, reward_scale=SCALE), twin


def _direct(twin: headrace.BatchEnv) -> Step:
    space: Any = twin.single_action_space
    return twin.step(PUSH.clamp(-1.0, 1.0) * float(space.high[0]))


def _true_last(step: Step) -> Tensor:
    """The observation that the action led to."""
    if "final_obs" not in step.info or "_final_obs" not in step.info:
        return step.obs["policy"]
    return torch.where(step.info["_final_obs"][:, None], step.info["final_obs"]["policy"], step.obs["policy"])


def _rsl_rl(core: LearnerEnv) -> Callable[[], dict[str, Any]]:
    from headrace.libraries.rsl_rl import RslRlEnv

    env = RslRlEnv(core)

    def step() -> dict[str, Any]:
        with torch.inference_mode():  # as rsl_rl collects
            obs, reward, dones, extras = env.step(PUSH.clone())
        assert dones.dtype == torch.int64
        assert obs.batch_size == (ENVS,)
        assert not any(tensor.is_inference() for tensor in (obs["policy"], reward, core.obs["policy"]))
        return {"obs": obs["policy"], "reward": reward, "ended": dones.bool(), "cut": extras.get("time_outs")}

    return step


def _rl_games(core: LearnerEnv) -> Callable[[], dict[str, Any]]:
    from headrace.libraries.rl_games import RlGamesEnv

    env = RlGamesEnv(core)
    env.reset()

    def step() -> dict[str, Any]:
        obs, reward, dones, infos = env.step(PUSH)
        return {"obs": obs["obs"], "reward": reward, "ended": dones, "cut": infos.get("time_outs")}

    return step


def _skrl(core: LearnerEnv) -> Callable[[], dict[str, Any]]:
    from headrace.libraries.skrl import SkrlEnv

    env = SkrlEnv(core)
    env.reset()

    def step() -> dict[str, Any]:
        obs, reward, terminated, truncated, infos = env.step(PUSH)
        assert reward.shape == terminated.shape == truncated.shape == (ENVS, 1)
        ended, last = (terminated | truncated)[:, 0], infos.get("final_observations", obs)
        found = {"obs": obs, "reward": reward[:, 0].clone(), "ended": ended, "cut": truncated[:, 0], "last": last}
        reward += 1e6  # as skrl does, in place; it must be nobody else's
        return found

    return step


def _sb3(core: LearnerEnv) -> Callable[[], dict[str, Any]]:
    from headrace.libraries.sb3 import Sb3Env

    env = Sb3Env(core)
    env.reset()

    def step() -> dict[str, Any]:
        env.step_async(PUSH.clamp(-1.0, 1.0).numpy())  # SB3 cuts actions itself
        obs, reward, dones, infos = env.step_wait()
        cut = torch.tensor([bool(info.get("TimeLimit.truncated")) for info in infos])
        last = torch.from_numpy(obs).clone()
        for slot, info in enumerate(infos):
            assert set(info) <= {"episode", "TimeLimit.truncated", "terminal_observation", "is_success"}
            if "terminal_observation" in info:
                last[slot] = torch.from_numpy(info["terminal_observation"])
        tensors = {"obs": torch.from_numpy(obs), "ended": torch.from_numpy(dones), "cut": cut, "last": last}
        found = tensors | {"reward": torch.from_numpy(reward).clone()}
        reward += 1e6  # as SB3 does, in place
        return found

    return step


ADAPTERS = {"rsl_rl": _rsl_rl, "rl_games": _rl_games, "skrl": _skrl, "sb3": _sb3}


@pytest.mark.parametrize("library", ADAPTERS)
def test_a_library_is_told_what_happened_and_the_true_last_observation(library: str) -> None:
    core, twin = _twins()
    step = ADAPTERS[library](core)
    ended, cut = 0, 0
    for _ in range(STEPS):
        told, true = step(), _direct(twin)
        only_cut = true.truncated & ~true.terminated
        assert torch.equal(told["obs"], true.obs["policy"])
        assert torch.equal(told["reward"], true.reward * SCALE)
        assert torch.equal(told["ended"], true.terminated | true.truncated)
        # no word of time-outs where there are none is as good as flags that are not set
        assert torch.equal(told["cut"] if told["cut"] is not None else torch.zeros(ENVS, dtype=torch.bool), only_cut)
        if "last" in told:
            assert torch.equal(told["last"], _true_last(true))
        ended, cut = ended + int(true.terminated.sum()), cut + int(only_cut.sum())
    assert ended >= 2, "the twin should have seen falls"
    assert cut >= 2, "and episodes that were cut off"
    assert len(core.finished()) == ended + cut


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-3.0, 3.0), (0.0, 2.0)])
def test_actions_are_cut_and_scaled_to_the_bounds(low: float, high: float) -> None:
    from gymnasium import spaces

    core, _ = _twins()
    core.env.single_action_space = spaces.Box(low, high, (1,))
    core = LearnerEnv(core.env, reward_scale=SCALE)
    actions = torch.tensor([[-7.0], [-1.0], [0.0], [0.5], [9.0]])
    got = core.rescale_actions(actions)
    assert got.flatten().tolist() == [low, low, (low + high) / 2, low + 0.75 * (high - low), high]
    got += 1.0
    assert actions[2] == 0.0  # what came back is the caller's own


def test_groups_are_handed_over_where_the_library_reads_them_and_other_cameras_are_not_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``pusher-camera`` has a vector for the actor, more for the critic, and an image that nobody is told to read."""
    from headrace.libraries.rl_games import RlGamesEnv
    from headrace.libraries.rsl_rl import RslRlEnv
    from headrace.libraries.sb3 import Sb3Env
    from headrace.libraries.skrl import SkrlEnv

    env = headrace.make("pusher-camera", 2, seed=0, threads=1)
    core = LearnerEnv(env, actor_groups=["policy"])
    zeros = torch.zeros(2, core.action_dim)
    rsl_rl, rl_games, skrl, sb3 = RslRlEnv(core), RlGamesEnv(core), SkrlEnv(core), Sb3Env(core)
    core.reset()
    drawn: list[int] = []
    draw = type(env._held).draw

    def counted(self, ids, slots):
        drawn.append(len(ids))
        draw(self, ids, slots)

    monkeypatch.setattr(type(env._held), "draw", counted)
    assert {name: tuple(rows.shape) for name, rows in rsl_rl.step(zeros)[0].items()} == {
        "policy": (2, 17),
        "critic": (2, 23),
    }
    assert {name: tuple(rows.shape) for name, rows in rl_games.step(zeros)[0].items()} == {
        "obs": (2, 17),
        "states": (2, 23),
    }
    assert rl_games.get_env_info()["state_space"].shape == (23,)
    assert skrl.step(zeros)[0].shape == (2, 17)
    state = skrl.state()
    assert state is not None
    assert torch.equal(state, core.obs["critic"])
    sb3.step_async(zeros.numpy())
    seen = sb3.step_wait()[0]
    assert {name: rows.shape for name, rows in seen.items()} == {"policy": (2, 17), "critic": (2, 23)}
    assert sum(drawn) == 0


@pytest.mark.parametrize("library", ADAPTERS)
def test_a_critic_that_sees_more_learns_and_its_weights_travel(library: str, tmp_path: Path) -> None:
    settings = PPOCfg(steps=4, epochs=1, minibatches=2, hidden=(16,))
    with library_run(seed=1):
        env = headrace.make("pusher-camera", 2, seed=0, threads=1)
        learner = make_learner(library, env, settings)
        learner.iterate()
        path = tmp_path / f"file{spec_of(library).suffix}"
        name: Any = library
        learner.save(
            path, CheckpointMeta(library=name, task="pusher-camera", iteration=1, score=None, settings=settings)
        )
        other = make_learner(library, env, settings)
        other.load(path)
        assert torch.equal(other.policy()(env.observe()), learner.policy()(env.observe()))


def test_the_four_libraries_have_networks_of_the_same_size() -> None:
    sizes: dict[str, list[int]] = {}
    with library_run(seed=1):
        for library in ADAPTERS:
            learner: Any = make_learner(library, headrace.make("cartpole", ENVS, seed=0, threads=1), PPOCfg())
            match library:
                case "rsl_rl":
                    modules = [learner.runner.alg.actor, learner.runner.alg.critic]
                case "rl_games":
                    modules = [learner.agent.model]
                case "skrl":
                    modules = list(learner.agent.models.values())
                case _:
                    modules = [learner.model.policy]
            weights = [weight for module in modules for weight in module.parameters() if weight.requires_grad]
            sizes[library] = sorted(weight.numel() for weight in weights)
    # actor and critic of 4 → 64 → 64 → 1, and the spread of the one action
    assert sizes["rsl_rl"] == sorted([256, 64, 4096, 64, 64, 1] * 2 + [1])
    assert all(found == sizes["rsl_rl"] for found in sizes.values()), sizes


def test_an_episode_that_ends_and_is_cut_off_at_once_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _ = _twins()
    core.reset()
    flags = {"terminated": [True, True, False, False], "truncated": [True, False, True, False]}
    terminated, truncated = (torch.tensor(flag) for flag in flags.values())
    ends: Any = SimpleNamespace(env_ids=torch.tensor([0, 1, 2]))
    step = Step(core.obs, torch.ones(ENVS), terminated, truncated, {"ends": ends})
    monkeypatch.setattr(core.env, "step", lambda _: step)
    turn = core.step(PUSH)
    assert turn.terminated.tolist() == flags["terminated"]
    assert turn.truncated.tolist() == [False, False, True, False]
    assert turn.ended.tolist() == [True, True, True, False]
    assert turn.any_ended
    assert turn.any_truncated


def test_what_is_written_into_an_info_of_sb3_is_gone_in_the_next_step() -> None:
    from headrace.libraries.sb3 import Sb3Env

    core, _ = _twins()
    env = Sb3Env(core)
    env.reset()
    still = torch.zeros(ENVS, 1).numpy()
    first = env.step(still)[3]
    assert first == [{}] * ENVS
    assert len({id(info) for info in first}) == ENVS
    first[1]["note"] = "mine"
    assert env.step(still)[3] == [{}] * ENVS
    assert first[1] == {"note": "mine"}

"""Environments that do nothing, for what an adapter costs: one that answers as a ``BatchEnv`` does, under our adapter,
and one in each library's own interface, under the library's own loop.

Both hand out constants: 256 environments, 48 observations, 12 actions from -1 to 1, and no episode ends. The native one
does not even do what the interface leaves to environments: cut actions, scale rewards, make a ``TensorDict`` or infos.
Ours has all that an adapter does. Networks, settings and threads are the same; so are the loops, which are
rsl_rl's ``OnPolicyRunner.learn``, rl_games' ``train_epoch`` and SB3's ``collect_rollouts``; skrl runs its
``SequentialTrainer`` natively and our learner's loop over its agent with the adapter. Learning is timed apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

ENVS, SEEN, ACTIONS = 256, 48, 12

Rollout = Callable[[], tuple[float, float]]
"""Collect one rollout and learn from it: seconds of each."""


def both_arms(library: str, settings: Any) -> dict[str, Rollout]:
    """``adapter`` and ``native``, each with a learner of its own."""
    from headrace.libraries import make_learner

    env: Any = _nothing()
    ours: Any = make_learner(library, env, settings)
    theirs: Any = make_learner(library, env, settings)
    return {"adapter": ours.iterate, "native": _NATIVE[library](theirs)}


def _nothing() -> SimpleNamespace:
    """What adapters ask of a ``BatchEnv``, with constants for answers."""
    import numpy as np
    import torch
    from gymnasium import spaces

    from headrace.types import Step

    no = torch.zeros(ENVS, dtype=torch.bool)
    step = Step({"policy": torch.zeros(ENVS, SEEN)}, torch.zeros(ENVS), no, no, {})
    seen = spaces.Box(-np.inf, np.inf, (SEEN,), np.float32)
    return SimpleNamespace(
        num_envs=ENVS,
        seed=0,
        device=torch.device("cpu"),
        autoreset="same_step",
        single_action_space=spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32),
        single_observation_space=spaces.Dict({"policy": seen}),
        task=SimpleNamespace(cfg=SimpleNamespace(episode_length=1000), images={}),
        episode_steps=torch.zeros(ENVS, dtype=torch.int64),
        reset=lambda **_: (step.obs, {}),
        step=_always(step),
    )


def _always(answer: Any) -> Callable[[Any], Any]:
    return lambda _: answer


def _constants() -> tuple[Any, Any, Any]:
    """Observations, zero rewards, flags that are not set."""
    import torch

    return torch.zeros(ENVS, SEEN), torch.zeros(ENVS), torch.zeros(ENVS, dtype=torch.bool)


def _native_rsl_rl(learner: Any) -> Rollout:
    from tensordict import TensorDict

    obs, zeros, no = _constants()
    seen = TensorDict({"policy": obs}, [ENVS], device="cpu")
    answer = (seen, zeros, no.long(), {"time_outs": no})
    learner.runner.env = SimpleNamespace(device=zeros.device, get_observations=lambda: seen, step=_always(answer))
    return learner.iterate


def _native_rl_games(learner: Any) -> Rollout:
    obs, zeros, no = _constants()
    answer = ({"obs": obs}, zeros, no, {"time_outs": no})
    learner.agent.vec_env = SimpleNamespace(step=_always(answer), set_train_info=lambda *_: None)
    learner.agent.clip_actions = True  # its default; with the adapter, which cuts them, it need not
    return learner.iterate


def _native_sb3(learner: Any) -> Rollout:
    import numpy as np

    obs, zeros, no = (constant.numpy() for constant in _constants())
    env = SimpleNamespace(num_envs=ENVS, step=_always((obs, zeros, no, [{} for _ in range(ENVS)])))
    model = learner.model
    model._last_obs, model._last_episode_starts = obs, np.ones(ENVS, dtype=bool)

    def iterate() -> tuple[float, float]:
        begin = time.perf_counter()
        model.collect_rollouts(env, learner._callback, model.rollout_buffer, learner.settings.steps)
        between = time.perf_counter()
        model.train()
        return between - begin, time.perf_counter() - between

    return iterate


def _native_skrl(learner: Any) -> Rollout:
    from skrl.envs.wrappers.torch import Wrapper
    from skrl.trainers.torch import SequentialTrainer

    obs, zeros, no = _constants()

    class Nothing(Wrapper):
        """Constants in skrl's interface; no episode is cut, so skrl adds nothing to the reward in place."""

        def reset(self) -> Any:
            return obs, {}

        def step(self, actions: Any) -> Any:
            del actions
            return obs, zeros[:, None], no[:, None], no[:, None], {}

        def state(self) -> None:
            return None

        def render(self) -> None: ...

        def close(self) -> None: ...

    agent, learning = learner.agent, 0.0
    update = agent.update

    def timed(**now: Any) -> None:
        nonlocal learning
        begin = time.perf_counter()
        update(**now)
        learning = time.perf_counter() - begin

    agent.update = timed
    cfg: Any = {
        "timesteps": learner.settings.steps,
        "headless": True,
        "disable_progressbar": True,
        "close_environment_at_exit": False,
    }
    trainer = SequentialTrainer(env=Nothing(learner.core.env), agents=agent, cfg=cfg)

    def iterate() -> tuple[float, float]:
        begin = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begin - learning
        agent.tracking_data.clear()
        return seconds, learning

    return iterate


_NATIVE: dict[str, Callable[[Any], Rollout]] = {
    "rsl_rl": _native_rsl_rl,
    "rl_games": _native_rl_games,
    "skrl": _native_skrl,
    "sb3": _native_sb3,
}

"""One library on one task in a process of its own: answers the questions of ``libraries.py``, a line of JSON each."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TASKS: dict[str, tuple[int, dict[str, Any]]] = {
    "cartpole": (256, {}),
    "ant": (64, {}),
    "cartpole-camera": (32, {"pixels": 48, "frame_stack": 2, "color": "gray"}),
}
"""Task → environments and overrides."""
BEST, WINDOW, LEARNING_ENVS = 300.0, 50, 64
ENVS, SEEN, ACTIONS = 256, 48, 12


def main(library: str, task: str) -> int:
    import warnings

    warnings.simplefilter("ignore")  # the libraries' deprecations
    import headrace
    from headrace.adapters.library import make_learner
    from headrace.adapters.settings import PPOSettings
    from headrace.adapters.torch_state import library_run

    num_envs, overrides = TASKS[task]
    with library_run(seed=0):
        env = headrace.make(task, num_envs, seed=0, overrides=overrides)
        learner = make_learner(library, env, PPOSettings())
        learner.iterate()
        overhead: Callable[[int], dict[str, float]] | None = None
        played: Callable[[int], dict[str, float]] | None = None
        print(json.dumps({"ready": {}}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            match asked["question"]:
                case "train":
                    answer = _train(learner, asked["iterations"], num_envs)
                case "play":
                    played = played or _play(library, task, learner)
                    answer = played(asked["steps"])
                case "overhead":
                    overhead = overhead or _overhead(library)
                    answer = overhead(asked["pairs"])
                case _:
                    answer = _learn(library, asked["seed"], asked["iterations"])
            print(json.dumps(answer), flush=True)
    return 0


def _train(learner: Any, iterations: int, num_envs: int) -> dict[str, float]:
    times = [learner.iterate() for _ in range(iterations)]
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return {
        "collect": sum(one.collect for one in times),
        "learn": sum(one.learn for one in times),
        "frames": iterations * learner.settings.steps * num_envs,
        "megabytes": peak / 1024,
    }


def _learn(library: str, seed: int, iterations: int) -> dict[str, float | None]:
    """Seconds of collecting and learning to the threshold, None where it was not reached, and the final return."""
    import headrace
    from headrace.adapters.library import make_learner
    from headrace.adapters.settings import PPOSettings
    from headrace.adapters.torch_state import library_run

    env = headrace.make("cartpole", LEARNING_ENVS, seed=seed)
    recent: deque[float] = deque(maxlen=WINDOW)
    seconds, reached = 0.0, None
    with library_run(seed=seed):
        learner = make_learner(library, env, PPOSettings(seed=seed))
        for _ in range(iterations):
            seconds += sum(learner.iterate())
            recent.extend(learner.finished().returns)
            if reached is None and len(recent) == WINDOW and sum(recent) / WINDOW >= 0.95 * BEST:
                reached = seconds
        learner.close()
    env.close()
    return {"seconds": reached, "final": sum(recent) / len(recent)}


def _play(library: str, task: str, learner: Any) -> Callable[[int], dict[str, float]]:
    """Play the checkpoint of ``learner`` from a file, then the same actions from the same state without a policy."""
    import headrace
    from headrace.adapters.learner import CheckpointMeta
    from headrace.adapters.library import make_learner

    num_envs, overrides = TASKS[task]
    env = headrace.make(task, num_envs, seed=1, overrides=overrides)
    fresh = make_learner(library, env, learner.settings)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"policy{learner.suffix}"
        meta = CheckpointMeta(library=learner.library, task=task, iteration=0, score=None, settings=learner.settings)
        learner.save(path, meta)
        fresh.load(path)
    policy = fresh.policy()
    obs, _ = env.reset(seed=1)

    def measure(steps: int) -> dict[str, float]:
        nonlocal obs
        state, taken = env.state_dict(), []
        begin = time.perf_counter()
        for _ in range(steps):
            taken.append(policy(obs))
            step = env.step(taken[-1])
            obs = step.obs
        play = time.perf_counter() - begin
        env.load_state_dict(state)
        begin = time.perf_counter()
        for actions in taken:
            obs = env.step(actions).obs
        return {"play": play, "bare": time.perf_counter() - begin, "frames": steps * num_envs}

    return measure


# --- nothing ------------------------------------------------------------------------------------------------------


def _overhead(library: str) -> Callable[[int], dict[str, float]]:
    """Blocks of rollouts with the adapter and natively, in turn: median seconds a step of each, collecting alone."""
    from headrace.adapters.library import make_learner
    from headrace.adapters.settings import PPOSettings

    env: Any = _nothing()
    settings = PPOSettings(epochs=1)  # learning is not timed here
    ours: Any = make_learner(library, env, settings)
    theirs: Any = make_learner(library, env, settings)
    native = _native(library, theirs)
    arms: dict[str, Callable[[], float]] = {"adapter": lambda: ours.iterate().collect, "native": native}
    for arm in arms.values():
        arm()
    turn = 0

    def measure(pairs: int) -> dict[str, float]:
        nonlocal turn
        turn += 1
        times: dict[str, list[float]] = {name: [] for name in arms}
        for i in range(pairs):
            for name in arms if (i + turn) % 2 else reversed(arms):
                times[name].append(arms[name]() / ours.settings.steps)
        return {name: statistics.median(values) for name, values in times.items()}

    return measure


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
        device=torch.device("cpu"),
        autoreset="same_step",
        single_action_space=spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32),
        single_observation_space=spaces.Dict({"policy": seen}),
        task=SimpleNamespace(cfg=SimpleNamespace(episode_length=1000)),
        episode_steps=torch.zeros(ENVS, dtype=torch.int64),
        reset=lambda: (step.obs, {}),
        step=_always(step),
    )


def _always(answer: Any) -> Callable[[Any], Any]:
    return lambda _: answer


def _native(library: str, learner: Any) -> Callable[[], float]:
    """One rollout of the library's own loop over an environment that does nothing: seconds of collecting."""
    import numpy as np
    import torch

    obs, zeros, no = torch.zeros(ENVS, SEEN), torch.zeros(ENVS), torch.zeros(ENVS, dtype=torch.bool)
    if library == "rsl_rl":
        from tensordict import TensorDict

        seen = TensorDict({"policy": obs}, [ENVS], device="cpu")
        answer = (seen, zeros, no.long(), {"time_outs": no})
        learner.runner.env = SimpleNamespace(
            device=torch.device("cpu"), get_observations=lambda: seen, step=_always(answer)
        )
        return lambda: learner.iterate().collect
    if library == "rl_games":
        answer = ({"obs": obs}, zeros, no, {"time_outs": no})
        learner.agent.vec_env = SimpleNamespace(step=_always(answer), set_train_info=lambda *_: None)
        return lambda: learner.iterate().collect
    if library == "sb3":
        given = obs.numpy(), zeros.numpy(), no.numpy(), [{} for _ in range(ENVS)]
        model = learner.model
        env = SimpleNamespace(num_envs=ENVS, step=_always(given))
        model._last_obs, model._last_episode_starts = given[0], np.ones(ENVS, dtype=bool)

        def collect() -> float:
            begin = time.perf_counter()
            model.collect_rollouts(env, learner._callback, model.rollout_buffer, learner.settings.steps)
            seconds = time.perf_counter() - begin
            model.train()
            return seconds

        return collect
    return _native_skrl(learner, obs, zeros, no)


def _native_skrl(learner: Any, obs: Any, zeros: Any, no: Any) -> Callable[[], float]:
    from skrl.envs.wrappers.torch import Wrapper
    from skrl.trainers.torch import SequentialTrainer

    class Nothing(Wrapper):
        """Constants in skrl's interface; skrl adds to the reward in place, to zero times the discount."""

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
    trainer = SequentialTrainer(env=Nothing(learner._core.env), agents=agent, cfg=cfg)

    def collect() -> float:
        begin = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begin - learning
        agent.tracking_data.clear()
        return seconds

    return collect


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""robosuite, in an interpreter of its own: run by ``make test-simulators``, which makes that environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headrace
from headrace.testing import check_env

ROOT = Path(__file__).parents[2]
PYTHON = str(ROOT / ".venv-robosuite" / "bin" / "python")
ENTRY = str(ROOT / "examples" / "simulators" / "robosuite_lift.py") + ":make"


def _lift(num_envs: int, *, horizon: int = 12, **settings: Any) -> headrace.bridges.BridgeEnv:
    return headrace.bridge(
        python=PYTHON, entry=ENTRY, num_envs=num_envs, workers=1, env_kwargs={"horizon": horizon}, **settings
    )


def _actions(episode_ids: list[int], steps: list[int], width: int) -> torch.Tensor:
    rows = [np.sin(0.7 * id + 0.3 * step + np.arange(width)) for id, step in zip(episode_ids, steps, strict=True)]
    return torch.from_numpy(np.array(rows, dtype=np.float32))


def _episodes(env: headrace.bridges.BridgeEnv, wanted: set[int], pauses: np.random.Generator | None) -> Any:
    env.reset()
    width = env.single_action_space.shape[0]
    seen: dict[int, list[Any]] = {}
    done: set[int] = set()
    while not wanted <= done:
        if pauses is not None:
            resting = torch.from_numpy(pauses.random(env.num_envs) < 0.4)
            env.resume(~resting)
            env.suspend(resting)
        ids, acting = env.episode_ids.tolist(), env.active.clone()
        step = env.step(_actions(ids, [len(seen.get(id, ())) for id in ids], width))
        ended = step.terminated | step.truncated
        final = step.info.get("final_obs", step.obs)
        for i in torch.nonzero(acting).flatten().tolist():
            rows = final if ended[i] else step.obs
            bits = tuple(rows[group][i].numpy().tobytes() for group in sorted(rows))
            seen.setdefault(ids[i], []).append((bits, float(step.reward[i])))
            if ended[i]:
                done.add(ids[i])
    env.close()
    return {id: seen[id] for id in wanted}


def test_suspension_neighbors_and_identity_are_exact_to_the_last_bit() -> None:
    alone = _episodes(_lift(1, seed=3), {0, 1, 2}, None)
    assert len(alone[2]) == 12
    assert alone[0][0] != alone[1][0]
    assert _episodes(_lift(3, seed=3), {0, 1, 2}, np.random.default_rng(0)) == alone


def test_versions_are_those_that_headrace_could_not_have_beside_its_own() -> None:
    env = _lift(1)
    link: Any = env.backend.workers[0]  # type: ignore[attr-defined]  # of a foreign backend
    assert link._versions[1].startswith("1.26")
    env.reset()
    assert env.instructions() == ("lift the cube",)
    env.close()


def test_the_contract_holds_for_what_it_claims() -> None:
    results = check_env(lambda num_envs, **more: _lift(num_envs, **more), sizes=(1, 2))
    for result in results:
        print(result)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

"""``headrace.load_policy``: every source gives a policy that plays, and what is damaged is refused for every caller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import headrace
from headrace.errors import ConfigError, DataError, HeadraceError
from headrace.evaluation import PlayCfg
from headrace.learning import PPOCfg
from headrace.policies import LeRobotPolicy, PolicyServer, ServeCfg
from headrace.policies.act import ActCfg, ActPolicy, save_policy
from headrace.policies.load_policy import find_policy
from headrace.policies.protocol import ChunkContext
from headrace.types import Obs

SHORT = {"episode_length": 30}
RECIPE = headrace.EnvRecipe("cartpole", num_envs=2, threads=1, overrides=SHORT)


def lean(obs: Obs) -> Tensor:
    """One action per row."""
    return 0.3 * obs["policy"][:, :1]


class Lean:
    """The same as chunks of two."""

    horizon, action_dim, obs_steps = 2, 1, 1

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        return lean(obs)[:, None].expand(-1, 2, 1)


@pytest.fixture
def env() -> headrace.BatchEnv:
    return RECIPE.make(autoreset="disabled", final_obs=False)  # type: ignore[return-value]


def rows(env: object, policy: object, **more: object) -> list[object]:
    return headrace.evaluate(env, policy, episodes=3, progress=False, **more).episodes  # type: ignore[arg-type]


def test_a_function_that_states_no_horizon_is_played_alike_by_evaluate_play_and_by_hand(
    env: headrace.BatchEnv, tmp_path: Path
) -> None:
    loaded = headrace.load_policy(lean, env)
    assert (loaded.horizon, loaded.action_dim) == (1, 1)
    expected = rows(env, loaded)
    assert rows(env, lean) == rows(RECIPE, f"{__name__}:lean") == expected
    for policy in (lean, f"{__name__}:lean"):
        played = headrace.play(
            RECIPE, policy=policy, episodes=3, run=headrace.RunCfg(output=tmp_path / str(hash(policy)))
        )
        assert played.bundle.reward is not None
        mean = sum(row.reward for row in expected) / 3  # type: ignore[attr-defined]
        assert played.bundle.reward.mean == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("source", [Lean(), Lean, f"{__name__}:Lean"])
def test_objects_and_classes_by_name_are_the_same_policy(source: object, env: headrace.BatchEnv) -> None:
    if source is Lean:
        source = f"{__name__}:Lean"
    assert rows(env, headrace.load_policy(source, env)) == rows(env, Lean())  # type: ignore[arg-type]


def test_a_server_is_a_policy_that_can_be_called_and_played(env: headrace.BatchEnv) -> None:
    with PolicyServer(Lean(), ServeCfg(port=0)) as server:
        remote = headrace.load_policy(server.address, env)
        assert (remote.horizon, remote.action_dim) == (2, 1)
        assert rows(env, remote, play=PlayCfg(policy_id="lean")) == rows(env, Lean())
        remote.engine.close()  # type: ignore[attr-defined]


def test_trainings_are_found_by_name_directory_file_and_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: headrace.BatchEnv
) -> None:
    monkeypatch.chdir(tmp_path)
    small = PPOCfg(steps=8, epochs=1, minibatches=2)
    made = headrace.train("cartpole", iterations=1, num_envs=4, threads=1, ppo=small, overrides=SHORT)
    obs = {"policy": torch.linspace(-0.1, 0.1, 8).reshape(2, 4)}
    context = find_context()
    answers = [
        headrace.load_policy(source, where)(obs, context)
        for source in ("latest", made.directory, made.directory / "checkpoints" / "last.pt")
        for where in (env, RECIPE)
    ]
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert answers[0].shape == (2, 1, 1)
    threads = torch.get_num_threads()
    assert rows(env, headrace.load_policy("latest", env)) == rows("cartpole", "latest", num_envs=2)
    assert torch.get_num_threads() == threads
    with pytest.raises(ConfigError, match="expected an environment to play it in, got none; pass env="):
        headrace.load_policy(made.directory)
    with headrace.policies.serve("cartpole", policy="latest", cfg=ServeCfg(port=0)) as server:
        assert server.metadata["action_horizon"] == 1


def find_context() -> ChunkContext:
    from headrace.policies.protocol import one_row

    return one_row("").rows(torch.tensor([0, 0]))


def _serve(path: str) -> object:
    return headrace.policies.serve("cartpole", policy=path)


CALLERS: dict[str, Callable[[str], object]] = {
    "load_policy": lambda path: headrace.load_policy(path, RECIPE),
    "evaluate": lambda path: headrace.evaluate(RECIPE, path, progress=False),
    "play": lambda path: headrace.play(RECIPE, policy=path),
    "run": lambda path: headrace.bench.run(RECIPE, policy=path),
    "view": lambda path: headrace.viewing.view(RECIPE, policy=path, port=0),
    "serve": _serve,
}


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("damage", ["cut", "bits", "text"])
def test_a_damaged_checkpoint_is_refused_for_every_caller(
    caller: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "policy.pt"
    save_policy(ActPolicy(ActCfg(obs_dim=4, action_dim=1)), file, task="cartpole")
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "text":
        file.write_bytes(b"hello")
    else:
        for place in range(len(content) // 2, len(content) // 2 + 600):
            content[place] ^= 0xFF
        file.write_bytes(content)
    with pytest.raises(DataError, match=r"policy\.pt"):
        CALLERS[caller](str(file))


@pytest.mark.parametrize("source", ["latest", "best", "published", None])
def test_what_belongs_to_a_task_needs_one(source: str | None) -> None:
    with pytest.raises(ConfigError, match="expected an environment that was made from a name or recipe"):
        headrace.load_policy(source)


def test_what_is_not_there_is_refused_with_a_hint() -> None:
    with pytest.raises(HeadraceError, match="did you mean 'pusher-solid'"):
        headrace.load_policy("pusher-sold")
    with pytest.raises(ConfigError, match="no such file"):
        headrace.load_policy("runs/nothing.pt")
    assert find_policy("published", "cartpole").origin == "published"


PLAYED = ("act", "diffusion", "pi0", "pi05", "smolvla")
REFUSED = (
    *("groot", "pi0_fast", "reward_classifier", "sac", "sarm", "tdmpc", "vqbet", "wall_x", "xvla"),  # LeRobot 0.4.4
    *("eo1", "evo1", "fastwam", "gaussian_actor", "lingbot_va", "molmoact2", "multi_task_dit"),  # 0.6.1
    *("robometer", "topreward", "vla_jepa"),
)


@pytest.mark.parametrize("kind", [*PLAYED, *REFUSED])
def test_types_of_lerobot_are_played_or_refused_with_a_reason(kind: str) -> None:
    class Policy:
        config = SimpleNamespace(type=kind, chunk_size=2)

        def predict_action_chunk(self, batch: object, noise: object = None) -> torch.Tensor:
            return torch.zeros(1)

    if kind in PLAYED:
        LeRobotPolicy(Policy())
        return
    with pytest.raises(ConfigError, match=rf"type '{kind}': expected one that .*, got one that \w+"):
        LeRobotPolicy(Policy())

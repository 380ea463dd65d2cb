"""The chunk policy that ships: what the manifest says of it is so, and it does its task."""

from __future__ import annotations

import hashlib
from importlib.resources import files

import pytest
import torch

from headrace.chunking import Batching, ChunkPolicy
from headrace.envs import make
from headrace.errors import DataError
from headrace.rollout import act_policy, evaluate, load_chunk_policy
from headrace.rollout.act_policy import ActPolicy, shipped_policies
from headrace.rollout.evaluation import EpisodeResult
from headrace.rollout.imitation import MeanAction
from headrace.statistics import Interval

TASK = "pusher-solid"
HELD_OUT = 987_654


def success(policy: ChunkPolicy, episodes: int) -> Interval:
    env = make(TASK, 32, autoreset="disabled", final_obs=False)
    rate = evaluate(env, policy, episodes=episodes, execute=16, seed=HELD_OUT, progress=False).success_rate
    assert rate is not None
    return rate


def test_every_shipped_file_is_small_safe_to_load_and_the_one_in_the_manifest() -> None:
    folder = files("headrace").joinpath("checkpoints")
    assert TASK in shipped_policies()
    for task, entry in shipped_policies().items():
        content = folder.joinpath(str(entry["file"])).read_bytes()
        assert len(content) < 2_000_000
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        policy = load_chunk_policy(task)
        assert (policy.horizon, policy.obs_steps, policy.training) == (16, 1, False)


def test_the_shipped_policy_is_clearly_better_than_untrained_and_than_its_mean_action() -> None:
    policy = load_chunk_policy(TASK)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        untrained = ActPolicy(policy.cfg).eval()
    for name, buffer in policy.named_buffers():
        untrained.get_buffer(name).copy_(buffer)
    trained = success(policy, 64)
    assert trained.low > success(untrained, 64).high
    assert trained.low > success(MeanAction(policy.get_buffer("action_mean")), 64).high


def test_the_shipped_policy_scores_what_the_manifest_says() -> None:
    stated = shipped_policies()[TASK]["score"]
    assert isinstance(stated, dict)
    measured = success(load_chunk_policy(TASK), 64)
    # two intervals of the same rate overlap but for about one seed in two hundred; this one is fixed
    assert measured.low <= stated["high"]
    assert measured.high >= stated["low"]


def table(num_envs: int) -> list[EpisodeResult]:
    env = make(TASK, num_envs, autoreset="disabled", final_obs=False)
    strict = Batching(mode="strict", size=8)
    policy = load_chunk_policy(TASK)
    return evaluate(env, policy, episodes=8, execute=16, seed=2, batching=strict, progress=False).episodes


def test_its_results_do_not_depend_on_the_number_of_environments() -> None:
    assert table(3) == table(8)


def test_a_checkpoint_that_was_tampered_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {**shipped_policies()[TASK], "sha256": "0" * 64}
    monkeypatch.setattr(act_policy, "shipped_policies", lambda: {TASK: entry})
    with pytest.raises(DataError, match=r"not the one in manifest\.json"):
        load_chunk_policy(TASK)

"""Collection over workers: a dataset per worker, merged to what one process records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from worker_policies import RECIPE, Deadly, Shove

from flat import evaluate
from headrace import EnvRecipe
from headrace.errors import ConfigError, DataError
from headrace.evaluation import PlayCfg, WorkersCfg, record_episodes
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, merge_datasets, verify_dataset

EPISODES = 12


def _recorded(directory: Path, episodes: object = EPISODES) -> EpisodeDataset:
    """What one process records."""
    env = RECIPE.make(autoreset="disabled", final_obs=False)
    with EpisodeRecorder(directory, info=DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        evaluate(env, Shove(), episodes=episodes, progress=False)  # type: ignore[arg-type]
    env.close()
    return EpisodeDataset(directory)


def _content(dataset: EpisodeDataset) -> dict[int, dict[str, bytes]]:
    return {
        episode.meta.episode_id: {name: np.ascontiguousarray(episode.read(name)).tobytes() for name in episode.names}
        for episode in dataset
    }


@pytest.mark.usefixtures("cluster")
def test_workers_record_what_one_process_does_although_one_dies(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    policy = Deadly(notes, episode=4, chunk=3)
    directory = tmp_path / "parts"
    found = record_episodes(
        RECIPE, policy, directory=directory, episodes=EPISODES, workers=WorkersCfg(count=2, block=3), progress=False
    )
    assert policy.deaths == 1
    assert found.unfinished == 0
    parts = sorted(directory.iterdir())
    assert len(parts) >= 2  # the third joins if there is something left for it
    whole = EpisodeDataset(merge_datasets(parts, tmp_path / "whole"))
    assert verify_dataset(tmp_path / "whole").problems == ()
    assert _content(whole) == _content(_recorded(tmp_path / "alone"))
    with pytest.raises(ConfigError, match="already exists"):
        record_episodes(RECIPE, policy, directory=directory)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_demonstrations_of_an_expert_are_collected_and_merged_from_the_command_line(tmp_path: Path) -> None:
    from headrace.cli import main
    from headrace.imitation.experts import expert_for
    from headrace.policies import as_chunk_policy
    from headrace.recording import RecorderCfg

    expert = expert_for("pusher-solid")
    policy = as_chunk_policy(lambda obs: expert(obs)[:, None], horizon=1, action_dim=7)
    found = record_episodes(
        EnvRecipe("pusher-solid", num_envs=4, threads=1),
        policy,
        directory=tmp_path / "parts",
        record=RecorderCfg(keep="succeeded"),
        episodes=12,
        workers=WorkersCfg(count=2, block=3),
        play=PlayCfg(policy_id="expert"),
        progress=False,
    )
    reached = [row.episode_id for row in found.episodes if row.success]
    assert len(reached) > 0
    parts = [str(path) for path in sorted((tmp_path / "parts").iterdir())]
    assert main(["record", "merge", *parts, "-o", str(tmp_path / "whole")]) == 0
    whole = EpisodeDataset(tmp_path / "whole")
    assert sorted(entry.episode_id for entry in whole.entries) == reached
    assert {episode.meta.episode_id: episode.meta.length for episode in whole} == {
        row.episode_id: row.length for row in found.episodes if row.success
    }


def test_an_episode_that_two_recorded_alike_is_merged_once_and_another_is_refused(tmp_path: Path) -> None:
    _recorded(tmp_path / "a", range(4))
    _recorded(tmp_path / "b", range(2, 6))
    merged = EpisodeDataset(merge_datasets([tmp_path / "a", tmp_path / "b"], tmp_path / "whole"))
    assert sorted(entry.episode_id for entry in merged.entries) == list(range(6))
    assert _content(merged) == _content(_recorded(tmp_path / "alone", 6))
    env = RECIPE.make(autoreset="disabled", final_obs=False)
    with EpisodeRecorder(tmp_path / "other", info=DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        evaluate(env, Shove(), episodes=[2], execute=4, progress=False)
    env.close()
    with pytest.raises(DataError, match="episode 2 of seed 5"):
        merge_datasets([tmp_path / "a", tmp_path / "other"], tmp_path / "refused")

"""A plan recorded in parts: datasets, merged to what one process records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from worker_policies import RECIPE, Shove

from flat import evaluate
from headrace.errors import DataError
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, merge_datasets

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

"""Episodes on disk: recorder, datasets, exports, video, exact replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.recording._recorder import EpisodeRecorder, RecorderCfg, StepFeed
    from headrace.recording._store import DatasetInfo
    from headrace.recording._video import TiledVideo, VideoObserver
    from headrace.recording.dataset import EpisodeDataset, merge_datasets
    from headrace.recording.export.exporting import export_dataset
    from headrace.recording.export.lerobot_dataset import LeRobotDataset
    from headrace.recording.film import FilmCfg
    from headrace.recording.playback import make_replay_env, replay_episode
    from headrace.recording.show import verify_dataset

__all__ = [
    "DatasetInfo",
    "EpisodeDataset",
    "EpisodeRecorder",
    "FilmCfg",
    "LeRobotDataset",
    "RecorderCfg",
    "StepFeed",
    "TiledVideo",
    "VideoObserver",
    "export_dataset",
    "make_replay_env",
    "merge_datasets",
    "replay_episode",
    "verify_dataset",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)

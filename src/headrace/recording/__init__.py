"""Episodes on disk: recorder, datasets, exports, video, exact replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.recording._recorder import EpisodeRecorder as EpisodeRecorder
    from headrace.recording._recorder import RecorderCfg as RecorderCfg
    from headrace.recording._store import DatasetInfo as DatasetInfo
    from headrace.recording._video import VideoObserver as VideoObserver
    from headrace.recording.dataset import EpisodeDataset as EpisodeDataset
    from headrace.recording.dataset import merge_datasets as merge_datasets
    from headrace.recording.export.exporting import export_dataset as export_dataset
    from headrace.recording.export.lerobot_dataset import LeRobotDataset as LeRobotDataset
    from headrace.recording.film import FilmCfg as FilmCfg
    from headrace.recording.playback import make_replay_env as make_replay_env
    from headrace.recording.playback import replay_episode as replay_episode
    from headrace.recording.show import verify_dataset as verify_dataset

__getattr__, __dir__ = lazy_exports(__name__, __file__)

"""Episodes on disk: journal, writers, readers, video."""

from headrace.recording._dataset import Episode, EpisodeDataset
from headrace.recording._export import export_dataset
from headrace.recording._feed import StepFeed
from headrace.recording._info import DatasetInfo
from headrace.recording._lerobot_dataset import LeRobotDataset
from headrace.recording._merge import merge_datasets
from headrace.recording._recorder import EpisodeRecorder, RecorderCfg
from headrace.recording._show import contact_sheet, episode_table
from headrace.recording._verify import verify_dataset
from headrace.recording._video import TiledVideo, VideoObserver

__all__ = [
    "DatasetInfo",
    "Episode",
    "EpisodeDataset",
    "EpisodeRecorder",
    "LeRobotDataset",
    "RecorderCfg",
    "StepFeed",
    "TiledVideo",
    "VideoObserver",
    "contact_sheet",
    "episode_table",
    "export_dataset",
    "merge_datasets",
    "verify_dataset",
]

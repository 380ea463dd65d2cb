"""Episodes on disk: journal, writers, readers, video."""

from headrace.recording.dataset import Episode, EpisodeDataset
from headrace.recording.episode_file import EpisodeMeta
from headrace.recording.feed import StepFeed
from headrace.recording.recorder import EpisodeRecorder, RecorderCfg, RecorderReport
from headrace.recording.store import DatasetInfo

__all__ = [
    "DatasetInfo",
    "Episode",
    "EpisodeDataset",
    "EpisodeMeta",
    "EpisodeRecorder",
    "RecorderCfg",
    "RecorderReport",
    "StepFeed",
]

"""Episodes on disk: journal, writers, readers, video."""

from headrace.recording.dataset import Episode, EpisodeDataset
from headrace.recording.episode_file import EpisodeMeta
from headrace.recording.export import export_dataset
from headrace.recording.feed import StepFeed
from headrace.recording.recorder import EpisodeRecorder, RecorderCfg, RecorderReport
from headrace.recording.show import contact_sheet, episode_table
from headrace.recording.store import DatasetInfo
from headrace.recording.verify import Verdict, verify_dataset
from headrace.recording.video import TiledVideo, VideoObserver

__all__ = [
    "DatasetInfo",
    "Episode",
    "EpisodeDataset",
    "EpisodeMeta",
    "EpisodeRecorder",
    "RecorderCfg",
    "RecorderReport",
    "StepFeed",
    "TiledVideo",
    "Verdict",
    "VideoObserver",
    "contact_sheet",
    "episode_table",
    "export_dataset",
    "verify_dataset",
]

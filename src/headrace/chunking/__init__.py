"""Action chunks: cursors, admission rules, inference engines, ensembling."""

from headrace.chunking._admission import (
    Admission,
    Greedy,
    Immediate,
    Periodic,
    QueueState,
    Synchronized,
    Threshold,
    WholeBatchOnAny,
    register_admission,
)
from headrace.chunking._context import ChunkContext, EpisodeRows
from headrace.chunking._engines import Engine, InlineEngine, ProcessEngine, Reply, Request, register_engine
from headrace.chunking._lerobot import LeRobotPolicy, load_lerobot_policy
from headrace.chunking._policy import Batching, ChunkPolicy, as_chunk_policy

__all__ = [
    "Admission",
    "Batching",
    "ChunkContext",
    "ChunkPolicy",
    "Engine",
    "EpisodeRows",
    "Greedy",
    "Immediate",
    "InlineEngine",
    "LeRobotPolicy",
    "Periodic",
    "ProcessEngine",
    "QueueState",
    "Reply",
    "Request",
    "Synchronized",
    "Threshold",
    "WholeBatchOnAny",
    "as_chunk_policy",
    "load_lerobot_policy",
    "register_admission",
    "register_engine",
]

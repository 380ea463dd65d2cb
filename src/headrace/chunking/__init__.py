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
    admission_names,
    make_admission,
    register_admission,
)
from headrace.chunking._batching import Answer, Batching
from headrace.chunking._blending import TemporalEnsemble
from headrace.chunking._context import ChunkContext, EpisodeRows
from headrace.chunking._cursors import ChunkLengths, Cursors
from headrace.chunking._engines import (
    Engine,
    EngineFactory,
    EngineName,
    InlineEngine,
    ProcessEngine,
    Reply,
    Request,
    ThreadEngine,
    make_engine,
    register_engine,
)
from headrace.chunking._history import ObsHistory
from headrace.chunking._lerobot import LeRobotPolicy, load_lerobot_policy
from headrace.chunking._policy import ChunkPolicy, PolicyLike, RemembersEpisodes, as_chunk_policy, has_memory

__all__ = [
    "Admission",
    "Answer",
    "Batching",
    "ChunkContext",
    "ChunkLengths",
    "ChunkPolicy",
    "Cursors",
    "Engine",
    "EngineFactory",
    "EngineName",
    "EpisodeRows",
    "Greedy",
    "Immediate",
    "InlineEngine",
    "LeRobotPolicy",
    "ObsHistory",
    "Periodic",
    "PolicyLike",
    "ProcessEngine",
    "QueueState",
    "RemembersEpisodes",
    "Reply",
    "Request",
    "Synchronized",
    "TemporalEnsemble",
    "ThreadEngine",
    "Threshold",
    "WholeBatchOnAny",
    "admission_names",
    "as_chunk_policy",
    "has_memory",
    "load_lerobot_policy",
    "make_admission",
    "make_engine",
    "register_admission",
    "register_engine",
]

"""Action chunks: cursors, admission rules, inference engines, ensembling."""

from headrace.chunking._admission import Admission, All, Any, Clock, Greedy, Queue, Subset, Threshold
from headrace.chunking._batching import Answer, Batching
from headrace.chunking._blending import TemporalEnsemble
from headrace.chunking._cursors import ChunkLengths, Cursors
from headrace.chunking._engines import (
    Engine,
    EngineName,
    InlineEngine,
    ProcessEngine,
    Reply,
    Request,
    ThreadEngine,
    make_engine,
)
from headrace.chunking._history import ObsHistory
from headrace.chunking._policy import ChunkContext, ChunkPolicy, PolicyLike, as_chunk_policy

__all__ = [
    "Admission",
    "All",
    "Answer",
    "Any",
    "Batching",
    "ChunkContext",
    "ChunkLengths",
    "ChunkPolicy",
    "Clock",
    "Cursors",
    "Engine",
    "EngineName",
    "Greedy",
    "InlineEngine",
    "ObsHistory",
    "PolicyLike",
    "ProcessEngine",
    "Queue",
    "Reply",
    "Request",
    "Subset",
    "TemporalEnsemble",
    "ThreadEngine",
    "Threshold",
    "as_chunk_policy",
    "make_engine",
]

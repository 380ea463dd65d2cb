"""Action chunks: cursors, admission rules, inference engines, ensembling."""

from headrace.chunking.admission import Admission, All, Any, Clock, Greedy, Queue, Subset, Threshold
from headrace.chunking.batching import Answer, Batching
from headrace.chunking.blending import TemporalEnsemble
from headrace.chunking.cursors import ChunkLengths, Cursors
from headrace.chunking.engines import (
    Engine,
    EngineName,
    InlineEngine,
    ProcessEngine,
    Reply,
    Request,
    ThreadEngine,
    make_engine,
)
from headrace.chunking.history import ObsHistory
from headrace.chunking.policy import ChunkContext, ChunkPolicy, PolicyLike, as_chunk_policy

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

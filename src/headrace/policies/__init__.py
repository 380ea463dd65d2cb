"""Policies: the chunk protocol, loading, engines that run them, servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.policies._lerobot import LeRobotPolicy, load_lerobot_policy
    from headrace.policies.batching import Batching
    from headrace.policies.engines import Engine, InlineEngine, ProcessEngine, Reply, Request, register_engine
    from headrace.policies.observation_map import ObservationMap
    from headrace.policies.protocol import ChunkContext, ChunkPolicy, EpisodeRows, as_chunk_policy
    from headrace.policies.serving._remote import RemoteEngine
    from headrace.policies.serving._server import PolicyServer, ServeCfg
    from headrace.policies.serving.images import resize_with_pad
    from headrace.policies.serving.remote_cfg import RemoteCfg
    from headrace.policies.serving.serve import serve
    from headrace.policies.words_policy import PusherWordsPolicy

__all__ = [
    "Batching",
    "ChunkContext",
    "ChunkPolicy",
    "Engine",
    "EpisodeRows",
    "InlineEngine",
    "LeRobotPolicy",
    "ObservationMap",
    "PolicyServer",
    "ProcessEngine",
    "PusherWordsPolicy",
    "RemoteCfg",
    "RemoteEngine",
    "Reply",
    "Request",
    "ServeCfg",
    "as_chunk_policy",
    "load_lerobot_policy",
    "register_engine",
    "resize_with_pad",
    "serve",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)

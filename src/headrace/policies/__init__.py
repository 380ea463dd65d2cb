"""Policies: the chunk protocol, loading, engines that run them, servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.policies._lerobot import LeRobotPolicy, load_lerobot_policy
    from headrace.policies.batching import Batching
    from headrace.policies.observation_map import ObservationMap
    from headrace.policies.protocol import as_chunk_policy
    from headrace.policies.serving._remote import RemoteEngine
    from headrace.policies.serving._server import PolicyServer, ServeCfg
    from headrace.policies.serving.remote_cfg import RemoteCfg
    from headrace.policies.serving.serve import serve

__all__ = [
    "Batching",
    "LeRobotPolicy",
    "ObservationMap",
    "PolicyServer",
    "RemoteCfg",
    "RemoteEngine",
    "ServeCfg",
    "as_chunk_policy",
    "load_lerobot_policy",
    "serve",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)

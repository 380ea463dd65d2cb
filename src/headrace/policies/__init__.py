"""Policies: the chunk protocol, loading, engines that run them, servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.policies._lerobot import LeRobotPolicy as LeRobotPolicy
    from headrace.policies._lerobot import load_lerobot_policy as load_lerobot_policy
    from headrace.policies.batching import Batching as Batching
    from headrace.policies.observation_map import ObservationMap as ObservationMap
    from headrace.policies.protocol import as_chunk_policy as as_chunk_policy
    from headrace.policies.serving._remote import RemoteEngine as RemoteEngine
    from headrace.policies.serving._server import PolicyServer as PolicyServer
    from headrace.policies.serving._server import ServeCfg as ServeCfg
    from headrace.policies.serving._server import serve as serve
    from headrace.policies.serving.links import RemoteCfg as RemoteCfg

__getattr__, __dir__ = lazy_exports(__name__, __file__)

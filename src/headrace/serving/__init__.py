"""Policies in another process or on another machine: a batching server, and an engine that talks to servers."""

from headrace.serving._images import resize_with_pad
from headrace.serving._links import RemoteCfg
from headrace.serving._mapping import WireMapping
from headrace.serving._remote import RemoteEngine
from headrace.serving._server import PolicyServer, ServeCfg

__all__ = ["PolicyServer", "RemoteCfg", "RemoteEngine", "ServeCfg", "WireMapping", "resize_with_pad"]

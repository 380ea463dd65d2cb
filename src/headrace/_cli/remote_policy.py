"""``--policy openpi://host:8000`` and its options: a policy that a server runs."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.envs import BatchEnv
    from headrace.serving import RemoteEngine


def add_remote_options(parser: argparse.ArgumentParser) -> None:
    """Options for policies that a server runs."""
    group = parser.add_argument_group("policies of a server (openpi://, gr00t://, roboarena://, vllm-omni://)")
    group.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="KEY=GROUP",
        help="fill the server's KEY from a group, or a part of it such as policy[0:7]; repeatable",
    )
    group.add_argument(
        "--prompt-key", default="prompt", metavar="KEY", help="name of the instruction in a request (default: prompt)"
    )
    group.add_argument("--resize", metavar="HxW", help="fit images into this size, padded with black")
    group.add_argument("--connections", type=int, default=1, help="requests under way at once (default: 1)")
    group.add_argument("--images", default="raw", choices=("raw", "png", "jpeg"), help="encoding of images on the wire")


def open_remote(arguments: argparse.Namespace, env: BatchEnv) -> RemoteEngine | None:
    """The engine for an address in ``--policy``, else None; sizes that a server does not say come from one answer."""
    source: str | None = arguments.policy
    if source is None or "://" not in source:
        return None
    from headrace.serving import RemoteCfg, RemoteEngine
    from headrace.serving._mapping import parse_mapping

    shape = env.single_action_space.shape or (0,)
    mapping = parse_mapping(arguments.map, image_size=_size(arguments.resize), prompt=arguments.prompt_key)
    engine = RemoteEngine(
        source,
        mapping=mapping if mapping.keys else None,
        horizon=arguments.horizon,
        action_dim=shape[0],
        connections=arguments.connections,
        images=arguments.images,
        cfg=RemoteCfg(
            timeout=arguments.timeout or RemoteCfg().timeout, api_key=os.environ.get("HEADRACE_API_KEY") or None
        ),
    )
    if engine.sizes.horizon is None and arguments.horizon is None:
        try:
            env.reset(seed=arguments.seed)
            learned = engine.probe(env.observe([0]), env.instructions([0]))
            if learned.action_dim != shape[0]:
                raise ConfigError(f"--policy {source}: plans actions of {learned.action_dim}, the task has {shape[0]}")
        except BaseException:
            engine.close()
            raise
    return engine


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    height, _, width = text.partition("x")
    if not height.isdigit() or not width.isdigit():
        raise ConfigError(f"--resize: expected HEIGHTxWIDTH such as 224x224, got {text!r}")
    return int(height), int(width)

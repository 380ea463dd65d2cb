"""``--policy openpi://host:8000`` and its options: a policy that a server runs."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.errors import ConfigError

_PROMPT = "prompt"


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
        "--prompt-key", default=_PROMPT, metavar="KEY", help="name of the instruction in a request (default: prompt)"
    )
    group.add_argument("--resize", metavar="HxW", help="fit images into this size, padded with black")
    group.add_argument("--connections", type=int, default=1, help="requests under way at once (default: 1)")
    group.add_argument("--images", default="raw", choices=("raw", "png", "jpeg"), help="encoding of images on the wire")


def remote_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``headrace.evaluate`` that these options say."""
    found: dict[str, Any] = {"connections": arguments.connections, "images": arguments.images}
    size = _size(arguments.resize)
    if arguments.map:
        from headrace.serving._mapping import parse_mapping

        found["mapping"] = parse_mapping(arguments.map, image_size=size, prompt=arguments.prompt_key)
    elif size is not None or arguments.prompt_key != _PROMPT:
        raise ConfigError(
            "--resize, --prompt-key: expected --map KEY=GROUP with them; without, groups go by name as they are"
        )
    return found


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    height, _, width = text.partition("x")
    if not height.isdigit() or not width.isdigit():
        raise ConfigError(f"--resize: expected HEIGHTxWIDTH such as 224x224, got {text!r}")
    return int(height), int(width)

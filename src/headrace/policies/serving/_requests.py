"""What clients of ``headrace serve`` send: our own requests of n rows, and openpi's of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from headrace.errors import DataError
from headrace.policies.engines import Request
from headrace.policies.protocol import TENSOR_FIELDS, ChunkContext, ChunkPolicy, EpisodeRows, one_row
from headrace.policies.serving._dialects import PROTOCOL
from headrace.policies.serving._wire import Array, shorten
from headrace.types import Obs

_MOST_ROWS = 1 << 16
_EPISODE_KEYS = ("episode/seed", "episode/id", "episode/chunk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Who sends requests without an identity: they are the chunks of episode ``number`` of seed 0."""

    number: int
    requests: int


def read_request(message: Mapping[str, object], policy: ChunkPolicy, visitor: Visitor) -> tuple[Request, bool]:
    """Return the request in a decoded frame, and whether it is one of ours (n rows); else it is openpi's (one row)."""
    if "headrace" in message:
        return _ours(message, policy), True
    return _openpi(message, policy, visitor), False


def _ours(message: Mapping[str, object], policy: ChunkPolicy) -> Request:
    told, obs = message["headrace"], message.get("obs")
    if not isinstance(told, dict) or not isinstance(obs, dict):
        raise DataError(f"request: expected maps under 'headrace' and 'obs', got {shorten(message)}")
    fields = cast("dict[str, object]", told)
    if type(fields.get("protocol")) is not int or fields["protocol"] != PROTOCOL:
        raise DataError(
            f"request: expected protocol {PROTOCOL}, got {shorten(fields.get('protocol'))}; use one version"
        )
    context = _context(fields.get("context"), policy)
    groups = {name: _tensor(f"obs {name!r}", values) for name, values in cast("dict[str, object]", obs).items()}
    for name, values in groups.items():
        if not values.dim() or len(values) != len(context):
            raise DataError(f"request: expected {len(context)} rows of {name!r}, got {tuple(values.shape)}")
    return Request(obs=groups, context=context, ended=_ended(fields.get("ended")))


def _context(told: object, policy: ChunkPolicy) -> ChunkContext:
    if not isinstance(told, dict):
        raise DataError(f"request: expected a context map, got {shorten(told)}")
    fields = cast("dict[str, object]", told)
    texts = _texts(fields.get("instructions"))
    count = len(texts)
    tensors: dict[str, Tensor] = {}
    for name in TENSOR_FIELDS:
        values = _tensor(f"context {name!r}", fields.get(name))
        shape = (count, policy.horizon, policy.action_dim) if name == "left_over" else (count,)
        dtype = torch.float32 if name == "left_over" else torch.int64
        if tuple(values.shape) != shape or values.dtype != dtype:
            raise DataError(f"request: expected {name} {dtype} {shape}, got {values.dtype} {tuple(values.shape)}")
        most = policy.horizon if name in ("left_over_length", "delay") else None
        if values.dtype == torch.int64 and name != "seeds" and not _all_within(values, most):
            upto = "" if most is None else f" to {most}"
            raise DataError(f"request: expected {name} from 0{upto}, got {values.tolist()[:8]}")
        tensors[name] = values
    return ChunkContext(instructions=texts, **tensors)


def _all_within(values: Tensor, most: int | None) -> bool:
    return not len(values) or (int(values.min()) >= 0 and (most is None or int(values.max()) <= most))


def _ended(told: object) -> EpisodeRows | None:
    if told is None:
        return None
    if not isinstance(told, dict):
        raise DataError(f"request: expected a map of ended episodes, got {shorten(told)}")
    fields = cast("dict[str, object]", told)
    texts = _texts(fields.get("instructions"))
    seeds, ids = (_tensor(f"ended {name!r}", fields.get(name)) for name in ("seeds", "episode_ids"))
    if seeds.shape != (len(texts),) or ids.shape != (len(texts),) or {seeds.dtype, ids.dtype} != {torch.int64}:
        raise DataError(f"request: expected {len(texts)} int64 seeds and ids of ended episodes")
    return EpisodeRows(seeds=seeds, episode_ids=ids, instructions=texts)


def _openpi(message: Mapping[str, object], policy: ChunkPolicy, visitor: Visitor) -> Request:
    """One observation under openpi's flat keys; ``observation/state`` is the group ``policy``."""
    obs: Obs = {}
    for key, value in message.items():
        if key in ("prompt", *_EPISODE_KEYS):
            continue
        name = key.removeprefix("observation/")
        group = "policy" if name in ("state", "policy") else name
        if group in obs:
            raise DataError(f"request: two keys for the group {group!r}, one of them {key!r}")
        obs[group] = _tensor(f"{key!r}", np.asarray(value) if isinstance(value, float | int) else value)[None]
    if not obs:
        raise DataError(f"request: expected an observation, such as observation/state, got {shorten(message)}")
    prompt = message.get("prompt", "")
    if not isinstance(prompt, str):
        raise DataError(f"request: expected a text under 'prompt', got {shorten(prompt)}")
    defaults = (0, visitor.number, visitor.requests)
    seed, episode, chunk = (
        _integer(key, message.get(key, default)) for key, default in zip(_EPISODE_KEYS, defaults, strict=True)
    )
    size = policy.horizon, policy.action_dim
    context = one_row(prompt, seed=seed, env_id=visitor.number, episode_id=episode, chunk_index=chunk, size=size)
    return Request(obs=obs, context=context)


def _integer(key: str, value: object) -> int:
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= int(value) < 1 << 62:
        return int(value)
    raise DataError(f"request: expected a number from 0 under {key!r}, got {shorten(value)}")


def _texts(told: object) -> tuple[str, ...]:
    if not isinstance(told, list) or not all(isinstance(text, str) for text in cast("list[object]", told)):
        raise DataError(f"request: expected a list of instructions, one text per row, got {shorten(told)}")
    if len(cast("list[object]", told)) > _MOST_ROWS:
        raise DataError(f"request: expected at most {_MOST_ROWS} rows, got {len(cast('list[object]', told))}")
    return tuple(cast("list[str]", told))


def _tensor(what: str, value: object) -> Tensor:
    if not isinstance(value, np.ndarray) or cast("Array", value).dtype.kind not in "biuf":
        raise DataError(f"request: expected an array of numbers for {what}, got {shorten(value)}")
    array = cast("Array", value)
    # a policy may write into what it is given: a copy, since a decoded array is read-only
    return torch.from_numpy(np.array(array))

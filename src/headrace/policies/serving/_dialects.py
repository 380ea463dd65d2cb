"""What is said over a connection: how observation rows become requests, and answers become chunks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError, DataError, PolicyError
from headrace.policies.batching import COUNTS, Answer
from headrace.policies.engines import Request
from headrace.policies.observation_map import ObservationMap, take_actions, to_array
from headrace.policies.preflight import FeatureSpec
from headrace.policies.protocol import TENSOR_FIELDS, ChunkContext, ChunkPolicy, EpisodeRows, one_row
from headrace.policies.serving._wire import Array, ArrayForm, pack, shorten, unpack, unpack_map
from headrace.policies.serving.links import Link
from headrace.types import Obs

PROTOCOL = 1
"""Of what headrace's own server and client say beyond openpi's frames."""
_LARGEST_SIZE = 1 << 20
"""Of a horizon, an action or a batch: memory is allocated by what a server says of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSizes:
    """What a server says about its policy; None where it does not."""

    horizon: int | None = None
    action_dim: int | None = None
    obs_steps: int | None = None
    strict_size: int | None = None
    """Rows of its strict batches; None where its answers depend on who shares a batch."""
    memory: bool = False
    """Whether its policy keeps something per episode."""
    process: str = ""
    """Of a policy with memory: which server this is; another one in its place remembers nothing."""
    features: Mapping[str, FeatureSpec] = field(default_factory=dict[str, FeatureSpec])
    """What it states about the inputs and the action of its policy."""


class _Speaker:
    """Speaks one dialect with a server: what all have in common."""

    def __init__(self, server: str, limit: int) -> None:
        self._server, self._limit = server, limit
        self.sizes = ServerSizes()

    def _unpack(self, frame: bytes) -> object:
        try:
            return unpack(frame, limit=self._limit)
        except DataError as error:
            raise PolicyError(f"server {self._server}: {error}") from error

    def _answer(self, actions: Array, *, calls: int, padding: int = 0, verified: int = 0, checking: int = 0) -> Answer:
        """Actions (n, horizon, A) as a server sent them, whose sizes are not checked yet."""
        if actions.dtype.kind not in "fiu":
            raise PolicyError(f"server {self._server}: expected actions of numbers, got {actions.dtype}")
        with np.errstate(over="ignore"):  # becomes an infinity, which is refused later
            given = torch.from_numpy(np.array(actions, np.float32))
        return Answer(actions=given, calls=calls, padding=padding, verified=verified, checking=checking)

    def _make_failure(self, text: str) -> PolicyError:
        return PolicyError(f"server {self._server} failed; it says:\n{text.strip()}")


class WebsocketSpeaker(_Speaker):
    """openpi's wire: a row per request for servers of others, all rows in one for ``headrace serve``."""

    def __init__(self, server: str, mapping: ObservationMap | None, limit: int) -> None:
        super().__init__(server, limit)
        self._mapping = mapping
        self._ours = False
        self.metadata: dict[str, object] = {}

    def greet(self, link: Link, timeout: float) -> None:
        """Connect, and read the metadata."""
        del timeout
        first = link.open()
        if isinstance(first, str):
            raise self._make_failure(first)
        try:
            self.metadata = unpack_map(first or b"", limit=self._limit)
        except DataError as error:
            raise PolicyError(
                f"server {self._server}: expected the metadata of a policy server, got {error}"
            ) from error
        ours = self.metadata.get("headrace")
        self._ours = isinstance(ours, dict)
        if self._ours:
            self.sizes = _our_sizes(self._server, cast("dict[str, object]", ours))
        else:
            self._check_foreign()

    def frames(self, request: Request) -> list[memoryview]:
        """One frame for our own server, a frame per row for others."""
        if self._ours:
            return [self._our_frame(request)]
        mapping, context = cast("ObservationMap", self._mapping), request.context
        columns = mapping.fill(request.obs)
        frames: list[memoryview] = []
        for row, text in enumerate(context.instructions):
            message: dict[str, object] = {key: values[row] for key, values in columns.items()}
            frames.append(pack(message if mapping.prompt is None else {**message, mapping.prompt: text}))
        return frames

    def answer(self, frames: Sequence[bytes | str], request: Request) -> Answer:
        """Return the actions of all rows."""
        rows = len(request.context)
        for frame in reversed(frames):
            if isinstance(frame, str):
                raise self._make_failure(frame)
        messages = [self._read(cast("bytes", frame)) for frame in frames]
        if self._ours:
            return self._our_answer(messages[0])
        if len(messages) != rows:
            raise PolicyError(f"server {self._server}: expected {rows} answers, got {len(messages)}")
        keys = cast("ObservationMap", self._mapping).actions or ("actions",)
        try:
            chunks = [take_actions(message, keys) for message in messages]
            if len({chunk.shape for chunk in chunks}) > 1:
                raise ConfigError(f"answer: expected chunks of one size, got {[chunk.shape for chunk in chunks]}")
            return self._answer(np.stack(chunks), calls=rows)
        except ConfigError as error:
            raise PolicyError(f"server {self._server}: {error}") from error

    def _our_frame(self, request: Request) -> memoryview:
        if self._mapping is not None and self._mapping.keys:
            obs = self._mapping.fill(request.obs)
        else:
            obs = {name: to_array(name, values) for name, values in request.obs.items()}
        ours: dict[str, object] = {"protocol": PROTOCOL, "context": request.context.to_arrays()}
        if request.ended is not None:
            ended = request.ended
            ours["ended"] = {
                "seeds": ended.seeds.cpu().numpy(),
                "episode_ids": ended.episode_ids.cpu().numpy(),
                "instructions": list(ended.instructions),
            }
        return pack({"obs": obs, "headrace": ours})

    def _our_answer(self, message: object) -> Answer:
        found = cast("dict[str, object]", message) if isinstance(message, dict) else {}
        actions, cost = found.get("actions"), found.get("headrace")
        if not isinstance(actions, np.ndarray) or not isinstance(cost, dict):
            raise PolicyError(f"server {self._server}: expected actions and their cost, got {shorten(message)}")
        spent = cast("dict[str, object]", cost)
        counts = {name: spent.get(name, 0) for name in COUNTS}  # 0.2 sends two of them
        if not {"calls", "padding"} <= spent.keys() or not all(isinstance(count, int) for count in counts.values()):
            raise PolicyError(f"server {self._server}: expected a count of calls and padding, got {shorten(spent)}")
        return self._answer(cast("Array", actions), **cast("dict[str, int]", counts))

    def _read(self, frame: bytes) -> object:
        message = self._unpack(frame)
        if isinstance(message, dict) and cast("dict[str, object]", message).get("type") == "error":
            raise self._make_failure(str(cast("dict[str, object]", message).get("message", message)))
        return message

    def _check_foreign(self) -> None:
        """Refuse what only our own server understands; openpi's metadata says nothing that could be checked."""
        if self._mapping is None or not self._mapping.keys:
            raise ConfigError(
                f"server {self._server}: expected a mapping, since it is not a headrace server (its metadata has "
                f"{sorted(self.metadata)}); pass ObservationMap(keys={{'observation/state': 'policy', …}}) or --map"
            )


class Gr00tSpeaker(_Speaker):
    """GR00T's wire (n1.6 on): one request of n rows; arrays in the form that the server's own answers have."""

    def __init__(self, server: str, mapping: ObservationMap | None, api_token: str | None, limit: int) -> None:
        super().__init__(server, limit)
        self._mapping, self._token = mapping or ObservationMap(), api_token
        self._form: ArrayForm = "npy"
        self._modalities: dict[str, _Modality] = {}

    def greet(self, link: Link, timeout: float) -> None:
        """Connect, ask for the modalities, and check the mapping against them."""
        link.open()
        link.send(self._call("get_modality_config"))
        frame = link.receive(timeout)
        if frame is None:
            link.close()
            raise PolicyError(f"server {self._server}: no answer within {timeout:g} s; is it a GR00T server?")
        raw = cast("bytes", frame)
        # the marker of a modality tells the two generations of servers apart, before any array has been seen
        self._form = "npy" if b"__ModalityConfig_class__" in raw else "nd"
        sent = self._read(raw)
        if not isinstance(sent, dict) or "action" not in sent:
            raise PolicyError(f"server {self._server}: expected GR00T's modality configuration, got {shorten(sent)}")
        try:
            self._modalities = {name: _Modality.parse(value) for name, value in cast("dict[str, object]", sent).items()}
        except (KeyError, TypeError, ValueError) as error:
            raise PolicyError(f"server {self._server}: cannot read its modality configuration: {error!r}") from error
        self._check()
        history = max((1 - min(m.deltas) for n, m in self._modalities.items() if n in ("video", "state")), default=1)
        dtypes = {"video": "uint8", "state": None}
        features = {f"{m}.{key}": FeatureSpec(dtype=dtypes[m]) for m in dtypes for key in self._keys(m)}
        horizon = len(self._modalities["action"].deltas)
        self.sizes = ServerSizes(horizon=horizon, obs_steps=history, features=features)

    def frames(self, request: Request) -> list[memoryview]:
        """One request for all rows; a reset before it where all of them begin."""
        context = request.context
        observation: dict[str, dict[str, object]] = {"video": {}, "state": {}, "language": {}}
        for key, values in self._mapping.fill(request.obs).items():
            modality, _, name = key.partition(".")
            stacked = values if (self.sizes.obs_steps or 1) > 1 else values[:, None]
            picked = stacked[:, [delta - 1 for delta in self._modalities[modality].deltas]]
            observation[modality][name] = picked.astype(np.float32) if modality == "state" else picked
        language = self._modalities.get("language")
        for name in language.keys if language is not None else ():
            observation["language"][name] = [[text] for text in context.instructions]
        data: dict[str, object] = {"observation": observation, "options": None}
        calls = [self._call("get_action", data)]
        if not context.chunk_index.any():
            calls.insert(0, self._call("reset", {"options": None}))
        return calls

    def answer(self, frames: Sequence[bytes | str], request: Request) -> Answer:
        """Return the action parts side by side, in the order of the server's modality keys."""
        del request
        answers = [self._read(cast("bytes", frame)) for frame in frames]
        sent = answers[-1]
        action = cast("list[object]", sent)[0] if isinstance(sent, list) and sent else sent
        try:
            chunk = take_actions(action, self._mapping.actions or self._modalities["action"].keys)
        except ConfigError as error:
            raise PolicyError(f"server {self._server}: {error}") from error
        return self._answer(chunk, calls=1)

    def _call(self, endpoint: str, data: dict[str, object] | None = None) -> memoryview:
        message: dict[str, object] = {"endpoint": endpoint}
        if data is not None:
            message["data"] = data
        if self._token is not None:
            message["api_token"] = self._token
        return pack(message, self._form)

    def _read(self, frame: bytes) -> object:
        message = self._unpack(frame)
        if isinstance(message, dict) and "error" in message:
            raise self._make_failure(str(cast("dict[str, object]", message)["error"]))
        return cast("object", message)

    def _check(self) -> None:
        wanted = {f"{modality}.{key}" for modality in ("video", "state") for key in self._keys(modality)}
        given = set(self._mapping.keys)
        if wanted != given:
            raise ConfigError(
                f"server {self._server}: expected a mapping of the keys {sorted(wanted)}; "
                f"missing {sorted(wanted - given)}, unknown {sorted(given - wanted)}"
            )

    def _keys(self, modality: str) -> tuple[str, ...]:
        found = self._modalities.get(modality)
        return () if found is None else found.keys


@dataclass(frozen=True, slots=True)
class _Modality:
    """One of GR00T's modalities: its keys, and which time steps of them, 0 = now."""

    keys: tuple[str, ...]
    deltas: tuple[int, ...]

    @classmethod
    def parse(cls, sent: object) -> _Modality:
        fields = cast("dict[str, object]", json.loads(sent) if isinstance(sent, str | bytes) else sent)
        keys, deltas = (cast("list[object]", fields[name]) for name in ("modality_keys", "delta_indices"))
        if not deltas or not all(isinstance(delta, int) for delta in deltas):
            raise ValueError(f"delta_indices {deltas}")
        return cls(tuple(map(str, keys)), tuple(cast("list[int]", deltas)))


def _our_sizes(server: str, sent: dict[str, object]) -> ServerSizes:
    numbers = {name: sent.get(name) for name in ("protocol", "horizon", "action_dim", "obs_steps", "strict_size")}
    least = {"protocol": PROTOCOL, "horizon": 1, "action_dim": 1, "obs_steps": 1, "strict_size": 0}
    in_range = all(type(number) is int and least[name] <= number <= _LARGEST_SIZE for name, number in numbers.items())
    if not in_range or numbers["protocol"] != PROTOCOL:
        raise PolicyError(
            f"server {server}: expected headrace's metadata of protocol {PROTOCOL}, got {numbers}; "
            "run the same version of headrace on both sides"
        )
    sizes = cast("dict[str, int]", numbers)
    return ServerSizes(
        horizon=sizes["horizon"],
        action_dim=sizes["action_dim"],
        obs_steps=sizes["obs_steps"],
        strict_size=sizes["strict_size"] or None,
        memory=sent.get("memory") is True,
        process=str(sent.get("process", "")) if sent.get("memory") is True else "",
        features=_features(server, sent.get("features", {})),  # 0.2 sends none
    )


def _features(server: str, sent: object) -> dict[str, FeatureSpec]:
    try:
        if isinstance(sent, dict):
            return {str(key): FeatureSpec.from_json(spec) for key, spec in cast("dict[object, object]", sent).items()}
    except DataError as error:
        raise PolicyError(f"server {server}: {error}") from error
    raise PolicyError(f"server {server}: expected a map of features, got {shorten(sent)}")


Speaker: TypeAlias = WebsocketSpeaker | Gr00tSpeaker


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
    sent, obs = message["headrace"], message.get("obs")
    if not isinstance(sent, dict) or not isinstance(obs, dict):
        raise DataError(f"request: expected maps under 'headrace' and 'obs', got {shorten(message)}")
    fields = cast("dict[str, object]", sent)
    if type(fields.get("protocol")) is not int or fields["protocol"] != PROTOCOL:
        raise DataError(
            f"request: expected protocol {PROTOCOL}, got {shorten(fields.get('protocol'))}; use one version"
        )
    context = _context(fields.get("context"), policy)
    groups = {name: _tensor(f"obs {name!r}", values) for name, values in cast("dict[str, object]", obs).items()}
    for name, values in groups.items():
        if not values.dim() or len(values) != len(context):
            raise DataError(f"request: expected {len(context)} rows of {name!r}, got {tuple(values.shape)}")
    return Request(obs=groups, context=context, ended=_read_ended(fields.get("ended")))


def _context(sent: object, policy: ChunkPolicy) -> ChunkContext:
    if not isinstance(sent, dict):
        raise DataError(f"request: expected a context map, got {shorten(sent)}")
    fields = cast("dict[str, object]", sent)
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


def _read_ended(sent: object) -> EpisodeRows | None:
    if sent is None:
        return None
    if not isinstance(sent, dict):
        raise DataError(f"request: expected a map of ended episodes, got {shorten(sent)}")
    fields = cast("dict[str, object]", sent)
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


def _texts(sent: object) -> tuple[str, ...]:
    if not isinstance(sent, list) or not all(isinstance(text, str) for text in cast("list[object]", sent)):
        raise DataError(f"request: expected a list of instructions, one text per row, got {shorten(sent)}")
    if len(cast("list[object]", sent)) > _MOST_ROWS:
        raise DataError(f"request: expected at most {_MOST_ROWS} rows, got {len(cast('list[object]', sent))}")
    return tuple(cast("list[str]", sent))


def _tensor(what: str, value: object) -> Tensor:
    if not isinstance(value, np.ndarray) or cast("Array", value).dtype.kind not in "biuf":
        raise DataError(f"request: expected an array of numbers for {what}, got {shorten(value)}")
    array = cast("Array", value)
    # a policy may write into what it is given: a copy, since a decoded array is read-only
    return torch.from_numpy(np.array(array))

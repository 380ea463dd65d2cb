"""What is said over a connection: how observation rows become requests, and answers become chunks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import numpy as np
import torch

from headrace.errors import ConfigError, DataError, PolicyError
from headrace.policies.batching import COUNTS, Answer
from headrace.policies.engines import Request
from headrace.policies.observation_map import ObservationMap, take_actions, to_array
from headrace.policies.serving._links import Link
from headrace.policies.serving._wire import Array, ArrayForm, pack, shorten, unpack, unpack_map
from headrace.policies.serving.images import Images, encode_images, is_picture
from headrace.policies.serving.remote_cfg import ImageCoding

PROTOCOL = 1
"""Of what headrace's own server and client say beyond openpi's frames."""
_LARGEST_SIZE = 1 << 20
"""Of a horizon, an action or a batch: memory is allocated by what a server says of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebsocketDialect:
    """A relative of openpi's wire. A request is one row; the framing is the same for all."""

    path: str = ""
    """Of the address, where the user gives none."""
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to every request."""
    session_key: str | None = None
    """The key under which the episode's identity is sent as a text."""
    reset: Mapping[str, str] | None = None
    """Sent when all rows of a request begin their episodes; the server has one state for all of them."""


WEBSOCKET_DIALECTS: dict[str, WebsocketDialect] = {
    "openpi": WebsocketDialect(),
    "roboarena": WebsocketDialect(extra={"endpoint": "infer"}, session_key="session_id", reset={"endpoint": "reset"}),
    "vllm-omni": WebsocketDialect(path="/v1/realtime/robot/openpi", reset={"endpoint": "reset"}),
}


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

    def _failed(self, text: str) -> PolicyError:
        return PolicyError(f"server {self._server} failed; it says:\n{text.strip()}")


class WebsocketSpeaker(_Speaker):
    """openpi's wire: a row per request for servers of others, all rows in one for ``headrace serve``."""

    def __init__(
        self, server: str, dialect: WebsocketDialect, mapping: ObservationMap | None, coding: ImageCoding, limit: int
    ) -> None:
        super().__init__(server, limit)
        self._dialect, self._mapping = dialect, mapping
        self._coding: ImageCoding = coding
        self._ours = False
        self.metadata: dict[str, object] = {}

    def greet(self, link: Link, timeout: float) -> None:
        """Connect, and read the metadata."""
        del timeout
        first = link.open()
        if isinstance(first, str):
            raise self._failed(first)
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
        identities = list(zip(context.seeds.tolist(), context.episode_ids.tolist(), strict=True))
        frames: list[memoryview] = []
        if self._dialect.reset is not None and not context.chunk_index.any() and len(context):
            frames.append(pack(self._dialect.reset))
        for row, (seed, episode) in enumerate(identities):
            message: dict[str, object] = {key: values[row] for key, values in columns.items()}
            if mapping.prompt is not None:
                message[mapping.prompt] = context.instructions[row]
            if self._dialect.session_key is not None:
                message[self._dialect.session_key] = f"{seed}-{episode}"
            frames.append(pack({**message, **self._dialect.extra}))
        return frames

    def answer(self, frames: Sequence[bytes | str], request: Request) -> Answer:
        """Return the actions of all rows."""
        rows = len(request.context)
        if not self._ours and len(frames) == rows + 1:  # the answer to a reset, a text in RoboArena
            frames = frames[1:]
        for frame in reversed(frames):
            if isinstance(frame, str):
                raise self._failed(frame)
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
        obs = {name: self._coded(to_array(name, values)) for name, values in request.obs.items()}
        ours: dict[str, object] = {"protocol": PROTOCOL, "context": request.context.to_arrays()}
        if request.ended is not None:
            ended = request.ended
            ours["ended"] = {
                "seeds": ended.seeds.cpu().numpy(),
                "episode_ids": ended.episode_ids.cpu().numpy(),
                "instructions": list(ended.instructions),
            }
        return pack({"obs": obs, "headrace": ours})

    def _coded(self, values: Array) -> object:
        if self._coding == "raw" or not values.size or not is_picture(values.shape[1:], values.dtype):
            return values
        return encode_images(cast("Images", values), self._coding)

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
            raise self._failed(str(cast("dict[str, object]", message).get("message", message)))
        return message

    def _check_foreign(self) -> None:
        """Return what RoboArena and vLLM-Omni say about pictures; openpi's own metadata says nothing that could be
        checked."""
        if self._mapping is None or not self._mapping.keys:
            raise ConfigError(
                f"server {self._server}: expected a mapping, since it is not a headrace server (its metadata has "
                f"{sorted(self.metadata)}); pass ObservationMap(keys={{'observation/state': 'policy', …}}) or --map"
            )
        if self._coding != "raw":
            raise ConfigError(f"server {self._server}: compressed images are understood by 'headrace serve' only")
        said = self.metadata.get("policy_server_config", self.metadata)
        told = cast("dict[str, object]", said) if isinstance(said, dict) else {}
        size = told.get("image_resolution")
        if isinstance(size, list) and self._mapping.image_size not in (None, tuple(cast("list[int]", size))):
            raise ConfigError(f"server {self._server}: wants images {size}, the mapping has {self._mapping.image_size}")
        for needed, part in (("needs_wrist_camera", "wrist"), ("needs_session_id", "session")):
            keys = [*self._mapping.keys, self._dialect.session_key or ""]
            if told.get(needed) is True and not any(part in key for key in keys):
                raise ConfigError(f"server {self._server}: {needed}, but no key of the mapping has {part!r} in it")


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
        told = self._read(raw)
        if not isinstance(told, dict) or "action" not in told:
            raise PolicyError(f"server {self._server}: expected GR00T's modality configuration, got {shorten(told)}")
        try:
            self._modalities = {name: _Modality.parse(value) for name, value in cast("dict[str, object]", told).items()}
        except (KeyError, TypeError, ValueError) as error:
            raise PolicyError(f"server {self._server}: cannot read its modality configuration: {error!r}") from error
        self._check()
        history = max((1 - min(m.deltas) for n, m in self._modalities.items() if n in ("video", "state")), default=1)
        self.sizes = ServerSizes(horizon=len(self._modalities["action"].deltas), obs_steps=history)

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
        told = answers[-1]
        action = cast("list[object]", told)[0] if isinstance(told, list) and told else told
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
            raise self._failed(str(cast("dict[str, object]", message)["error"]))
        return cast("object", message)

    def _check(self) -> None:
        wanted = {f"{modality}.{key}" for modality in ("video", "state") for key in self._keys(modality)}
        if any(
            "." in key and key.split(".")[0] in ("video", "state") for m in ("video", "state") for key in self._keys(m)
        ):
            raise ConfigError(f"server {self._server}: speaks the flat form of GR00T n1.5; use n1.6 or later")
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
    def parse(cls, told: object) -> _Modality:
        fields = cast("dict[str, object]", json.loads(told) if isinstance(told, str | bytes) else told)
        keys, deltas = (cast("list[object]", fields[name]) for name in ("modality_keys", "delta_indices"))
        if not deltas or not all(isinstance(delta, int) for delta in deltas):
            raise ValueError(f"delta_indices {deltas}")
        return cls(tuple(map(str, keys)), tuple(cast("list[int]", deltas)))


def _our_sizes(server: str, told: dict[str, object]) -> ServerSizes:
    numbers = {name: told.get(name) for name in ("protocol", "horizon", "action_dim", "obs_steps", "strict_size")}
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
        memory=told.get("memory") is True,
        process=str(told.get("process", "")) if told.get("memory") is True else "",
    )


Speaker: TypeAlias = WebsocketSpeaker | Gr00tSpeaker

"""Policy servers written from the documented frames of openpi and GR00T, which answer as a test says."""

from __future__ import annotations

import contextlib
import io
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import zmq
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve

Answer = Callable[[dict[str, Any], ServerConnection], object]


def to_map(array: np.ndarray) -> dict[bytes, object]:
    return {
        b"__ndarray__": True,
        b"data": array.tobytes(),
        b"dtype": array.dtype.str,
        b"shape": array.shape,
    }


def encode(value: object) -> object:
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    return to_map(value) if isinstance(value, np.ndarray) else value


def decode(value: dict[Any, Any]) -> object:
    if b"__ndarray__" in value:
        return np.frombuffer(value[b"data"], value[b"dtype"]).reshape(value[b"shape"])
    return value


class OpenpiServer:
    """Metadata first, then an answer per request; an exception is a text frame with its traceback, then close 1011.

    ``answer(request, connection)`` gives the reply's map, or bytes or a text to send as they are, or None for silence.
    """

    def __init__(self, answer: Answer, *, metadata: object = None, port: int = 0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self._answer = answer
        self._metadata = {"config": "test"} if metadata is None else metadata
        self._live: set[ServerConnection] = set()
        self._server: Server = serve(self._handle, "127.0.0.1", port, compression=None, max_size=None)
        self.port: int = self._server.socket.getsockname()[1]
        self.address = f"ws://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def _handle(self, connection: ServerConnection) -> None:
        self.connections += 1
        self._live.add(connection)
        with contextlib.suppress(ConnectionClosed):
            first = self._metadata
            connection.send(first if isinstance(first, bytes | str) else msgpack.packb(first, default=encode))
            for frame in connection:
                request = msgpack.unpackb(frame, object_hook=decode)
                self.requests.append(request)
                try:
                    reply = self._answer(request, connection)
                except Exception:  # noqa: BLE001  # as openpi's server does
                    connection.send(traceback.format_exc())
                    connection.close(1011, "Internal server error. Traceback included in previous frame.")
                    return
                if reply is not None:
                    connection.send(reply if isinstance(reply, bytes | str) else msgpack.packb(reply, default=encode))
        self._live.discard(connection)

    def close(self) -> None:
        self._server.shutdown()
        for connection in list(self._live):
            connection.close_socket()
        self._thread.join()

    def __enter__(self) -> OpenpiServer:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


MODALITIES = {
    "video": {"delta_indices": [0], "modality_keys": ["ego_view"]},
    "state": {"delta_indices": [0], "modality_keys": ["arm", "hand"]},
    "action": {"delta_indices": [0, 1, 2, 3], "modality_keys": ["arm", "hand"]},
    "language": {"delta_indices": [0], "modality_keys": ["annotation.human.task_description"]},
}


class Gr00tServer:
    """GR00T's REP socket in either array form; ``get_action(observation)`` gives the action's map, or raw bytes."""

    def __init__(
        self,
        get_action: Callable[[dict[str, Any]], object],
        *,
        form: str = "nd",
        modalities: dict[str, Any] | None = None,
        port: int = 0,
        api_token: str | None = None,
    ) -> None:
        self.calls: list[str] = []
        self.seen: list[dict[str, Any]] = []
        self._get_action, self._form, self._token = get_action, form, api_token
        self._modalities = MODALITIES if modalities is None else modalities
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self.address.rsplit(":", 1)[1])
        self._running = True
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while self._running:
            if not self._socket.poll(50):
                continue
            request = msgpack.unpackb(self._socket.recv(), object_hook=self._decode)
            try:
                reply = self._handle(request)
            except Exception as error:  # noqa: BLE001  # as GR00T's server does
                reply = {"error": str(error)}
            if reply is not None:
                self._socket.send(reply if isinstance(reply, bytes) else msgpack.packb(reply, default=self._encode))
        self._socket.close(linger=0)

    def _handle(self, request: dict[str, Any]) -> object:
        if self._token is not None and request.get("api_token") != self._token:
            return {"error": "Unauthorized: Invalid API token"}
        self.calls.append(request["endpoint"])
        if request["endpoint"] == "get_modality_config":
            mark = "__ModalityConfig_class__" if self._form == "npy" else "__ModalityConfig__"
            return {name: {mark: True, "as_json": value} for name, value in self._modalities.items()}
        if request["endpoint"] == "reset":
            return {}
        self.seen.append(request["data"]["observation"])
        action = self._get_action(request["data"]["observation"])
        return action if isinstance(action, bytes) or action is None else [action, {}]

    def _encode(self, value: object) -> object:
        if not isinstance(value, np.ndarray):
            return value
        if self._form == "npy":
            file = io.BytesIO()
            np.save(file, value, allow_pickle=False)
            return {"__ndarray_class__": True, "as_npy": file.getvalue()}
        return {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": value.shape, b"data": value.tobytes()}

    def _decode(self, value: dict[Any, Any]) -> object:
        if "__ndarray_class__" in value:
            assert self._form == "npy"
            return np.load(io.BytesIO(value["as_npy"]), allow_pickle=False)
        if b"nd" in value:
            assert self._form == "nd"
            return np.frombuffer(value[b"data"], value[b"type"]).reshape(value[b"shape"])
        return value

    def close(self) -> None:
        self._running = False
        self._thread.join()
        self._context.term()

    def __enter__(self) -> Gr00tServer:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

"""The wire between headrace and its child: whatever either side sends, the other says so and goes on, or ends."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bridges import child
from headrace.bridges.interpreter import CHILD_FILE
from headrace.bridges.make import bridge
from headrace.errors import ConfigError, EnvError, HeadraceError

TOY = Path(__file__).parent / "foreign" / "toy_simulator.py"
TOKEN = "open sesame"
_FRAME = struct.Struct(">4sIQ")


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN", TOKEN)


def _frame(head: object, body: bytes = b"", *, head_size: int | None = None, body_size: int | None = None) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    sizes = (len(text) if head_size is None else head_size, len(body) if body_size is None else body_size)
    return _FRAME.pack(b"HRC1", *sizes) + text + body


def _read(stream: Any) -> dict[str, Any]:
    _, head, body = _FRAME.unpack(stream.read(_FRAME.size))
    said = json.loads(stream.read(head))
    stream.read(body)
    return said


@contextmanager
def _listening(name: str = "Walk", file: Path = CHILD_FILE) -> Generator[int]:
    """The port of a child that listens; it must be alive at the end."""
    command = [sys.executable, str(file), "--listen", "127.0.0.1:0", "--entry", f"{TOY}:{name}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            port = re.search(r"port (\d+)", process.stdout.readline())
            assert port is not None
            said: list[str] = []
            reader = threading.Thread(target=lambda: said.extend(iter(process.stdout.readline, "")))  # pyright: ignore[reportOptionalMemberAccess]  # a pipe
            reader.start()
            yield int(port[1])
            assert process.poll() is None, "".join(said)
        finally:
            process.kill()


@contextmanager
def _connected(port: int, *, rudely: bool = False) -> Generator[tuple[socket.socket, Any]]:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    with connection, connection.makefile("rb") as stream:
        yield connection, stream
        if rudely:  # an RST instead of a goodbye
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _admitted(connection: socket.socket, stream: Any) -> bytes:
    """What makes the environments, for whoever knows the token."""
    proof = child.prove_token(TOKEN, _read(stream)["nonce"])
    return _frame({"call": "make", "kwargs": {}, "env_ids": [0, 1], "proof": proof})


def _plays(port: int) -> None:
    env = bridge(address=f"tcp://127.0.0.1:{port}", num_envs=2, timeout=20.0)
    env.reset()
    env.step(torch.zeros(2, 2))
    env.close()


def test_a_listening_child_outlives_strangers() -> None:
    strangers = [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        _frame(b"{"),
        _frame(b"[1]"),
        _frame(b"\xff\xfe"),
        _frame(b"[" * 100_000),
        _frame({}),
        _frame({"call": "make"}),
        _frame({"call": "make", "proof": "é"}),
        _frame({"call": "step", "env_ids": [0]}),
        _frame({"call": "make"}, head_size=1 << 31),
        _frame({"call": "make"}, body_size=1 << 31),
    ]
    with _listening() as port:
        for index, sent in enumerate(strangers * 2):
            with _connected(port, rudely=index % 3 == 0) as (connection, stream):
                if index % 2:
                    _read(stream)
                connection.sendall(sent)
        _plays(port)


def test_a_wrong_token_has_one_guess_and_a_large_frame_needs_the_right_one() -> None:
    with _listening() as port:
        for sent in (_frame({"call": "make", "proof": "0"}), _frame({"call": "make"}, body_size=1 << 31)):
            with _connected(port) as (connection, stream):
                _read(stream)
                connection.sendall(sent * 2)
                answers = stream.read()
                assert answers.count(b"HRC1") == (1 if b'"proof"' in sent else 0)
        _plays(port)


def test_a_listening_child_outlives_its_clients_and_environments_that_cannot_be_closed() -> None:
    shuffle = random.Random(3)
    with _listening("Unclosable") as port:
        for index in range(40):
            with _connected(port, rudely=index % 2 == 0) as (connection, stream):
                calls = _admitted(connection, stream)
                calls += _frame({"call": "reset", "env_ids": [0], "seeds": [1]}, b"x" * shuffle.randrange(9))
                calls += _frame(shuffle.choice([{"call": "make"}, {"call": "step", "env_ids": [9]}, {"call": None}]))
                damaged = bytearray(calls)
                for _ in range(shuffle.randrange(3)):
                    damaged[shuffle.randrange(len(damaged))] = shuffle.randrange(256)
                connection.sendall(damaged[: shuffle.randrange(len(damaged) + 1)])
        _plays(port)


@pytest.mark.parametrize("drips", [False, True])
def test_a_client_that_says_nothing_or_little_is_left_after_a_while(tmp_path: Path, drips: bool) -> None:
    impatient = tmp_path / "child.py"
    text = CHILD_FILE.read_text()
    assert "_GREETING_SECONDS = 30.0\n" in text
    impatient.write_text(text.replace("_GREETING_SECONDS = 30.0\n", "_GREETING_SECONDS = 0.4\n"))
    with _listening(file=impatient) as port, _connected(port) as (connection, _):
        done = threading.Event()

        def drip() -> None:
            with suppress(OSError):  # the child hangs up
                for byte in struct.pack(">4sIQ", b"HRC1", 2000, 0) + b" " * 600:
                    connection.sendall(bytes([byte]))
                    if done.wait(0.1):
                        return

        if drips:
            threading.Thread(target=drip, daemon=True).start()
        began = time.monotonic()
        _plays(port)
        done.set()
        assert time.monotonic() - began < 30  # dripping goes on for a minute


_NUMBERS = {"type": "box", "shape": [3]}
_HELLO = {
    "name": "fake",
    "observation_space": child.space_to_json(_NUMBERS),
    "action_space": child.space_to_json({"type": "box", "shape": [2]}),
    "render_mode": "rgb_array",
    "abilities": {"native": True, "reseed": True, "save": True},
}
_ANSWERS: dict[str, Callable[[int], tuple[dict[str, Any], bytes]]] = {
    "make": lambda rows: (_HELLO, b""),
    "layout": lambda rows: ({}, b""),
    "reset": lambda rows: ({"told": [""] * rows}, bytes(12 * rows)),
    "step": lambda rows: ({}, bytes(23 * rows)),
    "save": lambda rows: ({"sizes": [1] * rows}, bytes(rows)),
    "restore": lambda rows: ({}, b""),
    "render": lambda rows: ({"shapes": [[1, 1, 3]] * rows}, bytes(3 * rows)),
}


@contextmanager
def _fake_child(change: Callable[[str, dict[str, Any], bytes], bytes]) -> Generator[str]:
    """The address of a child for one client, whose answers go through ``change`` before they are sent."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as stream:
            greeting = {"protocol": 1, "nonce": "", "python": "3.8", "numpy": "1"}
            connection.sendall(change("start", greeting, b""))
            while True:
                try:
                    asked = _read(stream)
                    if asked["call"] == "close":
                        return
                    answer = _ANSWERS[asked["call"]](len(asked.get("env_ids", [])))
                    connection.sendall(change(asked["call"], *answer))
                except (OSError, struct.error):  # the parent has left
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def _use_everything(address: str) -> None:
    env = bridge(address=address, num_envs=2, timeout=0.3)
    try:
        env.reset()
        env.step(torch.zeros(2, 2))
        env.load_state_dict(env.state_dict())
        assert env.render_each() is not None
    finally:
        env.close()


@pytest.mark.parametrize(
    ("call", "wrong", "error"),
    [
        ("start", {"protocol": "1"}, ConfigError),
        ("make", {"observation_space": {"type": "box"}}, ConfigError),
        ("make", {"abilities": ["native"]}, EnvError),
        ("make", {"fidelity": "perfect"}, EnvError),
        ("reset", {"told": None}, EnvError),
        ("reset", {"told": [""]}, EnvError),
        ("reset", {"told": [3, 4]}, EnvError),
        ("save", {"sizes": 2}, EnvError),
        ("save", {"sizes": [3, -1]}, EnvError),
        ("render", {"shapes": [[1, 1, 3], None]}, EnvError),
        ("render", {"shapes": [[1, 3], [1, 3]]}, EnvError),
    ],
)
@pytest.mark.usefixtures("nobody_left")
def test_answers_that_mean_nothing_are_clear_errors(call: str, wrong: dict[str, Any], error: type[Exception]) -> None:
    def change(asked: str, head: dict[str, Any], body: bytes) -> bytes:
        return _frame({**head, **wrong} if asked == call else head, body)

    with _fake_child(change) as address, pytest.raises(error):
        _use_everything(address)


@pytest.mark.usefixtures("nobody_left")
def test_damaged_answers_are_errors_of_ours_whatever_is_damaged() -> None:
    shuffle = random.Random(5)
    refused = 0
    for _ in range(40):
        chosen = shuffle.choice(["start", *_ANSWERS])

        def change(asked: str, head: dict[str, Any], body: bytes, chosen: str = chosen) -> bytes:
            sent = bytearray(_frame(head, body))
            if asked == chosen:
                if shuffle.random() < 0.3:
                    return bytes(sent[: shuffle.randrange(len(sent))])
                for _ in range(3):
                    sent[shuffle.randrange(len(sent))] = shuffle.randrange(256)
            return bytes(sent)

        with _fake_child(change) as address:
            try:
                _use_everything(address)
            except HeadraceError:
                refused += 1
    assert refused > 10

"""A front: clients of different speed share one server behind it, of ours or a stock one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from remote_rows import ACTION_DIM, HORIZON, make_request
from script_server import OpenpiServer
from served_policies import Denoiser
from test_batcher import Gate, Remembering
from test_policy_server import FAST, SERVE, play
from test_remote_engine import MAPPING, plan
from websockets.sync.client import connect

from flat import remote_engine
from headrace.errors import ConfigError, PolicyError
from headrace.policies import Batching, PolicyServer, RemoteCfg, RemoteEngine, ServeCfg, serve
from headrace.policies.serving._wire import unpack_map

SIZES: dict[str, Any] = {"mapping": MAPPING, "horizon": HORIZON, "action_dim": ACTION_DIM}


def front_of(address: str, reconnect: float = 5.0) -> PolicyServer:
    return serve(cfg=ServeCfg(port=0, forward=RemoteCfg(address, timeout=30.0, reconnect=reconnect)))


def together(act: Callable[[int], object]) -> list[Any]:
    """Results, or errors, of three clients in threads of their own."""
    found: dict[int, object] = {}

    def run(number: int) -> None:
        try:
            found[number] = act(number)
        except PolicyError as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(3)]


def chunks(address: str, client: int, pause: float = 0.0, requests: int = 4, **how: Any) -> list[list[float]]:
    """First numbers of the chunks of three rows, request by request."""
    with remote_engine(address, **how) as engine:
        taken: list[list[float]] = []
        for chunk in range(requests):
            engine.submit(make_request(3, first_episode=10 * client, chunk=chunk))
            reply = engine.poll(wait=True)
            assert reply is not None
            taken.append(reply.answer.actions[:, 0, 0].tolist())
            time.sleep(pause)
        return taken


def test_three_clients_of_different_speed_get_the_answers_of_a_stock_server_as_directly() -> None:
    with OpenpiServer(plan) as server:
        direct = [chunks(server.address, client, **SIZES) for client in range(3)]
        seen = list(server.requests)
        server.requests.clear()
        with front_of(server.address) as front:
            with connect(front.address) as client:
                assert unpack_map(client.recv()) == {"config": "test"}, "the metadata are those of the server"
            shared = together(lambda number: chunks(front.address, number, pause=0.03 * number, **SIZES))
            stats = front.stats
    assert shared == direct == [[[10.0 * client + row for row in range(3)]] * 4 for client in range(3)]
    assert sorted(map(str, server.requests)) == sorted(map(str, seen)), "requests pass as they are"
    assert (stats.requests, stats.rows, stats.failed, server.connections) == (36, 36, 0, 4)


def test_waiting_clients_of_a_stock_server_take_turns() -> None:
    fronts: list[PolicyServer] = []

    def answer(request: dict[str, Any], connection: object) -> dict[str, object]:
        wanted = min(36, len(server.requests) + 2)  # every client has a request in the queue
        while fronts[0].stats.requests < wanted:
            time.sleep(0.001)
        return plan(request)

    with OpenpiServer(answer) as server, front_of(server.address) as front:
        fronts.append(front)
        together(lambda number: chunks(front.address, number, **SIZES))
    clients = [int(request["observation/state"][0]) // 10 for request in server.requests]
    assert [sorted(clients[turn : turn + 3]) for turn in range(0, 36, 3)] == [[0, 1, 2]] * 12


def test_three_clients_of_different_speed_share_the_batches_of_our_own_server_and_get_its_bits() -> None:
    with PolicyServer(Denoiser(4, 1), SERVE) as server, RemoteEngine(server.address) as engine:
        direct = play("cartpole-told", 5, range(9), policy=engine.policy, engine=engine)
    with PolicyServer(Denoiser(4, 1), SERVE) as server, front_of(server.address) as front:

        def third(number: int) -> object:
            with RemoteEngine(front.address) as engine:
                assert engine.strict_size == 8, "strict as the server behind"
                plan = range(3 * number, 3 * number + 3)
                return play("cartpole-told", number + 1, plan, policy=engine.policy, engine=engine)

        parts = together(third)
        assert parts[0] + parts[1] + parts[2] == direct
        assert front.stats.shared > 0, "some requests must have had rows of several clients"
        assert server.clients == 1
        assert (front.stats.calls, front.stats.padding) == (server.stats.calls, server.stats.padding)


def test_the_server_behind_sees_the_ends_of_episodes_whose_client_left_the_front() -> None:
    policy = Remembering()
    with PolicyServer(policy, FAST) as server:
        cfg = ServeCfg(port=0, forward=server.address, linger=0.0)
        with PolicyServer(None, cfg) as front:
            assert chunks(front.address, 0, requests=2) == [[0.0, 1.0, 2.0]] * 2
            while front.clients:
                time.sleep(0.001)
            time.sleep(0.05)  # the model's thread of the front notes the ends
            assert chunks(front.address, 1, requests=1) == [[10.0, 11.0, 12.0]]
    assert policy.ended[:3] == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_a_dead_server_is_an_error_for_every_client_and_is_used_again_when_it_is_back(kind: str) -> None:
    def make(port: int) -> OpenpiServer | PolicyServer:
        return OpenpiServer(plan, port=port) if kind == "stock" else PolicyServer(Gate(), ServeCfg(port=port)).start()

    how = SIZES if kind == "stock" else {}
    server = make(0)
    with front_of(server.address, reconnect=0.3) as front:
        port = server.port
        server.close()
        errors = together(lambda number: chunks(front.address, number, **how))
        for error in errors:
            assert isinstance(error, PolicyError)
            assert f"127.0.0.1:{port}: no connection within 0.3 s" in str(error)
        assert front.stats.failed == 3
        server = make(port)
        assert chunks(front.address, 2, requests=1, **how) == [[20.0, 21.0, 22.0]]
        server.close()
    with pytest.raises(PolicyError, match=r"no connection within 0\.3 s"):
        front_of(server.address, reconnect=0.3).start()


def test_an_error_of_a_stock_server_reaches_the_client_that_caused_it_alone() -> None:
    def fail(request: dict[str, Any], connection: object) -> dict[str, object]:
        if request["observation/state"][0] == 11:
            raise ValueError("eleven is too many")
        return plan(request)

    with OpenpiServer(fail) as server, front_of(server.address) as front:
        first, second, third = together(lambda number: chunks(front.address, number, **SIZES))
    assert "eleven is too many" in str(second)
    assert (first[0], third[0]) == ([0.0, 1.0, 2.0], [20.0, 21.0, 22.0])


def test_what_a_front_cannot_serve_is_refused() -> None:
    cfg = ServeCfg(port=0, forward="openpi://127.0.0.1:1")
    with pytest.raises(ConfigError, match="no task, policy or sizes with forward"):
        serve("pusher-solid", cfg=cfg)
    for policy, settings in ((Gate(), cfg), (None, None)):
        with pytest.raises(ConfigError, match=r"expected a policy, or ServeCfg\(forward"):
            PolicyServer(policy, settings)
    with pytest.raises(ConfigError, match="server behind forms its own batches"):
        ServeCfg(forward="openpi://127.0.0.1:1", batching=Batching(mode="fast"))
    with pytest.raises(ConfigError, match="would reach the episodes of other clients"):
        serve(cfg=ServeCfg(port=0, forward="gr00t://127.0.0.1:1")).start()

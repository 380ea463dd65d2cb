"""The engine against servers of others: what is sent, what is taken, and every way in which a server can misbehave."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from remote_rows import ACTION_DIM, HORIZON, make_request
from script_server import Gr00tServer, OpenpiServer, encode
from test_serving_wire import FRAMES

from flat import remote_engine
from headrace.errors import ConfigError, LifecycleError, PolicyError
from headrace.policies import ObservationMap, RemoteCfg, RemoteEngine

MAPPING = ObservationMap(
    keys={"observation/state": "policy", "observation/image": "camera"}, prompt="prompt", image_size=(4, 4)
)
GR00T_MAPPING = ObservationMap(keys={"video.ego_view": "camera", "state.arm": "policy", "state.hand": "policy[1:2]"})
QUICK = {"timeout": 5.0, "reconnect": 5.0}


def plan(request: dict[str, Any], connection: object = None) -> dict[str, object]:
    """Every number of the chunk is the first of the state."""
    return {"actions": np.full((HORIZON, ACTION_DIM), request["observation/state"][0], np.float64)}


def engine_for(server: OpenpiServer, **options: Any) -> RemoteEngine:
    given = {"mapping": MAPPING, "horizon": HORIZON, "action_dim": ACTION_DIM, **QUICK, **options}
    return remote_engine(server.address, **given)


def ask(engine: RemoteEngine, rows: int = 3, **options: Any) -> torch.Tensor:
    engine.submit(make_request(rows, **options))
    reply = engine.poll(wait=True)
    assert reply is not None
    return reply.answer.actions


def test_an_openpi_server_gets_a_request_per_row_and_its_chunks_come_back_in_order() -> None:
    with OpenpiServer(plan) as server, engine_for(server) as engine:
        actions = ask(engine, rows=3, first_episode=5)
    assert actions.dtype == torch.float32
    assert actions[:, 0, 0].tolist() == [5.0, 6.0, 7.0]
    assert [request["prompt"] for request in server.requests] == ["do 5", "do 6", "do 7"]
    picture = server.requests[1]["observation/image"]
    assert picture.shape == (4, 4, 3)
    assert picture[:, :, 0].tolist() == [[0, 6, 6, 0]] * 4, "resized undistorted: black beside it"
    assert engine.strict_size is None


def test_an_answer_that_openpis_own_server_sent_is_taken() -> None:
    reply = (FRAMES / "openpi_reply.bin").read_bytes()
    metadata = (FRAMES / "openpi_metadata.bin").read_bytes()
    with OpenpiServer(lambda *_: reply, metadata=metadata) as server, engine_for(server, action_dim=2) as engine:
        assert ask(engine, rows=1).tolist() == [[[0.5, 1.5], [2.5, 3.5], [4.5, 5.5], [6.5, 7.5]]]


def test_the_traceback_of_openpis_own_server_is_shown() -> None:
    text = (FRAMES / "openpi_error.txt").read_text()

    def fail(request: dict[str, Any], connection: Any) -> None:
        connection.send(text)
        connection.close(1011, "Internal server error. Traceback included in previous frame.")

    with OpenpiServer(fail) as server, engine_for(server) as engine:
        with pytest.raises(PolicyError, match=r"(?s)it says:.*ValueError: the model is out of memory.*episode 2"):
            ask(engine)
    assert server.connections == 1, "an error of the model is not asked for again"


def chunk(change: object) -> Any:
    """An answer with ``change`` for actions."""
    return lambda *_: {"actions": change}


WHOLE = np.zeros((HORIZON, ACTION_DIM), np.float32)
BAD_ANSWERS: dict[str, tuple[Any, str]] = {
    "raises": (lambda *_: 1 / 0, "ZeroDivisionError"),
    "NaN": (chunk(np.full_like(WHOLE, np.nan)), "NaN or infinity"),
    "too large for 32 bits": (chunk(np.full((HORIZON, ACTION_DIM), 1e300)), "NaN or infinity"),
    "infinity": (chunk(np.full_like(WHOLE, np.inf)), "NaN or infinity"),
    "too short": (chunk(WHOLE[:-1]), r"expected actions \(3, 4, 3\)"),
    "too long": (chunk(np.zeros((HORIZON + 1, ACTION_DIM))), r"got \(3, 5, 3\)"),
    "wrong action size": (chunk(WHOLE[:, :2]), r"got \(3, 4, 2\)"),
    "no time axis": (chunk(WHOLE[0]), r"got \(3, 3\)"),
    "scalar": (chunk(np.float32(1.0)), "expected an array under 'actions'"),
    "empty": (chunk(WHOLE[:0]), r"got \(3, 0, 3\)"),
    "text actions": (chunk("left"), "expected an array under 'actions'"),
    "texts in an array": (chunk(np.array([["a"]])), "actions of numbers"),
    "flags": (chunk(np.ones((HORIZON, ACTION_DIM), bool)), "actions of numbers"),
    "no actions": (lambda *_: {"action": WHOLE}, r"got the keys \['action'\]"),
    "nothing": (lambda *_: {}, r"got the keys \[\]"),
    "a list": (lambda *_: msgpack.packb([1, 2]), "expected a map with actions"),
    "garbage": (lambda *_: b"\xc1garbage", "expected msgpack"),
    "cut short": (lambda *_: msgpack.packb({"actions": WHOLE}, default=encode)[:-5], "expected msgpack"),
    "pickled": (
        lambda *_: msgpack.packb({"actions": {b"__ndarray__": True, b"data": b"", b"dtype": "O", b"shape": [0]}}),
        "expected the dtype of numbers",
    ),
    "a text": (lambda *_: "I am a teapot", "(?s)it says:.*teapot"),
    "another error form": (lambda *_: {"type": "error", "message": "queue is full"}, "(?s)it says:.*queue is full"),
}


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_a_bad_answer_is_an_error_that_says_what_came_and_the_engine_goes_on(kind: str) -> None:
    bad, message = BAD_ANSWERS[kind]
    misbehaves = threading.Event()
    misbehaves.set()

    def answer(request: dict[str, Any], connection: Any) -> object:
        return bad(request, connection) if misbehaves.is_set() else plan(request)

    with OpenpiServer(answer) as server, engine_for(server) as engine:
        with pytest.raises(PolicyError, match=message) as error:
            ask(engine)
        assert "episode 0" in str(error.value)
        assert not engine.pending
        misbehaves.clear()
        assert ask(engine)[:, 0, 0].tolist() == [0.0, 1.0, 2.0]


def test_chunks_of_different_sizes_in_one_request_are_refused() -> None:
    def uneven(request: dict[str, Any], connection: object) -> dict[str, object]:
        return {"actions": np.zeros((int(request["observation/state"][0]) + 1, 3))}

    with (
        OpenpiServer(uneven) as server,
        engine_for(server) as engine,
        pytest.raises(PolicyError, match="chunks of one size"),
    ):
        ask(engine)


def test_a_slow_server_is_an_error_after_the_time_out_and_its_late_answer_is_not_taken_for_the_next() -> None:
    late = threading.Event()

    def answer(request: dict[str, Any], connection: Any) -> object:
        if request["observation/state"][0] == 0:
            late.wait(5.0)
        return plan(request)

    with OpenpiServer(answer) as server, engine_for(server, timeout=0.3, reconnect=5.0) as engine:
        with pytest.raises(PolicyError, match=r"no answer within 0.3 s"):
            ask(engine, rows=1)
        late.set()
        assert ask(engine, rows=1, first_episode=7)[0, 0, 0] == 7.0


def test_a_connection_lost_in_mid_call_is_opened_again_and_the_request_sent_once_more() -> None:
    lost = []

    def answer(request: dict[str, Any], connection: Any) -> object:
        if len(lost) < 2:
            lost.append(request)
            connection.close_socket()
            return None
        return plan(request)

    with OpenpiServer(answer) as server, engine_for(server) as engine:
        assert ask(engine)[:, 0, 0].tolist() == [0.0, 1.0, 2.0]
    assert server.connections in (2, 3), "frames that were read before the loss may count, too"


def test_a_server_that_was_restarted_is_found_again() -> None:
    first = OpenpiServer(plan)
    with engine_for(first) as engine:
        ask(engine)
        first.close()
        again: list[OpenpiServer] = []
        later = threading.Timer(0.3, lambda: again.append(OpenpiServer(plan, port=first.port)))
        later.start()
        assert ask(engine, rows=1, first_episode=9)[0, 0, 0] == 9.0
        later.join()
        again[0].close()


def test_a_server_that_stays_away_is_an_error_that_says_for_how_long_it_was_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = OpenpiServer(plan)
    with engine_for(server, reconnect=0.3) as engine:
        server.close()
        with pytest.raises(PolicyError, match=r"no connection within 0.3 s"):
            ask(engine)
    caplog.clear()
    with pytest.raises(PolicyError, match=r"no connection within 0.3 s"):
        remote_engine(server.address, mapping=MAPPING, reconnect=0.3)
    (told,) = [record.getMessage() for record in caplog.records if record.name == "headrace.policies.serving"]
    assert "trying for 0.3 s" in told, "nobody waits in silence"


def test_closing_drops_a_call_under_way_at_once() -> None:
    held = threading.Event()
    with OpenpiServer(lambda *_: held.wait(30.0) and None) as server:
        engine = engine_for(server)
        engine.submit(make_request(1))
        begin = time.monotonic()
        while not server.requests:
            time.sleep(0.01)
        engine.close()
        assert time.monotonic() - begin < 20.0  # far below the server's 30 s: the call was dropped, not waited for
        held.set()
        with pytest.raises(LifecycleError, match="closed"):
            engine.submit(make_request(1))


def test_one_request_is_under_way_at_a_time() -> None:
    held = threading.Event()

    def answer(request: dict[str, Any], connection: Any) -> object:
        held.wait(10.0)
        return plan(request)

    with OpenpiServer(answer) as server, engine_for(server) as engine:
        engine.submit(make_request(1))
        assert engine.busy
        assert engine.poll(wait=False) is None
        with pytest.raises(LifecycleError, match="a request is under way"):
            engine.submit(make_request(1))
        held.set()
        assert engine.poll(wait=True) is not None
        assert not engine.pending


def test_an_answer_over_the_limit_is_refused() -> None:
    huge = np.zeros((HORIZON, 100_000), np.float32)
    cfg = {"timeout": 5.0, "reconnect": 1.0, "frame_limit": 10_000}
    with OpenpiServer(chunk(huge)) as server, engine_for(server, **cfg) as engine:
        with pytest.raises(PolicyError, match="oversized answer"):
            ask(engine)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (b"\xc1", "expected the metadata of a policy server"),
        ([1, 2], "expected the metadata of a policy server"),
        ("Traceback: no GPU", "(?s)it says:.*no GPU"),
        ({"headrace": {"protocol": 99}}, "expected headrace's metadata of protocol 1"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_before_the_first_step(metadata: object, message: str) -> None:
    with OpenpiServer(plan, metadata=metadata) as server, pytest.raises((PolicyError, ConfigError), match=message):
        engine_for(server, reconnect=1.0)
    assert server.requests == []


def test_a_server_of_others_needs_a_mapping() -> None:
    with OpenpiServer(plan) as server, pytest.raises(ConfigError, match="expected a mapping"):
        engine_for(server, mapping=None)


def test_a_mapping_that_names_an_unknown_group_is_refused_with_the_groups_there_are() -> None:
    wrong = ObservationMap(keys={"observation/state": "joints"})
    with (
        OpenpiServer(plan) as server,
        engine_for(server, mapping=wrong) as engine,
        pytest.raises(PolicyError, match=r"'camera', 'policy'\], got 'joints'"),
    ):
        ask(engine)


def test_the_sizes_can_be_learned_from_one_answer() -> None:
    request = make_request(1)
    with OpenpiServer(plan) as server, engine_for(server, horizon=None, action_dim=None) as engine:
        with pytest.raises(ConfigError, match="which it does not say"):
            _ = engine.policy
        policy = engine.probe(request.obs, request.context.instructions)
        assert (policy.horizon, policy.action_dim, policy.obs_steps) == (HORIZON, ACTION_DIM, 1)
        ask(engine)


def test_addresses_name_the_dialect_and_wrong_ones_are_refused() -> None:
    with (
        OpenpiServer(plan) as server,
        remote_engine(
            f"openpi://127.0.0.1:{server.port}", mapping=MAPPING, horizon=HORIZON, action_dim=ACTION_DIM
        ) as engine,
    ):
        ask(engine)
    for address in ("http://a:1", "openpie://a:1", "a:1", "ws://:1", "ws://a:0"):
        with pytest.raises(ConfigError, match="expected"):
            remote_engine(address)


def gr00t_plan(observation: dict[str, Any]) -> dict[str, np.ndarray]:
    rows = len(observation["state"]["arm"])
    arm = np.repeat(observation["state"]["arm"], HORIZON, axis=1)
    return {"arm": arm, "hand": np.zeros((rows, HORIZON, 1), np.float32)}


@pytest.mark.parametrize("form", ["npy", "nd"])
def test_a_gr00t_server_of_either_array_form_gets_one_request_for_all_rows(form: str) -> None:
    with Gr00tServer(gr00t_plan, form=form) as server:
        address = f"gr00t://127.0.0.1:{server.port}"
        with remote_engine(address, mapping=GR00T_MAPPING, action_dim=3, **QUICK) as engine:
            assert engine.policy.horizon == HORIZON
            actions = ask(engine, rows=3, first_episode=2)
            ask(engine, rows=3, chunk=1)
    assert actions[:, 0].tolist() == [[2.0, 0.5, 0.0], [3.0, 0.5, 0.0], [4.0, 0.5, 0.0]]
    seen = server.seen[0]
    assert seen["video"]["ego_view"].shape == (3, 1, 8, 4, 3)
    assert seen["state"]["hand"].tolist() == [[[0.5]]] * 3
    assert seen["language"] == {"annotation.human.task_description": [["do 2"], ["do 3"], ["do 4"]]}
    assert server.calls == ["get_modality_config", "reset", "get_action", "get_action"]


def test_gr00ts_history_is_taken_from_our_own() -> None:
    modalities = {
        "video": {"delta_indices": [-2, 0], "modality_keys": ["ego_view"]},
        "state": {"delta_indices": [0], "modality_keys": ["arm"]},
        "action": {"delta_indices": [0, 1, 2, 3], "modality_keys": ["arm"]},
    }
    mapping = ObservationMap(keys={"video.ego_view": "camera", "state.arm": "policy"})
    obs = {
        "policy": torch.arange(6.0).reshape(1, 3, 2),
        "camera": torch.arange(3, dtype=torch.uint8)[None, :, None, None, None].expand(1, 3, 8, 6, 3).contiguous(),
    }
    with Gr00tServer(lambda o: {"arm": np.zeros((1, 4, 3))}, modalities=modalities) as server:
        with remote_engine(server.address, mapping=mapping, action_dim=3, **QUICK) as engine:
            assert engine.policy.obs_steps == 3
            ask(engine, rows=1, obs=obs)
    seen = server.seen[0]
    assert seen["video"]["ego_view"][0, :, 0, 0, 0].tolist() == [0, 2]
    assert seen["state"]["arm"].tolist() == [[[4.0, 5.0]]]


def test_a_gr00t_mapping_is_checked_against_the_modalities_of_the_server() -> None:
    with Gr00tServer(gr00t_plan) as server, pytest.raises(ConfigError, match=r"missing \['state.hand'\], unknown"):
        remote_engine(
            server.address,
            mapping=ObservationMap(keys={"video.ego_view": "camera", "state.arm": "policy", "state.leg": "policy"}),
        )


GR00T_FAULTS: dict[str, tuple[Any, str]] = {
    "raises": (lambda _: 1 / 0, "(?s)it says:.*division by zero"),
    "garbage": (lambda _: b"\xc1", "expected msgpack"),
    "a missing part": (lambda o: {"arm": gr00t_plan(o)["arm"]}, "expected an array under 'hand'"),
    "uneven parts": (lambda o: {**gr00t_plan(o), "hand": np.zeros((3, 2, 1))}, "parts of one length"),
    "too few rows": (lambda o: {k: v[:1] for k, v in gr00t_plan(o).items()}, r"got \(1, 4, 3\)"),
    "NaN": (lambda o: {k: v + np.nan for k, v in gr00t_plan(o).items()}, "NaN or infinity"),
}


@pytest.mark.parametrize("kind", GR00T_FAULTS)
def test_a_bad_answer_of_a_gr00t_server_is_an_error_and_the_engine_goes_on(kind: str) -> None:
    bad, message = GR00T_FAULTS[kind]
    faults = [bad]
    with Gr00tServer(lambda o: (faults.pop() if faults else gr00t_plan)(o)) as server:
        with remote_engine(server.address, mapping=GR00T_MAPPING, action_dim=3, **QUICK) as engine:
            with pytest.raises(PolicyError, match=message):
                ask(engine)
            assert ask(engine)[:, 0, 0].tolist() == [0.0, 1.0, 2.0]


def test_a_gr00t_server_that_is_silent_gone_or_restarted() -> None:
    silent = Gr00tServer(lambda _: None)
    cfg = {"timeout": 0.5, "reconnect": 5.0}
    with remote_engine(silent.address, mapping=GR00T_MAPPING, action_dim=3, **cfg) as engine:
        with pytest.raises(PolicyError, match=r"no answer within 0.5 s"):
            ask(engine)
        silent.close()
        again: list[Gr00tServer] = []
        later = threading.Timer(0.3, lambda: again.append(Gr00tServer(gr00t_plan, port=silent.port)))
        later.start()
        assert ask(engine, rows=2)[:, 0, 0].tolist() == [0.0, 1.0]
        later.join()
        again[0].close()
    with pytest.raises(PolicyError, match="no connection within"):
        remote_engine(silent.address, mapping=GR00T_MAPPING, reconnect=0.2)


def test_a_gr00t_server_wants_its_token() -> None:
    with Gr00tServer(gr00t_plan, api_token="secret") as server:
        with pytest.raises(PolicyError, match="Unauthorized"):
            remote_engine(server.address, mapping=GR00T_MAPPING, **QUICK)
        cfg = {"timeout": 5.0, "api_key": "secret"}
        with remote_engine(server.address, mapping=GR00T_MAPPING, action_dim=3, **cfg) as engine:
            ask(engine)


@pytest.mark.parametrize("source", ["policy[", "policy[1]", "", "policy[a:b]"])
def test_a_mapping_that_cannot_be_read_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="a part of one such as"):
        ObservationMap(keys={"observation/state": source})


def test_a_server_that_dies_of_a_request_each_time_is_an_error_and_not_an_endless_loop() -> None:
    with OpenpiServer(lambda _, connection: connection.close_socket()) as server, engine_for(server) as engine:
        with pytest.raises(PolicyError, match="lost the connection 5 times under one request"):
            ask(engine)
    assert server.connections == 5


def test_a_second_answer_to_a_request_is_not_taken_for_the_answer_to_the_next() -> None:
    sent = threading.Event()

    def answer_twice(request: dict[str, Any], connection: Any) -> None:
        for _ in range(2):
            connection.send(msgpack.packb(plan(request), default=encode))
        sent.set()

    with OpenpiServer(answer_twice) as server, engine_for(server) as engine:
        assert ask(engine, rows=1, first_episode=5)[0, 0, 0] == 5.0
        sent.wait(5.0)
        time.sleep(0.1)  # on its way to the engine
        with pytest.raises(PolicyError, match="an answer that nobody asked for"):
            ask(engine, rows=1, first_episode=6)
        sent.clear()
        assert ask(engine, rows=1, first_episode=7)[0, 0, 0] == 7.0, "over a new connection"


@pytest.mark.parametrize(
    "address", ["ws://host:99999", "ws://host:x", "ws://[::1", "openpi://host:0", "gr00t://host:-1"]
)
def test_an_address_without_a_possible_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="server address: expected"):
        remote_engine(address, mapping=MAPPING)


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": float("nan")},
        {"timeout": float("inf")},
        {"timeout": None},
        {"reconnect": 0},
        {"frame_limit": 1.5},
        {"ping_interval": -1},
        {"api_key": "a\r\nHost: b"},
    ],
)
def test_settings_that_no_socket_takes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"remote {next(iter(wrong))}: expected"):
        RemoteCfg("ws://a:1", **wrong)


HEADRACE_SIZES = {"protocol": 1, "horizon": 4, "action_dim": 3, "obs_steps": 1, "strict_size": 8, "memory": False}


@pytest.mark.parametrize(
    "change",
    [
        {"horizon": 0},
        {"horizon": True},
        {"horizon": 1 << 40},
        {"action_dim": -3},
        {"obs_steps": 0},
        {"strict_size": -4},
        {"protocol": True},
    ],
)
def test_a_headrace_server_with_impossible_sizes_is_refused_before_the_first_step(change: dict[str, object]) -> None:
    with (
        OpenpiServer(plan, metadata={"headrace": {**HEADRACE_SIZES, **change}}) as server,
        pytest.raises(PolicyError, match="expected headrace's metadata"),
    ):
        remote_engine(server.address, **QUICK)

"""``PolicyServer`` with our own client: equal bits, shared batches, clients that go, keys and health."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from remote_rows import ACTION_DIM, HORIZON, make_request
from served_policies import STRICT, Denoiser
from test_batcher import Gate, Remembering
from test_serving_wire import FRAMES
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import headrace
from flat import evaluate, remote_engine
from headrace.errors import ConfigError, PolicyError, StorageError
from headrace.evaluation import EpisodeResult
from headrace.policies import Batching, ObservationMap, PolicyServer, RemoteEngine, ServeCfg
from headrace.policies.engines import Request
from headrace.policies.protocol import ChunkContext
from headrace.policies.serving import _server
from headrace.policies.serving._wire import pack, unpack_map
from headrace.types import Obs

SERVE = ServeCfg(port=0, batching=STRICT)
FAST = ServeCfg(port=0, batching=Batching(mode="fast"), max_wait=0.0)
OBS_DIM = {"cartpole": 4, "cartpole-told": 4, "cartpole-camera": 48 * 48 * 6}


def play(task: str, num_envs: int, episodes: range, **how: object) -> list[EpisodeResult]:
    overrides = {"episode_length": 60}  # eight chunks: what is compared is the order of requests, not skill
    env = headrace.make(task, num_envs, threads=1, autoreset="disabled", final_obs=False, overrides=overrides)
    policy = how.pop("policy", None) or Denoiser(OBS_DIM[task], 1)
    found = evaluate(env, policy, episodes=episodes, execute=8, seed=11, progress=False, **how)
    env.close()
    return found.episodes


@pytest.mark.parametrize("task", ["cartpole", "cartpole-told", "cartpole-camera"])
def test_tables_are_equal_to_the_bit_inline_in_a_thread_a_process_and_from_one_or_two_clients_of_a_server(
    task: str,
) -> None:
    episodes = range(10)
    inline = play(task, 5, episodes, batching=STRICT)
    assert play(task, 3, episodes, batching=STRICT, engine="thread") == inline
    if task != "cartpole":
        assert play(task, 4, episodes, batching=STRICT, engine="process") == inline
    with PolicyServer(Denoiser(OBS_DIM[task], 1), SERVE) as server:
        with RemoteEngine(server.address) as engine:
            assert engine.strict_size == 8
            assert play(task, 4, episodes, policy=engine.policy, engine=engine) == inline
        halves: dict[int, list[EpisodeResult]] = {}

        def half(first: int) -> None:
            with RemoteEngine(server.address) as engine:
                halves[first] = play(task, 3, range(first, first + 5), policy=engine.policy, engine=engine)

        threads = [threading.Thread(target=half, args=(first,)) for first in (0, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert halves[0] + halves[5] == inline
        assert server.stats.shared > 0, "some batches must have had rows of both clients"


@pytest.mark.parametrize("task", ["cartpole-told", "cartpole-camera"])
def test_two_client_processes_with_different_seeds_share_a_server_and_get_the_tables_of_inline_runs(task: str) -> None:
    policy = Denoiser(OBS_DIM[task], 1)
    program = Path(__file__).parent / "served_policies.py"
    with PolicyServer(policy, SERVE) as server:
        clients = [
            subprocess.Popen(
                [sys.executable, str(program), server.address, task, "0", "6", "3", str(seed)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in (11, 12)
        ]
        tables = [json.loads(client.communicate(timeout=300)[0]) for client in clients]
    for seed, table in zip((11, 12), tables, strict=True):
        overrides = {"episode_length": 60}
        env = headrace.make(task, 4, threads=1, autoreset="disabled", final_obs=False, overrides=overrides)
        alone = evaluate(env, policy, episodes=6, execute=8, seed=seed, batching=STRICT, progress=False)
        assert table == [[e.episode_id, e.seed, e.reward, e.length, e.success, e.diverged] for e in alone.episodes]


@pytest.mark.parametrize(("cfg", "size"), [(SERVE, 8), (FAST, None)])
def test_a_result_says_whether_its_server_was_strict(cfg: ServeCfg, size: int | None) -> None:
    env = headrace.make("cartpole", 2, threads=1, autoreset="disabled", final_obs=False)
    with PolicyServer(Denoiser(4, 1), cfg) as server, RemoteEngine(server.address) as engine:
        found = evaluate(env, engine.policy, engine=engine, episodes=2, execute=8, progress=False)
    assert found.strict_size == size


def test_a_fast_server_says_that_it_is_not_strict() -> None:
    with PolicyServer(Gate(), FAST) as server, RemoteEngine(server.address) as engine:
        assert engine.strict_size is None


def test_a_failing_policy_shows_its_traceback_and_finished_episodes_are_kept() -> None:
    def sick(obs: Obs, context: ChunkContext) -> torch.Tensor:
        if (context.episode_ids == 5).any():
            raise RuntimeError("the model is out of memory")
        return torch.zeros(len(context), 8, 1)

    sick.horizon, sick.action_dim = 8, 1  # type: ignore[attr-defined]
    with PolicyServer(sick, FAST) as server, RemoteEngine(server.address) as engine:
        with pytest.raises(PolicyError, match=r"(?s)it says:.*in sick.*the model is out of memory") as error:
            play("cartpole", 2, range(8), policy=engine.policy, engine=engine)
    finished = error.value.finished.episodes  # type: ignore[union-attr]
    assert len(finished) >= 3
    assert 5 not in [episode.episode_id for episode in finished]


def test_a_server_killed_in_mid_evaluation_and_started_again_leaves_no_trace_in_the_table() -> None:
    inline = play("cartpole", 3, range(6), batching=STRICT)
    calls = threading.Semaphore(0)

    class Counted(Denoiser):
        def forward(self, obs: Obs, context: ChunkContext) -> torch.Tensor:
            calls.release()
            return super().forward(obs, context)

    first = PolicyServer(Counted(4, 1), SERVE).start()

    def restart() -> None:
        for _ in range(8):
            calls.acquire(timeout=60.0)
        first.close()
        again.append(PolicyServer(Denoiser(4, 1), ServeCfg(port=first.port, batching=STRICT)).start())

    again: list[PolicyServer] = []
    restarting = threading.Thread(target=restart)
    restarting.start()
    with RemoteEngine(first.address) as engine:
        assert play("cartpole", 3, range(6), policy=engine.policy, engine=engine) == inline
    restarting.join()
    assert again[0].stats.rows > 0
    again[0].close()


def test_the_journal_of_a_server_with_strict_batches_is_resumed(tmp_path: Path) -> None:
    keep, told = headrace.evaluation.JournalCfg(path=tmp_path / "j", resume=True), {"policy_id": "d", "execute": 8}
    recipe = headrace.EnvRecipe("cartpole", num_envs=2, seed=11, overrides={"episode_length": 60})
    inline = play("cartpole", 3, range(4), batching=STRICT)
    with PolicyServer(Denoiser(4, 1), SERVE) as server:
        for episodes in (2, 4):
            cfg = headrace.evaluation.PlayCfg(**told)  # type: ignore[arg-type]
            where = headrace.policies.RemoteCfg(server.address)
            found = headrace.evaluate(recipe, where, episodes=episodes, play=cfg, journal=keep, progress=False)
    assert found.episodes == inline


def test_a_server_that_stands_still_is_an_error_after_the_time_out_and_is_used_again_when_it_goes_on() -> None:
    program = (
        "from served_policies import STRICT, Denoiser\n"
        "from headrace.policies import PolicyServer, ServeCfg\n"
        "server = PolicyServer(Denoiser(4, 1), ServeCfg(port=0, batching=STRICT)).start()\n"
        "print(server.address, flush=True)\n"
        "server.wait()\n"
    )
    folder = str(Path(__file__).parent)
    with subprocess.Popen([sys.executable, "-c", program], cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        request = _rows_for(Denoiser(4, 1))
        try:
            with remote_engine(address, timeout=20.0) as engine:
                engine.submit(request)
                before = engine.poll(wait=True)
            with remote_engine(address, timeout=1.0, reconnect=60.0) as engine:
                process.send_signal(signal.SIGSTOP)
                engine.submit(request)
                with pytest.raises(PolicyError, match="within 1 s"):
                    engine.poll(wait=True)
                process.send_signal(signal.SIGCONT)
            with remote_engine(address, timeout=20.0) as engine:
                engine.submit(request)
                after = engine.poll(wait=True)
            assert before is not None
            assert after is not None
            assert torch.equal(before.answer.actions, after.answer.actions)
        finally:
            process.kill()


def _rows_for(policy: Denoiser) -> Request:
    """Two rows in the middle of an episode."""
    request = make_request(2, chunk=1, obs={"policy": torch.arange(8.0).reshape(2, 4)})
    left_over = torch.zeros(2, policy.horizon, policy.action_dim)
    return replace(request, context=replace(request.context, left_over=left_over))


def test_a_server_that_comes_back_with_another_policy_is_an_error() -> None:
    first = PolicyServer(Denoiser(4, 1), SERVE).start()
    with remote_engine(first.address, reconnect=10.0) as engine:
        first.close()
        with PolicyServer(Denoiser(4, 1, horizon=9), ServeCfg(port=first.port, batching=STRICT)):
            with pytest.raises(PolicyError, match="came back with another policy"):
                play("cartpole", 2, range(2), policy=engine.policy, engine=engine)


def test_a_server_started_anew_has_lost_the_memory_of_its_policy_which_is_an_error() -> None:
    quick = {"timeout": 10.0, "reconnect": 10.0}
    with PolicyServer(Remembering(), FAST) as server, remote_engine(server.address, **quick) as engine:
        engine.submit(make_request(1))
        assert engine.poll(wait=True) is not None
        server.close()

        def ask_for_the_next_chunk() -> None:
            engine.submit(make_request(1, chunk=1))
            engine.poll(wait=True)

        with (
            PolicyServer(Remembering(), replace(FAST, port=server.port)),
            pytest.raises(PolicyError, match="started anew, and its policy remembers nothing"),
        ):
            ask_for_the_next_chunk()


def test_a_client_that_disappears_loses_only_its_rows() -> None:
    policy = Gate(closed=True)
    with PolicyServer(policy, FAST) as server:
        staying, going = RemoteEngine(server.address), RemoteEngine(server.address)
        staying.submit(make_request(1))
        assert policy.entered.acquire(timeout=30.0)
        going.submit(make_request(2, first_episode=20))
        while server.stats.requests < 2:
            pass
        going.close()
        while server.clients > 1:
            pass
        policy.allowed.release(10)
        assert staying.poll(wait=True) is not None
        staying.submit(make_request(1, first_episode=1))
        assert staying.poll(wait=True) is not None
        staying.close()
        assert policy.batches == [[0], [1]]
        assert server.stats.dropped == 1


def test_a_policy_with_memory_is_told_over_the_wire_when_episodes_begin_and_end() -> None:
    class Leaning(Remembering):
        horizon, action_dim = 8, 1

        def __call__(self, obs: Obs, context: ChunkContext) -> torch.Tensor:
            return torch.zeros(len(context), 8, 1)

    policy = Leaning()
    with PolicyServer(policy, FAST) as server, remote_engine(server.address) as engine:
        play("cartpole", 2, range(5), policy=engine.policy, engine=engine)
    assert sorted(policy.begun) == sorted(policy.ended) == [(11, episode) for episode in range(5)]


def test_an_observation_map_fills_the_groups_of_our_own_server_as_it_fills_a_local_policy() -> None:
    class Pole(Gate):
        """Pushes to the side that its state says."""

        horizon, action_dim = 8, 1

        def __call__(self, obs: Obs, context: ChunkContext) -> torch.Tensor:
            return torch.tanh(obs["pole"].sum(dim=1) - obs["cart"][:, 0])[:, None, None].expand(-1, 8, 1)

    keys = {"pole": "policy[2:4]", "cart": "-policy[0:1]"}
    mapping = ObservationMap(keys=keys, negated=(0,))
    inline = play("cartpole", 3, range(4), policy=Pole(), mapping=mapping, batching=STRICT)
    with PolicyServer(Pole(), SERVE) as server, RemoteEngine(server.address, mapping=mapping) as engine:
        assert play("cartpole", 3, range(4), policy=engine.policy, engine=engine) == inline


def test_health_is_answered_to_everybody_and_a_key_is_asked_of_clients() -> None:
    with PolicyServer(Gate(), ServeCfg(port=0, api_key="secret")) as server:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/healthz", timeout=10.0) as answer:
            assert (answer.status, answer.read()) == (200, b"OK\n")
        for key in (None, "wrong"):
            with pytest.raises(PolicyError, match="refused the API key"):
                remote_engine(server.address, api_key=key)
        with remote_engine(server.address, api_key="secret") as engine:
            engine.submit(make_request(1))
            assert engine.poll(wait=True) is not None


def test_web_pages_and_more_clients_than_allowed_are_rejected() -> None:
    from websockets.exceptions import InvalidStatus

    with PolicyServer(Gate(), ServeCfg(port=0, max_clients=1)) as server:
        with pytest.raises(InvalidStatus, match="403"):
            connect(server.address, origin="http://evil.example")
        with connect(server.address, compression=None) as client:
            client.recv()
            with pytest.raises(InvalidStatus, match="503"):
                connect(server.address, compression=None)
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/healthz", timeout=10.0) as answer:
                assert answer.status == 200
    with pytest.raises(ConfigError, match="max_clients"):
        ServeCfg(max_clients=0)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    about = ["-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*made, *about, "-keyout", tmp_path / "key", "-out", tmp_path / "cert"], check=True, capture_output=True
    )
    both = tmp_path / "both.pem"
    both.write_text((tmp_path / "cert").read_text() + (tmp_path / "key").read_text())
    return both


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_with_a_certificate_it_speaks_tls_to_clients_that_trust_it(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PolicyServer(Gate(), replace(SERVE, certificate=certificate)) as server:
        assert server.address.startswith("wss://")
        with pytest.raises(PolicyError, match="certificate verify failed"):
            remote_engine(server.address, reconnect=0.2)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with remote_engine(server.address) as engine:
            engine.submit(make_request(1))
            assert engine.poll(wait=True) is not None
        with pytest.raises(PolicyError, match="no connection"):
            remote_engine(server.address.replace("wss", "ws"), reconnect=0.2)


def test_a_file_without_a_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("words")
    for name in ("x.pem", "none.pem"):
        with pytest.raises(ConfigError, match=f"certificate: expected a PEM file.*{name}"):
            PolicyServer(Denoiser(4, 1), ServeCfg(certificate=tmp_path / name))


def test_large_frames_are_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    decode = _server.unpack_map

    def unpack(*args: object, **how: object) -> dict[str, object]:
        threads.append(threading.current_thread().name == "headrace-server")
        return decode(*args, **how)

    monkeypatch.setattr(_server, "unpack_map", unpack)
    with PolicyServer(Denoiser(4, 1), FAST) as server:
        for message in ({"a": 1}, {"a": np.zeros(1 << 18, np.uint8)}):
            with connect(server.address) as client:
                client.recv()
                client.send(pack(message))
                client.recv()
    assert threads == [True, False]


def test_a_local_server_rejects_requests_under_a_name_of_others() -> None:
    with PolicyServer(Gate(), ServeCfg(port=0)) as server:
        for name, welcome in (("127.0.0.1", True), ("localhost", True), ("evil.example", False)):
            sock = socket.create_connection(("127.0.0.1", server.port))
            refused = contextlib.nullcontext() if welcome else pytest.raises(InvalidStatus, match="403")
            with sock, refused, connect(f"ws://{name}:{server.port}", sock=sock, proxy=None) as client:
                client.recv()


def test_it_listens_on_this_machine_only_unless_told_otherwise() -> None:
    assert ServeCfg().host == "127.0.0.1"
    with PolicyServer(Gate(), SERVE) as server, pytest.raises(StorageError, match="cannot listen on"):
        PolicyServer(Gate(), ServeCfg(port=server.port)).start()


def test_the_metadata_has_sizes_and_strictness() -> None:
    with PolicyServer(Gate(), SERVE, name="gate") as server, connect(server.address, compression=None) as client:
        told = unpack_map(client.recv())
    assert told["action_horizon"] == HORIZON
    ours = told["headrace"]
    assert (ours["policy"], ours["horizon"], ours["action_dim"]) == ("gate", HORIZON, ACTION_DIM)
    assert (ours["obs_steps"], ours["strict_size"], ours["memory"]) == (1, 8, False)


def test_a_request_in_openpis_frames_is_answered_in_openpis_frames() -> None:
    seen: list[tuple[Obs, ChunkContext]] = []

    def policy(obs: Obs, context: ChunkContext) -> torch.Tensor:
        seen.append((obs, context))
        return context.noise(2, 3)

    policy.horizon, policy.action_dim = 2, 3  # type: ignore[attr-defined]
    frame = (FRAMES / "openpi_request.bin").read_bytes()
    with PolicyServer(policy, FAST) as server, connect(server.address, compression=None) as client:
        client.recv()
        replies = []
        for extra in ({}, {}, {"episode/seed": 3, "episode/id": 9, "episode/chunk": 2}):
            client.send(pack({**unpack_map(frame), **extra}) if extra else frame)
            replies.append(unpack_map(client.recv()))
    assert [reply["actions"].shape for reply in replies] == [(2, 3)] * 3
    assert set(replies[1]["server_timing"]) == {"infer_ms", "prev_total_ms"}
    obs, context = seen[0]
    assert {name: tuple(values.shape) for name, values in obs.items()} == {"image": (1, 4, 6, 3), "policy": (1, 2)}
    assert context.instructions == ("push the cube",)
    identities = [(int(c.seeds), int(c.episode_ids), int(c.chunk_index)) for _, c in seen]
    assert identities == [(0, 0, 0), (0, 0, 1), (3, 9, 2)]
    assert not np.array_equal(replies[0]["actions"], replies[1]["actions"])


BAD_REQUESTS: dict[str, tuple[object, str]] = {
    "garbage": (b"\xc1", "expected msgpack"),
    "a text": ("hello", "expected a map"),
    "a list": (b"\x91\x01", "expected a map"),
    "nothing": (pack({}), "expected an observation"),
    "no numbers": (pack({"observation/state": "left"}), "expected an array of numbers"),
    "a prompt that is no text": (pack({"observation/state": np.zeros(2), "prompt": 3}), "expected a text"),
    "two states": (pack({"observation/state": np.zeros(2), "policy": np.zeros(2)}), "two keys for the group"),
    "no context": (pack({"headrace": {"protocol": 1}, "obs": {}}), "expected a context map"),
    "another protocol": (pack({"headrace": {"protocol": 9}, "obs": {}}), "expected protocol 1"),
    "a protocol that is an array": (pack({"headrace": {"protocol": np.ones(2)}, "obs": {}}), "DataError: request: exp"),
    "a negative episode": (pack({"observation/state": np.zeros(2), "episode/id": -4}), "expected a number from 0"),
    "a negative seed of numpy": (
        pack({"observation/state": np.zeros(2), "episode/seed": np.int64(-4)}),
        "expected a number from 0",
    ),
    "a seed of 64 bits": (
        pack({"observation/state": np.zeros(2), "episode/seed": np.uint64(2**64 - 1)}),
        "expected a number from 0",
    ),
}


@pytest.mark.parametrize("kind", BAD_REQUESTS)
def test_a_bad_request_is_told_to_its_client_and_the_server_goes_on(kind: str) -> None:
    bad, message = BAD_REQUESTS[kind]
    with PolicyServer(Gate(), FAST) as server:
        with connect(server.address, compression=None) as client:
            client.recv()
            client.send(bad)
            told = client.recv(timeout=10.0)
            assert isinstance(told, str)
            assert message in told
        with RemoteEngine(server.address) as engine:
            engine.submit(make_request(2))
            assert engine.poll(wait=True) is not None


def test_a_context_of_the_wrong_size_is_refused() -> None:
    with PolicyServer(Gate(), FAST) as server, connect(server.address, compression=None) as client:
        client.recv()
        arrays = make_request(2).context.to_arrays()
        arrays["left_over"] = np.zeros((2, 1, 1), np.float32)
        client.send(pack({"headrace": {"protocol": 1, "context": arrays}, "obs": {}}))
        assert "expected left_over torch.float32 (2, 4, 3)" in str(client.recv(timeout=10.0))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("episode_ids", -1, "expected episode_ids from 0, got [-1, -1]"),  # the mark of padding rows
        ("chunk_index", -3, "expected chunk_index from 0"),
        ("left_over_length", HORIZON + 1, f"expected left_over_length from 0 to {HORIZON}"),
        ("delay", -1, f"expected delay from 0 to {HORIZON}"),
    ],
)
def test_a_context_that_cannot_be_is_refused(field: str, value: int, message: str) -> None:
    with PolicyServer(Gate(), FAST) as server, connect(server.address, compression=None) as client:
        client.recv()
        arrays = make_request(2).context.to_arrays() | {field: np.full(2, value, np.int64)}
        client.send(pack({"headrace": {"protocol": 1, "context": arrays}, "obs": {}}))
        assert message in str(client.recv(timeout=10.0))


def test_a_request_over_the_limit_is_refused_by_name() -> None:
    with PolicyServer(Gate(), ServeCfg(port=0, frame_limit=10_000)) as server, RemoteEngine(server.address) as engine:
        obs = {"policy": torch.zeros(1, 100_000)}
        engine.submit(make_request(1, obs=obs))
        with pytest.raises(PolicyError, match="larger than the server takes"):
            engine.poll(wait=True)


def test_settings_that_cannot_work_are_refused() -> None:
    for wrong in (
        {"max_rows": 0},
        {"max_rows": 1.5},
        {"max_wait": -1.0},
        {"max_wait": float("nan")},
        {"frame_limit": 0},
        {"port": 70000},
        {"port": -1},
        {"port": "8000"},
    ):
        with pytest.raises(ConfigError, match=rf"serve {next(iter(wrong))}: expected"):
            ServeCfg(**wrong)  # type: ignore[arg-type]

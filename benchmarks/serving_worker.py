"""The processes of ``benchmarks/serving.py``: servers, clients of one call each, and clients that evaluate.

serving_worker.py server KIND            prints {"port": …}; KIND: raw, policy, zmq, model, model-serial
serving_worker.py call KIND PORT         a contestant: raw, ours, openpi, zmq
serving_worker.py play                   evaluates what each line of JSON says
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from interleaved import serve

ROWS, SIZE, HORIZON, ACTIONS = 8, 224, 16, 7
CALLS = 8
"""Of a measurement, whose median counts."""
FIXED, PER_ROW = 0.040, 0.005


def median_of(call: Callable[[], object]) -> float:
    """Milliseconds."""
    seconds = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return 1000 * sorted(seconds)[CALLS // 2]


def pictures() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shape = (ROWS, SIZE, SIZE, 3)
    return {name: random.integers(0, 256, shape).astype(np.uint8) for name in ("left", "right")}


def told_port(port: int) -> None:
    print(json.dumps({"port": port}), flush=True)


def serve_raw() -> None:
    """The same bytes there, as many bytes of actions back: what the websocket itself takes."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.server import serve as listen

    answer = bytes(ROWS * HORIZON * ACTIONS * 4)

    def echo(connection: Any) -> None:
        with contextlib.suppress(ConnectionClosed):  # the benchmark ends its processes without ceremony
            for _ in connection:
                connection.send(answer)

    with listen(echo, "127.0.0.1", 0, compression=None, max_size=None) as server:
        told_port(server.socket.getsockname()[1])
        server.serve_forever()


def serve_zmq() -> None:
    """A GR00T server without a model, in the array form of main."""
    import zmq

    from headrace.policies.serving._wire import pack, unpack_map

    socket = zmq.Context().socket(zmq.REP)
    told_port(socket.bind_to_random_port("tcp://127.0.0.1"))
    modalities: dict[str, Any] = {
        "video": {"delta_indices": [0], "modality_keys": ["left", "right"]},
        "action": {"delta_indices": list(range(HORIZON)), "modality_keys": ["arm"]},
    }
    marked = {name: {"__ModalityConfig__": True, "as_json": value} for name, value in modalities.items()}
    while True:
        request = unpack_map(socket.recv())
        if request["endpoint"] == "get_modality_config":
            socket.send(pack(marked, "nd"))
        else:
            socket.send(pack({"arm": np.zeros((ROWS, HORIZON, ACTIONS), np.float32)}, "nd"))


def serve_policy(kind: str) -> None:
    """Our server: with a model that costs nothing, or 40 ms and 5 ms per row off the CPU."""
    import torch

    from headrace.policies import Batching, PolicyServer, ServeCfg, as_chunk_policy
    from headrace.policies.protocol import ChunkContext

    def plan(obs: dict[str, torch.Tensor], context: ChunkContext) -> torch.Tensor:
        del obs
        if kind != "policy":
            time.sleep(FIXED + PER_ROW * len(context))
        return torch.zeros(len(context), HORIZON, ACTIONS)

    rows = 1 if kind == "model-serial" else 64
    cfg = ServeCfg(port=0, batching=Batching(mode="fast"), max_rows=rows, max_wait=0.0 if kind == "policy" else 0.02)
    with PolicyServer(as_chunk_policy(plan, horizon=HORIZON, action_dim=ACTIONS), cfg) as server:
        told_port(server.port)
        server.wait()


def call_raw(port: int) -> None:
    from websockets.sync.client import connect

    frame = bytes(sum(image.nbytes for image in pictures().values()))
    with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as connection:

        def call() -> None:
            connection.send(frame)
            connection.recv()

        call()
        serve({"bytes": len(frame)}, lambda: median_of(call))


def call_openpi(port: int) -> None:
    """openpi's own client, in its own environment; it knows no rows: the pictures are those of one observation."""
    import warnings

    warnings.simplefilter("ignore")  # it opens its connection in a way that websockets will not allow for ever
    from openpi_client import msgpack_numpy
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    client = WebsocketClientPolicy("127.0.0.1", port)
    obs: dict[str, Any] = {f"observation/{name}": images for name, images in pictures().items()}
    obs["prompt"] = "push the cube"
    client.infer(obs)
    serve({"bytes": len(msgpack_numpy.packb(obs))}, lambda: median_of(lambda: client.infer(obs)))


def call_ours(port: int, scheme: str) -> None:
    import torch

    from headrace.policies import ObservationMap, RemoteEngine
    from headrace.policies.engines import Request
    from headrace.policies.protocol import ChunkContext

    zero = torch.zeros(ROWS, dtype=torch.int64)
    context = ChunkContext(
        seeds=zero,
        env_ids=zero,
        episode_ids=torch.arange(ROWS),
        chunk_index=zero + 1,
        instructions=("push the cube",) * ROWS,
        left_over=torch.zeros(ROWS, HORIZON, ACTIONS),
        left_over_length=zero,
        delay=zero,
    )
    obs = {name: torch.from_numpy(images) for name, images in pictures().items()}
    request = Request(obs=obs, context=context)
    mapping = ObservationMap(keys={"video.left": "left", "video.right": "right"}) if scheme == "tcp" else None
    with RemoteEngine(f"{scheme}://127.0.0.1:{port}", mapping=mapping, action_dim=ACTIONS) as engine:

        def call() -> None:
            engine.submit(request)
            engine.poll(wait=True)

        call()
        # the size of a frame is nobody's business but a benchmark's
        sent = sum(map(len, engine._line.speaker.frames(request)))
        serve({"bytes": sent}, lambda: median_of(call))


class OneByOne:
    """An engine as a serial client has it: one row per request, one request after the other."""

    overlaps, strict_size = False, None

    def __init__(self, engine: Any) -> None:
        self._engine, self._reply = engine, None

    @property
    def busy(self) -> bool:
        return self._reply is not None

    pending = busy

    def submit(self, request: Any) -> None:
        import torch

        from headrace.policies.batching import Answer
        from headrace.policies.engines import Reply, Request

        parts = []
        for row in torch.arange(len(request.context)).split(1):
            obs = {name: values.index_select(0, row) for name, values in request.obs.items()}
            self._engine.submit(Request(obs=obs, context=request.context.rows(row)))
            parts.append(self._engine.poll(wait=True))
        actions = torch.cat([part.answer.actions for part in parts])
        seconds = sum(part.seconds for part in parts)
        self._reply = Reply(
            request=request, answer=Answer(actions=actions, calls=len(parts), padding=0), seconds=seconds
        )

    def poll(self, *, wait: bool) -> Any:
        del wait
        reply, self._reply = self._reply, None
        return reply

    def close(self) -> None:
        self._engine.close()


def play() -> None:
    """For each line of JSON: make environments, say so, play some episodes when told to; prints steps and times."""
    import torch

    import headrace
    from headrace import evaluate
    from headrace.evaluation import PlayCfg
    from headrace.policies import RemoteEngine

    torch.set_num_threads(1)
    print(json.dumps({"ready": {}}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        num_envs, overrides = job["num_envs"], {"episode_length": job["steps"]}
        env = headrace.make(
            "pusher-solid", num_envs, threads=1, autoreset="disabled", final_obs=False, overrides=overrides
        )
        with RemoteEngine(f"ws://127.0.0.1:{job['port']}") as engine:
            env.reset(seed=0)
            env.step(torch.zeros(num_envs, ACTIONS))  # compiled before the clock runs
            print(json.dumps({"prepared": True}), flush=True)
            sys.stdin.readline()
            begin = time.time()
            runs = OneByOne(engine) if job["serial"] else engine
            episodes = range(job["first"], job["first"] + job["count"])
            found = evaluate(
                env,
                engine.policy,
                play=PlayCfg(engine=runs, execute=HORIZON),
                episodes=episodes,
                seed=1,
                progress=False,
            )
            print(json.dumps({"steps": found.counters.env_steps, "begin": begin, "end": time.time()}), flush=True)
        env.close()


def main() -> None:
    mode, *words = sys.argv[1:]
    if mode == "server":
        {"raw": serve_raw, "zmq": serve_zmq}.get(words[0], lambda: serve_policy(words[0]))()
    elif mode == "call":
        kind, port = words[0], int(words[1])
        if kind in ("ours", "zmq"):
            call_ours(port, "ws" if kind == "ours" else "tcp")
        else:
            {"raw": call_raw, "openpi": call_openpi}[kind](port)
    else:
        play()


if __name__ == "__main__":
    main()

"""The genuine client of openpi, in .venv-openpi: ``genuine_openpi.py HOST PORT KEY EPISODE COUNT`` prints chunks."""

from __future__ import annotations

import json
import sys
import warnings

import numpy as np

warnings.simplefilter("ignore")  # the client opens its connection in a way that websockets will not allow for ever
from openpi_client.websocket_client_policy import WebsocketClientPolicy  # noqa: E402  # after the filter


def main(host: str, port: str, key: str, episode: str, count: str) -> None:
    client = WebsocketClientPolicy(host, int(port), api_key=key)
    metadata = client.get_server_metadata()
    chunks = []
    for chunk in range(int(count)):
        state = np.array([0.1 * int(episode), 0.2 * chunk, -0.3, 0.4], np.float32)
        image = np.full((8, 8, 3), int(episode), np.uint8)
        obs = {"observation/state": state, "observation/image": image, "prompt": f"push {episode}"}
        if int(episode) >= 0:
            obs |= {"episode/seed": 5, "episode/id": int(episode), "episode/chunk": chunk}
        answer = client.infer(obs)
        assert set(answer) >= {"actions", "policy_timing", "server_timing"}
        chunks.append(answer["actions"].tolist())
    print(json.dumps({"horizon": metadata["action_horizon"], "numpy": np.__version__, "chunks": chunks}))


if __name__ == "__main__":
    main(*sys.argv[1:])

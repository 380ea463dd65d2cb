"""The genuine client of openpi talks to our server: ``make test-openpi``, in an environment of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch
from served_policies import STRICT, Denoiser

from flat import ask
from headrace.policies import PolicyServer, ServeCfg, as_chunk_policy
from headrace.policies.protocol import ChunkContext

ROOT = Path(__file__).parents[3]
CLIENT = Path(__file__).parent / "genuine_openpi.py"
CHUNKS = 6


def start(server: PolicyServer, episode: int, key: str = "secret") -> subprocess.Popen[str]:
    python = ROOT / ".venv-openpi" / "bin" / "python"
    words = [python, CLIENT, "127.0.0.1", str(server.port), key, str(episode), str(CHUNKS)]
    return subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def expected(episode: int) -> list[list[list[float]]]:
    """The chunks of an inline strict run over the same observations."""
    policy = as_chunk_policy(Denoiser(4, 2))
    chunks = []
    for chunk in range(CHUNKS):
        one = torch.ones(1, dtype=torch.int64)
        context = ChunkContext(
            seeds=5 * one,
            env_ids=0 * one,
            episode_ids=episode * one,
            chunk_index=chunk * one,
            instructions=(f"push {episode}",),
            left_over=torch.zeros(1, policy.horizon, policy.action_dim),
            left_over_length=0 * one,
            delay=0 * one,
        )
        state = torch.tensor([[0.1 * episode, 0.2 * chunk, -0.3, 0.4]], dtype=torch.float64).float()
        image = torch.full((1, 8, 8, 3), episode, dtype=torch.uint8)
        chunks.append(ask(policy, {"policy": state, "image": image}, context, STRICT).actions[0].tolist())
    return chunks


def test_eight_clients_of_openpi_share_a_server_and_get_the_bits_of_inline_strict_runs() -> None:
    cfg = ServeCfg(port=0, batching=STRICT, api_key="secret", max_wait=0.05)
    with PolicyServer(Denoiser(4, 2), cfg) as server:
        clients = [start(server, episode) for episode in range(8)]
        told = [client.communicate(timeout=300) for client in clients]
        shared = server.stats.shared
    answers = [json.loads(out) for out, _ in told]
    assert all(answer["numpy"].startswith("1.") and answer["horizon"] == 8 for answer in answers)
    for episode, answer in enumerate(answers):
        assert answer["chunks"] == expected(episode)
    assert shared > 0


def test_a_client_of_openpi_without_the_key_is_turned_away() -> None:
    with PolicyServer(Denoiser(4, 2), ServeCfg(port=0, api_key="secret")) as server:
        client = start(server, 0, key="wrong")
        _, errors = client.communicate(timeout=120)
    assert client.returncode != 0
    assert "401" in errors

"""Serve a policy, and evaluate it from two client processes at once: the table is that of a run without a server.

The server merges the rows of both clients into batches; strict batches give every row the bits of an inline run.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import headrace
from headrace import evaluate, load_policy
from headrace.evaluation import EpisodeResult, PlayCfg
from headrace.policies import Batching, PolicyServer, RemoteEngine, ServeCfg


def play(address: str, first: int, count: int, num_envs: int) -> list[EpisodeResult]:
    """Some episodes, with the policy of the server."""
    env = headrace.make("pusher-solid", num_envs, threads=1, autoreset="disabled", final_obs=False)
    episodes = range(first, first + count)
    with RemoteEngine(address) as engine:
        return evaluate(
            env, engine.policy, play=PlayCfg(engine=engine, execute=16), episodes=episodes, progress=False
        ).episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--num-envs", type=int, default=8, help="of each client")
    arguments = parser.parse_args()
    half = arguments.episodes // 2
    policy, strict = load_policy("pusher-solid"), Batching(mode="strict", size=16)
    with (
        PolicyServer(policy, ServeCfg(port=0, batching=strict)) as server,
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as clients,
    ):
        halves = [clients.submit(play, server.address, first, half, arguments.num_envs) for first in (0, half)]
        remote = [episode for part in halves for episode in part.result()]
        stats = server.stats
    print(f"{stats.rows} rows in {stats.batches} batches, {stats.shared} of them with rows of both clients")

    env = headrace.make("pusher-solid", arguments.num_envs, autoreset="disabled", final_obs=False)
    inline = evaluate(env, policy, episodes=2 * half, play=PlayCfg(execute=16, batching=strict), progress=False)
    print("equal to a run without a server, to the last bit:", remote == inline.episodes)
    print(f"{sum(bool(episode.success) for episode in remote)} of {len(remote)} episodes succeeded")


if __name__ == "__main__":
    main()

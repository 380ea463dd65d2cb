"""Trains ``my-robot-reach``: the settings that it needs, in one place."""

from __future__ import annotations

import argparse

import headrace
from headrace.learning import PPOCfg

SETTINGS = PPOCfg(steps=32, epochs=4, minibatches=4, learning_rate=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--output", default="runs/my-robot")
    arguments = parser.parse_args()
    result = headrace.train(
        "my-robot-reach",
        iterations=arguments.iterations,
        ppo=SETTINGS,
        num_envs=arguments.num_envs,
        run=headrace.RunCfg(output=arguments.output),
    )
    print(result.last)


if __name__ == "__main__":
    main()

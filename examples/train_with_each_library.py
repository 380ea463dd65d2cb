"""PPO on one task with four libraries and our own learner, from one configuration.

The same network, batch, epochs, learning rate, gamma and lambda; where a library cannot do what the settings say, its
bundle states it. Needs: pip install 'headrace[rsl-rl,rl-games,skrl,sb3]'. On the command line the same is
`headrace train TASK --library NAME`.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

import headrace
from headrace.learning import PPOCfg
from headrace.libraries import library_run, make_learner

LIBRARIES = ("headrace", "rsl_rl", "rl_games", "skrl", "sb3")


def main() -> None:
    """Train with each in turn and show how far it came."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cartpole-camera")
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--libraries", nargs="+", default=LIBRARIES, choices=LIBRARIES)
    arguments = parser.parse_args()

    pictures = {"pixels": 48, "frame_stack": 2, "color": "gray"} if "camera" in arguments.task else {}
    table = Table(title=f"{arguments.task}, {arguments.iterations} iterations of {arguments.num_envs} environments")
    for column in ("library", "episodes", "mean return of the last ten", "collecting s", "learning s"):
        table.add_column(column, justify="left" if column == "library" else "right")
    for library in arguments.libraries:
        env = headrace.make(arguments.task, arguments.num_envs, seed=0, overrides=pictures)
        returns: list[float] = []
        collecting = learning = 0.0
        with library_run(seed=0):
            learner = make_learner(library, env, PPOCfg())
            for iteration in range(arguments.iterations):
                times = learner.iterate()
                collecting, learning = collecting + times.collect, learning + times.learn
                returns += learner.finished().returns.tolist()
                print(f"\r{library}: iteration {iteration + 1}", end="", flush=True)
            learner.close()
        env.close()
        last = returns[-10:]
        mean = f"{sum(last) / len(last):.1f}" if last else "–"
        table.add_row(library, f"{len(returns)}", mean, f"{collecting:.1f}", f"{learning:.1f}")
        print()
    Console().print(table)


if __name__ == "__main__":
    main()

"""Opens an export with Minari; runs in .venv-minari: ``minari_reader.py EPISODES EXPORT``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from episodes import Source


def main(source: Source, export: Path) -> None:
    os.environ["MINARI_DATASETS_PATH"] = str(export.parent)
    import minari

    dataset = minari.load_dataset(export.name)
    assert dataset.total_episodes == len(source.lines)
    assert dataset.total_steps == sum(line["length"] for line in source.lines)
    for found, (line, episode) in zip(dataset.iterate_episodes(), source.episodes(), strict=True):
        assert len(found) == line["length"]
        for name, rows in episode.items():
            values = {"actions": found.actions, "rewards": found.rewards}.get(name)
            values = {"terminated": found.terminations, "truncated": found.truncations}.get(name, values)
            if name.startswith("obs/"):
                values = found.observations
                for part in name.split("/")[1:]:
                    values = values[part]
            if values is None:
                values = found.infos[name]
            np.testing.assert_array_equal(values, rows, err_msg=name)
        row = {name: value[0] for name, value in found.observations.items() if not isinstance(value, dict)}
        for name, value in row.items():
            assert dataset.observation_space[name].contains(value), name
        # gym-aloha declares [-1, 1] and takes joint positions beyond it, as ours does
        if not source.info["recipe"].get("source", "").startswith("aloha"):
            assert dataset.action_space.contains(found.actions[0])
    assert dataset.env_spec is not None or not source.info["recipe"].get("source")
    print(f"Minari reads {len(source.lines)} episodes, action space {dataset.action_space}")


if __name__ == "__main__":
    main(Source(Path(sys.argv[1])), Path(sys.argv[2]))

"""Opens an export with robomimic's own dataset class, and with h5py alone; runs in .venv-robomimic.

``robomimic_reader.py EPISODES EXPORT``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import h5py
import numpy as np
import robomimic.utils.obs_utils as obs_utils
from episodes import Source
from robomimic.utils.dataset import SequenceDataset


def main(source: Source, export: Path) -> None:
    read_with_h5py(source, export)
    with h5py.File(export) as file:
        keys = [key for key, item in file["data/demo_0/obs"].items() if isinstance(item, h5py.Dataset)]
        images = [key for key in keys if file[f"data/demo_0/obs/{key}"].ndim == 4]
    numbers = [key for key in keys if key not in images]
    obs_utils.initialize_obs_utils_with_obs_specs([{"obs": {"low_dim": numbers, "rgb": images}}])
    dataset = SequenceDataset(
        str(export), obs_keys=keys, dataset_keys=("actions", "rewards", "dones"), hdf5_cache_mode=None
    )
    assert len(dataset) == sum(line["length"] for line in source.lines)
    index = 0
    for line, episode in source.episodes():
        for step in range(line["length"]):
            item = dataset[index]
            np.testing.assert_array_equal(item["actions"][0], episode["actions"][step])
            np.testing.assert_array_equal(item["rewards"][0], episode["rewards"][step])
            for key in keys:
                for group, row in (("obs", step), ("next_obs", step + 1)):
                    wanted = episode[f"obs/{key}"][row]
                    np.testing.assert_array_equal(item[group][key][0], wanted, err_msg=f"{group}/{key}")
            index += 1
    print(f"robomimic reads {len(source.lines)} demonstrations, {index} samples, images: {images or 'none'}")


def read_with_h5py(source: Source, export: Path) -> None:
    with h5py.File(export) as file:
        assert file.attrs["format_version"] == 1
        data = file["data"]
        assert list(data) == [f"demo_{number}" for number in range(len(source.lines))]
        assert json.loads(data.attrs["env_args"])["env_name"] == source.info["recipe"].get("source", "")
        for number, (line, episode) in enumerate(source.episodes()):
            demo = data[f"demo_{number}"]
            assert int(demo.attrs["num_samples"]) == line["length"]
            assert demo.attrs.get("instruction", "") == line["instruction"]
            for name, rows in episode.items():
                if name.startswith("obs/"):
                    np.testing.assert_array_equal(demo[name][()], rows[:-1])
                    np.testing.assert_array_equal(demo[f"next_{name}"][()], rows[1:])
                elif name == "states":
                    np.testing.assert_array_equal(demo[name][()], rows[:-1])
                else:
                    np.testing.assert_array_equal(demo[name][()], rows)
    print(f"h5py reads {len(source.lines)} demonstrations")


if __name__ == "__main__":
    main(Source(Path(sys.argv[1])), Path(sys.argv[2]))

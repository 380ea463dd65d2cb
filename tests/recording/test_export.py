"""Our files opened by the readers people use, and by the published layouts."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
from counting_env import CountingEnv

from headrace.errors import ConfigError, DataError, MissingExtraError, StorageError, UnknownNameError
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, RecorderCfg, export_dataset, verify_dataset
from headrace.recording._video import decode_frames, frame_times
from headrace.recording.export import exporting as export_module
from headrace.recording.export._lerobot import LeRobotExporter
from headrace.recording.export._lerobot_stats import combine, image_stats, vector_stats

FIELDS = ("obs", "actions", "processed_actions", "rewards", "flags", "states")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "counting"
    info = DatasetInfo(recipe={"source": "counting", "sim": "none"}, fps=20, instruction="count to the end")
    with EpisodeRecorder(path, RecorderCfg(fields=FIELDS), info) as recorder:
        env = CountingEnv(4, [recorder], image=32)
        env.reset(seed=3)
        for _ in range(30):
            env.step()
    return path


def test_robomimic_finds_what_its_layout_promises(recorded, tmp_path):
    export_dataset(recorded, tmp_path / "demos.hdf5", "robomimic")
    dataset = EpisodeDataset(recorded)
    with h5py.File(tmp_path / "demos.hdf5") as file:
        assert file.attrs["format_version"] == 1
        data = file["data"]
        assert data.attrs["total"] == dataset.steps
        arguments = json.loads(data.attrs["env_args"])
        assert arguments["env_name"] == "counting"
        assert arguments["type"] == 2
        # natural order: demo_10 after demo_9
        assert list(data) == [f"demo_{number}" for number in range(len(dataset))]
        assert len(dataset) > 10
        for number, episode in enumerate(dataset):
            demo, length = data[f"demo_{number}"], episode.meta.length
            assert demo.attrs["num_samples"] == length
            assert demo.attrs["seed"] == 3
            assert bool(demo.attrs["success"]) == episode.meta.success
            np.testing.assert_array_equal(demo["actions"], episode.read("actions"))
            np.testing.assert_array_equal(demo["rewards"], episode.read("rewards"))
            np.testing.assert_array_equal(demo["dones"], np.arange(length) == length - 1)
            for name in ("policy", "camera", "inner/count", "inner/flags", "inner/deep/half", "nothing"):
                whole = episode.read(f"obs/{name}")
                for group, rows in (("obs", whole[:-1]), ("next_obs", whole[1:])):
                    stored = demo[f"{group}/{name}"]
                    assert stored.dtype == whole.dtype
                    np.testing.assert_array_equal(stored[()], rows)
            np.testing.assert_array_equal(demo["states"], episode.read("states")[:-1])
            np.testing.assert_array_equal(demo["initial_state/physics"], episode.read("states")[:1])
        succeeded = [name.decode() for name in file["mask/succeeded"]]
        assert succeeded == [f"demo_{n}" for n, entry in enumerate(dataset.entries) if entry.success]
        assert len(file["mask/succeeded"]) + len(file["mask/failed"]) == len(file["mask/all"])
    assert verify_dataset(tmp_path / "demos.hdf5").problems == ()


def test_minari_loads_the_dataset_by_its_id(recorded, tmp_path, monkeypatch):
    import minari

    export_dataset(recorded, tmp_path / "counting-v0", "minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    loaded = minari.load_dataset("counting-v0")
    dataset = EpisodeDataset(recorded)
    assert loaded.total_episodes == len(dataset)
    assert loaded.total_steps == dataset.steps
    for ours, theirs in zip(dataset, loaded.iterate_episodes(), strict=True):
        np.testing.assert_array_equal(theirs.observations["policy"], ours.read("obs/policy"))
        np.testing.assert_array_equal(theirs.observations["camera"], ours.read("obs/camera"))
        assert theirs.observations["camera"].dtype == np.uint8
        np.testing.assert_array_equal(theirs.observations["inner"]["count"], ours.read("obs/inner/count"))
        assert theirs.observations["inner"]["flags"].dtype == np.bool_
        assert theirs.observations["inner"]["deep"]["half"].dtype == np.float16
        assert theirs.observations["nothing"].shape == (ours.meta.length + 1, 3, 0)
        np.testing.assert_array_equal(theirs.actions, ours.read("actions"))
        np.testing.assert_array_equal(theirs.rewards, ours.read("rewards"))
        np.testing.assert_array_equal(theirs.terminations, ours.read("terminated"))
        np.testing.assert_array_equal(theirs.truncations, ours.read("truncated"))
    assert loaded.observation_space["camera"].shape == (32, 32, 3)
    assert loaded.observation_space["inner"]["flags"].dtype == np.bool_
    assert loaded.action_space.shape == (2,)
    metadata = list(loaded.storage.get_episode_metadata([0, 1]))
    assert [line["seed"] for line in metadata] == [3, 3]
    assert verify_dataset(tmp_path / "counting-v0").problems == ()


def test_lerobot_has_its_layout_with_a_frame_for_every_row(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(LeRobotExporter, "file_bytes", 60_000)  # several files from a few episodes
    out = tmp_path / "lerobot"
    export_dataset(recorded, out, "lerobot")
    dataset = EpisodeDataset(recorded)
    info = json.loads((out / "meta" / "info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert (info["fps"], info["total_episodes"], info["total_frames"]) == (20, len(dataset), dataset.steps)
    assert info["splits"] == {"train": f"0:{len(dataset)}"}
    features = info["features"]
    assert features["observation.state"] == {"dtype": "float32", "shape": [3], "names": None}
    assert features["observation.images.camera"]["dtype"] == "video"
    assert features["observation.inner.count"] == {"dtype": "int64", "shape": [1], "names": None}
    assert features["observation.inner.flags"]["dtype"] == "bool"
    assert features["action"]["shape"] == [2]
    assert "observation.nothing" not in features
    files = sorted((out / "data" / "chunk-000").iterdir())
    assert len(files) > 1
    table = pq.read_table(files)
    assert set(table.column_names) == {key for key, feature in features.items() if feature["dtype"] != "video"}
    lines = pq.read_table(out / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    frames = {
        file.name: [*decode_frames(file)] for file in (out / "videos/observation.images.camera/chunk-000").iterdir()
    }
    for line, episode in zip(lines, dataset, strict=True):
        length = episode.meta.length
        rows = table.slice(line["dataset_from_index"], length)
        assert line["dataset_to_index"] - line["dataset_from_index"] == line["length"] == length
        assert line["tasks"] == ["count to the end"]
        np.testing.assert_array_equal(np.stack(rows["observation.state"].to_pylist()), episode.read("obs/policy")[:-1])
        np.testing.assert_array_equal(np.stack(rows["action"].to_numpy()), episode.read("actions"))
        np.testing.assert_array_equal(rows["next.reward"].to_numpy(), episode.read("rewards"))
        np.testing.assert_allclose(rows["timestamp"].to_numpy(), np.arange(length) / 20, rtol=1e-6)  # float32
        np.testing.assert_array_equal(rows["next.done"].to_numpy(False), np.arange(length) == length - 1)
        assert rows["next.success"].to_pylist()[-1] == episode.meta.success
        key = "videos/observation.images.camera"
        first = round(line[f"{key}/from_timestamp"] * 20)
        pictures = np.stack(frames[f"file-{line[f'{key}/file_index']:03d}.mp4"][first : first + length])
        # H.264 at crf 18 with half the color resolution: close, and closer to its own frame than to the next
        original = episode.read("obs/camera")[:-1].astype(float)
        assert np.abs(pictures - original).mean() < 12
        # exact statistics, whatever the video lost
        assert line["stats/observation.images.camera/count"] == [length]
        np.testing.assert_allclose(
            np.array(line["stats/observation.images.camera/mean"])[:, 0, 0],
            original.mean((0, 1, 2)) / 255,
            rtol=1e-12,  # two orders of adding
        )
    verdict = verify_dataset(out)
    assert verdict.problems == ()
    assert (verdict.kind, verdict.episodes, verdict.steps) == ("lerobot", len(dataset), dataset.steps)
    stats = json.loads((out / "meta" / "stats.json").read_text())
    actions = np.concatenate([episode.read("actions") for episode in dataset]).astype(np.float64)
    np.testing.assert_allclose(stats["action"]["mean"], actions.mean(0), rtol=1e-12)  # two orders of adding
    np.testing.assert_allclose(stats["action"]["std"], actions.std(0), rtol=1e-9)
    assert stats["action"]["min"] == actions.min(0).tolist()
    assert stats["action"]["count"] == [dataset.steps]
    assert np.array(stats["observation.images.camera"]["q50"]).shape == (3, 1, 1)


def test_statistics_of_parts_combine_to_those_of_the_whole():
    generator = np.random.default_rng(0)
    parts = [generator.normal(size=(rows, 2, 3)) for rows in (1, 7, 30)]
    combined = combine([{"x": vector_stats(part)} for part in parts])["x"]
    whole = vector_stats(np.concatenate(parts))
    for name in ("min", "max", "mean", "std", "count"):
        np.testing.assert_allclose(combined[name], whole[name], rtol=1e-12)  # two orders of adding
    pictures = generator.integers(0, 256, size=(5, 4, 6, 3)).astype(np.uint8)
    got, wanted = image_stats(pictures), vector_stats(pictures.reshape(-1, 3) / 255)
    for name in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(got[name][:, 0, 0], wanted[name], rtol=1e-12)  # two orders of adding
    for name in ("q01", "q50", "q99"):
        # a histogram gives the value at the rank, numpy one between two values
        assert np.abs(got[name][:, 0, 0] - wanted[name]).max() <= 4 / 255


@pytest.mark.parametrize("to", ["robomimic", "lerobot", "minari"])
def test_an_export_cut_short_leaves_nothing_and_gives_the_same_when_it_is_started_again(recorded, tmp_path, to):
    name = {"robomimic": "x.hdf5", "lerobot": "x", "minari": "x-v0"}[to]
    export_dataset(recorded, tmp_path / "whole" / name, to)
    target = tmp_path / "cut" / name

    class Cut(BaseException):
        pass

    def cut(done: int, total: int) -> None:
        if done == 2:
            raise Cut

    with pytest.raises(Cut):
        export_dataset(recorded, target, to, progress=cut)
    assert not list(target.parent.iterdir())
    progress: list[tuple[int, int]] = []
    export_dataset(recorded, target, to, progress=lambda done, total: progress.append((done, total)))
    assert progress[-1] == (len(EpisodeDataset(recorded)),) * 2
    first, second = tmp_path / "whole" / name, target
    assert verify_dataset(second).problems == ()

    def content(place: Path) -> dict[Path, bytes]:
        files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
        # an encoder's threads may decide otherwise
        return {file.relative_to(place): b"" if file.suffix == ".mp4" else file.read_bytes() for file in files}

    assert content(first) == content(second)


@pytest.mark.parametrize(("to", "name"), [("robomimic", "x.hdf5"), ("minari", "x-v0")])
def test_failed_episodes_can_be_exported_apart(recorded, tmp_path, to, name):
    for only in ("succeeded", "failed"):
        made = export_dataset(recorded, tmp_path / only / name, to, only=only, min_length=3)
        assert made == tmp_path / only / name
        assert verify_dataset(made).episodes == len(EpisodeDataset(recorded, only=only, min_length=3))


def test_exports_refuse_what_they_cannot_do(recorded, tmp_path):
    (tmp_path / "there.hdf5").touch()
    with pytest.raises(ConfigError, match="ever overwritten"):
        export_dataset(recorded, tmp_path / "there.hdf5", "robomimic")
    with pytest.raises(UnknownNameError, match="lerobot"):
        export_dataset(recorded, tmp_path / "x", "lerobt")
    with pytest.raises(ConfigError, match="ant-v0"):
        export_dataset(recorded, tmp_path / "x", "minari")
    for fps in (12.5, 0, -20, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="whole number from 1"):
            export_dataset(recorded, tmp_path / "x", "lerobot", fps=fps)
    with pytest.raises(DataError, match="no episode"):
        export_dataset(recorded, tmp_path / "x.hdf5", "robomimic", min_length=1000)
    assert [file.name for file in tmp_path.iterdir()] == ["there.hdf5"]


def test_an_export_stops_at_a_damaged_episode(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "copy")
    file = next((tmp_path / "copy" / "episodes").iterdir())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=file.name):
        export_dataset(tmp_path / "copy", tmp_path / "x.hdf5", "robomimic")
    assert not (tmp_path / "x.hdf5").exists()
    problems = verify_dataset(tmp_path / "copy").problems
    assert len(problems) == 1
    assert "checksum of" in problems[0]


def test_verify_finds_a_video_with_a_frame_missing_and_rows_out_of_step(recorded, tmp_path):
    from headrace.recording._video import Mp4Writer

    out = tmp_path / "lerobot"
    export_dataset(recorded, out, "lerobot")
    file = out / "videos" / "observation.images.camera" / "chunk-000" / "file-000.mp4"
    frames = [*decode_frames(file)]
    assert len(frame_times(file)) == len(frames) == EpisodeDataset(recorded).steps
    writer = Mp4Writer(file, 20, 32, 32)
    for frame in frames[:-1]:
        writer.add(frame)
    writer.close()
    assert any(f"{len(frames) - 1} frames" in problem for problem in verify_dataset(out).problems)
    file.write_bytes(b"no video")
    assert any("not a video" in problem for problem in verify_dataset(out).problems)
    file.unlink()
    assert any("missing" in problem for problem in verify_dataset(out).problems)
    info = json.loads((out / "meta" / "info.json").read_text())
    info["fps"] = 30
    (out / "meta" / "info.json").write_text(json.dumps(info))
    assert any("timestamp" in problem for problem in verify_dataset(out).problems)


def test_verify_finds_rows_that_do_not_match_their_counts(recorded, tmp_path):
    export_dataset(recorded, tmp_path / "x.hdf5", "robomimic")
    with h5py.File(tmp_path / "x.hdf5", "a") as file:
        file["data/demo_1"].attrs["num_samples"] = 1
        del file["data/demo_2"]
    problems = verify_dataset(tmp_path / "x.hdf5").problems
    assert any("demo_1/actions" in problem for problem in problems)
    assert any("natural order" in problem for problem in problems)
    assert any("total" in problem for problem in problems)
    assert any("mask/all: names demo_2" in problem for problem in problems)
    export_dataset(recorded, tmp_path / "x-v0", "minari")
    with h5py.File(tmp_path / "x-v0" / "data" / "main_data.hdf5", "a") as file:
        file["episode_0"].attrs["total_steps"] = 1
    problems = verify_dataset(tmp_path / "x-v0").problems
    assert any("episode_0/actions" in problem for problem in problems)
    assert any("total_steps" in problem for problem in problems)


def test_a_disk_that_fills_up_stops_an_export_that_can_be_started_again(recorded, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, hard))
    try:
        with pytest.raises(StorageError, match="could not be written: the file would exceed the size limit"):
            export_dataset(recorded, tmp_path / "x", "lerobot")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "x").exists()
    export_dataset(recorded, tmp_path / "x", "lerobot")
    assert verify_dataset(tmp_path / "x").problems == ()


def test_an_export_that_cannot_fit_is_not_begun(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 1000))
    with pytest.raises(StorageError, match="the disk has 1,000; make room"):
        export_dataset(recorded, tmp_path / "x.hdf5", "robomimic")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("to", "module"), [("robomimic", "h5py"), ("lerobot", "pyarrow")])
def test_an_absent_library_is_named_with_the_extra_that_brings_it(recorded, tmp_path, monkeypatch, to, module):
    monkeypatch.setitem(sys.modules, module, None)
    name = "x.hdf5" if to == "robomimic" else "x"
    with pytest.raises(MissingExtraError, match=r"headrace\[record\]"):
        export_dataset(recorded, tmp_path / name, to)


def test_verify_says_when_there_is_no_dataset(tmp_path):
    with pytest.raises(DataError, match="nothing"):
        verify_dataset(tmp_path / "no")
    with pytest.raises(DataError, match="expected an episode dataset"):
        verify_dataset(tmp_path)

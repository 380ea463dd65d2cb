"""Stores whose files are missing, cut, damaged or of different moments, and writes that fail in the middle."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from killed_store import ACTION, LENGTH, NUM_ENVS, SPACES, STACK, as_batch, bare, make_buffer, make_stream
from replay_reference import NaiveStore, Row, bits, check_batch

from headrace.errors import DataError, IdError, LifecycleError
from headrace.files import FileHash, Manifest
from headrace.replay import ArraySpec, ReplayBuffer, SliceSampler
from headrace.replay import _blocks as durability
from headrace.types import Step


def feed(buffer, store, stream, steps) -> None:
    for _ in range(steps):
        obs, action, step, active = stream.step(ACTION)
        store.extend(obs, action, step, active, "same_step")
        buffer.extend(obs[""], action, bare(step), active)


def fill(path: Path, steps: int = 60):
    buffer, store, stream = make_buffer(path), NaiveStore(NUM_ENVS, LENGTH), make_stream(3)
    feed(buffer, store, stream, steps)
    return buffer, store, stream


def blocks(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("*.bin"))


NAMES = (
    "column0.0000", "commit", "final", "flags", "frames0.0000", "heads", "kept", "main.draws", "main.priorities",
    "main.priority_state", "prefix", "rewards", "steps", "trajectory",
)  # fmt: skip


@pytest.mark.parametrize("how", ["deleted", "emptied", "cut"])
@pytest.mark.parametrize("name", NAMES)
def test_a_store_without_a_whole_file_is_refused(name, how, tmp_path) -> None:
    fill(tmp_path / "store")[0].close()
    assert blocks(tmp_path / "store") == [f"{known}.bin" for known in NAMES]
    path = tmp_path / "store" / f"{name}.bin"
    size = {"deleted": 0, "emptied": 0, "cut": path.stat().st_size - 1}[how]
    os.truncate(path, size)
    if how == "deleted":
        path.unlink()
    with pytest.raises(DataError, match=f"{name}.bin"):
        ReplayBuffer.open(tmp_path / "store")
    if not name.startswith("main."):
        with pytest.raises(DataError, match=f"{name}.bin"):
            ReplayBuffer.open(tmp_path / "store", read_only=True)


@pytest.mark.parametrize("name", ["commit", "final", "flags", "kept", "prefix", "steps", "trajectory"])
def test_a_flipped_bit_in_the_bookkeeping_is_refused_or_shows_nothing_wrong(name, tmp_path) -> None:
    buffer, stream, store = make_buffer(tmp_path / "store"), make_stream(3), NaiveStore(NUM_ENVS, 1000)
    feed(buffer, store, stream, 60)
    buffer.close()
    path = tmp_path / "store" / f"{name}.bin"
    whole = path.read_bytes()
    draw, refused = np.random.default_rng(0), 0
    for _ in range(30):
        damaged = bytearray(whole)
        damaged[draw.integers(len(whole))] ^= 1 << int(draw.integers(8))
        path.write_bytes(damaged)
        try:
            again = ReplayBuffer.open(tmp_path / "store")
        except DataError:
            refused += 1
            continue
        check_what_is_seen(again, {index: store.rows[e][place] for index, (e, place) in store.index().items()})
        again.close()
        path.write_bytes(whole)
    # one of the two halves of a record is enough
    assert refused > 0 or name in ("commit", "kept")


def check_what_is_seen(buffer: ReplayBuffer, rows: dict[int, Row]) -> None:
    """Compare observations and rewards; kinds of ends are one bit each, without a checksum."""
    batch = buffer.get(buffer.indices())
    for b, index in enumerate(batch["index"].tolist()):
        assert bits(batch["observation"][b]) == bits(rows[index].obs[""])
        assert bits(batch["next", "observation"][b]) == bits(rows[index].next_obs[""])
        assert float(batch["next", "reward"][b, 0]) == np.float32(rows[index].reward)


@pytest.mark.parametrize("seed", range(4))
def test_files_of_different_moments_give_flushed_transitions_or_an_error(seed, tmp_path, monkeypatch) -> None:
    """After the loss of power every file may be older or newer; ``kept`` is synced before it is needed."""
    monkeypatch.setattr(durability, "_AHEAD", 4)
    draw = np.random.default_rng(seed)
    stream, store = make_stream(seed), NaiveStore(NUM_ENVS, 400)
    buffer = ReplayBuffer(NUM_ENVS * 400, NUM_ENVS, SPACES[""], ACTION, stack=STACK, directory=tmp_path / "store")
    feed(buffer, store, stream, int(draw.integers(300, 700)))
    buffer.flush()
    shutil.copytree(tmp_path / "store", tmp_path / "flushed")
    reference = {index: store.rows[e][place] for index, (e, place) in store.index().items()}
    feed(buffer, store, stream, int(draw.integers(1, 300)))
    buffer.store.memory.release()  # the process dies without close()
    kept = 0
    for _ in range(6):
        mixed = tmp_path / "mixed"
        shutil.copytree(tmp_path / "store", mixed)
        for name in blocks(mixed):
            if name != "kept.bin" and draw.random() < 0.5:
                shutil.copy(tmp_path / "flushed" / name, mixed / name)
        monkeypatch.setattr(durability, "_boot", lambda: 7)
        with pytest.raises(DataError, match="trust_unflushed=False"):
            ReplayBuffer.open(mixed)
        again = ReplayBuffer.open(mixed, trust_unflushed=False)
        check_what_is_seen(again, reference)
        kept += len(again)
        again.close()
        shutil.rmtree(mixed)
        monkeypatch.undo()
        monkeypatch.setattr(durability, "_AHEAD", 4)
    assert kept > 0


def test_a_commit_record_older_than_the_files_is_refused_on_the_same_boot(tmp_path) -> None:
    buffer, store, stream = fill(tmp_path / "store")
    buffer.flush()
    old = (tmp_path / "store" / "commit.bin").read_bytes()
    feed(buffer, store, stream, 200)
    buffer.store.memory.release()
    (tmp_path / "store" / "commit.bin").write_bytes(old)
    with pytest.raises(DataError, match="older than the other files"):
        ReplayBuffer.open(tmp_path / "store")
    with pytest.raises(DataError, match="older than the other files"):
        ReplayBuffer.open(tmp_path / "store", trust_unflushed=True)
    again = ReplayBuffer.open(tmp_path / "store", trust_unflushed=False)
    feed(again, NaiveStore(NUM_ENVS, LENGTH), make_stream(9), 30)
    assert len(again) > 0


def test_a_killed_process_and_a_proper_restart_lose_nothing(tmp_path, monkeypatch) -> None:
    buffer, store, _ = fill(tmp_path / "store")
    buffer.store.memory.release()
    check_batch(_everything(ReplayBuffer.open(tmp_path / "store")), store, 1, 0.99)
    monkeypatch.setattr(durability, "_boot", lambda: 7)
    again = ReplayBuffer.open(tmp_path / "store", trust_unflushed=True)
    assert sorted(again.indices().tolist()) == sorted(store.index())
    again.close()
    monkeypatch.setattr(durability, "_boot", lambda: 8)
    assert len(ReplayBuffer.open(tmp_path / "store")) == len(store.index()), "close() flushes"


def _everything(buffer: ReplayBuffer):
    batch = buffer.get(buffer.indices()).clone()
    buffer.store.memory.release()
    return batch


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_clear_never_gives_an_index_twice(where, tmp_path) -> None:
    directory = tmp_path / "store" if where == "disk" else None
    buffer = ReplayBuffer(NUM_ENVS * LENGTH, NUM_ENVS, SPACES[""], ACTION, stack=STACK, directory=directory)
    stream, seen = make_stream(5), set[int]()
    for steps in (10, 70, 3):
        feed(buffer, NaiveStore(NUM_ENVS, LENGTH), stream, steps)
        old = buffer.indices()
        assert not seen & set(old.tolist())
        seen |= set(old.tolist())
        buffer.clear()
        assert len(buffer) == 0
        with pytest.raises(IdError, match="not stored"):
            buffer.get(old[:1])
        if where == "disk":
            buffer.close()
            buffer = ReplayBuffer.open(tmp_path / "store")
            assert len(buffer) == 0
    reference = NaiveStore(NUM_ENVS, LENGTH)
    reference.written = buffer.written.tolist()
    reference.trajectories = buffer.store.pool.trajectories.tolist()
    feed(buffer, reference, stream, 60)
    check_batch(buffer.get(buffer.indices()), reference, 1, 0.99)


def test_a_reader_follows_a_clear(tmp_path) -> None:
    buffer, _, stream = fill(tmp_path / "store")
    reader = ReplayBuffer.open(tmp_path / "store", read_only=True, sampler=SliceSampler(2))
    assert len(reader) == len(buffer)
    buffer.clear()
    assert len(reader) == 0
    with pytest.raises(LifecycleError, match="got none"):
        reader.sample(4)
    reference = NaiveStore(NUM_ENVS, LENGTH)
    reference.written, reference.trajectories = buffer.written.tolist(), buffer.store.pool.trajectories.tolist()
    feed(buffer, reference, stream, 20)
    check_batch(reader.sample(16), reference, 1, 0.99)


def test_a_batch_that_fails_in_the_middle_leaves_nothing_of_itself(tmp_path, monkeypatch) -> None:
    buffer, store, stream = fill(tmp_path / "store", steps=10)
    before = buffer.written.tolist()
    batch = as_batch([stream.step(ACTION) for _ in range(40)])
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")

    plain = buffer.store.pool.write
    monkeypatch.setattr(buffer.store.pool, "write", lambda write: (fail(), plain(write))[1])
    with pytest.raises(OSError, match="Input/output"):
        buffer.extend(batch)
    monkeypatch.undo()
    assert buffer.written.tolist() == before
    assert set(buffer.indices().tolist()) <= set(store.index())
    check_batch(buffer.get(buffer.indices()), store, 1, 0.99) if len(buffer) else None
    buffer.extend(batch)
    assert len(buffer) == NUM_ENVS * LENGTH


def test_a_forked_child_cannot_write_its_parents_store(tmp_path) -> None:
    buffer, _, stream = fill(tmp_path / "store")
    obs, action, step, active = stream.step(ACTION)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            buffer.extend(obs[""], action, bare(step), active)
        except LifecycleError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert f"belongs to process {os.getpid()}" in pipe.read()
    os.waitpid(child, 0)
    assert len(buffer) == NUM_ENVS * LENGTH


@pytest.mark.parametrize("name", ["final", "prefix"])
def test_a_side_row_that_no_store_has_is_refused_before_memory_is_taken_for_it(name, tmp_path) -> None:
    buffer, _, _ = fill(tmp_path / "store", 30)
    buffer.close()
    file = tmp_path / "store" / f"{name}.bin"
    rows = np.fromfile(file, np.int32)
    assert (rows >= 0).any()
    rows[rows >= 0] = np.arange((rows >= 0).sum()) + 2**30
    rows.tofile(file)
    with pytest.raises(DataError, match=r"final\.bin, prefix\.bin: side row 1,07"):
        ReplayBuffer.open(tmp_path / "store")


def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path) -> None:
    make_buffer(tmp_path / "store").close()
    path = tmp_path / "store" / "manifest.json"
    about = json.loads(path.read_text())["about"]
    about["views"]["../../evil"] = about["views"]["main"]
    Manifest(format="headrace-replay", version=3, about=about, files={}).write(path)
    with pytest.raises(DataError, match=r"\.\./\.\./evil"):
        ReplayBuffer.open(tmp_path / "store")
    assert not list(tmp_path.parent.glob("evil*"))


HOSTILE = (
    -1,
    0,
    1 << 40,
    1 << 62,
    1 << 100,
    0.5,
    float("inf"),
    None,
    True,
    "",
    "x" * 9,
    [],
    [-1],
    [1 << 40, 1 << 40],
    {},
)


def hostile(value, draw: np.random.Generator):
    """Replace one number, text, list or object somewhere inside a value."""
    if isinstance(value, (dict, list)) and value and ("store" in value or draw.random() < 0.85):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = keys[int(draw.integers(len(keys)))]
        value[key] = hostile(value[key], draw)
        return value
    return HOSTILE[int(draw.integers(len(HOSTILE)))]


@pytest.mark.parametrize("count", [120, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["store", "checkpoint"])
def test_hostile_manifests_with_a_valid_digest_are_data_errors(kind, count, tmp_path) -> None:
    buffer = fill(tmp_path / "store")[0]
    buffer.save(tmp_path / "checkpoint")
    buffer.close()
    path = tmp_path / kind / "manifest.json"
    whole, draw, refused = path.read_text(), np.random.default_rng(1), 0
    for _ in range(count):
        content = json.loads(whole)
        files = {name: FileHash(**about) for name, about in content["files"].items()}
        Manifest(format="headrace-replay", version=3, about=hostile(content["about"], draw), files=files).write(path)
        try:
            again = ReplayBuffer.open(tmp_path / kind) if kind == "store" else ReplayBuffer.load(tmp_path / kind)
        except DataError:
            refused += 1
            continue
        again.close()
    assert refused > count // 2


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path) -> None:
    make_buffer(tmp_path / "store").close()
    block, target = tmp_path / "store" / "rewards.bin", tmp_path / "target"
    target.write_bytes(block.read_bytes())
    block.unlink()
    block.symlink_to(target)
    with pytest.raises(DataError, match="symbolic links"):
        ReplayBuffer.open(tmp_path / "store")


def test_links_in_a_checkpoint_are_not_followed(tmp_path) -> None:
    shutil.copytree(Path(__file__).parents[1] / "data/v0_2/stores/saved", tmp_path / "saved")
    for file in sorted((tmp_path / "saved").glob("*.bin")):
        target = tmp_path / "target"
        file.rename(target)
        file.symlink_to(target)
        with pytest.raises(DataError, match=rf"{file.name}: .*link"):
            ReplayBuffer.load(tmp_path / "saved")
        target.rename(file)
    ReplayBuffer.load(tmp_path / "saved").close()


def test_small_things_that_went_wrong() -> None:
    half = ReplayBuffer(8, 2, ArraySpec((3,), torch.bfloat16), ACTION, codec="zstd")
    obs, no = torch.arange(6.0).view(2, 3).bfloat16(), torch.zeros(2, dtype=torch.bool)
    reward = torch.ones(2, requires_grad=True) * 2
    assert half.get(torch.empty(0, dtype=torch.int64))["observation"].shape == (0, 3)
    half.extend(obs, torch.zeros(2, 2), Step(obs + 1, reward, no, no, {}))
    stored = half.get(half.indices())
    assert torch.equal(stored["next", "observation"], obs + 1)
    assert stored["next", "reward"].tolist() == [[2.0], [2.0]]

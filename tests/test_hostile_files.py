"""Files from others, damaged at random: every kind that headrace reads gives a DataError that names it, or its content.

One seeded fuzzer for all kinds: no other error, no memory beyond the cap, no code run, nothing written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace._published import read_form
from headrace.bench import read_bundle
from headrace.envs.recipe import EnvRecipe
from headrace.errors import HeadraceError
from headrace.evaluation import Evaluation
from headrace.evaluation.suites import read_suite
from headrace.learning.actor_critic import load_actor_critic
from headrace.libraries.registry import read_agent
from headrace.libraries.training import read_meta, read_settings, read_weights, recognize
from headrace.policies.act import read_policy
from headrace.recording import EpisodeDataset, EpisodeRecorder, export_dataset, verify_dataset
from headrace.replay import ReplayBuffer
from policies.test_untrusted_files import model, script
from recording.counting_env import CountingEnv

OLD = Path(__file__).parent / "data/v0_2"
SHIPPED = Path(headrace.__file__).parent / "checkpoints"
CAP = 256 << 20
"""Of memory that reading a file of at most a few megabytes may take at a time."""
AGENT = "seed: 1\nparams: &params\n  rate: 3.0e-4\n  layers: [64, 64]\nother: *params\n"


def read_checkpoint(path: Path) -> None:
    kind, spec = recognize(path)
    if spec is not None:
        read_meta(path, spec)
    if path.suffix != ".zip" and kind != "torchscript":
        read_weights(path, trust=False)


def read_policy_file(path: Path) -> None:
    env = headrace.make("cartpole", 2)
    with contextlib.closing(env):
        headrace.load_policy(path, env, trust=True)


def read_dataset(path: Path) -> None:
    for episode in EpisodeDataset(path):
        for name in episode.names:
            episode.field(name)
            episode.read(name)
    verify_dataset(path)


def read_export(path: Path) -> None:
    verify_dataset(path)
    if path.name != "minari":
        ReplayBuffer.from_dataset(path, reward=0.0)


def read_store(path: Path) -> None:
    buffer = ReplayBuffer.open(path)
    with contextlib.closing(buffer):
        if len(buffer):
            buffer.sample(4)


def read_saved(path: Path) -> None:
    ReplayBuffer.load(path).close()


KINDS: dict[str, tuple[str | None, Callable[[Path], Any]]] = {
    **{f"checkpoint of {name}": (name, read_checkpoint) for name in (
        "ant-rsl_rl.pt", "cartpole-rl_games.pth", "cartpole-sb3.zip", "cartpole-skrl.pt", "pusher-solid-act.pt")},
    "network": ("cartpole.pt", load_actor_critic),
    "chunk policy": ("imitation/policy.pt", read_policy),
    "state of an imitation": ("imitation/policy.pt.training", lambda path: read_form(path, "x", "headrace-clone-1")),
    "state of a training": ("trainings/headrace/checkpoints/resume-3.pt", lambda path: read_weights(path, trust=False)),
    "training": ("trainings/headrace", read_settings),
    "torchscript.pt": (None, read_policy_file),
    "policy.onnx": (None, read_policy_file),
    "bundle": ("bundles/a/training.json", read_bundle),
    "evaluation": ("evaluations", lambda path: [Evaluation.load(file) for file in path.iterdir()]),
    "journal": ("journals/run.jsonl", Evaluation.load),
    "suite": ("suite.toml", read_suite),
    "recipe": ("recipe.json", EnvRecipe.load),
    "agent.yaml": (None, read_agent),
    "recording": ("datasets/images", read_dataset),
    "robomimic.hdf5": (None, read_export),
    "lerobot": (None, read_export),
    "minari": (None, read_export),
    "store": ("stores/live", read_store),
    "saved store": ("stores/saved", read_saved),
}  # fmt: skip
"""Kind → where its original is, or None for one that is made here; and what reads it."""


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one of each kind, under its name."""
    folder = tmp_path_factory.mktemp("originals")
    for kind, (place, _) in KINDS.items():
        if place is not None:
            found = OLD / place if (OLD / place).exists() else SHIPPED / place
            target = folder / (kind if found.is_dir() else f"{kind}{found.suffix}")
            shutil.copytree(found, target) if found.is_dir() else shutil.copy(found, target)
    script(folder / "torchscript.pt", folder / "written")
    model(folder / "policy.onnx")
    for name in ("preset.yaml", "agent.yaml"):
        (folder / name).write_text(AGENT)
    with EpisodeRecorder(folder / "recorded") as recorder:
        env = CountingEnv(2, [recorder])
        env.reset()
        for _ in range(12):
            env.step()
    export_dataset(folder / "recorded", folder / "robomimic.hdf5", "robomimic", fps=20)
    export_dataset(folder / "recorded", folder / "lerobot", "lerobot", fps=20)
    export_dataset(folder / "recorded", folder / "minari-v0", "minari", fps=20)
    (folder / "minari-v0").rename(folder / "minari")
    return folder


def mutate(content: bytes, draw: np.random.Generator) -> bytes:
    """Cut a file, change bits of it at its ends or anywhere, overwrite or repeat a piece, or make a number large."""
    changed, how = bytearray(content), int(draw.integers(7))
    size = max(len(changed), 1)
    at = int(draw.integers(size))
    if how == 0:
        del changed[at:]
    elif how == 1:
        changed[at : at + 64] = draw.bytes(64)
    elif how == 2:
        changed[at:at] = changed[at : at + int(draw.integers(1, 64))]
    elif how == 3 and any(digits := [place for place, byte in enumerate(changed) if 48 <= byte < 58]):
        place = digits[int(draw.integers(len(digits)))]
        changed[place : place + 1] = (b"-1", b"99999999999999", b"1e400", b"NaN", b"[]", b'"\\ud800"')[at % 6]
    else:
        for _ in range(int(draw.integers(1, 8))):
            near = int(draw.integers(min(2000, size)))
            changed[(near, -near - 1, int(draw.integers(size)))[how % 3] % size] ^= 1 << int(draw.integers(8))
    return bytes(changed)


_seen: list[str] = []
_watched: list[Path] = []


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what would be code, or a file written outside of the place of the test."""
    if not _watched:
        return
    if event in ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"):
        _seen.append(f"{event} {arguments}")
    elif event in ("open", "os.remove", "os.rename", "os.rmdir") and not isinstance(arguments[0], int):
        flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else os.O_WRONLY
        place = os.path.realpath(os.fsdecode(arguments[0]))
        written = event != "open" or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        nameless = event == "open" and os.path.isdir(place)  # how a file without a name is opened
        if written and not nameless and not place.startswith((str(_watched[0]), "/dev/", "/proc/")):
            _seen.append(f"{event} {arguments}")


@contextlib.contextmanager
def watching(place: Path) -> Generator[list[str]]:
    if not _watched and not _seen:
        sys.addaudithook(_listen)
    _seen.clear()
    _watched.append(place)
    try:
        yield _seen
    finally:
        _watched.clear()


def peak(begin: bool = False) -> int:
    """Most bytes of memory since the last begin; of the system, so that no library's are missed."""
    if begin:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


@pytest.mark.parametrize("count", [6, pytest.param(210, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")  # of damaged numbers, by numpy and h5py
def test_a_damaged_file_is_a_data_error_or_reads(kind: str, count: int, originals: Path, tmp_path: Path) -> None:
    (original,) = [path for path in originals.iterdir() if path.name == kind or path.stem == kind]
    target, read = tmp_path / original.name, KINDS[kind][1]
    shutil.copytree(original, target) if original.is_dir() else shutil.copy(original, target)
    read(target)
    files = sorted(path for path in target.rglob("*") if path.is_file()) if target.is_dir() else [target]
    draw = np.random.default_rng([count, len(kind)])
    refused, unnamed = 0, list[str]()
    for _ in range(count):
        file = files[int(draw.integers(len(files)))]
        whole = file.read_bytes()
        file.write_bytes(mutate(whole, draw))
        before = peak(begin=True)
        with watching(tmp_path) as seen:
            try:
                read(target)
            except HeadraceError as error:
                refused += 1
                unnamed += [] if target.name in str(error) or file.name in str(error) else [str(error)]
            except Exception as error:
                raise AssertionError(f"{kind}, {file.relative_to(tmp_path)}: a raw {error!r}") from error
        assert not seen, seen
        assert peak() - before < CAP, f"{kind}, {file.name}"
        file.write_bytes(whole)
    assert unnamed == []
    assert refused, "what is changed is noticed"

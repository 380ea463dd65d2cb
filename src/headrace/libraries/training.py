"""The training loop of every library, and its checkpoints: recognized without executing anything in them.

Global state that libraries change is put back after a run, and saved where resuming needs it.
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import torch

from headrace._interrupts import delay_signals
from headrace._published import read_weights
from headrace.envs.recipe import EnvRecipe
from headrace.errors import ConfigError, DataError
from headrace.files import Owner, open_archive, read_json, read_record, write_whole
from headrace.learning.ppo import PPOCfg
from headrace.libraries.registry import LibrarySpec, libraries, library
from headrace.types import EpisodeEnds, StateDict

if TYPE_CHECKING:
    from headrace.libraries.learner import Learner


FileKind = Literal["library", "torchscript", "onnx", "chunk"]

META_KEY = "headrace"
"""The name of our description in a checkpoint; in a zip archive it is a member of this name + .json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """Our description in a checkpoint, next to the library's own content."""

    library: str
    task: str
    iteration: int
    score: float | None
    """Mean return of recent training episodes, where some had ended."""
    settings: PPOCfg
    agent: Mapping[str, Any] | None = None
    """The library's own configuration, where the training was given one instead of settings."""
    overrides: Mapping[str, object] = field(default_factory=dict[str, object])
    """Of the task's settings, by path."""

    def plain(self) -> dict[str, object]:
        """Return what a checkpoint holds of it: numbers, words, lists and dicts."""
        lists = {"settings": plain(asdict(self.settings)), "overrides": plain(self.overrides)}
        found: dict[str, object] = {"format": 1, **asdict(self), **lists}
        if self.agent is None:
            del found["agent"]
        return found


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, words and lists, as JSON has them: tuples become lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}  # pyright: ignore[reportUnknownArgumentType]  # of anything


def recognize(path: Path, *, trust: bool = False) -> tuple[FileKind, LibrarySpec | None]:
    """Return what a file is, from its content, and whose checkpoint; anything damaged or unknown is a
    :class:`DataError`."""
    if not path.is_file():
        got = "a directory; name a file in it, such as checkpoints/last" if path.is_dir() else "nothing there"
        raise DataError(f"{path}: expected a checkpoint file, got {got}")
    if path.suffix == ".onnx":
        return "onnx", None
    with open_archive(path) as archive:
        names = archive.namelist()
    # a TorchScript file has its code in the archive, next to the pickle that every torch file has
    if any(name.split("/", 2)[1:2] == ["code"] for name in names):
        return "torchscript", None
    entries = frozenset(read_weights(path, trust=trust, mapped=True) if _is_torch_file(names) else names)
    if {"format", "cfg", "weights"} <= entries:
        return "chunk", None
    matching = [spec for spec in libraries() if spec.marks <= entries]
    if not matching:
        raise DataError(
            f"{path}: not a checkpoint of any known library: expected one of "
            f"{', '.join(spec.name for spec in libraries())}, a TorchScript or ONNX file or a chunk policy, got the "
            f"entries {sorted(entries)}"
        )
    return "library", max(matching, key=lambda spec: len(spec.marks))


def read_meta(path: Path, spec: LibrarySpec, *, trust: bool = False) -> CheckpointMeta | None:
    """Our description in a checkpoint of a library; None in one that the library wrote without us."""
    with open_archive(path) as archive:
        names, member = archive.namelist(), f"{META_KEY}.json"
        found: Any = json.loads(archive.read(member)) if member in names else None
    if _is_torch_file(names):
        found = read_weights(path, trust=trust, mapped=True)
        for key in spec.meta_key:
            found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, dict):
        return None
    entry = {name: value for name, value in cast("dict[str, Any]", found).items() if name != "format"}
    settings = read_record(PPOCfg, entry.get("settings"), str(path))
    meta = read_record(CheckpointMeta, entry | {"settings": settings}, str(path))
    library(meta.library)
    return meta


def check_fit(path: Path, library_name: str, load: Callable[[], object]) -> None:
    """Run ``load``; weights that do not match the networks become an error that says what to do."""
    try:
        load()
    except (RuntimeError, KeyError, ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"{path}: its weights do not match the networks of {library_name} here: {error}\n"
            "Use the task and settings it was trained with; a policy of your own plays as module:name"
        ) from error


def _is_torch_file(members: list[str]) -> bool:
    """Whether an archive is what ``torch.save`` writes."""
    return any(name.endswith("/data.pkl") for name in members)


INDEX = "checkpoint.json"
"""In the directory of a run: which checkpoints it has, and of what."""
CHECKPOINTS = "checkpoints"
"""In the directory of a run: they are in here."""
STATE = "resume-{}.pt"
"""Next to the last checkpoint: environment and random streams of the same iteration, which is in its name."""
_RECENT = 100
_SHARE = 50.0
"""Checkpoints take at most one part in this of the time."""


class Times(NamedTuple):
    """Seconds of one iteration, wall time."""

    collect: float
    learn: float


class Iteration(NamedTuple):
    """One iteration, as :func:`train_iterations` reports it."""

    number: int
    """From 1; a resumed training counts on."""
    times: Times
    finished: EpisodeEnds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The checkpoints of a run."""

    task: str
    library: str
    num_envs: int
    last: Path
    best: Path
    iteration: int
    """Of the last one."""
    score: float | None
    best_score: float | None
    saved_at: float
    """Unix time of the last one."""


class CheckpointKeeper:
    """Saves a learner between iterations, often enough that a crash costs seconds, seldom enough to cost nothing.

    ``last`` is always of a whole iteration, and in place from before the first on; ``best`` has the highest mean return
    of the last 100 training episodes among those that were saved.
    """

    def __init__(self, directory: Path, learner: Learner, recipe: EnvRecipe, *, resumable: bool = True) -> None:
        """Prepare; nothing is written yet.

        Args:
            directory: of the run.
            learner: to save.
            recipe: of the environments that it learns on.
            resumable: False for environments whose state cannot be saved as plain numbers.
        """
        self.directory, self._learner, self._recipe, self._resumable = directory, learner, recipe, resumable
        suffix = library(learner.library).suffix
        self.last = directory / CHECKPOINTS / f"last{suffix}"
        self.best = directory / CHECKPOINTS / f"best{suffix}"
        self.kept: Kept | None = None
        self._owner = Owner()
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._best_score: float | None = None
        self._due = 0.0

    def note(self, iteration: int, finished: EpisodeEnds) -> None:
        """Count a whole iteration, and save if it is time to."""
        self._recent.extend(finished.returns.tolist())
        if time.perf_counter() >= self._due:
            self.save(iteration)

    def save(self, iteration: int) -> None:
        """Write ``last``, and ``best`` where it is.

        The state to resume from is written before ``last`` and under the iteration's own name: at any moment, also
        after a crash or on a full disk, ``last`` has its state next to it.
        """
        if self.kept is not None and self.kept.iteration == iteration:
            return
        self._owner.check(self.directory, "train in a new process, into a directory of its own")
        begin = time.perf_counter()
        score = sum(self._recent) / len(self._recent) if self._recent else None
        task, name = self._recipe.source, self._learner.library
        about: dict[str, Any] = {"library": name, "task": task, "iteration": iteration, "score": score}
        settings, agent = self._learner.settings, self._learner.agent_cfg
        meta = CheckpointMeta(**about, settings=settings, agent=agent, overrides=self._recipe.overrides)
        state = self._state(iteration)
        self._learner.save(self.last, meta)
        for old in self.last.parent.glob(STATE.format("*")):
            if old != state:
                old.unlink()
        if self.kept is None or (score is not None and (self._best_score is None or score >= self._best_score)):
            self._learner.save(self.best, meta)
            self._best_score = score
        self.kept = Kept(
            **about,
            num_envs=self._recipe.num_envs,
            last=self.last,
            best=self.best,
            best_score=self._best_score,
            saved_at=time.time(),
        )
        paths = {"last": f"{CHECKPOINTS}/{self.last.name}", "best": f"{CHECKPOINTS}/{self.best.name}"}
        write_whole(self.directory / INDEX, json.dumps(asdict(self.kept) | paths, indent=2) + "\n")
        now = time.perf_counter()
        self._due = now + max(1.0, _SHARE * (now - begin))

    def _state(self, iteration: int) -> Path | None:
        """Write what resuming needs; None where the environment cannot be saved, or only as a pickle."""
        if not self._resumable:
            return None
        path = self.last.with_name(STATE.format(iteration))
        content = {"iteration": iteration, "state": self._learner.state_dict()}
        write_whole(path, lambda part: torch.save(content, part))
        return path


def train_iterations(
    learner: Learner,
    keeper: CheckpointKeeper,
    iterations: int,
    on_iteration: Callable[[Iteration], bool],
    *,
    first: int = 0,
    agree: Callable[[bool], bool] = bool,
) -> int:
    """Train; returns the iterations that are done. Run it inside :func:`headrace.libraries.library_run`.

    Ctrl-C, and any other signal that has a handler, takes effect when the iteration under way is whole and saved;
    a second one at once. Whatever ``on_iteration`` raises goes on to the caller when that iteration is saved. Whatever
    an iteration itself raises goes on at once, since its networks and environments are between two states: the last
    checkpoint stays what it was, at most a second old or fifty times what saving takes.

    Args:
        learner: made by :func:`headrace.libraries.make_learner`.
        keeper: saves it.
        iterations: how many to do.
        on_iteration: called with each; True stops.
        first: iterations that were done before, where a training is resumed.
        agree: makes one decision of those of several processes that train together.
    """
    if iterations < 1:
        raise ConfigError(f"iterations: expected at least 1, got {iterations}")
    if not first:
        keeper.save(0)
    done = first
    with delay_signals() as came:
        for _ in range(iterations):
            times = Times(*learner.iterate())
            done += 1
            finished = learner.finished()
            keeper.note(done, finished)
            try:
                stop = on_iteration(Iteration(done, times, finished))
            except BaseException:  # raised again
                keeper.save(done)
                raise
            if agree(stop or bool(came)):
                break
        keeper.save(done)
    return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A run to continue, found to be of the same library and task."""

    last: Path
    meta: CheckpointMeta
    state: Path

    def changed(
        self, settings: PPOCfg, agent: Mapping[str, Any] | None, overrides: Mapping[str, object]
    ) -> dict[str, Any]:
        """Return what differs from the settings that the run had: name → [before, now]."""
        before = _describe_settings(self.meta.settings, self.meta.agent, self.meta.overrides)
        now = _describe_settings(settings, agent, overrides)
        return {name: [before.get(name), now.get(name)] for name in before | now if before.get(name) != now.get(name)}


def _describe_settings(
    settings: PPOCfg, agent: Mapping[str, Any] | None, overrides: Mapping[str, object]
) -> dict[str, Any]:
    """Return the settings of PPO or of the agent, and of the task as ``task.NAME``, as JSON has them."""
    own = asdict(settings) if agent is None else {**agent, "seed": settings.seed}
    return plain(own | {f"task.{name}": value for name, value in overrides.items()})


def resumable(run: Path, library_name: str, task: str, num_envs: int) -> Resumption:
    """Return the checkpoint of a run that ``library_name`` can continue on ``task``; nothing is loaded or written."""
    kept = read_index(run)
    if kept.num_envs != num_envs:
        raise ConfigError(
            f"{run}: its {kept.num_envs} environments are part of its state, got {num_envs}; resume it with "
            f"num_envs={kept.num_envs} (--num-envs {kept.num_envs})"
        )
    if kept.library != library_name:
        raise DataError(
            f"{run}: expected a run of {library_name}, got one of {kept.library}; pass --library {kept.library}"
        )
    meta = _read_kept(kept)
    if meta.task != task:
        raise DataError(f"{run}: expected a run of task {task!r}, got one of {meta.task!r}; resume it with that task")
    state = kept.last.with_name(STATE.format(meta.iteration))
    if not state.is_file():
        raise DataError(
            f"{run}: it has no {state.name}, so it cannot be resumed; runs of bridged environments keep none, as their "
            "state is a pickle"
        )
    return Resumption(last=kept.last, meta=meta, state=state)


def read_settings(run: Path) -> PPOCfg:
    """Return the settings of PPO that an earlier training had."""
    return _read_kept(read_index(run)).settings


def _read_kept(kept: Kept) -> CheckpointMeta:
    meta = read_meta(kept.last, library(kept.library))
    if meta is None:
        raise DataError(f"{kept.last}: expected a checkpoint of 'headrace train', got one without a description")
    return meta


def load_resumption(learner: Learner, resumption: Resumption) -> int:
    """Put a learner where a run left off; returns the iterations it had done."""
    state = read_weights(resumption.state, trust=False)
    learner.load(resumption.last)
    learner.load_state_dict(state["state"])
    return resumption.meta.iteration


def read_index(run: Path) -> Kept:
    """Return the checkpoints of a run's directory."""
    if not (run / INDEX).is_file():
        raise DataError(f"{run}: expected the directory of a training, got one without {INDEX}")
    kept = read_record(Kept, read_json(run / INDEX), str(run / INDEX))
    return replace(kept, **{name: run / CHECKPOINTS / getattr(kept, name).name for name in ("last", "best")})


@contextmanager
def library_run(seed: int | None = None) -> Generator[None]:
    """Run a library within a block; torch, numpy and ``random`` are as before afterwards.

    Inside, torch runs on one thread: with the physics on its own threads, more make small networks slower.

    Args:
        seed: for the three random streams, inside the block.
    """
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    cudnn, cuda = cast("Any", torch.backends.cudnn), torch.backends.cuda.matmul
    flags = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, cuda.allow_tf32
    # set_printoptions has no counterpart that reads
    options = torch._tensor_str.PRINT_OPTS  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    printing = dict(vars(options))
    # the same: only a setter is public
    checked = torch.distributions.Distribution._validate_args  # pyright: ignore[reportPrivateUsage]
    streams = random_state()
    torch.set_num_threads(1)
    torch.distributions.Distribution.set_default_validate_args(False)  # as rsl_rl and skrl do when they are imported
    if seed is not None:
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            # setting it, even to what it is, imports torch's compiler, which takes seconds
            torch.use_deterministic_algorithms(deterministic)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, cuda.allow_tf32 = flags
        vars(options).update(printing)
        torch.distributions.Distribution.set_default_validate_args(checked)
        load_random_state(streams)


def random_state() -> StateDict:
    """Return the streams of torch (CPU), numpy and ``random``, as tensors and numbers."""
    name, keys, position, has_gauss, gauss = cast(
        "tuple[str, np.ndarray[tuple[int], np.dtype[np.uint32]], int, int, float]", np.random.get_state()
    )
    version, words, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "random": [version, torch.tensor(words, dtype=torch.int64), gauss_next],
    }


def load_random_state(state: StateDict) -> None:
    """Put the streams back where :func:`random_state` found them."""
    torch.set_rng_state(state["torch"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, gauss_next = state["random"]
    random.setstate((version, tuple(words.tolist()), gauss_next))

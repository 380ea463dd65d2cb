"""Whatever can be played, as one kind of policy: checkpoints, TorchScript and ONNX files, functions, chunk policies."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from headrace._named import load_made
from headrace.adapters._checkpoint import CheckpointMeta, FileKind, read_meta, read_weights, recognize
from headrace.adapters._finding import bare_name, find_checkpoint
from headrace.adapters._learner import InferencePolicy, Memory
from headrace.adapters._library import library as library_of
from headrace.adapters._library import make_learner, resolve
from headrace.chunking import ChunkContext, ChunkPolicy, EpisodeRows, as_chunk_policy
from headrace.chunking._policy import PolicyLike
from headrace.envs._batch_env import BatchEnv
from headrace.envs._recipe import AnyEnv
from headrace.envs._registry import make
from headrace.errors import ConfigError, DataError, require_extra
from headrace.rollout import PPOCfg, load_chunk_policy
from headrace.rollout._act_policy import shipped_policies
from headrace.rollout._evaluate import action_size
from headrace.types import Obs

_SPARE = 2
"""Environments of a learner that only builds a network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFile:
    """A file that holds a policy, looked at and found fit to be played on a task."""

    path: Path
    kind: FileKind
    library: str | None = None
    meta: CheckpointMeta | None = None
    overrides: dict[str, object] = field(default_factory=dict[str, object])
    """Of the task's settings that the policy was trained with."""


def inspect_file(
    path: Path, task: str, *, library: str | None = None, trust: bool = False, any_chunks: bool = False
) -> PolicyFile:
    """What a file is; raises an error if it is damaged, of another library or of another task.

    Args:
        path: the file.
        task: what it must be of.
        library: what it must be of; None for any.
        trust: unpickle whatever is in it, which can execute arbitrary code.
        any_chunks: a chunk policy may be of another task, whose settings it then does not bring.
    """
    kind, spec = recognize(path, trust=trust)
    if kind == "onnx":
        require_extra("onnxruntime", extra="onnx", purpose=f"playing {path.name}")
    if kind in ("torchscript", "onnx"):
        return PolicyFile(path=path, kind=kind)
    own = None if spec is None else spec.name
    meta = None if spec is None else read_meta(path, spec, trust=trust)
    if library is not None and own != library:
        raise ConfigError(f"{path}: expected a checkpoint of {library}, got one of {own or 'a chunk policy'}")
    if spec is not None:
        spec.require()
    content = read_weights(path, trust=trust, mapped=True) if kind == "chunk" or own == "headrace" else {}
    said = meta.task if meta is not None else cast("str | None", content.get("task"))
    overrides = dict(content.get("overrides") or {} if meta is None else meta.overrides)
    if any_chunks and kind == "chunk":
        same = bare_name(str(said)) == bare_name(task)
        return PolicyFile(path=path, kind=kind, overrides=overrides if same else {})
    if said is not None and said.rsplit(":", 1)[-1] != task.rsplit(":", 1)[-1]:
        raise ConfigError(f"{path}: expected a checkpoint of task {task!r}, got one of {said!r}; play that task")
    return PolicyFile(path=path, kind=kind, library=own, meta=meta, overrides=overrides)


def policy_file(policy: object, task: str) -> PolicyFile | None:
    """The file that ``policy`` names; None for all that is no file, and for the policies that we ship by task.

    Args:
        policy: a checkpoint of a training, its directory, ``latest`` or ``best`` of ``runs/``, a TorchScript or ONNX
            file, a chunk policy; anything else is not looked at.
        task: what it must be of. A chunk policy may be of another task, whose settings it then does not bring.
    """
    if not isinstance(policy, (str, Path)) or str(policy) in shipped_policies():
        return None
    if str(policy) not in ("latest", "best") and not Path(policy).exists():
        return None
    return inspect_file(find_checkpoint(str(policy), task).path, task, any_chunks=True)


def load_policy(file: PolicyFile, env: AnyEnv, *, deterministic: bool, trust: bool = False) -> ChunkPolicy:
    """The policy of a file, for this environment: of horizon 1, unless it plans chunks. Use it in ``library_run``."""
    size = action_size(env.single_action_space)
    if file.kind == "torchscript":
        return as_steps(_function(_torchscript(file.path)), size)
    if file.kind == "onnx":
        return as_steps(_function(_onnx(file.path)), size)
    if file.kind == "chunk":
        return as_chunk_policy(load_chunk_policy(file.path), action_dim=size)
    assert file.library is not None
    loader = library_of(file.library).loader
    if loader is not None:
        return as_steps(resolve(loader)(file.path, deterministic=deterministic, trust=trust), size)
    settings = PPOCfg() if file.meta is None else file.meta.settings
    # the learner is only the library's way to build its network: its rollout memory is as small as can be, and its
    # environments are never stepped
    with closing(_spare(env)) as spare:
        learner = make_learner(file.library, spare, dataclasses.replace(settings, steps=settings.minibatches))
        learner.load(file.path, trust=trust)
        return as_steps(learner.policy(deterministic=deterministic), size)


def _spare(env: AnyEnv) -> AnyEnv:
    """A few environments of the same kind."""
    if isinstance(env, BatchEnv):
        return make(env.task, _SPARE, seed=env.seed, threads=1, device=str(env.device))
    if env.recipe is None:
        raise ConfigError(f"{env.name}: expected an environment that was made from a name or recipe, got an object")
    return env.recipe.make(num_envs=_SPARE, autoreset="same_step", workers=None, executor="inline")


def callable_policy(name: str, env: AnyEnv) -> ChunkPolicy:
    """A policy from ``module:name``: a function of the observation groups, a class of such, or a chunk policy."""
    policy = load_made(name, "--policy")
    if not callable(policy):
        raise ConfigError(f"--policy {name}: expected something that can be called, got {type(policy).__name__}")
    size = action_size(env.single_action_space)
    if getattr(policy, "horizon", None) is not None:
        return as_chunk_policy(cast("PolicyLike", policy), action_dim=size)
    return as_steps(_function(cast("Callable[[Obs], Tensor]", policy)), size)


def _function(call: Callable[[Obs], Tensor]) -> InferencePolicy:
    """A function of observations as a policy without memory."""
    return InferencePolicy(lambda obs, _: (call(obs), None))


def _torchscript(path: Path) -> Callable[[Obs], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch asks for torch.export, which is another format
        try:
            module = torch.jit.load(path, map_location="cpu").eval()
        except RuntimeError as error:
            raise DataError(f"{path}: TorchScript cannot read it: {str(error).splitlines()[0]}") from error

    def call(obs: Obs) -> Tensor:
        return cast("Tensor", module(obs["policy"]))

    return call


def _onnx(path: Path) -> Callable[[Obs], Tensor]:
    """Runs on ONNX Runtime, on one thread as everything inside ``library_run``."""
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph, InvalidProtobuf, NotImplemented

    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors; it would print its warnings to the terminal
    try:
        session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except (Fail, InvalidGraph, InvalidProtobuf, NotImplemented) as error:
        raise DataError(f"{path}: not an ONNX file, or cut off, or of a kind that cannot run here: {error}") from error
    names = [entry.name for entry in session.get_inputs()]
    if len(names) != 1:
        raise DataError(f"{path}: expected one input, the group 'policy', got {names}")

    def call(obs: Obs) -> Tensor:
        return torch.from_numpy(session.run(None, {names[0]: obs["policy"].cpu().numpy()})[0])

    return call


class StepPolicy:
    """An :class:`InferencePolicy` without memory: (n, A) actions, or (n,) choices, as chunks (n, 1, A)."""

    horizon = obs_steps = 1

    def __init__(self, policy: InferencePolicy, action_dim: int) -> None:
        self.policy, self.action_dim = policy, action_dim

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Plan one action per row."""
        del context
        actions = self.policy(obs)
        return actions[:, None, None] if actions.dim() == 1 else actions.unsqueeze(1)


class RecurrentStepPolicy(StepPolicy):
    """One with memory, which is kept here per episode: rows (layers, capacity, size) of what the library keeps.

    Row 0 is scratch, for rows that only fill a batch up.
    """

    def __init__(self, policy: InferencePolicy, action_dim: int) -> None:
        super().__init__(policy, action_dim)
        self._row_of: dict[tuple[int, int], int] = {}
        self._free: list[int] = []
        self._rows: Memory | None = None
        self._asked: tuple[Tensor, Tensor] | None = None
        self._index = torch.zeros(0, dtype=torch.int64)

    def begin(self, rows: EpisodeRows) -> None:
        """Give each episode a row of zeros."""
        for key in rows.keys():  # noqa: SIM118  (not a dict)
            if not self._free:
                self._grow()
            self._row_of[key] = self._free.pop()
        self._asked = None
        if self._rows is not None:
            begun = torch.tensor([self._row_of[key] for key in rows.keys()])  # noqa: SIM118  (not a dict)
            for kept in self._rows:
                kept[:, begun] = 0.0

    def end(self, rows: EpisodeRows) -> None:
        """Take the rows back."""
        for key in rows.keys():  # noqa: SIM118  (not a dict)
            self._free.append(self._row_of.pop(key))

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Plan one action per row, each with the memory of its episode."""
        index = self._rows_of(context)
        self.policy.memory = None if self._rows is None else tuple(kept[:, index].contiguous() for kept in self._rows)
        plan = super().__call__(obs, context)
        after = self.policy.memory
        assert after is not None
        if self._rows is None:
            count = self._capacity
            self._rows = tuple(part.new_zeros((part.shape[0], count, part.shape[2])) for part in after)
        for kept, part in zip(self._rows, after, strict=True):
            kept[:, index] = part
            kept[:, 0] = 0.0
        return plan

    def _rows_of(self, context: ChunkContext) -> Tensor:
        """int64 (n,); looked up once for as long as the same episodes are asked about."""
        asked = self._asked
        if asked is None or asked[0] is not context.seeds or asked[1] is not context.episode_ids:
            self._asked = context.seeds, context.episode_ids
            keys = zip(context.seeds.tolist(), context.episode_ids.tolist(), strict=True)
            self._index = torch.tensor([self._row_of.get(key, 0) for key in keys])
        return self._index

    @property
    def _capacity(self) -> int:
        return 1 + len(self._row_of) + len(self._free)

    def _grow(self) -> None:
        """Twice as many rows."""
        before = self._capacity
        self._free = list(range(2 * before, before - 1, -1))
        if self._rows is not None:
            more = [kept.new_zeros((kept.shape[0], before + 1, kept.shape[2])) for kept in self._rows]
            self._rows = tuple(torch.cat(pair, dim=1) for pair in zip(self._rows, more, strict=True))


def as_steps(policy: InferencePolicy, action_dim: int) -> ChunkPolicy:
    """The policy as a chunk policy of horizon 1."""
    return (RecurrentStepPolicy if policy.recurrent else StepPolicy)(policy, action_dim)

"""Policies of files that give one action per observation: trainings, TorchScript and ONNX."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from headrace.envs.batch_env import BatchEnv
from headrace.envs.recipe import AnyEnv, EnvRecipe
from headrace.envs.registry import make
from headrace.envs.task import count_actions
from headrace.errors import ConfigError, DataError
from headrace.files import hash_file, open_untrusted, parsing
from headrace.learning.ppo import PPOCfg
from headrace.libraries.learner import InferencePolicy, MemoryState
from headrace.libraries.registry import check_agent, make_learner
from headrace.libraries.registry import library as library_of
from headrace.policies.protocol import ChunkContext, ChunkPolicy, EpisodeRows
from headrace.types import Obs

if TYPE_CHECKING:
    from headrace.policies.load_policy import FoundPolicy

_SPARE = 2
"""Environments of a learner that only builds a network."""


def load_step_policy(
    found: FoundPolicy, env: AnyEnv | EnvRecipe, *, deterministic: bool, trust: bool = False
) -> ChunkPolicy:
    """Load the policy of a file, of horizon 1, for an environment; use it in ``library_run``."""
    # the learner is only the library's way to build its network: its rollout memory is as small as can be, and its
    # environments are never stepped
    with closing(_make_spare(env)) as spare:
        policy = _inference(found, spare, deterministic=deterministic, trust=trust)
        kind = RecurrentStepPolicy if policy.recurrent else StepPolicy
        return kind(policy, count_actions(spare.single_action_space), hash_file(found.path))


def _inference(found: FoundPolicy, spare: AnyEnv, *, deterministic: bool, trust: bool) -> InferencePolicy:
    if found.kind in ("torchscript", "onnx"):
        call = _torchscript(found.path) if found.kind == "torchscript" else _onnx(found.path)
        return InferencePolicy(lambda obs, _: (call(obs), None))
    assert found.library is not None
    loader = library_of(found.library).loader
    if loader is not None:
        return resolve_name(loader)(found.path, deterministic=deterministic, trust=trust)
    settings = PPOCfg() if found.meta is None else found.meta.settings
    agent = None if found.meta is None else found.meta.agent
    if agent is not None and not trust:
        check_agent(agent, found.path)
    learner = make_learner(found.library, spare, dataclasses.replace(settings, steps=settings.minibatches), agent)
    learner.load(found.path, trust=trust)
    return learner.policy(deterministic=deterministic)


def _make_spare(env: AnyEnv | EnvRecipe) -> AnyEnv:
    """Make a few environments of the same kind."""
    if isinstance(env, BatchEnv):
        return make(env.task, _SPARE, seed=env.seed, threads=1, device=str(env.device))
    recipe = env if isinstance(env, EnvRecipe) else env.recipe
    if recipe is None:
        raise ConfigError(
            f"{getattr(env, 'name', env)}: expected an environment that was made from a name or recipe, got an object"
        )
    changes = {"workers": None, "executor": "inline"} if recipe.bridged else {"threads": 1}
    return recipe.make(num_envs=_SPARE, autoreset="same_step", **changes)


def _torchscript(path: Path) -> Callable[[Obs], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch asks for torch.export, which is another format
        with parsing(path), open_untrusted(path) as file:
            module = torch.jit.load(file, map_location="cpu").eval()

    def call(obs: Obs) -> Tensor:
        return cast("Tensor", module(obs["policy"]))

    return call


def _onnx(path: Path) -> Callable[[Obs], Tensor]:
    """Run on ONNX Runtime, on one thread as everything inside ``library_run``.

    It has no operators but ONNX Runtime's own, and reads no data outside the directory of the file.
    """
    import onnxruntime

    states = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    raised = tuple(kind for kind in vars(states).values() if isinstance(kind, type) and issubclass(kind, Exception))
    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors; it would print its warnings to the terminal
    with parsing(path):
        try:
            session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            names = [entry.name for entry in session.get_inputs()]
        except raised as error:
            reason = f"not an ONNX file, or cut off, or of a kind that cannot run here: {error}"
            raise DataError(f"{path}: {reason}") from error
    if len(names) != 1:
        raise DataError(f"{path}: expected one input, the group 'policy', got {names}")

    def call(obs: Obs) -> Tensor:
        return torch.from_numpy(session.run(None, {names[0]: obs["policy"].cpu().numpy()})[0])

    return call


class StepPolicy:
    """The policy of a file without memory: (n, A) actions, or (n,) choices, as chunks (n, 1, A).

    Args:
        policy: what the library gives.
        action_dim: size of an action.
        file_hash: SHA-256 of the file, the policy's id.
    """

    horizon = obs_steps = 1

    def __init__(self, policy: InferencePolicy, action_dim: int, file_hash: str) -> None:
        self.policy, self.action_dim, self.file_hash = policy, action_dim, file_hash

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Plan one action per row."""
        del context
        actions = self.policy(obs)
        return actions[:, None, None] if actions.dim() == 1 else actions.unsqueeze(1)


class RecurrentStepPolicy(StepPolicy):
    """One with memory, which is kept here per episode: rows (layers, capacity, size) of what the library keeps.

    Row 0 is scratch, for rows that only fill a batch up.
    """

    def __init__(self, policy: InferencePolicy, action_dim: int, file_hash: str) -> None:
        super().__init__(policy, action_dim, file_hash)
        self._row_of: dict[tuple[int, int], int] = {}
        self._free: list[int] = []
        self._rows: MemoryState | None = None
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
        """Release the rows."""
        for key in rows.keys():  # noqa: SIM118  (not a dict)
            self._free.append(self._row_of.pop(key))

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Plan one action per row, each with the memory of its episode."""
        index = self._find_rows(context)
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

    def _find_rows(self, context: ChunkContext) -> Tensor:
        """Return the row of each episode, int64 (n,); looked up once as long as the episodes are the same."""
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
        """Double the rows."""
        before = self._capacity
        self._free = list(range(2 * before, before - 1, -1))
        if self._rows is not None:
            more = [kept.new_zeros((kept.shape[0], before + 1, kept.shape[2])) for kept in self._rows]
            self._rows = tuple(torch.cat(pair, dim=1) for pair in zip(self._rows, more, strict=True))

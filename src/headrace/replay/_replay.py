"""The off-policy store: rings of frames, written by steps, read by samplers."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headrace import rng
from headrace._kernels.gather import Bytes, Int64s
from headrace.buffers import OutputPool
from headrace.errors import ConfigError, DataError, IdError, LifecycleError, ShapeError
from headrace.files import claim, lock, write_directory
from headrace.replay import _disk as disk
from headrace.replay._arithmetic import Float64s
from headrace.replay._batches import RESERVED, assemble
from headrace.replay._checks import NestedObs, check_array, check_sizes, check_transition
from headrace.replay._compressed import CompressedRows
from headrace.replay._estimate import estimate_leaves, refuse_unless_fits
from headrace.replay._memory import COMMIT, BlockMemory, CheckpointMemory, FileMemory, Memory, RamMemory
from headrace.replay._pool import FramePool
from headrace.replay._priorities import PrioritizedSampler
from headrace.replay._rows import MappedRows, Rows
from headrace.replay._samplers import Picked, Sampler, UniformSampler, make_sampler, stored_positions
from headrace.replay._spec import Autoreset, Codec, SpaceLike, StoreSpec, array_spec, observation_leaves
from headrace.types import StackSpec, Step, as_device

if TYPE_CHECKING:
    from tensordict import TensorDict


class _Tickets:
    """The uniform numbers of draws, made for several draws at a time; which those are changes none of them."""

    _AHEAD = 32

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = 0
        self._made = np.empty((0, 0))

    def of(self, draw: int, count: int) -> Float64s:
        """Numbers in [0, 1) of this draw, (count,): a function of seed, draw and place."""
        row = draw - self._first
        if self._made.shape[1] != count or not 0 <= row < self._made.shape[0]:
            made = rng.uniform(self._seed, torch.arange(count), "replay", self._AHEAD, draw=draw)
            self._made, self._first, row = np.ascontiguousarray(made.numpy().T), draw, 0
        return self._made[row]


class _Cuts:
    """Counts cuts, and warns once when most steps are one: n-step returns are then one-step returns."""

    _ENOUGH = 64

    def __init__(self) -> None:
        self.total = 0
        self._going_on = 0
        self._warned = False

    def count(self, cuts: int, going_on: int) -> None:
        """A write had so many cuts, and so many transitions that went on from the one before."""
        self.total += cuts
        self._going_on += going_on
        if cuts and not self._warned and self.total >= self._ENOUGH and self.total > self._going_on:
            self._warned = True
            warnings.warn(
                f"ReplayBuffer: {self.total} of {self.total + self._going_on} steps did not go on from the observation "
                "stored before, so each was cut off as a trajectory of its own, and n-step returns are one-step "
                "returns. extend() must get as obs exactly, bit for bit, what was step.obs in the call before: store "
                "observations before a normalizer whose statistics drift, and the same dtype and rounding in both",
                UserWarning,
                stacklevel=4,
            )


class ReplayBuffer:
    """Keeps every frame once and gives back exact transitions, at ends, cuts, wrap-arounds and the write head.

    ``extend`` is fed with what a step gave; ``sample`` returns a ``TensorDict`` with the keys known from TorchRL:
    ``observation``, ``action``, ``("next", "observation" | "reward" | "done" | "terminated" | "truncated")``,
    ``("collector", "traj_ids")``, and ours: ``index`` (names a transition for ever), ``step_count`` (its place in the
    trajectory), ``("next", "cut")`` (the store does not know how the trajectory goes on: the write head, or a caller
    who went on from another observation). Observations of several groups are nested: ``("observation", "policy")``.

    Rewards and flags are (B, 1). With ``n_step`` > 1 the reward is the discounted sum, ``("next", …)`` is what was m
    steps later, ``steps_to_next_obs`` is m and ``gamma`` is γᵐ; m < n only at an end, a cut or the write head.

    **Memory.** The observation and the next observation of a sample are overlapping views of one gather of K + 1
    frames: writing into one changes the other; ``clone()`` gives them memory of their own. A sample stays valid as long
    as it is held; its memory is used again afterwards.

    **Threads.** One thread may extend while another samples: a lock makes each call whole.

    The other forms, which drop ``("next", obs)`` from batches as TorchRL does, are
    :func:`headrace.replay.reconstruct_next` and :func:`headrace.replay.to_delta`; they are smaller than usual but not
    exact.
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        observation: SpaceLike,
        action: SpaceLike,
        *,
        stack: Mapping[str, StackSpec] | StackSpec | None = None,
        extras: Mapping[str, SpaceLike] | None = None,
        sampler: Sampler | None = None,
        n_step: int = 1,
        gamma: float = 0.99,
        autoreset: Autoreset = "same_step",
        seed: int = 0,
        directory: str | Path | None = None,
        codec: Codec | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make an empty buffer.

        Args:
            capacity: transitions over all environments; each has a ring of ``capacity / num_envs``.
            num_envs: environments, N.
            observation: one environment's observation space, stacked as the environment gives it.
            action: one environment's action space.
            stack: how stacked observations are made of frames, by name; only the newest frame is stored.
            extras: more to keep per transition, by name: one environment's space or ``ArraySpec`` each. A behavior
                policy's log-probability for V-trace, or the recurrent state before the action, for example; they come
                back under their names.
            sampler: which transitions make a batch; uniform if None. It serves this buffer only.
            n_step: steps between observation and next observation.
            gamma: discount of n-step rewards.
            autoreset: ``same_step``: the last observation of an episode is in ``info["final_obs"]``.
                ``disabled``: it is ``step.obs`` itself.
            seed: of the draws; the k-th sample is a function of seed, k and content.
            directory: keep everything in files in this new directory instead of in memory; their space is reserved
                now. One process at a time may write there.
            codec: compress each frame without loss (extra ``compress``); for memory only.
            device: where batches go. What is stored lies in CPU memory in any case, and ``extend`` takes tensors of
                any device.
        """
        check_sizes(capacity, num_envs, n_step, gamma)
        if autoreset not in ("same_step", "disabled"):
            raise ConfigError(f"autoreset: expected 'same_step' or 'disabled', got {autoreset!r}")
        if codec is not None and directory is not None:
            raise ConfigError("codec: compressed frames differ in size, so they cannot be mapped from disk; drop one")
        sampler = sampler or UniformSampler()
        spec = StoreSpec(
            capacity=capacity,
            num_envs=num_envs,
            leaves=observation_leaves(observation, stack),
            action=array_spec(action, "action"),
            n_step=n_step,
            gamma=gamma,
            autoreset=autoreset,
            seed=seed,
            sampler=sampler.config(),
            codec=codec,
            extras={name: array_spec(space, f"extras[{name!r}]") for name, space in (extras or {}).items()},
        )
        taken = sorted(RESERVED & spec.extras.keys())
        if taken:
            raise ConfigError(f"extras: {', '.join(taken)} are keys of every batch; choose other names")
        memory: Memory = RamMemory()
        if directory is not None:
            path = Path(directory)
            memory = FileMemory(path, claim(path, "open it with ReplayBuffer.open, or choose another"))
        if codec is None:
            needed = estimate_leaves(capacity, num_envs, spec.leaves, spec.action)
            refuse_unless_fits(needed, memory.free_bytes(), "memory" if directory is None else str(directory))
        self._build(spec, sampler, memory, device)
        if directory is not None:
            disk.write_manifest(Path(directory), spec, {})

    def _build(self, spec: StoreSpec, sampler: Sampler, memory: Memory, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.device = as_device(device)
        self._cuts = _Cuts()
        self.sampler = sampler
        self._memory = memory

        def make(name: str, row_bytes: int, rows: int) -> Rows:
            if spec.codec is None:
                return MappedRows(memory, name, row_bytes, rows)
            return CompressedRows(spec.codec, row_bytes, memory, name)

        self._pool = FramePool(spec.leaves, spec.num_envs, spec.length, memory, make)
        slots = self._pool.first_side_row
        self._actions = MappedRows(memory, "actions", max(spec.action.nbytes, 1), slots)
        self._extras = {
            name: MappedRows(memory, f"extra{i}", max(extra.nbytes, 1), slots)
            for i, (name, extra) in enumerate(spec.extras.items())
        }
        self._reward_block = memory.allocate("rewards", slots * 4)
        self._flat_rewards = self._reward_block.view(np.float32)
        self._rewards = self._flat_rewards.reshape(spec.num_envs, -1)
        self._record = disk.CommitRecord(memory, spec.num_envs)
        self._pool.counts[:], self._pool.trajectories[:], self._draws = self._record.read()
        self._pool.recover()
        self._outputs = OutputPool()
        self._tickets = _Tickets(spec.seed)
        self._lock = threading.Lock()
        sampler.attach(self._pool)

    @classmethod
    def open(cls, directory: str | Path) -> ReplayBuffer:
        """Go on with a buffer that was made with ``directory=``, from its last complete ``extend``.

        Refused while another buffer, in this process or another, has it open: two writers would overwrite each other.
        """
        path = Path(directory)
        spec, manifest = disk.read_manifest(path)
        if manifest.files:
            raise DataError(f"{path}: this is a checkpoint, not a live store; use ReplayBuffer.load")
        buffer = cls.__new__(cls)
        buffer._build(spec, make_sampler(spec.sampler), FileMemory(path, lock(path)))
        return buffer

    @classmethod
    def load(cls, directory: str | Path, *, verify: bool = False) -> ReplayBuffer:
        """A buffer in memory from a checkpoint that :meth:`save` wrote.

        Frames are read from the files when they are first touched; the checkpoint is never changed and must stay in
        place. Sizes and the checksums of everything but frames are checked; ``verify=True`` reads the frames as well.
        """
        path = Path(directory)
        spec, manifest = disk.read_manifest(path)
        if not manifest.files:
            raise DataError(f"{path}: this is a live store, not a checkpoint; use ReplayBuffer.open")
        manifest.check(path, content=lambda name: verify or not disk.holds_frames(name))
        buffer = cls.__new__(cls)
        buffer._build(spec, make_sampler(spec.sampler), CheckpointMemory(path))
        return buffer

    def save(self, directory: str | Path) -> None:
        """Write a checkpoint to a new directory: sparse files, and a manifest with their checksums.

        The directory appears under its name only when it is complete.
        """
        with self._lock:
            blocks = self._blocks()

            def fill(folder: Path) -> None:
                files = {f"{name}.bin": disk.save_block(folder, name, block) for name, block in blocks.items()}
                disk.write_manifest(folder, self.spec, files)

            write_directory(Path(directory), fill)

    def _blocks(self) -> dict[str, Bytes]:
        """All memory by name, with the counters of this moment; called with the lock held."""
        self._record.write(self._pool.counts, self._pool.trajectories, self._draws)
        blocks = {**self._pool.blocks(), **self._actions.blocks()}
        blocks |= {"rewards": self._reward_block, COMMIT: self._record.block}
        blocks |= self.sampler.blocks()
        for rows in (*self._pool.rows.values(), *self._extras.values()):
            blocks |= rows.blocks()
        return blocks

    def __getstate__(self) -> dict[str, object]:
        """For ``pickle`` and ``deepcopy``: a copy of everything stored. A store on disk is not copied into a pickle."""
        if isinstance(self._memory, FileMemory):
            raise ConfigError(
                f"ReplayBuffer: this one lives in {self._memory.directory}; pass the path and ReplayBuffer.open() it "
                "there, or save() a checkpoint and load() it"
            )
        with self._lock:
            blocks = {name: block.copy() for name, block in self._blocks().items()}
        return {"spec": self.spec, "blocks": blocks, "device": str(self.device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._build(state["spec"], make_sampler(state["spec"].sampler), BlockMemory(state["blocks"]), state["device"])

    def flush(self) -> None:
        """Ask the operating system to write a store on disk out, so that it survives the loss of power."""
        with self._lock:
            self._memory.flush()

    def close(self) -> None:
        """Let another process write to a store on disk; this buffer must not be used any more. Safe to call again."""
        if isinstance(self._memory, FileMemory):
            self._memory.release()

    def __len__(self) -> int:
        return int(self._pool.lengths().sum())

    def __repr__(self) -> str:
        return (
            f"ReplayBuffer({len(self):,} of {self.capacity:,} transitions, {self.num_envs} environments, "
            f"{self.bytes_per_transition:,.0f} bytes per transition, n_step={self.spec.n_step}, "
            f"sampler={self.spec.sampler['kind']})"
        )

    @property
    def capacity(self) -> int:
        """Transitions that fit, over all environments."""
        return self.spec.capacity

    @property
    def num_envs(self) -> int:
        """Environments."""
        return self.spec.num_envs

    @property
    def lengths(self) -> Tensor:
        """Transitions stored per environment, int64 (N,), fresh."""
        return torch.from_numpy(self._pool.lengths())

    @property
    def written(self) -> Tensor:
        """Transitions ever stored per environment, int64 (N,), fresh; the last ``capacity / num_envs`` are there."""
        return torch.from_numpy(self._pool.counts.copy())

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer when every ring is full: frames, side rows used so far, bookkeeping, sampler."""
        actions = self._actions.nbytes(self._pool.first_side_row)
        extras = sum(column.nbytes(self._pool.first_side_row) for column in self._extras.values())
        return self._pool.nbytes + self._reward_block.nbytes + actions + extras + self.sampler.nbytes

    @property
    def bytes_per_transition(self) -> float:
        """``nbytes`` over ``capacity``."""
        return self.nbytes / self.capacity

    def clear(self) -> None:
        """Forget all transitions; memory is kept."""
        with self._lock:
            self._pool.clear()
            self._record.write(self._pool.counts, self._pool.trajectories, self._draws)
            self.sampler.attach(self._pool)

    def extend(
        self,
        obs: NestedObs,
        action: Tensor,
        step: Step,
        active: Tensor | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Store one transition of every active environment.

        Args:
            obs: the observation the action answered, group → (N, …) or one tensor (N, …), as declared.
            action: (N, …).
            step: what the environment gave for it. Under ``autoreset="same_step"`` the true last observations are in
                ``step.info["final_obs"]`` where ``step.info["_final_obs"]``.
            active: bool (N,); rows of environments that did not act are not read, and nothing is stored for them.
            extras: (N, …) each, all that were declared.

        ``obs`` is normally the ``step.obs`` of the call before. Where it is not, bit for bit, the caller reset the
        environment: the trajectory before is closed as cut, and a new one begins. All tensors are copied.
        """
        spec, pool = self.spec, self._pool
        checked = check_transition(
            spec.leaves, spec.action, spec.num_envs, spec.autoreset, obs, action, step, active
        )  # fmt: skip
        if isinstance(self._memory, FileMemory) and not self._memory.release.alive:
            raise LifecycleError("extend: this buffer was closed; open the store again with ReplayBuffer.open")
        given = extras or {}
        if given.keys() != spec.extras.keys():
            raise ShapeError(f"extras: expected {sorted(spec.extras)}, as declared, got {sorted(given)}")
        columns = {
            name: check_array(given[name], extra, f"extras[{name!r}]", spec.num_envs)
            for name, extra in spec.extras.items()
        }
        with self._lock:
            write = pool.write(
                checked.obs, checked.next_obs, checked.final_obs, checked.terminated, checked.truncated, checked.active
            )
            reward = checked.reward.numpy()
            self._flat_rewards[write.rows] = reward if checked.active is None else reward[write.env_ids]
            self._actions.write(write.rows, checked.action, write.env_ids)
            for name, column in columns.items():
                self._extras[name].write(write.rows, column, write.env_ids)
            self.sampler.written(write)
            self._cuts.count(int(np.count_nonzero(write.cut)), int(np.count_nonzero(write.steps)))
            if isinstance(self._memory, FileMemory):
                self._record.write(pool.counts, pool.trajectories, self._draws)
            pool.side.settle()

    def sample(self, batch_size: int) -> TensorDict:
        """Draw a batch: ``batch_size`` transitions, slices or trajectories, as the sampler says."""
        if batch_size < 1:
            raise ShapeError(f"batch_size: expected at least 1, got {batch_size}")
        with self._lock:
            picked = self.sampler.draw(self._tickets.of(self._draws, batch_size))
            self._draws += 1
            return self._batch(picked)

    @property
    def cuts(self) -> int:
        """Trajectories that were closed because an observation was not, bit for bit, the one that ``extend`` got as
        ``step.obs`` before."""
        return self._cuts.total

    def indices(self) -> Tensor:
        """``index`` of every stored transition, by environment, oldest first: int64 (len,), fresh."""
        with self._lock:
            stored = [p * self.num_envs + e for e, p in enumerate(stored_positions(self._pool))]
        return torch.from_numpy(np.concatenate(stored))

    def get(self, index: Tensor) -> TensorDict:
        """The transitions of these ``index`` values, int64 (B,), as :meth:`sample` gives them."""
        with self._lock:
            envs, positions = self._locate(index)
            if not len(index) and len(self):
                first = int(self._pool.lengths().argmax())
                return self._batch(Picked(envs=np.array([first]), positions=self._pool.oldest()[first : first + 1]))[:0]
            stored = (positions >= self._pool.oldest()[envs]) & (positions < self._pool.counts[envs])
            if not stored.all():
                raise IdError(f"index: {index[torch.from_numpy(~stored)].tolist()[:8]} are not stored, or no longer")
            return self._batch(Picked(envs=envs, positions=positions))

    def at(self, place: Tensor) -> TensorDict:
        """The transitions at places 0 ≤ place < len, int64 (B,), counted by environment, oldest first."""
        with self._lock:
            ends = np.cumsum(self._pool.lengths())
            where = place.numpy()
            if where.ndim != 1 or (where < 0).any() or (where >= ends[-1]).any():
                raise IdError(f"place: expected int64 (B,) between 0 and {int(ends[-1]) - 1}, got {place}")
            envs = np.searchsorted(ends, where, side="right")
            positions = self._pool.oldest()[envs] + where - (ends - self._pool.lengths())[envs]
            return self._batch(Picked(envs=envs, positions=positions))

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Give transitions new priorities, usually absolute TD errors; both (B,). Overwritten ones are passed over."""
        if not isinstance(self.sampler, PrioritizedSampler):
            raise ConfigError("update_priorities: the sampler has no priorities; pass sampler=PrioritizedSampler()")
        with self._lock:
            envs, positions = self._locate(index)
            values = priority.detach().to("cpu", torch.float64).numpy()
            self.sampler.update(envs, positions, values.reshape(-1) if values.ndim == 2 else values)

    def _locate(self, index: Tensor) -> tuple[Int64s, Int64s]:
        if index.dtype != torch.int64 or index.dim() != 1 or (index < 0).any():
            raise IdError(f"index: expected int64 (B,), not negative, got {index.dtype} {tuple(index.shape)}")
        positions, envs = np.divmod(index.cpu().numpy(), self.num_envs)
        return envs, positions

    def _batch(self, picked: Picked) -> TensorDict:
        """Everything about the picked transitions; called with the lock held."""
        batch = assemble(self.spec, self._pool, self._actions, self._extras, self._rewards, self._outputs, picked)
        if self.device.type == "cpu":
            return batch
        return batch.to(self.device)

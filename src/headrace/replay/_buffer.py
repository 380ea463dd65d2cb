"""The off-policy store: rings of frames, written by steps and batches, read by samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError, ShapeError
from headrace.files import Lock, claim, parsing, write_directory
from headrace.replay import _blocks as disk
from headrace.replay._blocks import MAIN, Allocator, Bytes, CheckpointAllocator, FileAllocator, ReadOnlyAllocator
from headrace.replay._extending import Batch, NestedObs, check_transition
from headrace.replay._samplers import Sampler, UniformSampler, list_positions, make_sampler
from headrace.replay._spec import (
    Autoreset,
    Codec,
    Discount,
    SpaceLike,
    StoreSpec,
    ViewSpec,
    estimate_store,
    refuse_unless_fits,
    store_spec,
)
from headrace.replay._store import Store
from headrace.replay._view import RESERVED, SamplerView
from headrace.types import StackSpec, Step

if TYPE_CHECKING:
    from tensordict import TensorDict


class ReplayBuffer(SamplerView):
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
    :func:`headrace.replay.forms.reconstruct_next` and :func:`headrace.replay.forms.to_delta`; they are smaller than
    usual but not exact.
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
        gamma: float | Sequence[float] = 0.99,
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
            gamma: discount of n-step rewards; one for all environments, or one for each.
            autoreset: ``same_step``: the last observation of an episode is in ``info["final_obs"]``.
                ``disabled``: it is ``step.obs`` itself.
            seed: of the draws; the k-th sample is a function of seed, k and content.
            directory: keep everything in files in this new directory instead of in memory; their space is reserved
                now. One process at a time may write there.
            codec: compress each frame without loss (extra ``compress``); for memory only.
            device: where batches go. What is stored lies in CPU memory in any case, and ``extend`` takes tensors of
                any device.
        """
        if codec is not None and directory is not None:
            raise ConfigError("codec: compressed frames differ in size, so they cannot be mapped from disk; drop one")
        sampler = sampler or UniformSampler()
        view = ViewSpec(sampler=sampler.config(), n_step=n_step, gamma=_discount(gamma), seed=seed)
        view.check(num_envs)
        spec = store_spec(capacity, num_envs, observation, action, stack, extras, autoreset, codec)
        taken = sorted(RESERVED & spec.extras.keys())
        if taken:
            raise ConfigError(f"extras: {', '.join(taken)} are keys of every batch; choose other names")
        memory = Allocator()
        if directory is not None:
            path = Path(directory)
            held = claim(path, "open it with ReplayBuffer.open, or choose another")
            memory = FileAllocator(path, held, creates=True)
        if codec is None:
            refuse_unless_fits(
                estimate_store(spec), memory.free_bytes(), "memory" if directory is None else str(directory)
            )
        self._build(spec, memory, sampler, view, device)
        self._describe()

    def _build(
        self, spec: StoreSpec, memory: Allocator, sampler: Sampler, settings: ViewSpec, device: torch.device | str,
        trust_unflushed: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(Store(spec, memory, trust_unflushed=trust_unflushed), MAIN, sampler, settings, device)
        self.spec = spec
        self._step = np.ones(spec.num_envs, np.int64)
        self._others: dict[str, SamplerView] = {}

    def _describe(self) -> None:
        """Write down what a store on disk has."""
        memory = self.store.memory
        if isinstance(memory, FileAllocator):
            disk.write_manifest(memory.directory, self.spec, self._view_specs())

    @property
    def views(self) -> dict[str, SamplerView]:
        """Samplers that read this store, by name; ``main`` is the buffer itself."""
        return {MAIN: self, **self._others}

    def _view_specs(self) -> dict[str, ViewSpec]:
        return {name: view.settings for name, view in self.views.items()}

    def _restore(
        self, spec: StoreSpec, views: Mapping[str, ViewSpec], memory: Allocator,
        devices: Mapping[str, str] | None = None, trust_unflushed: bool | None = None,
    ) -> ReplayBuffer:  # fmt: skip
        devices = devices or dict.fromkeys(views, "cpu")
        self._build(spec, memory, make_sampler(views[MAIN].sampler), views[MAIN], devices[MAIN], trust_unflushed)
        for name, view in views.items():
            if name != MAIN:
                self._others[name] = SamplerView(self.store, name, make_sampler(view.sampler), view, devices[name])
        return self

    def with_sampler(
        self,
        sampler: Sampler,
        name: str,
        *,
        n_step: int = 1,
        gamma: float | Sequence[float] = 0.99,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> SamplerView:
        """Return one more sampler over the same store, with settings of its own; see the constructor for them.

        Nothing is copied. The sampler and its state are saved with the store, and are in ``views[name]`` afterwards.
        """
        if name in self.views or not name.isidentifier():
            raise ConfigError(f"with_sampler: expected a new name of letters and digits, got {name!r}")
        spec = ViewSpec(sampler=sampler.config(), n_step=n_step, gamma=_discount(gamma), seed=seed)
        spec.check(self.num_envs)
        view = self._others[name] = SamplerView(self.store, name, sampler, spec, device)
        self._describe()
        return view

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        read_only: bool = False,
        sampler: Sampler | None = None,
        trust_unflushed: bool | None = None,
    ) -> ReplayBuffer:
        """Go on with a buffer that was made with ``directory=``, from its last complete ``extend``.

        A store that lacks a file, or whose bookkeeping contradicts itself, is refused.

        Args:
            directory: of the store.
            read_only: read what another process writes, while it does. Every batch is of transitions that were whole
                and stored at one moment: what the writer overwrote meanwhile is read again. Otherwise the store is
                refused while another buffer, in this process or another, writes to it.
            sampler: for ``read_only``, which has samplers and draws of its own; uniform if None.
            trust_unflushed: what to do if the machine was restarted after transitions were written that no
                :meth:`flush` or :meth:`close` covers: True keeps all of them, for a machine that was shut down properly
                or a directory that moved; False keeps what was flushed and not overwritten since, for one that lost
                power; None raises an error.
        """
        path = Path(directory)
        with parsing(path):
            return cls._open(path, read_only, sampler, trust_unflushed)

    @classmethod
    def _open(cls, path: Path, read_only: bool, sampler: Sampler | None, trust_unflushed: bool | None) -> ReplayBuffer:
        spec, views, manifest = disk.read_manifest(path, live=True)
        if not read_only:
            if sampler is not None:
                raise ConfigError("open: the store has its samplers already; add one with with_sampler(…)")
            memory = FileAllocator(path, Lock(path), creates=False)
            if disk.lacks_kept(manifest):
                memory.add_kept(spec.num_envs)
            buffer = cls.__new__(cls)._restore(spec, views, memory, trust_unflushed=trust_unflushed)
            memory.creates = True
            buffer._describe()
            return buffer
        sampler, buffer = sampler or UniformSampler(), cls.__new__(cls)
        settings = replace(views[MAIN], sampler=sampler.config())
        buffer._build(spec, ReadOnlyAllocator(path, lacks_kept=disk.lacks_kept(manifest)), sampler, settings, "cpu")
        return buffer

    @classmethod
    def from_dataset(
        cls,
        path: str | Path,
        *,
        groups: Sequence[str] | None = None,
        stack: Mapping[str, StackSpec] | None = None,
        reward: float | None = None,
        capacity: int | None = None,
        **settings: Any,
    ) -> ReplayBuffer:
        """Return a buffer with the episodes of a dataset, of one environment; each frame is stored once.

        Args:
            path: a recording of :class:`headrace.recording.EpisodeRecorder`, a dataset in LeRobot's layout (version
                3), or an HDF5 file of robomimic's. The formats of others may lack what followed the last action of an
                episode: that action is left out, unless it ended the episode, so that no target reads what followed.
                LeRobot's successful episodes end as terminated, others as truncated; robomimic's ``dones`` terminate.
            groups: names of observations to keep; all if None.
            stack: observations of single frames to be read as stacks, by name.
            reward: of every step; None for the recorded ones.
            capacity: transitions; as many as the dataset has if None.
            settings: ``sampler``, ``n_step``, ``gamma``, ``seed``, ``directory``, ``codec``, ``device``, as in the
                constructor.
        """
        from headrace.recording.to_replay import fill_from_dataset

        return fill_from_dataset(path, groups=groups, stack=stack, reward=reward, capacity=capacity, settings=settings)

    @classmethod
    def load(cls, directory: str | Path, *, verify: bool = False) -> ReplayBuffer:
        """Return a buffer in memory from a checkpoint that :meth:`save` wrote, with all its samplers and their state.

        Frames are read from the files when they are first touched; the checkpoint is never changed and must stay in
        place. Sizes and the checksums of everything but frames are checked; ``verify=True`` reads the frames as well.
        """
        path = Path(directory)
        with parsing(path):
            spec, views, manifest = disk.read_manifest(path, live=False)
            manifest.check(path, content=lambda name: verify or not disk.holds_frames(name))
            return cls.__new__(cls)._restore(spec, views, CheckpointAllocator(path))

    def save(self, directory: str | Path) -> None:
        """Write a checkpoint to a new directory: sparse files, and a manifest with their checksums.

        The directory appears under its name only when it is complete.
        """
        with self.store.lock:
            blocks = self._blocks()

            def fill(folder: Path) -> None:
                files = {f"{name}.bin": disk.save_block(folder, name, block) for name, block in blocks.items()}
                disk.write_manifest(folder, self.spec, self._view_specs(), files)

            write_directory(Path(directory), fill)

    def _blocks(self) -> dict[str, Bytes]:
        """Return all memory by name; called with the lock held."""
        self._check_own()
        blocks = self.store.blocks()
        for view in self.views.values():
            blocks |= view.memory.blocks
        return blocks

    def _check_own(self) -> None:
        if self.store.follows:
            raise ConfigError("ReplayBuffer: opened with read_only=True; save and copy it where it is written")

    def __getstate__(self) -> dict[str, object]:
        """For ``pickle`` and ``deepcopy``: a copy of everything stored. A store on disk is not copied into a pickle."""
        memory = self.store.memory
        if isinstance(memory, FileAllocator):
            raise ConfigError(
                f"ReplayBuffer: this one lives in {memory.directory}; pass the path and ReplayBuffer.open() it "
                "there, or save() a checkpoint and load() it"
            )
        with self.store.lock:
            blocks = {name: block.copy() for name, block in self._blocks().items()}
        devices = {name: str(view.device) for name, view in self.views.items()}
        return {"spec": self.spec, "views": self._view_specs(), "blocks": blocks, "devices": devices}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state["spec"], state["views"], Allocator(state["blocks"]), state["devices"])

    def flush(self) -> None:
        """Sync a store on disk, so that what is stored survives the loss of power.

        Transitions that are overwritten afterwards, and the newest one of each environment, are given up in that case:
        see ``trust_unflushed`` of :meth:`open`. The death of the process loses nothing either way.
        """
        with self.store.lock:
            self.store.flush()

    def close(self) -> None:
        """Flush a store on disk and let another process write to it. This buffer must not be used any more.

        Safe to call again.
        """
        memory = self.store.memory
        if isinstance(memory, FileAllocator) and memory.release.alive:
            if memory.owner.is_here:
                self.flush()
            memory.release()

    def __len__(self) -> int:
        with self.store.lock:
            self.store.follow()
            return len(self.store)

    def __repr__(self) -> str:
        view = self.settings
        return (
            f"ReplayBuffer({len(self):,} of {self.capacity:,} transitions, {self.num_envs} environments, "
            f"{self.bytes_per_transition:,.0f} bytes per transition, n_step={view.n_step}, "
            f"sampler={view.sampler['kind']})"
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
        with self.store.lock:
            self.store.follow()
            return torch.from_numpy(self.store.pool.lengths())

    @property
    def written(self) -> Tensor:
        """Transitions ever stored per environment, int64 (N,), fresh; the last ``capacity / num_envs`` are there."""
        with self.store.lock:
            self.store.follow()
            return torch.from_numpy(self.store.pool.counts.copy())

    @property
    def cuts(self) -> int:
        """Trajectories that were closed because an observation was not, bit for bit, the one that ``extend`` got as
        ``step.obs`` before."""
        return self.store.cuts

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer when every ring is full: frames, side rows used so far, bookkeeping, samplers."""
        return self.store.nbytes + sum(view.sampler.nbytes + view.memory.nbytes for view in self.views.values())

    @property
    def bytes_per_transition(self) -> float:
        """``nbytes`` over ``capacity``."""
        return self.nbytes / self.capacity

    def clear(self) -> None:
        """Forget all transitions; memory is kept."""
        with self.store.lock:
            self.store.check_writable()
            self.store.clear()

    def extend(
        self,
        obs: NestedObs | TensorDict,
        action: Tensor | None = None,
        step: Step | None = None,
        active: Tensor | None = None,
        extras: Mapping[str, Tensor] | None = None,
        *,
        fill_value: float | None = None,
    ) -> None:
        """Store one transition of every active environment, or, given one ``TensorDict``, a whole batch of them.

        Args:
            obs: the observation the action answered, group → (N, …) or one tensor (N, …), as declared. Or a batch
                (N, T), as :func:`headrace.learning.collect` and TorchRL's collectors give it; see below.
            action: (N, …).
            step: what the environment gave for it. Under ``autoreset="same_step"`` the true last observations are in
                ``step.info["final_obs"]`` where ``step.info["_final_obs"]``.
            active: bool (N,); rows of environments that did not act are not read, and nothing is stored for them.
            extras: (N, …) each, all that were declared.
            fill_value: for compact batches: what stands for next observations that are not there.

        ``obs`` is normally the ``step.obs`` of the call before. Where it is not, bit for bit, the caller reset the
        environment: the trajectory before is closed as cut, and a new one begins. All tensors are copied.

        **Batches** have ``observation``, ``action``, ``("next", "reward")``, ``("next", "done")``, ``("next",
        "terminated")``, the extras, and maybe ``active`` (N, T) and ``("collector", "traj_ids")``, which says where
        trajectories change without being done. They come in one of three forms:

        - with ``("next", "observation")``: the true next observations; exact, as step by step.
        - delta, with ``("next", "delta")`` (:func:`headrace.replay.forms.to_delta`): next observations are restored
          where the following entry does not have them: at ends, rounded as the delta is, and finite.
        - compact, with neither: next observations are ``fill_value`` where ``("next", "done")`` or ``("next", "cut")``
          is True, and exact elsewhere. A trajectory goes on in the following batch if that is compact, too.
        """
        store = self.store
        store.check_writable()
        if action is None or step is None:
            if extras is not None or active is not None or isinstance(obs, Tensor):
                raise ShapeError("extend: expected (obs, action, step), or one TensorDict (N, T) with everything in it")
            with store.lock:
                Batch(store, obs, fill_value).write()  # pyright: ignore[reportArgumentType]  # checked there
            return
        write = check_transition(self.spec, obs, action, step, active, extras or {})
        with store.lock:
            if not store.durable:
                store.write(write)
                return
            with store.adding(self._step):
                store.write(write)

    def indices(self) -> Tensor:
        """``index`` of every stored transition, by environment, oldest first: int64 (len,), fresh."""
        with self.store.lock:
            self.store.follow()
            stored = [p * self.num_envs + e for e, p in enumerate(list_positions(self.store.pool))]
        return torch.from_numpy(np.concatenate(stored))


def _discount(gamma: float | Sequence[float]) -> Discount:
    return tuple(map(float, gamma)) if isinstance(gamma, Sequence) else float(gamma)

"""TorchRL: an ``EnvBase`` over ``BatchEnv``, and a ``Storage`` over our replay buffer.

```python
frames = ReplayBuffer(1_000_000, env.num_envs, observation, action, stack=stack, autoreset="disabled")
buffer = TensorDictReplayBuffer(storage=ReplayStorage(frames), batch_size=256)
buffer.extend(data)      # (N, T), as collectors give it; or feed frames.extend(…) directly
loss(buffer.sample())
```
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, TensorSpec, TensorStorage, Unbounded
from torchrl.data.replay_buffers.storages import Storage
from torchrl.envs import EnvBase

from headrace.envs.batch_env import BatchEnv
from headrace.errors import ConfigError, LifecycleError, ShapeError
from headrace.replay import ReplayBuffer
from headrace.types import Obs


class TorchRLEnv(EnvBase):
    """N environments with batch size (N,). ``observation`` is a tensor where there is one group, else nested by group.

    ``_reset`` masks reset only those environments. ``_step`` masks advance only those: the others are suspended for the
    step, which costs nothing and changes nothing in them; their next observation is the one they hold, their reward 0.
    """

    def __init__(self, env: BatchEnv) -> None:
        """Take over an environment made with ``autoreset="disabled"``: TorchRL asks for resets itself."""
        if env.autoreset != "disabled":
            raise ConfigError('TorchRLEnv: expected make(…, autoreset="disabled"), as TorchRL resets by itself')
        super().__init__(device=env.device, batch_size=torch.Size([env.num_envs]))
        self.env = env
        self._seed: int | None = None
        groups = env.single_observation_space
        if not isinstance(groups, spaces.Dict):
            raise ConfigError(f"TorchRLEnv: expected a Dict observation space, got {groups!r}")
        specs = {name: _spec(space, env.num_envs) for name, space in groups.spaces.items()}
        self._single = next(iter(specs)) if len(specs) == 1 else None
        size = torch.Size([env.num_envs])
        inner = specs[self._single] if self._single is not None else Composite(specs, shape=size)
        self.observation_spec = Composite({"observation": inner}, shape=size)
        self.action_spec = _spec(env.single_action_space, env.num_envs)
        self.reward_spec = Unbounded(shape=torch.Size([env.num_envs, 1]))
        flag = Categorical(2, dtype=torch.bool, shape=torch.Size([env.num_envs, 1]))
        self.done_spec = Composite({"done": flag, "terminated": flag.clone(), "truncated": flag.clone()}, shape=size)

    def _reset(self, tensordict: TensorDict | None = None, **_kwargs: Any) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:
            obs, _ = self.env.reset(seed=self._seed)
            self._seed = None
        else:
            obs, _ = self.env.reset(options={"reset_mask": cast("Tensor", mask).reshape(self.env.num_envs)})
        no = torch.zeros(self.env.num_envs, 1, dtype=torch.bool)
        return self._result(obs, {"done": no, "terminated": no.clone(), "truncated": no.clone()})

    def _step(self, tensordict: TensorDict) -> TensorDict:
        mask = tensordict.get("_step", None)
        action = cast("Tensor", tensordict["action"])
        held = torch.zeros(self.env.num_envs, dtype=torch.bool)
        if mask is not None:
            held = ~cast("Tensor", mask).reshape(self.env.num_envs) & ~self.env.suspended
            self.env.suspend(held)
        step = self.env.step(action)
        if mask is not None:
            self.env.resume(held)
        flags = {"terminated": step.terminated[:, None], "truncated": step.truncated[:, None]}
        if mask is not None:
            # what was done before the step stays so where nothing was stepped
            still = held[:, None]
            for name, value in flags.items():
                before = tensordict.get(name, None)
                flags[name] = value | (still & before) if before is not None else value
        flags["done"] = flags["terminated"] | flags["truncated"]
        return self._result(step.obs, {"reward": step.reward[:, None], **flags})

    def _set_seed(self, seed: int | None) -> None:
        self._seed = seed

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environment."""
        super().close(raise_if_closed=raise_if_closed)
        self.env.close()

    def _result(self, obs: Obs, other: dict[str, Tensor]) -> TensorDict:
        size = [self.env.num_envs]
        value = obs[self._single] if self._single is not None else TensorDict({**obs}, size)
        return TensorDict({"observation": value, **other}, size)


def _spec(space: spaces.Space[Any], count: int) -> TensorSpec:
    """Return the spec of ``count`` rows of a space."""
    if isinstance(space, spaces.Box):
        shape = torch.Size([count, *space.shape])
        dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
        low, high = (torch.from_numpy(np.asarray(edge)).expand(shape) for edge in (space.low, space.high))
        if dtype.is_floating_point and not bool(low.isfinite().all() and high.isfinite().all()):
            return Unbounded(shape=shape, dtype=dtype)
        return Bounded(low=low, high=high, shape=shape, dtype=dtype)
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), shape=torch.Size([count]), dtype=torch.int64)
    raise ConfigError(f"TorchRLEnv: expected Box and Discrete spaces, got {space!r}")


Key: TypeAlias = str | tuple[str, ...]
_OWN = ("reward", "done", "terminated", "truncated")
_FRAMES, _KEPT = "frames", "kept"
"""Parts of a checkpoint."""


class ReplayStorage(TensorStorage):
    """Places (t, e) of a :class:`headrace.replay.ReplayBuffer`: transition k of environment e is at t = k mod length.

    It is a storage with ``ndim=2``, as TorchRL's ``LazyTensorStorage(n, ndim=2)``: ``extend`` takes batches (N, T) and
    returns the places of their transitions, ``add`` takes one step (N,). A place names the same transition until it is
    overwritten, so samplers that remember places work, and ``SliceSampler`` finds trajectories along t.

    All keys come back. Those that the frames do not have (declare them as ``extras`` to have them saved with it) are
    kept in plain tensors here, in memory.
    """

    def __init__(self, frames: ReplayBuffer) -> None:
        """Serve a buffer made with ``autoreset="disabled"``: a TensorDict has true next observations."""
        if frames.spec.autoreset != "disabled":
            raise ConfigError(
                'ReplayStorage: expected ReplayBuffer(autoreset="disabled"), as ("next", …) is the true end'
            )
        # the parent's own constructor would want the tensors that this class does not have
        Storage.__init__(self, max_size=frames.capacity)
        self.ndim = 2
        self.device = torch.device("cpu")
        self.initialized = True
        self._len = 0  # not read, but copies of a storage look for it
        self.frames = frames
        self._kept: TensorDict | None = None
        self._kept_keys: set[tuple[str, ...]] = set()
        self._counted: list[int] = []
        """What the writers of the attached buffers had counted after the last batch, in order of attachment."""

    @property
    def _rows(self) -> int:
        """Steps stored; every environment has as many."""
        lengths = self.frames.lengths
        if bool((lengths != lengths[0]).any()):
            raise LifecycleError(
                "ReplayStorage: the environments hold different numbers of transitions, so places (t, e) have holes; "
                "extend() the frames without active=, or use the buffer's own samplers"
            )
        return int(lengths[0])

    @property
    def shape(self) -> torch.Size:
        """Steps and environments."""
        return torch.Size([self._rows, self.frames.num_envs])

    def _max_size_along_dim0(self, *, single_data: object = None, batched_data: object = None) -> int:
        del single_data, batched_data
        return self.frames.spec.length

    @property
    def _len_along_dim0(self) -> int:
        return self._rows

    @property
    def _is_full(self) -> bool:
        return self._rows == self.frames.spec.length

    def set(  # pyright: ignore[reportIncompatibleVariableOverride]  # the base has one per version of torch
        self, cursor: Any, data: TensorDict, *, set_cursor: bool = True
    ) -> None:
        """Append steps (T, N), or one step (N,), at the places that TorchRL's round-robin writer counts."""
        if not set_cursor:
            raise ConfigError("ReplayStorage: transitions cannot be changed in place; extend() the buffer instead")
        rows = torch.as_tensor(cursor).reshape(-1)
        try:
            self._append(rows, data)
        except BaseException:  # also Ctrl-C; raised again
            self._correct_writers(len(rows))
            raise
        self._counted = [0 if writer is None else writer._write_count for writer in self._writers]
        self._set_last_cursor(cursor)
        self._bump_mutation_revision()

    def _append(self, rows: Tensor, data: TensorDict) -> None:
        count, length = self.frames.num_envs, self.frames.spec.length
        data = data.unsqueeze(0) if data.dim() == 1 else data
        if data.dim() != 2 or data.shape[1] != count or not 1 <= data.shape[0] <= length:
            raise ShapeError(
                f"extend: expected transitions ({count}, T) with 1 <= T <= {length}, environments first, as collectors "
                f"give them, got {tuple(reversed(data.shape))}"
            )
        if int(rows[0]) != int(self.frames.written[0]) % length:
            raise ConfigError(
                f"extend: expected places to be written in order, from {int(self.frames.written[0]) % length} on, got "
                f"{rows.tolist()[:4]}; feed the storage through one buffer only"
            )
        others = self._others(data)
        self.frames.extend(data.transpose(0, 1))  # may refuse: what is kept beside it must not change before
        self._keep(rows, data.select(*others))

    def _correct_writers(self, count: int) -> None:
        """Take back what writers counted for a batch that was refused: they count before they hand it over."""
        place = int(self.frames.written[0]) % self.frames.spec.length
        for number, writer in enumerate(self._writers):
            if writer is None:
                continue
            counted = writer._write_count - (self._counted[number] if number < len(self._counted) else 0)
            # by its count: a batch as long as the ring brings the cursor back to where it was. The cursor tells it of a
            # writer whose state was loaded meanwhile
            if counted == count or (counted != 0 and writer._cursor != place):
                writer._cursor = place
                writer._write_count -= count

    @property
    def _writers(self) -> list[Any]:
        """Of the attached buffers; None for one without."""
        return [getattr(buffer, "_writer", None) for buffer in cast("list[Any]", self._attached_entities)]

    def _others(self, data: TensorDict) -> list[tuple[str, ...]]:
        """Return the keys that the frames do not have; refused where they are not those of the batches before."""
        own = {"observation", "action", "index", *self.frames.spec.extras}
        names = [(key,) if isinstance(key, str) else key for key in cast("Iterable[Key]", data.keys(True, True))]
        own_next = {("next", name) for name in _OWN}
        others = [
            key for key in names
            if key[0] not in own and key not in own_next and key[:2] not in (("next", "observation"), ("next", "delta"))
        ]  # fmt: skip
        if self._kept is not None and self._kept_keys != set(others):
            raise ShapeError(f"extend: expected the keys {sorted(self._kept_keys)} as before, got {sorted(others)}")
        self._kept_keys = set(others)
        return others

    def _keep(self, rows: Tensor, data: TensorDict) -> None:
        """Put what the frames do not have into tensors of its own."""
        if self._kept is None:
            self._kept = cast(
                "TensorDict", data[:1].expand(self.frames.spec.length, self.frames.num_envs).clone().zero_()
            )
        self._kept[rows] = data

    def get(self, index: Any) -> TensorDict:
        """Return the transitions at these places: (t, e), or t for a step of all environments, numbers, slices or
        tensors."""
        rows, count = self.shape
        if isinstance(index, range):
            index = torch.arange(index.start, index.stop, index.step)
        if isinstance(index, tuple) and all(isinstance(part, Tensor) for part in cast("tuple[Any, ...]", index)):
            parts = cast("tuple[Tensor, ...]", index)
            place = parts[0] * count + parts[1] if len(parts) == 2 else parts[0][:, None] * count + torch.arange(count)
        else:
            place = torch.arange(rows * count).view(rows, count)[index]
        flat = place.reshape(-1)
        row, env = flat // count, flat % count
        newest = self.frames.written[env] - 1
        position = newest - (newest - row) % self.frames.spec.length
        batch = self.frames.get(position * count + env)
        if self._kept is not None:
            batch.update(self._kept[row, env])
        return batch.reshape(place.shape)

    def __len__(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]  # the base has no annotation
        return len(self.frames)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything stored, as tensors; for a buffer in memory."""
        state = self.frames.__getstate__()
        blocks = cast("dict[str, Any]", state["blocks"])
        kept = None if self._kept is None else self._kept.clone().to_dict()
        return {
            "layout": repr((state["spec"], state["views"])),
            "blocks": {name: torch.from_numpy(block) for name, block in blocks.items()},
            "kept": kept,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` of a storage over the same spaces and samplers gave."""
        self._take_up(state_dict["layout"], {name: block.numpy() for name, block in state_dict["blocks"].items()})
        kept = state_dict["kept"]
        self._set_kept(None if kept is None else TensorDict(kept, [self.frames.spec.length, self.frames.num_envs]))

    def dumps(self, path: str | Path) -> None:
        """Write a checkpoint to a new directory, as TorchRL's buffer calls it."""
        path = Path(path)
        path.mkdir(parents=True)
        self.frames.save(path / _FRAMES)
        if self._kept is not None:
            self._kept.memmap(str(path / _KEPT))

    def loads(self, path: str | Path) -> None:
        """Take up a checkpoint that :meth:`dumps` of a storage over the same spaces and samplers wrote."""
        path = Path(path)
        saved = ReplayBuffer.load(path / _FRAMES, verify=True).__getstate__()
        self._take_up(repr((saved["spec"], saved["views"])), cast("dict[str, Any]", saved["blocks"]))
        self._set_kept(TensorDict.load_memmap(str(path / _KEPT)).clone() if (path / _KEPT).exists() else None)

    def _take_up(self, layout: str, blocks: dict[str, Any]) -> None:
        """Replace what the frames hold, in a buffer of the same layout."""
        state = self.frames.__getstate__()
        own = repr((state["spec"], state["views"]))
        if layout != own:
            raise ConfigError(f"ReplayStorage: expected the state of a buffer with {own}, got one with {layout}")
        self.frames.__setstate__(state | {"blocks": blocks})
        self._bump_mutation_revision()

    def _set_kept(self, kept: TensorDict | None) -> None:
        self._kept = kept
        keys = [] if kept is None else cast("Iterable[Key]", kept.keys(True, True))
        self._kept_keys = {(key,) if isinstance(key, str) else key for key in keys}

    def __repr__(self) -> str:
        return f"ReplayStorage({self.frames!r})"

    def _empty(self) -> None:
        self.frames.clear()
        self._kept = None

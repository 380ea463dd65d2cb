"""A TorchRL ``Storage`` over our replay buffer, so that TorchRL's buffers, samplers and losses run on it.

```python
frames = ReplayBuffer(1_000_000, env.num_envs, observation, action, stack=stack, autoreset="disabled")
buffer = TensorDictReplayBuffer(storage=ReplayStorage(frames), batch_size=256)
buffer.extend(data)      # (N, T), as collectors give it; or feed frames.extend(…) directly
loss(buffer.sample())
```
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, TypeAlias, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import TensorStorage
from torchrl.data.replay_buffers.storages import Storage

from headrace.errors import ConfigError, LifecycleError, ShapeError
from headrace.replay import ReplayBuffer

Key: TypeAlias = str | tuple[str, ...]
_OWN = ("reward", "done", "terminated", "truncated")
_SAVE = "ReplayStorage: save and load the frames themselves, with storage.frames.save(directory) and ReplayBuffer.load"


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

    def _refuse(self, *_arguments: Any, **_settings: Any) -> NoReturn:
        """Refused: a checkpoint of the frames is a directory."""
        raise ConfigError(_SAVE)

    state_dict = load_state_dict = dumps = loads = _refuse

    def __repr__(self) -> str:
        return f"ReplayStorage({self.frames!r})"

    def _empty(self) -> None:
        self.frames.clear()
        self._kept = None

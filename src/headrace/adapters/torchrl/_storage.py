"""A TorchRL ``Storage`` over our replay buffer, so that TorchRL's buffers, samplers and losses run on it.

```python
frames = ReplayBuffer(1_000_000, env.num_envs, observation, action, stack=stack, autoreset="disabled")
storage = ReplayStorage(frames)
buffer = TensorDictReplayBuffer(
    storage=storage, sampler=RandomSampler(), collate_fn=storage.collate, batch_size=256
)
buffer.extend(batch)      # (N,) or (N, T) transitions, or feed frames.extend(…) directly
loss(buffer.sample())
```
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Storage

from headrace.errors import ConfigError, ShapeError
from headrace.replay import ReplayBuffer
from headrace.types import Step

_STORED = frozenset(("observation", "action", "next"))
_REBUILT = frozenset(("collector", "done", "index", "is_init", "step_count", "terminated", "truncated"))
"""Keys that follow from what is stored."""


class ReplayStorage(Storage):
    """Places of a :class:`headrace.replay.ReplayBuffer`: ``(k mod length)·N + e`` is transition k of environment e.

    A place names the same transition until it is overwritten, as in TorchRL's own storages, so samplers that remember
    places (``PrioritizedSampler``) work. Writing takes transitions of all N environments in order and appends them to
    the rings, into the places that TorchRL's round-robin writer counts. Keys besides observation, action and next must
    be declared as ``extras`` of the buffer.
    """

    def __init__(self, frames: ReplayBuffer) -> None:
        """Serve a buffer made with ``autoreset="disabled"``: a TensorDict has true next observations."""
        if frames.spec.autoreset != "disabled":
            raise ConfigError(
                'ReplayStorage: expected ReplayBuffer(autoreset="disabled"), as ("next", …) is the true end'
            )
        super().__init__(max_size=frames.capacity)
        self.frames = frames

    def set(self, cursor: Any, data: TensorDict, *, set_cursor: bool = True) -> None:
        """Append transitions (N,), or (N · T,) with the T of one environment after another."""
        count = self.frames.num_envs
        if data.dim() != 1 or data.shape[0] % count:
            raise ShapeError(
                f"extend: expected a multiple of {count} transitions, one or more of every environment, in order, got "
                f"{tuple(data.shape)}"
            )
        names = {str(name) for name in cast("Iterable[str]", data.keys())}
        unknown = sorted(names - _STORED - _REBUILT - self.frames.spec.extras.keys())
        if unknown:
            raise ConfigError(
                f"extend: {', '.join(unknown)} would be lost; declare them with ReplayBuffer(extras={{name: space}}), "
                "or leave them out with data.exclude(…)"
            )
        grid = data.reshape(count, -1)
        for t in range(grid.shape[1]):
            self._append(grid[:, t])
        if set_cursor:
            self._set_last_cursor(cursor)
        self._bump_mutation_revision()

    def _append(self, row: TensorDict) -> None:
        done, terminated = (cast("Tensor", row["next", key]).reshape(-1) for key in ("done", "terminated"))
        following = cast("TensorDict", row["next"])
        step = Step(
            cast("dict[str, Tensor]", _plain(following["observation"])),
            cast("Tensor", following["reward"]).reshape(-1).float().contiguous(),
            terminated.contiguous(),
            done & ~terminated,
            {},
        )
        extras = {name: cast("Tensor", row[name]).contiguous() for name in self.frames.spec.extras}
        self.frames.extend(_plain(row["observation"]), cast("Tensor", row["action"]).contiguous(), step, extras=extras)

    def get(self, index: Any) -> TensorDict:
        """The transitions at these places; see :class:`headrace.replay.ReplayBuffer` for the keys."""
        if isinstance(index, tuple) and len(cast("tuple[Any, ...]", index)) == 1:
            index = index[0]  # TorchRL's samplers of slices
        places = torch.as_tensor(range(*index.indices(len(self))) if isinstance(index, slice) else index)
        row, env = (part.reshape(-1) for part in _divmod(places.to("cpu", torch.int64), self.frames.num_envs))
        newest = self.frames.written[env] - 1
        position = newest - (newest - row) % self.frames.spec.length
        batch = self.frames.get(position * self.frames.num_envs + env)
        return batch.reshape(places.shape) if places.dim() != 1 else batch

    @staticmethod
    def collate(batch: TensorDict) -> TensorDict:
        """What TorchRL's buffer must be given as ``collate_fn``: a batch that was read is complete as it is."""
        return batch

    def __len__(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]  # the base has no annotation
        return len(self.frames)

    def state_dict(self) -> dict[str, Any]:
        """Refused: a checkpoint of the frames is a directory."""
        raise ConfigError("ReplayStorage: save the frames themselves, with storage.frames.save(directory)")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: a checkpoint of the frames is a directory."""
        raise ConfigError(f"ReplayStorage: load the frames with ReplayBuffer.load, got {sorted(state_dict)}")

    def _empty(self) -> None:
        self.frames.clear()


def _divmod(places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return places // count, places % count


def _plain(obs: Any) -> Tensor | dict[str, Tensor]:
    """Observations as ``extend`` takes them: contiguous, nested dicts for groups."""
    if isinstance(obs, Tensor):
        return obs.contiguous()
    return cast("dict[str, Tensor]", {str(name): _plain(value) for name, value in obs.items()})

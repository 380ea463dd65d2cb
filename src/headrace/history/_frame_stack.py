"""``FrameStack``: the newest K frames of every environment as one observation, kept as pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.errors import ConfigError, DataError, DtypeError, ShapeError
from headrace.history._buffers import CircularBuffer
from headrace.history._normalize import Channels, can_normalize
from headrace.history.ordered import OrderedFrames, StackOutput
from headrace.history.output import carry_rows, load_tensors
from headrace.ids import env_rows
from headrace.types import Ids, StackSpec, StateDict


class FrameStack(CircularBuffer):
    """A ``CircularBuffer`` of pictures in the dtype that the camera gives, normalized when a stack is read.

    An append copies one frame; reading a stack is one fused pass over its frames, straight into the observation.
    Environments that are not addressed (suspended ones) do not change by one bit.

    Args:
        spec: K, layout and reset rule. See ``StackSpec``.
        num_envs: N.
        frame_shape: the shape of one environment's frame.
        device: where the frames live.
        dtype: of a frame.
        channels: where a frame has its channels; used to normalize.
        normalize: observations are float32, x/255 minus each frame's mean per channel, from uint8 or floating point
            frames; otherwise they are copies of the frames as they are.
    """

    def __init__(
        self,
        spec: StackSpec,
        *,
        num_envs: int,
        frame_shape: tuple[int, ...],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.uint8,
        channels: Channels = "last",
        normalize: bool = False,
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"FrameStack.num_envs: expected at least 1, got {num_envs}")
        if any(size < 1 for size in frame_shape):
            raise ShapeError(f"FrameStack.frame_shape: expected sizes of at least 1, got {frame_shape}")
        if normalize:
            if not can_normalize(dtype):
                raise DtypeError(
                    f"FrameStack: only uint8 and float frames can be normalized, got {dtype}; leave normalize out"
                )
            if len(frame_shape) != (2 if channels == "none" else 3):
                raise ShapeError(
                    f"FrameStack.frame_shape: normalizing with channels={channels!r} expects "
                    f"{'(H, W)' if channels == 'none' else 'three axes'}, got {frame_shape}"
                )
        super().__init__(spec.frames, num_envs, device)
        self.spec = spec
        self.frame_shape = frame_shape
        self._output = StackOutput(spec, frame_shape, dtype, channels, normalize)
        self.observation_shape = self._output.shape
        self.observation_dtype = self._output.dtype
        self._normalize = normalize
        like = torch.empty((0, *frame_shape), dtype=dtype)
        self._frames, self._dtype = self._allocate(carry_rows(like)), dtype

    @property
    def stacked(self) -> Tensor:
        """(N, *observation_shape) in the dtype of a frame: one contiguous block, brought up to date when read here.

        Environments that were reset and have no frame since are zeros.
        """
        return self._output.layout(self._require_filled().data).view(self._dtype)

    def observe(self, env_ids: Ids | None = None) -> Tensor:
        """Return the stacks of some environments as the policy reads them: compact rows for indices, else all N rows.

        Fresh memory that the receiver owns.
        """
        where = env_rows(env_ids, num_envs=self.num_envs, device=self.device)
        return self._output.take(self._require_filled(), where.ids if where.mask is None else None)

    def peek(self, rows: Tensor, env_ids: Ids | None = None) -> Tensor:
        """Return what ``observe(env_ids)`` would give after ``append(rows, env_ids)``; changes nothing. Fresh memory.

        For the true last observation of an episode, whose next frame already belongs to the one that follows.
        """
        after = super().peek(rows, env_ids)
        return self._output.normalize(after) if self._normalize else self._output.layout(after)

    def state_dict(self) -> StateDict:
        """Return everything needed to go on bit-identically; copies."""
        state = super().state_dict()
        return {"frames": state["frames"], "started": state["pushed"] > 0}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from ``state_dict()`` of a stack of the same shape; anything else raises and changes nothing."""
        if not state.get("valid", torch.ones(1)).all():
            raise DataError("frames: expected all of them, got a stack of 0.2 with skipped frames; fill them there")
        started, kept = self._pushed > 0, self._require_filled()
        frames = torch.empty(kept.shape, dtype=self._dtype, device=self.device)
        load_tensors({"frames": frames, "started": started}, state)
        super().load_state_dict({"frames": frames, "pushed": started.long()})

    def _slot_axis(self, rank: int) -> int:
        return self.spec.axis(rank - 1)

    def _merge_frames(self, frames: OrderedFrames, data: Tensor | None = None) -> Tensor:
        return frames.data if data is None else data

    def _begins(self) -> Tensor:
        return torch.zeros_like(self._pushed, dtype=torch.bool) if self.spec.reset == "zero" else super()._begins()

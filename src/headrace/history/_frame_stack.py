"""``FrameStack``: the newest K frames of every environment as one observation, kept as pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.errors import ConfigError, DeviceError, DtypeError, LifecycleError, ShapeError
from headrace.history._normalize import Channels, can_normalize, normalize_into
from headrace.history.ordered import OrderedFrames, StackOutput
from headrace.history.output import carried, carrier, fresh, lasting_zeros, load_tensors
from headrace.ids import EnvRows, check_rows, env_rows
from headrace.types import Ids, StackSpec, StateDict, as_device


@dataclass(frozen=True, slots=True)
class MissingFrames:
    """Frames of a stack that were skipped and must be rendered before it can be read; m of them."""

    env_ids: Tensor
    """int64 (m,): the environment of each, ascending."""
    lags: Tensor
    """int64 (m,): how many frames ago, 0 = newest; at most K − 1."""

    def __len__(self) -> int:
        return int(self.env_ids.shape[0])


class FrameStack:
    """Keeps frames in the dtype the camera gives (uint8: a quarter of float32) and normalizes when a stack is read.

    Frames lie in memory from oldest to newest in the layout of the observation, so a stack is a view and reading it
    is one fused pass. Rows and environments line up as in ``CircularBuffer``: int64 indices mean compact rows, a bool
    mask means full rows of which those outside it are ignored. Environments that are not addressed (suspended ones)
    do not change by one bit.

    A frame that will not be read need not be rendered: ``skip`` only counts it. Before a stack with skipped frames
    is read, ``missing`` says which frames it lacks and ``fill`` takes them.

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
        self.spec = spec
        self.num_envs = num_envs
        self.frame_shape = frame_shape
        self._output = StackOutput(spec, frame_shape, dtype, channels, normalize)
        self.observation_shape = self._output.shape
        self.observation_dtype = self._output.dtype
        self.device = as_device(device)
        self._channels: Channels = channels
        self._normalize = normalize
        self._dtype = dtype
        stored = carrier(dtype, "FrameStack.dtype")
        self._frames = OrderedFrames(
            spec.frames, num_envs, frame_shape, spec.axis(len(frame_shape)), stored, self.device
        )
        self._started = lasting_zeros((num_envs,), torch.bool, self.device)
        self._skipped = lasting_zeros((num_envs,), torch.int64, self.device)
        self._valid = lasting_zeros((num_envs, spec.frames), torch.bool, self.device).fill_(True)
        # whether skip() was ever called: without it nothing has to be looked at before a read
        self._skips = False

    @property
    def nbytes(self) -> int:
        """Bytes of frames held."""
        return self._frames.data.nbytes

    @property
    def stacked(self) -> Tensor:
        """(N, *observation_shape) in the dtype of a frame: a contiguous view that the next append changes.

        Environments that were reset and have no frame since are zeros.
        """
        self._require_frames(None)
        return self._output.layout(self._frames.data).view(self._dtype)

    def reset(self, env_ids: Ids | None = None) -> None:
        """Forget the frames of some environments; the next append begins their stack by the reset rule."""
        where = env_rows(env_ids, num_envs=self.num_envs, device=self.device)
        where.fill(self._frames.data, 0)
        where.fill(self._started, False)
        where.fill(self._skipped, 0)
        where.fill(self._valid, True)

    def append(self, frames: Tensor, env_ids: Ids | None = None) -> None:
        """Add the newest frame of some environments; copied."""
        where = self._checked(frames, env_ids)
        self._frames.push(carried(frames, "frames"), where, by=self._skipped + 1, fill=self._begins())
        if self._skips:
            where.write(self._valid, where.select(self._moved_valid(self._skipped + 1) | self._begins()[:, None]))
            where.write(self._valid[:, -1], where.select(torch.ones_like(self._started)))
            where.fill(self._skipped, 0)
        where.fill(self._started, True)

    def skip(self, env_ids: Ids | None = None) -> None:
        """Note that some environments have a new frame which was not rendered. Costs a count, no pixels."""
        where = env_rows(env_ids, num_envs=self.num_envs, device=self.device)
        self._skips = True
        # before the first frame of an episode, ``repeat`` has all slots show that frame: all of them are missing
        beginning = torch.where(self._begins(), self.spec.frames, self._skipped + 1)
        where.write(self._skipped, where.select(beginning))
        where.fill(self._started, True)

    def missing(self, env_ids: Ids | None = None) -> MissingFrames:
        """Return the skipped frames that stacks of some environments lack. On a GPU this waits for the device."""
        where = env_rows(env_ids, num_envs=self.num_envs, device=self.device)
        behind = self._skipped > 0
        self._frames.push(
            None,
            env_rows(behind, num_envs=self.num_envs, device=self.device),
            by=self._skipped,
            fill=torch.zeros_like(behind),
        )
        self._valid.copy_(self._moved_valid(self._skipped))
        self._skipped.zero_()
        lacking = torch.zeros_like(self._valid)
        where.write(lacking, where.select(~self._valid))
        envs, slots = lacking.nonzero(as_tuple=True)
        return MissingFrames(envs, self.spec.frames - 1 - slots)

    def fill(self, missing: MissingFrames, frames: Tensor) -> None:
        """Put the frames (m, *frame_shape) that ``missing`` asked for into their stacks, before the next append."""
        expected = (len(missing), *self.frame_shape)
        if tuple(frames.shape) != expected or frames.dtype != self._dtype:
            raise ShapeError(
                f"frames: expected {expected} of {self._dtype}, one frame per missing one, "
                f"got {tuple(frames.shape)} of {frames.dtype}"
            )
        if frames.device != self.device:
            raise DeviceError(
                f"frames: expected a tensor on {self.device}, got one on {frames.device}; move it with .to()"
            )
        slots = self.spec.frames - 1 - missing.lags
        self._frames.write(missing.env_ids, slots, carried(frames, "frames"))
        self._valid[missing.env_ids, slots] = True

    def observe(self, env_ids: Ids | None = None) -> Tensor:
        """Return the stacks of some environments as the policy reads them: compact rows for indices, else all N rows.

        Fresh memory that the receiver owns.
        """
        where = env_rows(env_ids, num_envs=self.num_envs, device=self.device)
        self._require_frames(where)
        return self._output.take(self._frames.data, where.ids if where.mask is None else None)

    def peek(self, frames: Tensor, env_ids: Ids | None = None) -> Tensor:
        """Return what ``observe(env_ids)`` would give after ``append(frames, env_ids)``; changes nothing. Fresh memory.

        For the true last observation of an episode, whose next frame already belongs to the one that follows.
        """
        where = self._checked(frames, env_ids)
        self._require_frames(where, before_append=True)
        rows, by, fill = carried(frames, "frames"), self._skipped + 1, self._begins()
        if not self._normalize:
            return self._output.layout(self._frames.peek(rows, where, by=by, fill=fill)).view(self._dtype)
        # frame by frame: the stack in its own dtype would be memory that is not read
        out = fresh((where.row_count, *self._frames.data.shape[1:]), self.observation_dtype, self.device)
        if out.numel():
            for slot in range(self.spec.frames):
                frame = self._frames.peek_slot(slot, rows, where, by=by, fill=fill).view(self._dtype)
                normalize_into(frame, out.select(self._frames.axis + 1, slot), self._channels)
        return self._output.layout(out)

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything needed to go on bit-identically; copies."""
        return {name: tensor.clone() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from ``state_dict()`` of a stack of the same shape; anything else raises and changes nothing."""
        load_tensors(self._tensors(), state)
        self._skips = bool((self._skipped > 0).any() | ~self._valid.all())

    def _tensors(self) -> dict[str, Tensor]:
        frames = self._frames.data.view(self._dtype)
        return {"frames": frames, "started": self._started, "skipped": self._skipped, "valid": self._valid}

    def _checked(self, frames: Tensor, env_ids: Ids | None) -> EnvRows:
        where = env_rows(env_ids, num_envs=self.num_envs, device=self.device)
        check_rows("frames", frames, where, self.device)
        if tuple(frames.shape[1:]) != self.frame_shape:
            raise ShapeError(f"frames: expected frames of {self.frame_shape}, got {tuple(frames.shape[1:])}")
        if frames.dtype != self._dtype:
            raise DtypeError(f"frames: expected {self._dtype}, got {frames.dtype}")
        return where

    def _begins(self) -> Tensor:
        """Return bool (N,): the next frame fills every slot."""
        return torch.zeros_like(self._started) if self.spec.reset == "zero" else ~self._started

    def _moved_valid(self, by: Tensor) -> Tensor:
        """Return valid bits after moving each environment's frames down by ``by``; freed slots are invalid."""
        taken = torch.arange(self.spec.frames, device=self.device) + by[:, None]
        inside = taken < self.spec.frames
        return self._valid.gather(1, taken.clamp(max=self.spec.frames - 1)) & inside

    def _require_frames(self, where: EnvRows | None, *, before_append: bool = False) -> None:
        if not self._skips:
            return
        valid = self._moved_valid(self._skipped + before_append)
        if before_append:
            valid[:, -1] = True
            valid |= self._begins()[:, None]
        if where is not None and where.ids is not None:
            valid = valid[where.ids]
        elif where is not None and where.mask is not None:
            valid = valid | ~where.mask[:, None]
        if not bool(valid.all()):
            raise LifecycleError(
                "FrameStack: some of these stacks have skipped frames; render what missing() names and give them to "
                "fill() before reading"
            )

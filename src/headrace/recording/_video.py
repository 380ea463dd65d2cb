"""Video: encoding images to mp4 with PyAV, whose wheel brings its encoder, and tiled videos of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._leaves import flatten
from headrace.errors import ConfigError, DataError, ShapeError, require_extra
from headrace.files import put_in_place
from headrace.recording.fields import Field, as_array, as_rgb, can_be_shown, enlarge, is_image
from headrace.types import ResetRecord, StackSpec, StepRecord

Picture = NDArray[np.uint8]
"""An image (H, W, 3), or several (…, H, W, 3)."""

CODEC = "libx264"


def _library() -> Any:
    return require_extra("av", extra="record", purpose="mp4 video")


def pixel_format(height: int, width: int) -> str:
    """Of a video: 4:2:0 halves the color planes, which odd sizes do not allow."""
    return "yuv420p" if height % 2 == 0 and width % 2 == 0 else "yuv444p"


class Mp4Writer:
    """Encodes images one by one; holds a few frames at most. H.264, a key frame every ``gop`` frames.

    Args:
        path: file to write; replaced if there.
        fps: frames per second.
        height: of every image.
        width: of every image.
        gop: distance of key frames; small makes random access quick.
        crf: 0 (lossless) to 51.
        streamed: the file can be played up to the last key frame at any time, also after a crash.
    """

    def __init__(
        self, path: Path, fps: float, height: int, width: int, *, gop: int = 2, crf: int = 18, streamed: bool = False
    ) -> None:
        if not 0 < fps <= 1000:
            raise ConfigError(f"fps: expected more than 0 and at most 1000, got {fps}")
        options = {"movflags": "frag_keyframe+empty_moov+default_base_moof"} if streamed else {}
        self._library = _library()
        self._shape = (height, width, 3)
        self._rate = Fraction(fps).limit_denominator(1000)  # the one that was meant: 29.97 is 2997/100
        self.frames = 0
        self._container: Any = self._library.open(str(path), "w", format="mp4", options=options)
        self._stream: Any = self._container.add_stream(
            CODEC, rate=self._rate, options={"crf": str(crf), "g": str(gop), "bf": "0", "preset": "veryfast"}
        )
        self._stream.height, self._stream.width = height, width
        self._stream.pix_fmt = pixel_format(height, width)
        self._stream.codec_context.time_base = 1 / self._rate

    def add(self, picture: Picture) -> None:
        """Encode one image, uint8 (H, W, 3)."""
        if picture.shape != self._shape or picture.dtype != np.uint8:
            raise ShapeError(f"image: expected uint8 {self._shape}, got {picture.dtype} {picture.shape}")
        frame = self._library.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        frame.pts = self.frames
        frame.time_base = 1 / self._rate
        self._container.mux(self._stream.encode(frame))
        self.frames += 1

    def close(self) -> None:
        """Write what the encoder still holds, and the end of the file."""
        self._container.mux(self._stream.encode(None))
        self._container.close()


def frame_times(path: Path) -> list[float]:
    """Return seconds at which each frame of a video is shown, in order, without decoding."""
    with _opened(path) as container:
        packets = [packet for packet in container.demux(container.streams.video[0]) if packet.pts is not None]
        return sorted(float(packet.pts * packet.time_base) for packet in packets)


def decode_frames(path: Path) -> Iterator[Picture]:
    """Yield every frame of a video in order, decoded one by one, uint8 (H, W, 3)."""
    with _opened(path) as container:
        for frame in container.decode(video=0):
            yield frame.to_ndarray(format="rgb24")


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    """Open a video to read; what PyAV raises in the block becomes a DataError."""
    library = _library()
    try:
        with library.open(str(path)) as container:
            yield container
    except (library.error.FFmpegError, IndexError, OSError) as error:
        raise DataError(f"{path}: not a video, or a damaged one ({error})") from error


_GREEN, _RED = (40, 200, 40), (220, 40, 40)


class TiledVideo:
    """An mp4 of tiled images, encoded as they come: no frame is kept.

    Written to ``<path>.partial``, which can be played while it grows and after a crash, and renamed by ``close``.

    Args:
        path: file to make; must not exist.
        fps: frames per second.
        tiles: how many images a frame has.
    """

    def __init__(self, path: Path | str, *, fps: float, tiles: int) -> None:
        self.path = Path(path)
        if self.path.exists():
            raise ConfigError(f"{self.path}: already exists, and nothing is ever overwritten; choose another path")
        if tiles < 1:
            raise ConfigError(f"tiles: expected at least 1, got {tiles}")
        self.tiles = tiles
        self._fps = fps
        self._columns = math.ceil(math.sqrt(tiles))
        self._rows = math.ceil(tiles / self._columns)
        self._partial = self.path.with_name(f"{self.path.name}.partial")
        self._writer: Mp4Writer | None = None
        self._drawing = require_extra("PIL.ImageDraw", extra="record", purpose="text on a video")
        self._images = require_extra("PIL.Image", extra="record", purpose="text on a video")

    @property
    def frames(self) -> int:
        """Frames written so far."""
        return self._writer.frames if self._writer else 0

    def add(self, pictures: Picture, captions: list[str], outcomes: list[bool | None]) -> None:
        """Encode one frame.

        Args:
            pictures: uint8 (tiles, H, W, 3).
            captions: a line of text for each tile.
            outcomes: True frames a tile green, False red, None not at all.
        """
        # in a grid with even sides; small ones enlarged, so that the text on them can be read
        pictures = enlarge(pictures, 96)
        height, width = pictures.shape[1:3]
        places = [(tile // self._columns * height, tile % self._columns * width) for tile in range(self.tiles)]
        tall, wide = self._rows * height, self._columns * width
        frame = np.zeros((tall + tall % 2, wide + wide % 2, 3), np.uint8)
        for picture, (top, left) in zip(pictures, places, strict=False):
            frame[top : top + height, left : left + width] = picture
        canvas = self._images.fromarray(frame)
        draw = self._drawing.Draw(canvas)
        told = zip(captions, outcomes, strict=True)
        for (caption, outcome), (top, left) in zip(told, places, strict=False):
            draw.text((left + 2, top + 1), caption, fill="white", stroke_width=1, stroke_fill="black")
            if outcome is not None:
                color = _GREEN if outcome else _RED
                draw.rectangle((left, top, left + width - 1, top + height - 1), outline=color, width=2)
        if self._writer is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = Mp4Writer(self._partial, self._fps, *frame.shape[:2], gop=30, crf=23, streamed=True)
        self._writer.add(np.asarray(canvas))

    def close(self) -> None:
        """End the file and put it in its place. Without a frame there is no file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            put_in_place(self._partial, self.path)

    def __enter__(self) -> TiledVideo:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class VideoObserver:
    """Attach it to an environment, and the first environments are filmed from one camera.

    A tile shows its environment's image, the return of its episode so far, and a green or red frame in the step that
    ends an episode with or without success. A suspended environment's tile stands still.

    Args:
        path: mp4 file to make; must not exist.
        camera: observation group with uint8 images; the only one there is where None.
        stack: how the group stacks its frames, if it does; the newest is shown.
        render: for tasks without a camera, a function that draws an image of each of some environments, given their
            ids, int64 (n,): ``env.render_each``. Only those that are filmed are drawn.
        num_envs: the first n environments; fewer if there are fewer.
        fps: frames per second.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        camera: str | None = None,
        stack: StackSpec | None = None,
        render: Callable[[Tensor], Sequence[Picture]] | None = None,
        num_envs: int = 9,
        fps: float = 30.0,
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs: expected at least 1, got {num_envs}")
        if render is not None and (camera is not None or stack is not None):
            raise ConfigError("video: expected a camera or a render function, got both; choose one")
        self._stack = stack
        self._render = render
        self._path = Path(path)
        self._camera = camera
        self._wanted = num_envs
        self._fps = fps
        self._video: TiledVideo | None = None
        self._pictures: Picture | None = None
        self._returns: NDArray[np.float64] = np.empty(0)
        self.paused = False
        """While it is, episodes are followed, and nothing is drawn or filmed."""

    @property
    def needs(self) -> frozenset[Literal["states", "frames"]]:
        """Images of every step, where an observation group has them."""
        return frozenset() if self._render else frozenset({"frames"})

    def after_reset(self, record: ResetRecord) -> None:
        """Note that episodes begin."""
        if self._video is None:
            available = next(iter(flatten(record.obs).values())).shape[0]
            count = min(self._wanted, available)
            self._video = TiledVideo(self._path, fps=self._fps, tiles=count)
            self._returns = np.zeros(count)
        slots = self._filmed(record.env_ids)
        self._returns[slots] = 0.0
        self._show(record.obs, slots)

    def after_step(self, record: StepRecord) -> None:
        """Encode the step."""
        if self._video is None:
            raise DataError("video: attach the observer before reset, so that it sees episodes begin")
        step = record.step
        slots = self._filmed(record.env_ids)
        self._returns[slots] += as_array(step.reward, "reward")[slots]
        if self.paused:
            return
        self._show(step.obs, slots)
        mask, final = step.info.get("_final_obs"), step.info.get("final_obs")
        if mask is not None and final is not None:
            self._show(final, [slot for slot in slots if bool(mask[slot])])
        if self._render is not None:
            self._pictures = np.stack(self._render(torch.arange(len(self._returns))))
        assert self._pictures is not None
        outcomes: list[bool | None] = [None] * len(self._returns)
        ends = step.info.get("ends")
        if ends is not None and ends.success is not None:
            for slot, success in zip(ends.env_ids.tolist(), ends.success.tolist(), strict=True):
                if slot < len(outcomes):
                    outcomes[slot] = success
        captions = [f"{value:.1f}" + _word(outcome) for value, outcome in zip(self._returns, outcomes, strict=True)]
        self._video.add(self._pictures, captions, outcomes)

    def _filmed(self, env_ids: Tensor) -> list[int]:
        return [slot for slot in env_ids.tolist() if slot < len(self._returns)]

    def _show(self, obs: dict[str, Tensor], slots: list[int]) -> None:
        """Put some environments' camera images on their tiles."""
        if self._render is None:
            pictures = self._find(obs)
            if self._pictures is None:
                self._pictures = pictures[: len(self._returns)].copy()
            self._pictures[slots] = pictures[slots]

    def close(self) -> None:
        """End the video."""
        if self._video is not None:
            self._video.close()

    def __enter__(self) -> VideoObserver:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _find(self, obs: dict[str, Tensor] | dict[str, Any]) -> Picture:
        found = flatten(obs)
        cameras = [name for name, value in found.items() if is_image(tuple(value.shape[1:]))]
        if self._camera is None and len(cameras) != 1:
            got = f"{len(cameras)} of them, {', '.join(cameras)}; name the one to film" if cameras else "none"
            raise ConfigError(f"camera: expected one observation with images, got {got}")
        name = self._camera or cameras[0]
        if name not in cameras:
            raise ConfigError(f"camera: no images named {name!r}; there are: {', '.join(cameras) or 'none'}")
        pictures = as_array(found[name] if self._stack is None else self._stack.newest(found[name]), name)
        field = Field(name=name, dtype=pictures.dtype, shape=tuple(pictures.shape[1:]))
        if not can_be_shown(field):
            raise ConfigError(
                f"camera: expected uint8 images with 1, 3 or 4 channels, got {field.dtype}{field.shape}; "
                "name its stack, or film one that is not normalized"
            )
        return as_rgb(pictures)


def _word(outcome: bool | None) -> str:
    return "" if outcome is None else (" success" if outcome else " failed")

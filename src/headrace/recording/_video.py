"""Video: encoding images to mp4 with PyAV, whose wheel brings its encoder, and tiled videos of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._leaves import flatten
from headrace.errors import ConfigError, DataError, ShapeError, require_extra
from headrace.files import open_untrusted, put_in_place
from headrace.recording.fields import as_array, as_rgb
from headrace.types import Need, ResetRecord, StepRecord

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
    with _open_video(path) as container:
        packets = [packet for packet in container.demux(container.streams.video[0]) if packet.pts is not None]
        return sorted(float(packet.pts * packet.time_base) for packet in packets)


def decode_frames(path: Path) -> Iterator[Picture]:
    """Yield every frame of a video in order, decoded one by one, uint8 (H, W, 3)."""
    with _open_video(path) as container:
        for frame in container.decode(video=0):
            yield frame.to_ndarray(format="rgb24")


@contextmanager
def _open_video(path: Path) -> Generator[Any]:
    """Open a video to read; what PyAV raises in the block becomes a DataError."""
    library = _library()
    try:
        # of this format, since others name further files
        with open_untrusted(path) as file, library.open(file, format="mp4") as container:
            yield container
    except (library.error.FFmpegError, IndexError, OSError) as error:
        raise DataError(f"{path}: not a video, or a damaged one ({error})") from error


_GREEN, _RED = (40, 200, 40), (220, 40, 40)


class VideoObserver:
    """Attach it to an environment, and the first environments are filmed, tile beside tile.

    A tile shows its environment's image, the return of its episode so far, and a green or red frame in the step that
    ends an episode with or without success. Frames are encoded as they come, to ``<path>.partial``, which can be played
    while it grows and after a crash, and is renamed by :meth:`close`. Without a frame there is no file.

    Args:
        path: mp4 file to make; must not exist.
        render: draws an image, uint8 (H, W, 3), of each of some environments, given their ids, int64 (n,):
            ``env.render_each``, or ``env.open_renderer(…)`` for another camera. Only those that are filmed are drawn.
        num_envs: the first n environments; fewer if there are fewer.
        fps: frames per second.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(
        self, path: Path | str, render: Callable[[Tensor], Sequence[Picture]], *, num_envs: int = 9, fps: float = 30.0
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs: expected at least 1, got {num_envs}")
        self._path = Path(path)
        if self._path.exists():
            raise ConfigError(f"{path}: already exists, and nothing is ever overwritten; choose another path")
        self._partial = self._path.with_name(f"{self._path.name}.partial")
        self._render, self._wanted, self._fps = render, num_envs, fps
        self._writer: Mp4Writer | None = None
        self._drawing = require_extra("PIL.ImageDraw", extra="record", purpose="text on a video")
        self._images = require_extra("PIL.Image", extra="record", purpose="text on a video")
        self._returns: NDArray[np.float64] = np.empty(0)
        self.paused = False
        """While it is, episodes are followed, and nothing is drawn or filmed."""

    def after_reset(self, record: ResetRecord) -> None:
        """Note that episodes begin."""
        if not len(self._returns):
            available = next(iter(flatten(record.obs).values())).shape[0]
            self._returns = np.zeros(min(self._wanted, available))
        self._returns[self._find_slots(record.env_ids)] = 0.0

    def after_step(self, record: StepRecord) -> None:
        """Encode the step."""
        count = len(self._returns)
        if not count:
            raise DataError("video: attach the observer before reset, so that it sees episodes begin")
        step = record.step
        slots = self._find_slots(record.env_ids)
        self._returns[slots] += as_array(step.reward, "reward")[slots]
        if self.paused:
            return
        outcomes: list[bool | None] = [None] * count
        ends = step.info.get("ends")
        if ends is not None and ends.success is not None:
            for slot, success in zip(ends.env_ids.tolist(), ends.success.tolist(), strict=True):
                if slot < count:
                    outcomes[slot] = success
        self._add(as_rgb(np.stack(self._render(torch.arange(count)))), outcomes)

    def _find_slots(self, env_ids: Tensor) -> list[int]:
        return [slot for slot in env_ids.tolist() if slot < len(self._returns)]

    def _add(self, pictures: Picture, outcomes: Sequence[bool | None]) -> None:
        """Encode one frame: tiles in a grid with even sides, small ones enlarged, so that their text can be read."""
        scale = max(1, 96 // pictures.shape[1])
        pictures = pictures.repeat(scale, 1).repeat(scale, 2)
        tiles, height, width = pictures.shape[:3]
        columns = math.ceil(math.sqrt(tiles))
        tall, wide = math.ceil(tiles / columns) * height, columns * width
        canvas = self._images.new("RGB", (wide + wide % 2, tall + tall % 2))
        draw = self._drawing.Draw(canvas)
        for tile, (picture, value, outcome) in enumerate(zip(pictures, self._returns, outcomes, strict=True)):
            left, top = tile % columns * width, tile // columns * height
            canvas.paste(self._images.fromarray(np.ascontiguousarray(picture)), (left, top))
            word = {None: "", True: " success", False: " failed"}[outcome]
            draw.text((left + 2, top + 1), f"{value:.1f}{word}", fill="white", stroke_width=1, stroke_fill="black")
            if outcome is not None:
                color = _GREEN if outcome else _RED
                draw.rectangle((left, top, left + width - 1, top + height - 1), outline=color, width=2)
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            size = canvas.height, canvas.width
            self._writer = Mp4Writer(self._partial, self._fps, *size, gop=30, crf=23, streamed=True)
        self._writer.add(np.asarray(canvas))

    def close(self) -> None:
        """End the file and put it in its place."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            put_in_place(self._partial, self._path)

    def __enter__(self) -> VideoObserver:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

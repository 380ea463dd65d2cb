"""Encoding pictures to mp4 with PyAV, whose wheel brings its encoder, and counting the frames of one."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError, DataError, ShapeError, require_extra

Picture = NDArray[np.uint8]

CODEC = "libx264"


def _library() -> Any:
    return require_extra("av", extra="record", purpose="mp4 video")


def exact_rate(fps: float) -> Fraction:
    """Frames per second as the fraction that was meant: 29.97 is 2997/100."""
    if not 0 < fps <= 1000:
        raise ConfigError(f"fps: expected more than 0 and at most 1000, got {fps}")
    return Fraction(fps).limit_denominator(1000)


class Mp4Writer:
    """Encodes pictures one by one; holds a few frames at most. H.264, a key frame every ``gop`` frames.

    Args:
        path: file to write; replaced if there.
        fps: frames per second.
        height: of every picture.
        width: of every picture.
        gop: distance of key frames; small makes random access quick.
        crf: 0 (lossless) to 51.
        streamed: the file can be played up to the last key frame at any time, also after a crash.
    """

    def __init__(
        self, path: Path, fps: float, height: int, width: int, *, gop: int = 2, crf: int = 18, streamed: bool = False
    ) -> None:
        library = _library()
        options = {"movflags": "frag_keyframe+empty_moov+default_base_moof"} if streamed else {}
        self._library = library
        self._shape = (height, width, 3)
        self._rate = exact_rate(fps)
        self.frames = 0
        self._container: Any = library.open(str(path), "w", format="mp4", options=options)
        stream: Any = self._container.add_stream(
            CODEC, rate=self._rate, options={"crf": str(crf), "g": str(gop), "bf": "0", "preset": "veryfast"}
        )
        stream.height, stream.width = height, width
        # 4:2:0 halves the color planes, which odd sizes do not allow
        stream.pix_fmt = "yuv420p" if height % 2 == 0 and width % 2 == 0 else "yuv444p"
        stream.codec_context.time_base = 1 / self._rate
        self._stream = stream

    def add(self, picture: Picture) -> None:
        """Encode one picture, uint8 (H, W, 3)."""
        if picture.shape != self._shape or picture.dtype != np.uint8:
            raise ShapeError(f"picture: expected uint8 {self._shape}, got {picture.dtype} {picture.shape}")
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
    """Seconds at which each frame of a video is shown, in order, without decoding."""
    library = _library()
    try:
        with library.open(str(path)) as container:
            stream = container.streams.video[0]
            packets = [packet for packet in container.demux(stream) if packet.pts is not None]
            return sorted(float(packet.pts * packet.time_base) for packet in packets)
    except (library.error.FFmpegError, IndexError) as error:
        raise DataError(f"{path}: not a video, or a damaged one ({error})") from error


def read_frames(path: Path) -> list[Picture]:
    """Every frame of a video, decoded, uint8 (H, W, 3)."""
    with _library().open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]

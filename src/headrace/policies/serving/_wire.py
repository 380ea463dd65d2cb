"""The frames of policy servers: msgpack maps in which arrays are marked maps. Nothing is ever unpickled.

Three markings are in use, and all are read; which one is written is the choice of a dialect:

========== =============================================================== =====================================
form       map of an array                                                 written by
========== =============================================================== =====================================
``openpi`` bytes keys ``__ndarray__``, ``data``, ``dtype``, ``shape``      openpi, headrace
``nd``     ``nd``, ``type``, ``kind``, ``shape``, ``data`` (msgpack-numpy) GR00T main
``npy``    ``__ndarray_class__``, ``as_npy``: the bytes of an npy file     GR00T n1.5 to n1.7
========== =============================================================== =====================================
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError, require_extra
from headrace.policies.serving.links import FRAME_LIMIT

_msgpack: Any = require_extra("msgpack", extra="serve", purpose="talking to a policy server")

ArrayForm = Literal["openpi", "nd", "npy"]
Array = NDArray[np.generic]

_MOST_DIMENSIONS = 16
_MOST_ITEMS = 1 << 16
"""Entries of all lists and maps of a frame: each is a Python object, of many times the bytes that it takes here."""
_NPY_HEADER = re.compile(
    r"\{'descr': '(?P<descr>[^']+)', 'fortran_order': (?P<fortran>True|False), 'shape': \((?P<shape>[\d, ]*)\), ?\}"
)
_DTYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|[SU]\d{1,6})")


def pack(message: Mapping[str, object], form: ArrayForm = "openpi") -> memoryview:
    """Return a frame, in memory of its own: arrays are copied once.

    Arrays are written as ``form``; any other object than msgpack's own and numpy's is refused.
    """
    packer = _msgpack.Packer(default=partial(_mark_array, form=form), autoreset=False)
    try:
        packer.pack(message)
        return cast("memoryview", packer.getbuffer())
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"frame: expected arrays, texts, numbers, lists and maps, got {error}") from error


def unpack(frame: bytes | memoryview, *, limit: int = FRAME_LIMIT) -> object:
    """Return what a frame holds. Arrays are read-only views of memory of their own; damaged or oversized frames are
    refused.

    Args:
        frame: as received.
        limit: largest frame in bytes.
    """
    if len(frame) > limit:
        raise DataError(f"frame: expected at most {limit:,} bytes, got {len(frame):,}; raise the limit of both sides")
    try:
        budget, most = _Budget(), min(len(frame), _MOST_ITEMS)
        return cast(
            "object",
            _msgpack.unpackb(
                frame, object_hook=budget.read, list_hook=budget.count, max_array_len=most, max_map_len=most
            ),
        )
    except DataError:
        raise
    except (
        _msgpack.exceptions.UnpackException,
        _msgpack.exceptions.ExtraData,
        ValueError,
        TypeError,
        KeyError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DataError(
            f"frame: expected msgpack, got {len(frame):,} bytes that are not: {type(error).__name__}: {error}"
        ) from error


def unpack_map(frame: bytes | memoryview | str, *, limit: int = FRAME_LIMIT) -> dict[str, object]:
    """Return a frame that must hold a map with text keys."""
    message = frame if isinstance(frame, str) else unpack(frame, limit=limit)
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in cast("dict[object, object]", message)):
        raise DataError(f"frame: expected a map with text keys, got {shorten(message)}")
    return cast("dict[str, object]", message)


def shorten(message: object, most: int = 200) -> str:
    """Return a received object for an error message: its kind, shape or beginning."""
    if isinstance(message, np.ndarray):
        array = cast("Array", message)
        return f"an array {array.dtype}{list(array.shape)}"
    if isinstance(message, Mapping):
        return f"a map with the keys {sorted(str(key) for key in cast('Mapping[object, object]', message))}"
    text = message if isinstance(message, str) else repr(message)
    return text if len(text) <= most else f"{text[:most]}…"


def _mark_array(value: object, *, form: ArrayForm) -> dict[Any, object]:
    if isinstance(value, np.generic):
        _check_kind(value.dtype)
        if form == "openpi":
            return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} {shorten(value)}")
    array = np.ascontiguousarray(cast("Array", value)).reshape(value.shape)  # the former makes 0-d arrays 1-d
    _check_kind(array.dtype)
    if form == "npy":
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        return {"__ndarray_class__": True, "as_npy": buffer.getvalue()}
    # msgpack copies out of the array itself; a text array has no buffer that it takes
    data = array.tobytes() if array.dtype.kind in "SU" or not array.size else array.reshape(-1).data
    if form == "nd":
        return {b"nd": True, b"type": array.dtype.str, b"kind": b"", b"shape": array.shape, b"data": data}
    return {b"__ndarray__": True, b"data": data, b"dtype": array.dtype.str, b"shape": array.shape}


def _check_kind(dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "biufSU":
        raise TypeError(f"an array of {dtype}; send numbers, flags or texts")


class _Budget:
    """Counts what a frame expands to while it is decoded, and refuses it before that is too much."""

    def __init__(self) -> None:
        self._items = _MOST_ITEMS

    def count(self, items: list[Any] | dict[Any, Any]) -> list[Any] | dict[Any, Any]:
        self._items -= 1 + len(items)
        if self._items < 0:
            raise DataError(f"frame: expected at most {_MOST_ITEMS:,} entries of lists and maps, got more; send arrays")
        return items

    def read(self, message: dict[Any, Any]) -> object:
        self.count(message)
        return _read(message)


def _scalar(dtype: np.dtype[Any], data: object) -> object:
    """Return a scalar; a text of a given length, which numpy makes of an integer, is none."""
    expected = {"S": bytes, "U": str}.get(dtype.kind, int | float)
    if not isinstance(data, expected) or (isinstance(data, int) and abs(data) >= 1 << 64):
        raise DataError(f"frame: expected a scalar of {dtype}, got {shorten(data)}")
    return dtype.type(data)


def _read(message: dict[Any, Any]) -> object:
    """Return what a decoded map stands for: an array, a scalar, or itself."""
    if b"__ndarray__" in message:
        return _array(message[b"data"], message[b"dtype"], message[b"shape"])
    if b"__npgeneric__" in message:
        return _scalar(_dtype(message[b"dtype"]), message[b"data"])
    if b"nd" in message or ("nd" in message and "type" in message):
        fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in message.items()}
        if fields.get("kind") not in (None, b"", ""):
            raise DataError(f"frame: expected plain arrays, got one of kind {fields['kind']!r}")
        shape = fields["shape"] if fields["nd"] else ()
        array = _array(fields["data"], fields["type"], shape)
        return array if fields["nd"] else array[()]
    if "__ndarray_class__" in message:
        return _npy(message["as_npy"])
    for marker in ("__ModalityConfig_class__", "__ModalityConfig__"):
        if marker in message:
            return message["as_json"]
    return message


def _array(data: object, dtype: object, shape: object) -> Array:
    kind = _dtype(dtype)
    sizes = tuple(cast("list[object]", shape)) if isinstance(shape, list | tuple) else None
    if (
        sizes is None
        or not isinstance(data, bytes)
        or len(sizes) > _MOST_DIMENSIONS
        or any(not isinstance(size, int) or isinstance(size, bool) or size < 0 for size in sizes)
        or math.prod(cast("tuple[int, ...]", sizes)) * kind.itemsize != len(data)
    ):
        got = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise DataError(f"frame: expected an array {kind}{shorten(shape)} with as many bytes as that takes, got {got}")
    array: Array = np.frombuffer(data, kind).reshape(cast("tuple[int, ...]", sizes))
    return array if kind.isnative else array.astype(kind.newbyteorder("="))


def _dtype(name: object) -> np.dtype[Any]:
    text = name.decode("ascii", "replace") if isinstance(name, bytes) else name
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise DataError(f"frame: expected the dtype of numbers, flags or texts, such as '<f4', got {shorten(name)}")
    return np.dtype(text)


def _npy(data: object) -> Array:
    """Return the array of an npy file. Numpy's own reader evaluates the header as Python, and raises whatever that
    raises."""
    if not isinstance(data, bytes) or data[:6] != b"\x93NUMPY" or len(data) < 12 or data[6] not in (1, 2, 3):
        raise DataError(f"frame: expected the bytes of an npy file, got {shorten(data)}")
    begin = 10 if data[6] == 1 else 12
    end = begin + int.from_bytes(data[8:begin], "little")
    found = _NPY_HEADER.fullmatch(data[begin:end].decode("latin1").rstrip())
    if found is None:
        raise DataError("frame: expected an npy file with an array of numbers, flags or texts, got another header")
    sizes = [int(size) for size in found["shape"].split(",") if size.strip()]
    if found["fortran"] == "True":
        return _array(data[end:], found["descr"], sizes[::-1]).transpose()
    return _array(data[end:], found["descr"], sizes)

"""Frames: those that genuine servers and clients sent, and those that nobody should send.

``frames/`` holds what openpi's own server (2026-06) and ``openpi-client`` 0.1.2 put on the wire, and GR00T's two array
forms as written by numpy's ``save`` (n1.6, n1.7) and by ``msgpack-numpy`` 0.4.8 (main).
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest

from headrace.errors import DataError, ShapeError
from headrace.policies.observation_map import resize_with_pad
from headrace.policies.serving._wire import pack, unpack, unpack_map

FRAMES = Path(__file__).parent / "frames"
IMAGE = (np.arange(4 * 6 * 3) % 256).astype(np.uint8).reshape(4, 6, 3)
GR00T_REQUEST = {
    "endpoint": "get_action",
    "data": {
        "observation": {
            "video": {"ego_view": (np.arange(2 * 2 * 4 * 6 * 3) % 256).astype(np.uint8).reshape(2, 2, 4, 6, 3)},
            "state": {
                "arm": np.arange(4, dtype=np.float32).reshape(2, 1, 2),
                "hand": np.array([[[7.0]], [[8.0]]], np.float32),
            },
            "language": {"annotation.human.task_description": [["push"], ["pull"]]},
        },
        "options": None,
    },
}


def frame(name: str) -> bytes:
    return (FRAMES / name).read_bytes()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (msgpack.packb({b"__npgeneric__": True, b"data": 10**9, b"dtype": "|S1"}), "expected a scalar"),
        (msgpack.packb({b"__npgeneric__": True, b"data": 10**9, b"dtype": "<U1"}), "expected a scalar"),
        (msgpack.packb({b"__npgeneric__": True, b"data": "1" * 99, b"dtype": "<i8"}), "expected a scalar"),
        (msgpack.packb([{}] * 2_000_000), "exceeds|entries"),
        (msgpack.packb([[{}] * 1000] * 1000), "entries of lists and maps"),
        (msgpack.packb([[[]] * 60_000] * 60), "entries of lists and maps"),
        (b"\xdd\x7f\xff\xff\xff" * 10, "exceeds"),
        (b"\xdf\x7f\xff\xff\xff" * 10, "exceeds"),
    ],
)
def test_what_a_frame_expands_to_is_counted_before_it_is_decoded(frame: bytes, message: str) -> None:
    code = (
        "import resource, sys\n"
        "from headrace.errors import DataError\n"
        "from headrace.policies.serving._wire import unpack\n"
        "frame = sys.stdin.buffer.read()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    unpack(frame)\nexcept DataError as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], input=frame, capture_output=True, check=True)
    said, kilobytes = run.stdout.decode().rsplit("\n", 2)[:2]
    assert re.search(message, said)
    assert int(kilobytes) < 700_000  # two of the pictures, decoded and as Pillow holds them


def test_a_genuine_openpi_request_is_what_we_write_byte_for_byte() -> None:
    ours = pack(
        {
            "observation/image": IMAGE,
            "observation/state": np.array([0.5, -1.0], np.float32),
            "prompt": "push the cube",
        }
    )
    assert ours == frame("openpi_request.bin")


def test_genuine_openpi_frames_are_read() -> None:
    assert unpack_map(frame("openpi_metadata.bin")) == {"config": "pi0_test", "reset_pose": [0.0, 1.0]}
    request = unpack_map(frame("openpi_request.bin"))
    np.testing.assert_array_equal(request["observation/image"], IMAGE)
    reply = unpack_map(frame("openpi_second_reply.bin"))
    np.testing.assert_array_equal(reply["actions"], np.arange(8.0).reshape(4, 2) + 0.5)
    assert set(reply["server_timing"]) == {"infer_ms", "prev_total_ms"}


@pytest.mark.parametrize("form", ["npy", "nd"])
def test_a_genuine_gr00t_request_is_what_we_write_byte_for_byte(form: str) -> None:
    assert pack(GR00T_REQUEST, form) == frame(f"gr00t_{form}_request.bin")


@pytest.mark.parametrize("form", ["npy", "nd"])
def test_genuine_gr00t_replies_are_read_in_both_forms(form: str) -> None:
    action, info = unpack(frame(f"gr00t_{form}_reply.bin"))
    np.testing.assert_array_equal(action["arm"], np.arange(16, dtype=np.float32).reshape(2, 4, 2))
    assert info == {}
    modality = unpack_map(frame(f"gr00t_{form}_modality.bin"))
    assert modality["state"] == {"delta_indices": [0], "modality_keys": ["arm", "hand"]}


@pytest.mark.parametrize("form", ["openpi", "nd", "npy"])
@pytest.mark.parametrize("dtype", ["bool", "u1", "i8", "f2", "f4", "f8", ">f4", ">i2"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 1, 3)])
def test_arrays_survive_the_wire(form: str, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.asarray(np.arange(np.prod(shape)).reshape(shape) % 2, dtype)
    back = unpack_map(pack({"a": array}, form))["a"]
    assert back.shape == shape
    assert back.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(back, array)


def test_a_strided_array_is_written_in_c_order() -> None:
    array = np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1)[::2]
    np.testing.assert_array_equal(unpack_map(pack({"a": array}))["a"], array)


def test_numpy_scalars_and_texts_survive_the_wire() -> None:
    message = {"a": np.float32(0.1), "b": np.int64(7), "c": np.array(["push", "ü"]), "d": np.bool_(True)}
    back = unpack_map(pack(message))
    assert back["a"] == np.float32(0.1)
    assert back["a"].dtype == np.float32
    assert (back["b"], back["d"]) == (7, True)
    assert back["c"].tolist() == ["push", "ü"]


@pytest.mark.parametrize(
    "value", [np.array([object()]), np.zeros(2, np.complex64), np.zeros(2, "V4"), object(), np.array(["2020"], "M8[D]")]
)
def test_what_is_no_number_is_not_written(value: object) -> None:
    with pytest.raises(DataError, match="expected arrays, texts, numbers"):
        pack({"a": value})


def marked(**changes: object) -> bytes:
    fields = {"__ndarray__": True, "data": b"\0" * 8, "dtype": "<f4", "shape": [2], **changes}
    return msgpack.packb({"a": {key.encode(): value for key, value in fields.items()}})


def npy(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


@pytest.mark.parametrize(
    "bad",
    [
        marked(dtype="O"),
        marked(dtype="|O8"),
        marked(dtype="<c8", shape=[1]),
        marked(dtype="V8", shape=[1]),
        marked(dtype="f4,f4"),
        marked(dtype=7),
        marked(shape=[3]),
        marked(shape=[-2]),
        marked(shape=[2.0]),
        marked(shape=[True, 2]),
        marked(shape="2"),
        marked(shape=[1] * 40),
        marked(shape=[1 << 62, 4]),
        marked(data="text"),
        marked(data=None),
        msgpack.packb({"a": {b"__ndarray__": True}}),
        msgpack.packb({"a": {b"nd": True, b"type": "<f4", b"kind": b"O", b"shape": [1], b"data": b"\0" * 4}}),
        msgpack.packb({"a": {b"nd": True, b"type": [["x", "<f4"]], b"kind": b"V", b"shape": [1], b"data": b"\0" * 4}}),
        msgpack.packb({"a": {"__ndarray_class__": True, "as_npy": npy(np.array([{}]), allow_pickle=True)}}),
        msgpack.packb({"a": {"__ndarray_class__": True, "as_npy": b"\x93NUMPY"}}),
        msgpack.packb({"a": {"__ndarray_class__": True, "as_npy": npy(np.zeros(3))[:-8]}}),
        msgpack.packb({"a": {"__ndarray_class__": True, "as_npy": 3}}),
        msgpack.packb([1, 2]),
        msgpack.packb({1: 2}),
        msgpack.packb({b"bytes": 2}),
        msgpack.packb({"a": 1}) + b"\0",
        b"\x81" * 2000,
        b"\x91" * 100_000,
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xd6\xff\0\0",
    ],
)
def test_a_frame_that_is_not_plain_numbers_is_refused(bad: bytes) -> None:
    with pytest.raises(DataError, match="frame: expected"):
        unpack_map(bad)


def test_a_frame_over_the_limit_is_refused() -> None:
    big = pack({"a": np.zeros(1000, np.uint8)})
    unpack_map(big, limit=len(big))
    with pytest.raises(DataError, match="at most 900 bytes"):
        unpack_map(big, limit=900)


@pytest.mark.parametrize("name", sorted(path.name for path in FRAMES.glob("*.bin")))
def test_a_frame_that_was_cut_or_changed_anywhere_is_read_or_refused_but_never_crashes(name: str) -> None:
    whole = frame(name)
    for cut in range(len(whole)):
        with pytest.raises(DataError):
            unpack(whole[:cut])
    random = np.random.default_rng(1)
    for _ in range(2000):
        broken = bytearray(whole)
        for place in random.integers(0, len(whole), 3):
            broken[place] = random.integers(256)
        try:
            unpack(bytes(broken))
        except DataError:
            continue


@pytest.mark.parametrize("case", range(5))
def test_pictures_are_resized_to_the_pixels_of_openpis_own_function(case: int) -> None:
    with np.load(FRAMES / "openpi_resize.npz") as kept:
        resized = resize_with_pad(kept[f"in{case}"], *kept[f"size{case}"].tolist())
        np.testing.assert_array_equal(resized, kept[f"out{case}"])


def test_resizing_refuses_what_is_no_picture() -> None:
    with pytest.raises(ShapeError, match="expected uint8"):
        resize_with_pad(np.zeros((4, 4, 3), np.float32), 2, 2)

"""Instructions that this process retires, from the processor's own counter, where kernel and machine allow it."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_SYSCALLS = {"x86_64": 298, "aarch64": 241}
"""Number of ``perf_event_open``, for which C libraries have no function."""
_ATTRIBUTE_BYTES = 128
_INSTRUCTIONS = 1
_INHERIT, _NO_KERNEL, _NO_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 8


class InstructionCounter:
    """Counts instructions in user space, of this thread and of threads and processes that begin after it was made."""

    def __init__(self) -> None:
        attribute = bytearray(_ATTRIBUTE_BYTES)
        struct.pack_into("=IIQ", attribute, 0, 0, _ATTRIBUTE_BYTES, _INSTRUCTIONS)
        struct.pack_into("=Q", attribute, 40, _INHERIT | _NO_KERNEL | _NO_HYPERVISOR)
        number = _SYSCALLS.get(platform.machine())
        argument = (ctypes.c_char * _ATTRIBUTE_BYTES).from_buffer(attribute)
        of = (0, -1, -1)  # this thread, on any core, in no group of counters
        self._file = -1 if number is None else ctypes.CDLL(None).syscall(number, argument, *of, _CLOSE_ON_EXEC)

    def read(self) -> int | None:
        """Return the instructions so far; None where the machine does not count them for us."""
        if self._file < 0:
            return None
        return int.from_bytes(os.read(self._file, 8), "little")

    def close(self) -> None:
        """Give the counter back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

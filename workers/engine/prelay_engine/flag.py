"""A flag that native code can look at."""

from __future__ import annotations

import ctypes


class Flag:
    """As `threading.Event`, without waiting; 4 bytes at `address` are not 0 while it is set."""

    def __init__(self) -> None:
        self._value = ctypes.c_int32(0)
        self.address = ctypes.addressof(self._value)

    def __repr__(self) -> str:
        return f"Flag({self._value.value})"

    def is_set(self) -> bool:
        return self._value.value != 0

    def set(self) -> None:
        self._value.value = 1

    def clear(self) -> None:
        self._value.value = 0

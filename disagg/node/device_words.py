"""Stores numbers into words of host memory in the order of a device queue.

On a GPU the driver queues the store (`cuStreamWriteValue32`): it happens after all earlier work of the stream, and
after a fence over the whole system. A reader of the number therefore sees everything that the earlier work has
written, in the memory of any device. The driver is called through ctypes, because torch has no function for host
memory.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any

import torch

from disagg.core.errors import TransportError

_REGISTER_FLAGS = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped."""
_WORD_BYTES = 4


class DeviceWords:
    """Words of host memory, uint32, that one device can store into.

    The words stay registered with CUDA as long as this object lives. The owner keeps it until all stores have ended.
    """

    def __init__(self, words: Any, device: torch.device) -> None:
        """`words`: numpy array at the start of a memory page; the array stays in use as long as this object.

        Raises `TransportError` when the device cannot store into host memory.
        """
        self._words = words
        self._address = 0
        self._driver: Any = None
        if device.type == "cuda":
            self._driver = _driver()
            start, nbytes = int(words.ctypes.data), int(words.nbytes)
            _check("cudaHostRegister", int(_cudart().cudaHostRegister(start, nbytes, _REGISTER_FLAGS)))
            # The callback holds the array, and with it the mapping, until CUDA has forgotten the memory.
            weakref.finalize(self, _unregister, words).atexit = False
            address = ctypes.c_uint64()
            result = self._driver.cuMemHostGetDevicePointer_v2(
                ctypes.byref(address), ctypes.c_void_p(start), 0
            )
            _check("cuMemHostGetDevicePointer", result)
            self._address = address.value

    def store(self, stream: Any, index: int, number: int) -> None:
        """Queues the store of a number into a word on `stream`; on a CPU, `stream` is None and the store happens now.

        Raises `TransportError` if the driver refuses; nothing is queued then.
        """
        if stream is None:
            self._words[index] = number
            return
        address = self._address + _WORD_BYTES * index
        _check(
            "cuStreamWriteValue32",
            self._driver.cuStreamWriteValue32_v2(stream.cuda_stream, address, number, 0),
        )

    def try_store(self, stream: Any, index: int) -> None:
        """Stores a number once and waits for it. Raises `TransportError` if the word then lacks the number."""
        number = (int(self._words[index]) + 1) % (1 << 31)
        self.store(stream, index, number)
        if stream is not None:
            stream.synchronize()
        if int(self._words[index]) != number:
            raise TransportError("the device did not store into host memory")


def _unregister(words: Any) -> None:
    _cudart().cudaHostUnregister(int(words.ctypes.data))


def _cudart() -> Any:
    cuda: Any = torch.cuda  # its functions carry no types
    return cuda.cudart()


@cache
def _driver() -> Any:
    """Returns the CUDA driver's library. Calls keep the interpreter lock: they take less time than its release."""
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
        driver.cuStreamWriteValue32_v2.argtypes = (
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_uint32,
            ctypes.c_uint,
        )
        driver.cuMemHostGetDevicePointer_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    except (OSError, AttributeError) as exc:
        raise TransportError(f"the CUDA driver cannot store into host memory: {exc}") from exc
    return driver


def _check(name: str, result: int) -> None:
    if result != 0:
        raise TransportError(f"{name} failed with CUDA error {result}")

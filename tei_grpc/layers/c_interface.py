"""Owns torch's C interface (AOTInductor's) for compiled code: functions by address, tensors by handle."""

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor

LIBRARY: Final = "libtorch_cpu.so"  # torch has loaded it


@cache
def address_of(name: str) -> int:
    """Of a function. Raises OSError or AttributeError where there is none."""
    return ctypes.cast(getattr(ctypes.CDLL(LIBRARY), name), ctypes.c_void_p).value or 0


def dtype_number(dtype: torch.dtype) -> int:
    """As functions take it. Raises AttributeError where it has none."""
    return int(getattr(ctypes.CDLL(LIBRARY), f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")())


class Handles:
    """Tensors, each known to C by a number, for as long as this object is there."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        weakref.finalize(self, _delete, self._numbers).atexit = False  # a batch may still run at the process's end

    def add(self, tensor: Tensor) -> int:
        """Its number. Raises AttributeError where torch has no such interface."""
        capsule = torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor)
        number = int(_pointer()(capsule, None))
        self._numbers.append(number)
        return number


@cache
def _pointer() -> "ctypes._NamedFuncPointer":
    found = ctypes.pythonapi.PyCapsule_GetPointer
    found.restype, found.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return found


def _delete(numbers: Sequence[int]) -> None:
    delete = ctypes.CDLL(LIBRARY).aoti_torch_delete_tensor_object
    for number in numbers:
        delete(ctypes.c_void_p(number))

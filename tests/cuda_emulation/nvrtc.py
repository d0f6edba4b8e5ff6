"""NVRTC by ctypes, with the interface of CuPy's binding, so that the kernels compile in tests where CuPy is not.

The library comes from NVIDIA's nvrtc packages (nvidia-cuda-nvrtc, nvidia-cuda-nvrtc-cu12) or from the system.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
from pathlib import Path


class NvrtcError(Exception):
    """A call of NVRTC failed."""


@functools.cache
def libraries() -> dict[int, str]:
    """The libraries that are here, by their major version."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    found = {}
    for major in (12, 13):
        paths = [path for folder in folders for path in folder.glob(f"*/lib/libnvrtc.so.{major}")]
        name = str(paths[0]) if paths else f"libnvrtc.so.{major}"
        try:
            for part in paths[0].parent.glob(f"libnvrtc-builtins.so.{major}*") if paths else ():
                ctypes.CDLL(str(part))  # which the library looks for by its name alone
            ctypes.CDLL(name)
        except OSError:
            continue
        found[major] = name
    return found


class Nvrtc:
    """One of these libraries."""

    def __init__(self, major: int) -> None:
        self._library = ctypes.CDLL(libraries()[major])
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise NvrtcError(self._library.nvrtcGetErrorString(status).decode())

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def getSupportedArchs(self) -> list[int]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        return list(archs)

    def createProgram(self, source: str, name: str, headers: list[bytes], include_names: list[bytes]) -> int:
        program = ctypes.c_void_p()
        texts, names = (ctypes.c_char_p * len(headers))(*headers), (ctypes.c_char_p * len(headers))(*include_names)
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names
        )
        assert program.value is not None
        return program.value

    def destroyProgram(self, program: int) -> None:
        self._call("nvrtcDestroyProgram", ctypes.byref(ctypes.c_void_p(program)))

    def compileProgram(self, program: int, options: list[str]) -> None:
        texts = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        self._call("nvrtcCompileProgram", ctypes.c_void_p(program), len(options), texts)

    def getCUBIN(self, program: int) -> bytes:
        return self._read("nvrtcGetCUBIN", program)

    def getProgramLog(self, program: int) -> str:
        return self._read("nvrtcGetProgramLog", program).rstrip(b"\0").decode()

    def _read(self, function: str, program: int) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{function}Size", ctypes.c_void_p(program), ctypes.byref(size))
        room = ctypes.create_string_buffer(size.value)
        self._call(function, ctypes.c_void_p(program), room)
        return room.raw

"""Memory that the process holds but does not need (freed blocks, pages of files), and memory that is free."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import sys
from bisect import bisect
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

_ENTRY = 8  # bytes of /proc/self/pagemap for a page
_PRESENT_OR_SWAPPED, _OF_FILE = np.uint64(3 << 62), np.uint64(1 << 61)


def release_freed() -> None:
    """Return freed memory to the system, if the C library has a function for it (glibc).

    glibc returns a block only if it is larger than all blocks freed before. After a compile of a decoder of
    70 MB in 4 bits, it kept 80 MB.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_mapped(tensors: Iterable[torch.Tensor]) -> None:
    """Release the memory of plain tensors in mapped files. The system reads the pages again at the next use.

    safetensors maps files, and each page takes memory from its first use on. After a compile, engines have
    the weights in their own layouts: a decoder in 4 bits took 2.1 times its weights, and now takes 1.2. The
    memory of a tensor that was written to is not released, since its pages differ from the file.
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    try:
        mappings = _private_mappings()
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            for tensor in tensors:
                begin, end = _whole_pages(tensor)
                if begin < end and _is_in_one(mappings, begin, end) and not _is_written(pages, begin, end):
                    advise(begin, end - begin, mmap.MADV_DONTNEED)
    except OSError:  # /proc cannot be read; the system releases the pages when it needs memory
        return


def _private_mappings() -> list[tuple[int, int]]:
    """The address ranges of private mappings of files, in order."""
    mappings = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode = line.split()[:5]
        if access[3] == "p" and inode != "0":
            low, _, high = span.partition("-")
            mappings.append((int(low, 16), int(high, 16)))
    return mappings


def _whole_pages(tensor: torch.Tensor) -> tuple[int, int]:
    """The address range of the pages that contain only this tensor's memory."""
    if tensor.device.type != "cpu":
        return 0, 0
    storage, size = tensor.untyped_storage(), mmap.PAGESIZE
    first = storage.data_ptr()
    return -(-first // size) * size, (first + storage.nbytes()) // size * size


def _is_in_one(mappings: list[tuple[int, int]], begin: int, end: int) -> bool:
    place = bisect(mappings, (begin, sys.maxsize)) - 1
    return place >= 0 and end <= mappings[place][1]


def _is_written(pages: io.FileIO, begin: int, end: int) -> bool:
    """Whether a page differs from the file, because the process has written to it."""
    count = (end - begin) // mmap.PAGESIZE
    data = os.pread(pages.fileno(), count * _ENTRY, begin // mmap.PAGESIZE * _ENTRY)
    entries = np.frombuffer(data, np.uint64)
    own = ((entries & _PRESENT_OR_SWAPPED) != 0) & ((entries & _OF_FILE) == 0)
    return len(entries) != count or bool(own.any())


_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """The memory that this process may still use, on Linux; None on other systems."""
    limits = [value for value in (_available(), _left_to_group()) if value is not None]
    return min(limits, default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None


def _left_to_group() -> int | None:
    """The memory that is left of a container's limit."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        return limit - int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no limit ("max"), no such file
        return None

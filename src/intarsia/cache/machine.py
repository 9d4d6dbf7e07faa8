"""The environment that a measurement depends on: this machine and the versions on it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path

import torch


def digest(*parts: str) -> str:
    """A short digest of a text, as a key."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} {part}\n".encode())
    return digest.hexdigest()[:32]


def machine_key() -> str:
    """Processor, threads and the version of this package."""
    threads = torch.get_num_threads()  # engines use as many
    processor = f"{platform.machine()} {processor_name()}, {threads} of {os.cpu_count()} cores"
    return f"intarsia {package_version('intarsia')}, {processor}"


@functools.cache
def package_version(module: str) -> str:
    """The version of the package that provides a module, such as `onnxruntime-gpu`; "?" if there is none."""
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        providers = importlib.metadata.packages_distributions().get(module, [])
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(providers))) or "?"


@functools.cache
def _cpuinfo() -> list[str]:
    """The lines of /proc/cpuinfo; empty on systems other than Linux."""
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


@functools.cache
def processor_features() -> str:
    """A digest of the processor's features, since a virtual one of the same name may lack some."""
    if not (lines := _cpuinfo()):
        return platform.processor()
    kinds = ("flags", "Features", "model")
    features = sorted({line for line in lines if line.split(":")[0].strip() in kinds})
    return hashlib.sha256("\n".join(features).encode()).hexdigest()[:16]


@functools.cache
def has_bfloat16_tiles() -> bool:
    """Whether the processor multiplies tiles of bfloat16 (AMX), according to Linux."""
    return any("amx_bf16" in line.split() for line in _cpuinfo())


@functools.cache
def processor_name() -> str:
    """The processor's name: from /proc/cpuinfo on Linux (numbers on ARM), from `platform` elsewhere."""
    if not (lines := _cpuinfo()):
        return platform.processor()
    entries = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {key.strip(): value.strip() for key, value in entries.items()}
    if "model name" in fields:
        return fields["model name"]
    numbers = [fields[key] for key in ("CPU implementer", "CPU part", "CPU variant") if key in fields]
    return " ".join(numbers) or platform.processor()


# The processor: by it engines pick their kernels, and its cores are shared.


@functools.cache
def is_arm() -> bool:
    """Whether it is one of ARM, of 64 bits."""
    return platform.machine().lower() in ("aarch64", "arm64")


def thread_count(asked: int | None) -> int:
    """The user's number, or torch's, so that engines that take turns share the cores."""
    return torch.get_num_threads() if asked is None else asked

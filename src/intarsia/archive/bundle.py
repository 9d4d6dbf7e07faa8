"""Several compiled modules in one file: an archive of each, and a manifest that says what they are for.

Members share one container, so one reader checks digests, places and hostile names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import nn

from intarsia.archive.container import Reader, Writer, write_atomically
from intarsia.archive.load import check_version
from intarsia.archive.save import made_by, save_bytes
from intarsia.archive.values import Json
from intarsia.errors import ArchiveError
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.weights import tensor_digest


def write_bundle(
    path: str | os.PathLike[str],
    name: str,
    version: int,
    told: Mapping[str, Json],
    programs: Mapping[str, Compiled],
    others: Mapping[str, bytes] | None = None,
) -> None:
    """Write a file of the format `name`: what is `told`, and programs and `others` by names of members."""

    def write(file: BinaryIO, _: str) -> None:
        writer = Writer(file)
        for member, program in programs.items():
            writer.add(member, [save_bytes(program)])
        for member, data in (others or {}).items():
            writer.add(member, [data])
        writer.close({"format": name, "version": version, "made by": made_by(), **told})

    write_atomically(path, write)


def open_bundle(path: str | os.PathLike[str], name: str, version: int) -> Reader:
    """A file of that format, checked to be whole."""
    reader = Reader(path)
    check_version(reader.manifest, name, version)
    return reader


def check_member(where: str, program: Compiled) -> None:
    """ArchiveError for a program that changes buffers, or returns weights, of a module outside the file."""
    program.weights.check(thorough=True)
    if program.lowered.buffers:
        changed = ", ".join(program.lowered.buffers)
        raise ArchiveError(f"{where} changes its buffers ({changed}), which a file cannot share")
    if any(view is not None and view.held for view in program.lowered.views):
        raise ArchiveError(f"{where} returns weights of its own, which a file cannot share")


def weight_digests(module: nn.Module) -> dict[str, Json]:
    """A digest of each parameter and buffer, those that a state dict leaves out among them."""
    return {name: tensor_digest(tensor) for name, tensor in _weights(module).items()}


def check_weights(where: str, module: nn.Module, told: Mapping[str, Any]) -> None:
    """ArchiveError for a module with other weights than a file tells of."""
    weights = _weights(module)
    for name in {**told, **weights}:
        if name not in told or name not in weights:
            whose = "the file" if name in told else "the model"
            raise ArchiveError(f"{where} has other weights than when it was saved: only {whose} has {name}")
        if tensor_digest(weights[name]) != told[name]:
            raise ArchiveError(f"{where} has other weights than when it was saved: {name} differs")


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }

"""Archives changed on purpose, with or without seals that fit."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

from intarsia.archive.container import MANIFEST, SEAL, Writer


def members(data: bytes) -> dict[str, bytes]:
    """Every member of an archive by name."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sealed(data: bytes, edit: Callable[[dict[str, Any], dict[str, bytes]], None]) -> bytes:
    """The archive after an edit of manifest and members, with digests that fit again: a forgery."""
    found = members(data)
    manifest = json.loads(found.pop(MANIFEST))
    del found[SEAL], manifest["members"]
    edit(manifest, found)
    return packed(manifest, found)


def packed(manifest: dict[str, Any], contents: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    writer = Writer(file)
    for name, member in contents.items():
        writer.add(name, [member])
    writer.close(manifest)
    return file.getvalue()


def unsealed(contents: dict[str, bytes]) -> bytes:
    """These members as an archive lays them out, whatever their digests."""
    file = io.BytesIO()
    writer = Writer(file)
    for name, member in contents.items():
        writer.add(name, [member])
    writer._zip.close()
    return file.getvalue()


def repacked(contents: dict[str, bytes], **options: Any) -> bytes:
    """A plain zip of these members, as other programs write one."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        for name, member in contents.items():
            archive.writestr(name, member)
    return file.getvalue()

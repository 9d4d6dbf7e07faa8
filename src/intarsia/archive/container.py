"""The container: a zip of stored members at multiples of 64 bytes, with digests in a JSON manifest.

Stored and aligned members can be used where the file is mapped into memory. The last member is the digest of
the manifest, which has the digests of all others. A flipped bit is found before its member is returned or, in
a large member that is checked while others are read, before loading ends.

The digests detect damage and not forgery, so members are parsed as untrusted input although their digests
match.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import mmap
import os
import stat
import struct
import threading
import weakref
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NoReturn, Self

import numpy as np

from intarsia.errors import ArchiveError

MANIFEST, SEAL = "manifest.json", "manifest.sha256"
ALIGNMENT = 64
_PADDING = 0x4950  # the id of an extra field for padding
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_MOST_MEMBERS = 100_000
_READ = 1 << 20  # bytes that are read at once, which fit into a cache
_ROWS, _COLUMNS = 128, 1024  # of a table of 8-byte numbers
_BLOCK = _ROWS * _COLUMNS * 8


class Writer:
    """Writes members one after another, and the manifest last. A `with` block ends it after an error."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._members: dict[str, dict[str, Any]] = {}
        self.places: dict[str, int] = {}  # where members begin

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # An open ZipFile writes to the closed file when it is deleted, and Python prints that error.
        with contextlib.suppress(OSError, ValueError):
            self._zip.close()

    def add(self, name: str, chunks: Iterable[Any]) -> str:
        """Write a member; returns its digest."""
        info = zipfile.ZipInfo(name)  # with zip's earliest date, so that equal modules make equal files
        info.external_attr = (stat.S_IFREG | 0o644) << 16
        # Zip64 is forced, so that the header has a known length: 20 bytes more.
        start = self._file.tell() + _LOCAL_HEADER.size + len(name.encode()) + 20
        info.extra = _padding(-(start + 4) % ALIGNMENT)
        digest, sums, size = hashlib.sha256(), Checksum(), 0
        with self._zip.open(info, "w", force_zip64=True) as member:
            self.places[name] = self._file.tell()
            for chunk in chunks:
                member.write(chunk)
                digest.update(chunk)
                sums.update(chunk)
                size += len(chunk)
        self._members[name] = {"size": size, "sha256": digest.hexdigest(), "sums": sums.hexdigest()}
        return digest.hexdigest()

    def flush(self) -> None:
        """Make the written data visible to other processes."""
        self._file.flush()

    def close(self, manifest: Mapping[str, Any]) -> str:
        """Write the manifest, with the digests of all members, and end the file; returns its digest."""
        text = json.dumps({**manifest, "members": self._members}, allow_nan=False).encode()
        seal = self.add(MANIFEST, [text])
        self.add(SEAL, [seal.encode()])
        self._zip.close()
        return seal


def _padding(count: int) -> bytes:
    return struct.pack("<HH", _PADDING, count) + bytes(count)


class Reader:
    """The members of a file, each checked against its digest before it is returned."""

    def __init__(self, source: str | os.PathLike[str] | bytes) -> None:
        self.path: str | None = None if isinstance(source, bytes) else os.fspath(source)
        self._file: BinaryIO | None = None
        file: BinaryIO
        if isinstance(source, bytes):
            self._buffer, file = memoryview(source), io.BytesIO(source)  # which shares the memory of bytes
        else:
            self._file = file = open(source, "rb")  # noqa: SIM115  # read again while members are checked
            weakref.finalize(self, self._file.close)
            self._buffer = memoryview(_mapped(self._file))
        self._address = np.frombuffer(self._buffer, np.uint8).ctypes.data
        try:
            self._places = _places(self._buffer, file)
            text = self._bytes(MANIFEST)
            self.seal: str = hashlib.sha256(text).hexdigest()
            if self.seal.encode() != self._bytes(SEAL):
                raise ArchiveError("the manifest does not match its digest")
            self.manifest: dict[str, Any] = _parsed(text)
            self._check_members()
        except (
            zipfile.BadZipFile,
            struct.error,
            KeyError,
            EOFError,
            UnicodeError,
            NotImplementedError,
        ) as error:
            raise ArchiveError(f"it is not a whole archive ({type(error).__name__}: {error})") from error

    def _bytes(self, name: str) -> bytes:
        start, size = self._places[name]
        return bytes(self._buffer[start : start + size])

    def _check_members(self) -> None:
        listed = self.manifest.get("members")
        if not isinstance(listed, dict) or not all(isinstance(item, dict) for item in listed.values()):
            raise ArchiveError("its manifest lists no members")
        for name in {*listed, *self._places} - {MANIFEST, SEAL}:
            if name not in listed or name not in self._places:
                where = "its manifest" if name not in listed else "the file"
                raise ArchiveError(f"{name!r} is not in {where}")

    @contextlib.contextmanager
    def checking(self, name: str) -> Iterator[memoryview]:
        """A large member, which another thread checks; ArchiveError at the end if it is damaged.

        The thread reads it from the file again, since reading the mapped memory would load all of it at once.
        """
        start, size = self._places[name]
        entry, checksum = self.manifest["members"][name], Checksum()

        def read() -> None:
            if self._file is None:
                checksum.update(self._buffer[start : start + size])
                return
            self._file.seek(start)
            buffer, left = memoryview(bytearray(_READ)), size
            while left and (count := self._file.readinto(buffer[: min(left, _READ)])):  # type: ignore[attr-defined]
                checksum.update(buffer[:count])
                left -= count

        thread = threading.Thread(target=read, name="intarsia-checksum", daemon=True)
        thread.start()
        try:
            yield self._buffer[start : start + size]
        finally:
            thread.join()
            if size != entry["size"] or checksum.hexdigest() != entry["sums"]:
                raise ArchiveError(f"{name} does not match its digest")

    def place(self, address: int, size: int) -> int | None:
        """The position in the file of something in memory; None if it is not part of the mapped file."""
        start = address - self._address
        return start if start >= 0 and start + size <= len(self._buffer) else None

    def is_still_there(self) -> bool:
        """Whether the path still leads to the file that is read."""
        if self._file is None or self.path is None:
            return False
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return os.path.samestat(status, os.fstat(self._file.fileno()))

    def member(self, name: str) -> memoryview:
        """A member in the mapped file. Writes to it stay in this process."""
        start, size = self._places[name]
        view, entry = self._buffer[start : start + size], self.manifest["members"][name]
        if size != entry["size"] or hashlib.sha256(view).hexdigest() != entry["sha256"]:
            raise ArchiveError(f"{name} does not match its digest")
        return view


def _mapped(file: BinaryIO) -> mmap.mmap:
    try:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError as error:  # the file is empty
        raise ArchiveError("it is empty") from error


def _places(buffer: memoryview, file: BinaryIO) -> dict[str, tuple[int, int]]:
    """The position of each member; ArchiveError unless all members are stored, plain and distinct."""
    listed = zipfile.ZipFile(file).infolist()
    if len(listed) > _MOST_MEMBERS:
        raise ArchiveError(f"it has {len(listed)} members; at most {_MOST_MEMBERS} are read")
    if min((info.header_offset for info in listed), default=0) > 0:
        # This happens if a file that contains an archive is truncated after it.
        raise ArchiveError("it is not a complete archive: there is data before its first member")
    places: dict[str, tuple[int, int]] = {}
    for info in listed:
        name, kind = info.filename, stat.S_IFMT(info.external_attr >> 16)
        if name in places:
            raise ArchiveError(f"it has two members {name!r}")
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.file_size != info.compress_size
            or info.flag_bits & 1
        ):
            raise ArchiveError(f"{name!r} is compressed or encrypted")
        if (
            kind != stat.S_IFREG
            or name != info.orig_filename
            or name.startswith("/")
            or ".." in name.split("/")
        ):
            raise ArchiveError(f"{name!r} is not a plain file of an archive")
        header = _LOCAL_HEADER.unpack_from(buffer, info.header_offset)
        start = info.header_offset + _LOCAL_HEADER.size + header[9] + header[10]
        written = bytes(buffer[info.header_offset + _LOCAL_HEADER.size :][: header[9]])
        if header[0] != b"PK\x03\x04" or written != name.encode() or start + info.file_size > len(buffer):
            raise ArchiveError(f"{name!r} is not where the file says")
        places[name] = (start, info.file_size)
    ends = 0
    for name, (start, size) in sorted(places.items(), key=lambda item: item[1]):
        if start < ends or start % ALIGNMENT:
            raise ArchiveError(f"{name!r} overlaps another member or is not aligned")
        ends = start + size
    return places


def strict_json(text: bytes, advice: str = "") -> Any:
    """JSON without forms that readers interpret differently; ValueError, with a clause, for other text.

    `advice` is added to the error about numbers that JSON does not have.

    >>> strict_json(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ...
    ValueError: a name occurs twice in an object
    """

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number in JSON{advice}")

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a name occurs twice in an object")
        return table

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=distinct)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        value = strict_json(text)
    except ValueError as error:
        raise ArchiveError(f"its manifest is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ArchiveError("its manifest is not a JSON object")
    return value


class Checksum:
    """A checksum of large members, which takes little longer than reading them.

    SHA-256 of BERT-base's weights takes longer than its engine needs to load them. So every mebibyte is a
    table of numbers whose rows and columns are summed, and SHA-256 is computed of the sums. Damage, zeroed
    pages and exchanged pieces change them; against forgery, no digest inside the file helps.

    >>> one, other = Checksum(), Checksum()
    >>> one.update(b"ab"); one.update(b"c"); other.update(b"abc")
    >>> one.hexdigest() == other.hexdigest() != Checksum().hexdigest()
    True
    """

    def __init__(self) -> None:
        self._sums = hashlib.sha256()
        self._rest = bytearray()

    def update(self, data: Any) -> None:
        """Add bytes."""
        view = memoryview(data).cast("B")
        if self._rest:
            missing = _BLOCK - len(self._rest)
            self._rest += view[:missing]
            view = view[missing:]
            if len(self._rest) < _BLOCK:
                return
            self._add(memoryview(self._rest))
            self._rest = bytearray()
        whole = len(view) // _BLOCK * _BLOCK
        for start in range(0, whole, _BLOCK):
            self._add(view[start : start + _BLOCK])
        self._rest += view[whole:]

    def _add(self, block: memoryview) -> None:
        table = np.frombuffer(block, "<u8").reshape(_ROWS, _COLUMNS)
        self._sums.update(table.sum(0).tobytes())
        self._sums.update(table.sum(1).tobytes())

    def hexdigest(self) -> str:
        """The digest of all bytes so far."""
        sums = self._sums.copy()
        sums.update(self._rest)
        return sums.hexdigest()

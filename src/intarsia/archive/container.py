"""The file: a zip of stored members at multiples of 64 bytes, each with its digest in a JSON manifest.

Stored and aligned members can be used where the file is mapped into memory. The last member is the digest of
the manifest, which has the digests of all others: a flipped bit in any of them is found before that
member is given out or, in a large one that is checked while others are read, before loading ends.

The digests tell damage from forgery, not who wrote the file: members whose digests fit are parsed as hostile
all the same.
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
from typing import Any, BinaryIO, NoReturn

import numpy as np

from intarsia.errors import ArchiveError

MANIFEST, SEAL = "manifest.json", "manifest.sha256"
ALIGNMENT = 64
_PADDING = 0x4950  # the id of the extra field that holds nothing but padding
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_MOST_MEMBERS = 100_000
_READ = 1 << 20  # bytes read at once, which a cache holds
_ROWS, _COLUMNS = 128, 1024  # of eight bytes each
_BLOCK = _ROWS * _COLUMNS * 8


class Writer:
    """Writes members one after another, and the manifest last."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._members: dict[str, dict[str, Any]] = {}
        self.places: dict[str, int] = {}  # where members begin

    def add(self, name: str, chunks: Iterable[Any]) -> str:
        """Write a member; its digest."""
        info = zipfile.ZipInfo(name)  # the date is zip's earliest: equal modules make equal files
        info.external_attr = (stat.S_IFREG | 0o644) << 16
        # Zip64 is forced, so that the length of the header is known: 20 bytes more.
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
        """Make the written data visible to others that open the file."""
        self._file.flush()

    def close(self, manifest: Mapping[str, Any]) -> str:
        """Write the manifest, with the digests of all members, and end the file; the manifest's digest."""
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
        """A large member, checked by another thread meanwhile; ArchiveError at the end where it is damaged.

        It is read from the file once more: checked where it is mapped, it would take up memory at once.
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
        """Where in the file something begins that is in memory; None for what is not a part of the file."""
        start = address - self._address
        return start if start >= 0 and start + size <= len(self._buffer) else None

    def is_still_there(self) -> bool:
        """Whether the path leads to the file that is read, and to no other one."""
        if self._file is None or self.path is None:
            return False
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return os.path.samestat(status, os.fstat(self._file.fileno()))

    def member(self, name: str) -> memoryview:
        """A member where the file is mapped; what is written there stays in this process."""
        start, size = self._places[name]
        view, entry = self._buffer[start : start + size], self.manifest["members"][name]
        if size != entry["size"] or hashlib.sha256(view).hexdigest() != entry["sha256"]:
            raise ArchiveError(f"{name} does not match its digest")
        return view


def _mapped(file: BinaryIO) -> mmap.mmap:
    try:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError as error:  # of an empty file
        raise ArchiveError("it is empty") from error


def _places(buffer: memoryview, file: BinaryIO) -> dict[str, tuple[int, int]]:
    """The position of each member; ArchiveError unless all members are stored, plain and distinct."""
    listed = zipfile.ZipFile(file).infolist()
    if len(listed) > _MOST_MEMBERS:
        raise ArchiveError(f"it has {len(listed)} members; at most {_MOST_MEMBERS} are read")
    if min((info.header_offset for info in listed), default=0) > 0:
        # This happens if a file is truncated after an archive that it contains.
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
    """JSON without what its readers take in different ways; ValueError, in a clause, for any other text.

    The `advice` is for numbers that JSON lacks.

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
    """A checksum of large members, which costs little more than reading them.

    SHA-256 of the weights of a BERT-base takes longer than its engine needs to load them. Here every
    mebibyte is a table of numbers whose rows and columns are added up, and SHA-256 is taken of the sums:
    damage, zeroed pages and exchanged pieces change them. (Forgery is nothing a digest inside the file could
    tell.)

    >>> one, other = Checksum(), Checksum()
    >>> one.update(b"ab"); one.update(b"c"); other.update(b"abc")
    >>> one.hexdigest() == other.hexdigest() != Checksum().hexdigest()
    True
    """

    def __init__(self) -> None:
        self._sums = hashlib.sha256()
        self._rest = bytearray()

    def update(self, data: Any) -> None:
        """Take more bytes."""
        view = memoryview(data).cast("B")
        if self._rest:
            wanted = _BLOCK - len(self._rest)
            self._rest += view[:wanted]
            view = view[wanted:]
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

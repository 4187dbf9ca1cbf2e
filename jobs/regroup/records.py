"""Rows as bytes in a spool: each with its identity, its values as they were read, or the error that reading gave.

Values come back equal and of the same type, whatever the format of the input was. A value that can't is refused
(ValueTypeError), never changed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, BinaryIO
from uuid import UUID

import msgpack
import pyarrow as pa

from gristmill.jobs.row_errors import RowError
from gristmill.jobs.rows import Row

_HEADER = struct.Struct("<II")  # bytes of the record, their CRC-32
_INT, _DATE, _TIME, _DATETIME, _TIMEDELTA, _DECIMAL, _TUPLE, _UUID = range(8)


class ValueTypeError(Exception):
    """A value that a spool can't hold."""


class DamagedRecordError(Exception):
    """The bytes are no whole record."""


def to_record(row: Row, columns: Collection[str]) -> bytes:
    """A row with its values of `columns`, or its error. Raises ValueTypeError."""
    values = row.values
    if values is not None:
        values = {name: value for name, value in values.items() if name in columns}
    error = None if row.error is None else (row.error.code, row.error.message)
    record = [row.source_index, row.row_index, values, None if error is None else list(error)]
    data: bytes = _pack(record)
    return _HEADER.pack(len(data), zlib.crc32(data)) + data


def iterate_records(file: BinaryIO) -> Iterator[Row]:
    """The rows from here to the end of the file. Raises DamagedRecordError."""
    while header := file.read(_HEADER.size):
        if len(header) < _HEADER.size:
            raise DamagedRecordError
        size, checksum = _HEADER.unpack(header)
        data = file.read(size)
        if len(data) < size or zlib.crc32(data) != checksum:
            raise DamagedRecordError
        source_index, row_index, values, error = _unpack(data)
        yield Row(source_index, row_index, values, None if error is None else RowError(*error))


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_to_ext, strict_types=True, unicode_errors="surrogatepass")
    return packed


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_from_ext, unicode_errors="surrogatepass", strict_map_key=False)


def _to_ext(value: Any) -> msgpack.ExtType:
    kind = type(value)
    if kind is int:  # over 64 bits
        return msgpack.ExtType(_INT, str(value).encode())
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, _pack(list(value)))
    if kind is Decimal:
        return msgpack.ExtType(_DECIMAL, str(value).encode())
    if kind is date:
        return msgpack.ExtType(_DATE, value.isoformat().encode())
    if kind is time and value.tzinfo is None:
        return msgpack.ExtType(_TIME, value.isoformat().encode())
    if kind is timedelta:
        return msgpack.ExtType(_TIMEDELTA, _pack([value.days, value.seconds, value.microseconds]))
    if kind is UUID:
        return msgpack.ExtType(_UUID, value.bytes)
    if isinstance(value, datetime):
        return msgpack.ExtType(_DATETIME, _pack_datetime(value))
    raise ValueTypeError(f"{kind.__module__}.{kind.__name__}")


def _from_ext(code: int, data: bytes) -> Any:
    if code == _INT:
        return int(data)
    if code == _TUPLE:
        return tuple(_unpack(data))
    if code == _DECIMAL:
        return Decimal(data.decode())
    if code == _DATE:
        return date.fromisoformat(data.decode())
    if code == _TIME:
        return time.fromisoformat(data.decode())
    if code == _TIMEDELTA:
        return timedelta(*_unpack(data))
    if code == _UUID:
        return UUID(bytes=data)
    assert code == _DATETIME, code
    microseconds, zone = _unpack(data)
    return pa.scalar(microseconds, pa.timestamp("us", zone)).as_py()


def _pack_datetime(value: datetime) -> bytes:
    """By way of Arrow, from which it comes: so its time zone comes back as the same kind of object."""
    try:
        scalar = pa.scalar(value)
        packed = _pack([scalar.value, scalar.type.tz])
        if _from_ext(_DATETIME, packed) == value:
            return packed
    except (pa.ArrowException, ValueError, OverflowError, KeyError):
        pass
    raise ValueTypeError("datetime.datetime")

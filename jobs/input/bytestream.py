"""Plain, gzip and zstd files as one stream of bytes with a position, read in blocks of bounded size."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from gristmill.jobs.errors import SourceError
from gristmill.jobs.input.files import expect_ranges, open_input
from gristmill.jobs.source import Source

BLOCK_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ByteStream:
    """The decompressed bytes of a source. Files of several gzip members or zstd frames are read to their end.

    SourceError when the file can't be read, changed, or its compressed data is damaged or cut off;
    SourceUnavailable when its place does not answer.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.position = 0
        self._raw: Any = open_input(source.uri, source.version, source.size_bytes)
        self._file: Any = self._raw
        if source.compression is not None:
            self._file = pa.CompressedInputStream(self._raw, source.compression)

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end."""
        try:
            block: bytes = self._file.read(size)
        except OSError as error:
            name, at = self._source.uri, self.position
            raise SourceError(
                f"can't read {name!r} after byte {at}: {error}; replace the damaged file"
            ) from None
        self.position += len(block)
        return block

    def move_to(self, position: int, end: int | None = None) -> None:
        """Moves forward to `position`; compressed data between is read and dropped.

        `end`: reading will stop there, so that nothing beyond it is fetched from a distant store.
        """
        assert position >= self.position
        if self._source.compression is None:
            if end is not None:
                expect_ranges(self._raw, [(position, end)])
            self._file.seek(position)
            self.position = position
        while self.position < position and self.read(min(BLOCK_BYTES, position - self.position)):
            pass

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        self._raw.close()

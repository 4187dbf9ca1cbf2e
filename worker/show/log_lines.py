"""How a worker logs: one line a record on stderr, facts as key=value at its end.

What libraries write is cut to its first line and loses its details, which may hold messages; passwords in URLs are
blotted out everywhere.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time

OURS = "gristmill"
MAX_FOREIGN_CHARS = 300
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_USER_INFO = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]*@")
_PASSWORD = re.compile(r"(?i)(pass(?:word|wd)?=)[^\s&]+")


class LineFormatter(logging.Formatter):
    """`2026-11-29T17:00:00Z INFO gristmill.worker.serve.serve: text key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        is_ours = record.name.partition(".")[0] == OURS
        text = record.getMessage()
        if is_ours:
            facts = record.__dict__.items()
            text += "".join(f" {name}={value}" for name, value in facts if name not in _STANDARD)
            if record.exc_info and record.exc_info[1] is not None:
                text += self._to_error_text(record)
        else:
            text = text.strip().partition("\n")[0][:MAX_FOREIGN_CHARS]
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        return f"{moment} {record.levelname} {record.name}: {hide_passwords(text)}"

    def _to_error_text(self, record: logging.LogRecord) -> str:
        assert record.exc_info is not None
        if os.environ.get("GRISTMILL_TRACEBACK"):
            return "\n" + self.formatException(record.exc_info)
        error = record.exc_info[1]
        return f" ({type(error).__name__}: {' '.join(str(error).split())})"


def hide_passwords(text: str) -> str:
    """The text with the passwords of its URLs blotted out."""
    return _PASSWORD.sub(r"\1***", _USER_INFO.sub(r"\1:***@", text))


def set_up_logging(level: int = logging.INFO) -> None:
    """Our records from `level` on and the libraries' warnings, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(OURS).setLevel(level)

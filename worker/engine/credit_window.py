"""How many rows the engine process is given at once: enough to choose from, few enough to redo after a crash."""

from __future__ import annotations

from gristmill.engine.null_engine import is_null_url, parse_null_url
from gristmill.engine.request import EngineInfo

ROWS_PER_SEQ = 4  # for each running sequence: the rows that wait show the batcher who shares a prefix
NULL_ROWS = 4096
NULL_WINDOW_S = 2.0  # of a null engine that delays its rows


def credit_window(model: str, info: EngineInfo) -> int:
    """The most rows in flight."""
    if not is_null_url(model):
        return ROWS_PER_SEQ * info.max_num_seqs
    delay_s = parse_null_url(model).delay_s
    return max(16, min(NULL_ROWS, int(NULL_WINDOW_S / delay_s))) if delay_s else NULL_ROWS

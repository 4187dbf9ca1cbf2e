"""The names of the column formats. Each is the name of a file in input/formats and of one in output/formats."""

from __future__ import annotations

from typing import Literal

InputFormatName = Literal["auto", "jsonl", "parquet"]  # auto: by the files' names
OutputFormatName = Literal["parquet", "jsonl"]

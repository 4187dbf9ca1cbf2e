"""Arrow IPC files in and out: found by name, planned, kept columns with their types, failed rows tried again."""

import subprocess
import sys

import pyarrow as pa
import pyarrow.dataset as ds

table = pa.table({"text": ["a", None, "ccc"], "number": pa.array([1, 2, 3], pa.int16())})
with pa.ipc.new_file("rows.arrow", table.schema) as writer:
    writer.write_table(table)
places = ["--database-url", "sqlite:///jobs.db"]
words = ["--model", "null:", "--prompt", "{{ text }}", "--keep", "number", "--output-format", "arrow"]
command = [sys.executable, "-m", "gristmill"]
subprocess.run([*command, "run", "rows.arrow", "--output", "out", *words, *places], check=True)
subprocess.run([*command, "retry", "out", *places], check=True)
found = ds.dataset("out", format="arrow", exclude_invalid_files=True).to_table()
assert found.schema.field("number").type == pa.int16()
assert found["number"].to_pylist() == [1, 2, 3]
assert [count or 0 for count in found["prompt_tokens"].to_pylist()] == [1, 0, 3]
assert found["error_code"].to_pylist() == [None, "null_value", None]

"""Whole jobs on the null: engine: end to end, refused, interrupted, cancelled, killed, resumed."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.engine.errors import ModelRefused
from gristmill.jobs.errors import RefusedError
from gristmill.jobs.plan import order

PROMPT = "{{ text }}"


def _rows(num_rows: int) -> list[dict[str, Any]]:
    return [{"text": f"row {i}", "custom_id": f"c{i}"} for i in range(num_rows)]


def test_a_jsonl_job_gives_a_completion_for_every_row(kit: Any) -> None:
    source = kit.write_jsonl(_rows(200))
    assert kit.run(source, prompt=PROMPT, keep=["text"]) == 0
    rows = kit.rows()
    assert [row["row_index"] for row in rows] == list(range(200))
    assert [row["custom_id"] for row in rows] == [f"c{i}" for i in range(200)]
    assert rows[7]["text"] == '"row 7"'
    assert {row["source"] for row in rows} == {str(source)}
    manifest = json.loads((kit.output / "_manifest.json").read_text())
    assert sum(part["rows"] for part in manifest["parts"]) == 200


def test_a_parquet_job_keeps_the_types_of_its_columns(kit: Any) -> None:
    days = [date(2026, 1, 1 + i % 28) for i in range(300)]
    source = kit.write_parquet({"text": [f"t{i}" for i in range(300)], "day": days})
    assert kit.run(source, prompt="{{ text }} on {{ day }}", keep=["day"], shard_rows=70) == 0
    rows = kit.rows()
    assert [row["day"] for row in rows] == days
    assert rows[0]["prompt_tokens"] == len("t0 on 2026-01-01")
    schemas = {str(pq.read_schema(part)) for part in kit.output.glob("part-*.parquet")}
    assert len(schemas) == 1


def test_jsonl_output_holds_the_same_rows(kit: Any) -> None:
    source = kit.write_jsonl(_rows(100))
    assert kit.run(source, prompt=PROMPT, output_format="jsonl") == 0
    lines = [
        line for part in sorted(kit.output.glob("part-*.jsonl")) for line in part.read_text().splitlines()
    ]
    assert [json.loads(line)["custom_id"] for line in lines] == [f"c{i}" for i in range(100)]


def test_bad_rows_of_every_kind_are_error_rows_at_their_place_and_the_job_completes(kit: Any) -> None:
    bad = {
        3: ('{"text":', "invalid_json"),
        5: ("[1]", "not_an_object"),
        8: ('{"other": 1}', "missing_column"),
        13: ('{"text": null}', "null_value"),
        21: ('{"text": ""}', "empty_prompt"),
        34: ('{"text": "\\ud800"}', "invalid_text"),
    }
    lines: list[Any] = [bad[i][0] if i in bad else {"text": f"row {i}"} for i in range(40)]
    lines[20] = ""
    assert kit.run(kit.write_jsonl(lines), prompt=PROMPT, shard_rows=10) == 0
    rows = kit.rows()
    assert [row["row_index"] for row in rows] == [i for i in range(40) if i != 20]
    found = {row["row_index"]: row["error_code"] for row in rows if row["error_code"]}
    assert found == {index: code for index, (_, code) in bad.items()}


def test_failures_of_the_engine_are_error_rows_too(kit: Any) -> None:
    assert kit.run(kit.write_jsonl(_rows(200)), prompt=PROMPT, model="null:?failure_rate=0.2") == 0
    codes = [row["error_code"] for row in kit.rows()]
    assert set(codes) == {None, "null_failure"}


def test_the_same_command_again_prints_the_summary_and_computes_nothing(
    kit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = kit.write_jsonl(_rows(50))
    kit.run(source, prompt=PROMPT)
    before = {path.name: path.stat().st_mtime_ns for path in kit.output.iterdir()}
    capsys.readouterr()
    display = kit.new_display()
    assert kit.run(source, display, prompt=PROMPT) == 0
    assert "completed" in capsys.readouterr().out
    assert display.updates == []
    assert {path.name: path.stat().st_mtime_ns for path in kit.output.iterdir()} == before


def test_an_input_without_rows_completes_with_an_empty_part(kit: Any) -> None:
    assert kit.run(kit.write_jsonl([]), prompt=PROMPT) == 0
    (part,) = kit.output.glob("part-*.parquet")
    assert pq.read_metadata(part).num_rows == 0


def test_a_job_of_which_every_row_failed_completes_with_exit_code_1(
    kit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kit.run(kit.write_jsonl(["{", "["]), prompt=PROMPT) == 1
    assert len(kit.rows()) == 2
    with kit.store() as store:
        assert store.jobs.find(str(kit.output)).state == "completed"
    assert "every row" in capsys.readouterr().err


def test_more_errors_than_allowed_fail_the_job_and_keep_what_is_done(
    kit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = kit.write_jsonl(_rows(500))
    code = kit.run(source, prompt=PROMPT, model="null:?failure_rate=0.5", max_errors="4%")
    assert code == 1
    with kit.store() as store:
        status = store.jobs.status(store.jobs.find(str(kit.output)).job_id)
    assert status.state == "failed"
    assert status.failed > 20
    assert len(kit.rows()) == status.completed + status.failed
    assert "20 that --max-errors accepts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "{{ txet }}"}, "text"),
        ({"prompt": "{{ text "}, "prompt"),
        ({"keep": ["colour"], "prompt": PROMPT}, "colour"),
        ({"model": "null:?speed=9", "prompt": PROMPT}, "speed"),
        ({"model": "/nowhere/model", "prompt": PROMPT}, "/nowhere/model"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_before_anything_is_written(
    kit: Any, fields: dict[str, Any], words: str
) -> None:
    source = kit.write_jsonl(_rows(3))
    with pytest.raises((RefusedError, ModelRefused), match=words) as refusal:
        kit.run(source, **fields)
    assert "\n" not in str(refusal.value)
    assert not kit.output.exists()
    with kit.store() as store:
        assert store.jobs.newest() == []


def test_inputs_that_do_not_exist_and_outputs_that_are_files_are_refused(kit: Any) -> None:
    source = kit.write_jsonl(_rows(3))
    with pytest.raises(RefusedError, match="missing"):
        kit.run(kit.folder / "missing.jsonl", prompt=PROMPT)
    with pytest.raises(RefusedError, match="folder"):
        kit.run(source, prompt=PROMPT, output=str(source))


def test_the_folder_of_another_job_is_refused_unless_it_may_be_overwritten(kit: Any) -> None:
    source = kit.write_jsonl(_rows(30))
    kit.run(source, prompt=PROMPT)
    with pytest.raises(RefusedError):
        kit.run(source, prompt="another {{ text }}")
    with pytest.raises(RefusedError):
        kit.run(source, prompt=PROMPT, if_exists="fail")
    assert kit.rows()[0]["prompt_tokens"] == len("row 0")
    assert kit.run(source, prompt="another {{ text }}", if_exists="overwrite") == 0
    assert kit.rows()[0]["prompt_tokens"] == len("another row 0")


def test_shards_whose_large_rows_are_kept_stay_small_enough_for_memory(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "MAX_KEPT_BYTES", 2000)
    rows = [{"text": "x" * 80} for _ in range(100)]
    kit.run(kit.write_jsonl(rows), prompt=PROMPT, keep=["text"])
    assert max(pq.read_metadata(part).num_rows for part in kit.output.glob("part-*")) <= 25
    assert len(kit.rows()) == 100


def test_output_is_readable_as_one_table_while_and_after_the_job_runs(kit: Any) -> None:
    kit.run(kit.write_jsonl(_rows(300)), prompt=PROMPT, shard_rows=50)
    table = pa.concat_tables([pq.read_table(part) for part in sorted(kit.output.glob("part-*.parquet"))])
    assert table.num_rows == 300


def test_failed_rows_of_a_local_job_are_computed_again_on_request(kit: Any) -> None:
    source = kit.write_jsonl([{"text": f"row {i}"} for i in range(200)])
    fields = {"prompt": "{{ text }}", "model": "null:?failure_rate=0.2", "shard_rows": 40}
    assert kit.run(source, **fields) == 0
    before = kit.rows()
    num_failed = sum(row["error_code"] == "null_failure" for row in before)
    display = kit.new_display()
    assert kit.resume(str(kit.output), display, retry=True) == 0
    assert f"{num_failed} failed rows are computed again" in display.notes[0]
    assert kit.rows() == before  # this model fails the same rows each time
    assert (kit.output / "_manifest.json").exists()
    with kit.store() as store:
        job = store.jobs.find(str(kit.output))
        status = store.jobs.status(job.job_id)
    assert (status.state, status.completed, status.failed) == ("completed", 200 - num_failed, num_failed)
    assert display.updates[-1].rows_done == 200


def test_a_retry_without_failed_rows_is_refused(kit: Any) -> None:
    source = kit.write_jsonl([{"text": "row"}])
    assert kit.run(source, prompt="{{ text }}") == 0
    with pytest.raises(RefusedError, match="no failed rows"):
        kit.resume(str(kit.output), retry=True)


def test_a_slash_behind_a_file_is_refused_and_behind_the_output_is_the_same_folder(kit: Any) -> None:
    source = kit.write_jsonl([{"text": "a"}])
    with pytest.raises(RefusedError, match="no such file or folder"):
        kit.run(f"{source}/", prompt=PROMPT)
    assert not kit.output.exists()
    assert kit.run(source, prompt=PROMPT, output=f"{kit.output}/") == 0
    assert kit.run(source, prompt=PROMPT) == 0
    assert len(kit.rows()) == 1

"""Local jobs that are interrupted, cancelled, killed and resumed: no finished row is lost, none doubled."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gristmill.jobs.errors import JobIsLive, RefusedError
from gristmill.jobs.spec import parse_spec
from gristmill.worker.local.run import RunInterrupted, run_job
from gristmill.worker.serve.stop_signals import StopSignals
from gristmill.worker.show.progress import Progress

LIMIT_S = 30.0
PROMPT = "{{ text }}"


def _rows(num_rows: int) -> list[dict[str, Any]]:
    return [{"text": f"row {i}", "custom_id": f"c{i}"} for i in range(num_rows)]


def _comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("row_index", "custom_id", "completion", "finish_reason", "prompt_tokens", "completion_tokens")
    return [{name: row[name] for name in (*names, "error_code")} for row in rows]


def _stop_after(num_rows: int, signals: StopSignals) -> Any:
    def on_update(progress: Progress) -> None:
        if progress.rows_done >= num_rows:
            signals.request_stop()

    return on_update


def test_an_interrupted_job_resumes_and_nothing_committed_is_computed_again(
    kit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = kit.write_jsonl(_rows(400))
    fields = {"prompt": PROMPT, "model": "null:?delay_ms=1", "shard_rows": 150}
    signals = StopSignals()
    display = kit.new_display(_stop_after(60, signals))
    assert kit.run(source, display, signals, **fields) == 130
    assert f"gristmill resume {display.job_id}" in capsys.readouterr().err
    num_safe = len(kit.rows())
    assert 60 <= num_safe < 400
    display = kit.new_display()
    assert kit.resume(display.job_id or str(kit.output), display) == 0
    assert display.updates[0].rows_done == num_safe
    assert [row["row_index"] for row in kit.rows()] == list(range(400))


def test_a_cancel_from_another_process_keeps_finished_rows_and_can_be_resumed(kit: Any) -> None:
    source = kit.write_jsonl(_rows(2000))

    def cancel(progress: Progress) -> None:
        if progress.rows_done >= 100 and not cancelled:
            cancelled.append(True)
            with kit.store() as store:
                store.ends.request_cancel(display.job_id)

    cancelled: list[bool] = []
    display = kit.new_display(cancel)
    assert kit.run(source, display, prompt=PROMPT, model="null:?delay_ms=1") == 1
    num_safe = len(kit.rows())
    assert 100 <= num_safe < 2000
    with kit.store() as store:
        status = store.jobs.status(display.job_id)
    assert status.state == "cancelled"
    assert status.completed + status.failed + status.skipped + status.not_run == 2000
    assert status.completed == num_safe
    assert kit.resume(display.job_id) == 0
    assert [row["row_index"] for row in kit.rows()] == list(range(2000))


def test_a_job_whose_input_changed_is_not_resumed(kit: Any) -> None:
    signals = StopSignals()
    display = kit.new_display(_stop_after(10, signals))
    source = kit.write_jsonl(_rows(300))
    kit.run(source, display, signals, prompt=PROMPT, model="null:?delay_ms=2")
    kit.write_jsonl(_rows(301))
    with pytest.raises(RefusedError, match="changed"):
        kit.resume(display.job_id)


def test_a_stop_while_the_model_loads_ends_the_run_at_once(kit: Any) -> None:
    signals = StopSignals()
    timer = threading.Timer(0.3, signals.request_stop)
    timer.start()
    started_s = time.monotonic()
    source = kit.write_jsonl(_rows(10))
    assert kit.run(source, None, signals, prompt=PROMPT, model="null:?load_ms=60000") == 130
    timer.join()
    assert time.monotonic() - started_s < 2.3
    assert not kit.output.exists()


def _command(source: Path, output: Path, **flags: str) -> list[str]:
    options = {"prompt": PROMPT, "max-tokens": "8", "shard-rows": "100", **flags}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return [sys.executable, "-m", "gristmill", "run", str(source), "--output", str(output), *words]


def _wait_for_rows(kit: Any, num_rows: int, process: subprocess.Popen[str]) -> str:
    """Waits until the job has so many rows committed or reported; its id."""
    deadline = time.monotonic() + LIMIT_S
    with kit.store() as store:
        while time.monotonic() < deadline and process.poll() is None:
            job = store.jobs.find(str(kit.output))
            if job is not None and store.jobs.status(job.job_id).rows_done >= num_rows:
                return str(job.job_id)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.02)
    pytest.fail(f"the run ended with {process.returncode}: {process.communicate()[1]}")


def test_a_live_job_is_named_to_a_second_run_and_stops_within_two_seconds_of_ctrl_c(kit: Any) -> None:
    source = kit.write_jsonl(_rows(4000))
    command = _command(source, kit.output, model="null:?delay_ms=2")
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        job_id = _wait_for_rows(kit, 100, process)
        fields = {"prompt": PROMPT, "max_tokens": 8, "model": "null:?delay_ms=2"}
        with pytest.raises(JobIsLive, match=job_id):
            kit.run(source, **fields)
        with pytest.raises(JobIsLive, match=job_id):
            kit.run(source, **fields, if_exists="overwrite")
        started_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        stderr = process.communicate(timeout=LIMIT_S)[1]
        assert time.monotonic() - started_s < 2.0
    assert process.returncode == 130
    assert f"gristmill resume {job_id}" in stderr
    with kit.store() as store:
        assert store.jobs.status(job_id).completed == len(kit.rows()) >= 100


def test_a_run_killed_at_any_moment_loses_no_row_and_doubles_none(kit: Any) -> None:
    source = kit.write_jsonl(_rows(1500))
    undisturbed = kit.folder / "undisturbed"
    assert kit.run(source, prompt=PROMPT, max_tokens=8, output=str(undisturbed)) == 0
    command = _command(source, kit.output, model="null:?delay_ms=1")
    chance = random.Random(7)
    for num_rows in (0, 200, 800):
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        ) as process:
            _wait_for_rows(kit, num_rows, process)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=chance.random() * 0.2)
            process.kill()
    finished = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert finished.returncode == 0, finished.stderr
    assert "goes on" in finished.stderr
    assert _comparable(kit.rows()) == _comparable(kit.rows(undisturbed))
    assert not (kit.output / "_attempts").exists()


def test_the_first_signal_only_sets_a_flag_while_rows_run() -> None:
    with StopSignals() as signals, signals.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.should_stop()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_first_signal_raises_while_nothing_is_at_stake() -> None:
    with StopSignals(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_that_was_asked_for_before_the_rows_run_raises_then() -> None:
    with StopSignals() as signals, pytest.raises(KeyboardInterrupt):
        signals.request_stop()
        with signals.deferred():
            pytest.fail("the stretch began")


def test_run_job_prints_nothing_and_says_how_it_ended(kit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = kit.write_jsonl(_rows(200))
    order = parse_spec(
        {"input": str(source), "output": str(kit.output), "model": "null:?delay_ms=1", "prompt": PROMPT}
    )
    signals = StopSignals()
    with pytest.raises(RunInterrupted, match="rows are done and safe"):
        run_job(order, None, kit.new_display(_stop_after(30, signals)), signals)
    assert run_job(order, None, kit.new_display()).state == "completed"
    assert capsys.readouterr() == ("", "")

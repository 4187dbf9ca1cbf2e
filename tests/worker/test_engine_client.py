"""The client of the engine process: nothing is lost or doubled when either side dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gristmill.engine.config import EngineOptions
from gristmill.engine.errors import EngineDied, ModelRefused
from gristmill.engine.request import Completion, Request, SamplingParams
from gristmill.worker.engine.client import EngineClient

LIMIT_S = 20.0


@contextmanager
def _client(
    model: str = "null:", max_num_seqs: int | None = None, wait: bool = True
) -> Iterator[EngineClient]:
    client = EngineClient(model, EngineOptions(max_num_seqs=max_num_seqs))
    client.start()
    try:
        if wait:
            client.wait_loaded(LIMIT_S, lambda: False)
        yield client
    finally:
        client.close()


def _request(request_id: int, text: str = "hi", sampling: SamplingParams | None = None) -> Request:
    return Request(request_id, array("I", list(text.encode())), sampling or SamplingParams(), request_id)


def _collect(client: EngineClient, num_rows: int) -> list[Completion]:
    deadline = time.monotonic() + LIMIT_S
    completions: list[Completion] = []
    while len(completions) < num_rows and time.monotonic() < deadline:
        completions += client.poll(0.5)
    return completions


def _poll_until_dead(client: EngineClient) -> tuple[list[Completion], EngineDied]:
    deadline = time.monotonic() + LIMIT_S
    completions: list[Completion] = []
    while time.monotonic() < deadline:
        try:
            completions += client.poll(0.5)
        except EngineDied as death:
            return completions, death
    pytest.fail("the engine process did not die")


def test_every_request_gives_exactly_one_completion() -> None:
    with _client() as client:
        client.add([_request(i) for i in range(1000)])
        client.add([_request(i) for i in range(1000, 3000)])
        completions = _collect(client, 3000)
        assert [c.request_id for c in completions] == list(range(3000))
        assert client.in_flight == {}
        assert client.counters.num_prompt_tokens == 6000


def test_requests_may_be_added_before_the_model_is_loaded() -> None:
    with _client("null:?load_ms=50", wait=False) as client:
        client.add([_request(1)])
        assert [c.request_id for c in _collect(client, 1)] == [1]
        assert client.info is not None and client.info.context_size == 1 << 20


def test_poll_returns_nothing_when_nothing_comes_in_time() -> None:
    with _client() as client:
        assert client.poll(0.0) == []
        assert client.poll(0.01) == []


def test_a_cancelled_request_is_forgotten_at_once_and_never_completes() -> None:
    with _client("null:?delay_ms=1") as client:
        client.add([_request(i) for i in range(300)])
        client.cancel(range(0, 300, 2))
        assert sorted(client.in_flight) == list(range(1, 300, 2))
        client.add([_request(1000)])
        completions = _collect(client, 151)
        assert [c.request_id for c in completions] == [*range(1, 300, 2), 1000]


def test_a_refused_model_says_why() -> None:
    with _client("null:?speed=9", wait=False) as client:
        with pytest.raises(ModelRefused, match="unknown key 'speed'"):
            client.wait_loaded(LIMIT_S, lambda: False)
        with pytest.raises(ModelRefused):
            client.poll(LIMIT_S)


def test_a_stop_ends_the_wait_for_a_model() -> None:
    with _client("null:?load_ms=60000", wait=False) as client:
        with pytest.raises(EngineDied, match="stopped"):
            client.wait_loaded(LIMIT_S, lambda: True)
        assert client.pid is None


def test_a_model_that_loads_too_long_is_an_engine_death() -> None:
    with _client("null:?load_ms=60000", wait=False) as client:
        client.add([_request(1)])
        with pytest.raises(EngineDied, match=r"did not load within 0\.05 s") as death:
            client.wait_loaded(0.05, lambda: False)
        assert death.value.in_flight == (1,)


def test_kill_9_of_the_engine_names_the_requests_in_flight() -> None:
    with _client("null:?delay_ms=60000") as client:
        client.add([_request(i) for i in (5, 3, 4)])
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        completions, death = _poll_until_dead(client)
        assert completions == []
        assert death.in_flight == (5, 3, 4)
        assert death.exit_code == -signal.SIGKILL
        assert "SIGKILL" in str(death) and "\n" not in str(death)
        assert client.pid is None


def test_what_was_finished_before_a_crash_is_handed_out_first() -> None:
    with _client("null:?crash_on=BOOM", max_num_seqs=1) as client:
        client.add([_request(1), _request(2), _request(3, "a BOOM b"), _request(4)])
        completions, death = _poll_until_dead(client)
        assert [c.request_id for c in completions] == [1, 2]
        assert death.in_flight == (3, 4)


def test_a_restarted_engine_goes_on_and_so_do_the_counters() -> None:
    with _client("null:?crash_on=BOOM", max_num_seqs=1) as client:
        client.add([_request(1), _request(2, "BOOM")])
        _poll_until_dead(client)
        client.add([_request(3)])  # to a dead engine: it shows at the next poll
        with pytest.raises(EngineDied) as death:
            client.poll(LIMIT_S)
        again = [client.in_flight[request_id] for request_id in death.value.in_flight]
        client.start()
        assert client.in_flight == {}
        client.add([request for request in again if request.request_id == 3])
        assert [c.request_id for c in _collect(client, 1)] == [3]
        assert (client.counters.num_steps, client.counters.num_prompt_tokens) == (2, 4)


def test_full_sockets_in_both_directions_do_not_deadlock() -> None:
    long_text = SamplingParams(max_tokens=50_000, ignore_eos=True)  # a completion of 250 KB
    with _client() as client:
        client.add([_request(i, sampling=long_text) for i in range(100)])
        prompt = array("I", bytes(400_000))
        client.add([Request(100 + i, prompt, SamplingParams()) for i in range(100)])
        assert len(_collect(client, 200)) == 200


def test_ctrl_c_in_the_process_group_of_the_engine_does_not_end_it() -> None:
    with _client() as client:
        assert client.pid is not None
        assert os.getpgid(client.pid) == client.pid != os.getpgrp()
        os.killpg(client.pid, signal.SIGINT)
        client.add([_request(1)])
        assert len(_collect(client, 1)) == 1


def test_an_engine_outlives_the_thread_that_called_start() -> None:
    client = EngineClient("null:", EngineOptions())
    starter = threading.Thread(target=client.start)
    starter.start()
    starter.join()
    try:
        client.add([_request(1)])
        assert len(_collect(client, 1)) == 1
    finally:
        client.close()


def test_an_idle_engine_keeps_reporting() -> None:
    with _client() as client:
        first_s = client.last_progress_s
        deadline = time.monotonic() + LIMIT_S
        while client.last_progress_s == first_s and time.monotonic() < deadline:
            assert client.poll(0.05) == []
        assert first_s < client.last_progress_s < first_s + 1.0


def test_kill_and_close_may_be_repeated_in_any_order() -> None:
    with _client() as client:
        client.kill()
        client.kill()
        with pytest.raises(EngineDied) as death:
            client.poll(LIMIT_S)
        assert death.value.exit_code == -signal.SIGKILL
        client.close()
        client.close()
        client.kill()
        with pytest.raises(EngineDied, match="no engine process is running"):
            client.poll(0.0)


def test_close_is_quick_and_reaps_also_within_a_long_step() -> None:
    with _client("null:?delay_ms=60000") as client:
        client.add([_request(1)])
        pid = client.pid
        assert pid is not None
        start = time.monotonic()
        client.close()
        assert time.monotonic() - start < 2.0
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_twenty_restarts_leave_no_file_descriptor_or_process_behind() -> None:
    with _client() as client:
        before = len(os.listdir("/proc/self/fd"))
        pids = []
        for i in range(20):
            pids.append(client.pid)
            if i % 2:
                client.kill()
            client.start()
        client.wait_loaded(LIMIT_S, lambda: False)
        assert len(os.listdir("/proc/self/fd")) == before
        assert [t.name for t in threading.enumerate()].count("engine-io") == 1
        for pid in pids:
            assert pid is not None
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


PARENT = """
import sys
from array import array
from gristmill.engine.config import EngineOptions
from gristmill.engine.request import Request, SamplingParams
from gristmill.worker.engine.client import EngineClient
client = EngineClient(sys.argv[1], EngineOptions())
client.start()
if "load_ms" not in sys.argv[1]:
    client.wait_loaded(20, lambda: False)
    client.add([Request(1, array("I", [97]), SamplingParams())])
print(client.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("model", ["null:", "null:?load_ms=60000", "null:?delay_ms=60000"])
def test_the_engine_is_gone_two_seconds_after_kill_9_of_its_parent(model: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PARENT, model], env=env, stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            assert select.select([pidfd], [], [], 2.0)[0]
        finally:
            os.close(pidfd)


def test_a_process_that_can_not_be_spawned_is_an_engine_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with _client(wait=False) as client:
        with pytest.raises(EngineDied, match="could not be started"):
            client.wait_loaded(LIMIT_S, lambda: False)


def test_a_process_that_fails_by_itself_is_named_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho first; echo the last words >&2; exit 7\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with _client(wait=False) as client:
        with pytest.raises(EngineDied, match="exited with code 7: the last words") as death:
            client.wait_loaded(LIMIT_S, lambda: False)
        assert death.value.exit_code == 7


def test_a_module_of_the_users_folder_does_not_shadow_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("engine", "queue", "logging"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong module')")
    monkeypatch.chdir(tmp_path)
    with _client() as client:
        client.add([_request(1)])
        assert len(_collect(client, 1)) == 1

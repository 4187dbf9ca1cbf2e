"""The command line: words into specs, exit codes, one line for each error. The runs are real, on `null:`."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import gristmill.worker.cli.main
from gristmill.engine.config import engine_flags
from gristmill.engine.errors import EngineDied, ModelRefused
from gristmill.jobs.errors import JobIsLive, OutputError, RefusedError
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.spec import flags as spec_flags
from tests.worker.conftest import Invoke


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """The specs that `run` hands on, without running them."""
    received: list[JobSpec] = []

    def run_local(spec: JobSpec, database_url: str | None, display: Any) -> int:
        received.append(spec)
        return 0

    monkeypatch.setattr("gristmill.worker.local.run.run_local", run_local)
    return received


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"custom_id": f"r{i}", "text": f"row {i}"}) + "\n" for i in range(40)))
    return path


def fail_with(error: BaseException) -> Callable[..., int]:
    def run_local(*_: object) -> int:
        raise error

    return run_local


def test_help_names_every_command(invoke: Invoke) -> None:
    code, out, err = invoke("--help")
    assert (code, err) == (0, "")
    names = ("run", "submit", "worker", "resume", "retry", "workers", "migrate", "clean")
    for name in (*names, "list", "status", "cancel", "schema", "doctor", "bench", "compare", "quantize"):
        assert f"\n  {name} " in out


def test_no_words_print_the_help(invoke: Invoke) -> None:
    assert invoke() == invoke("--help")


def test_the_version_is_printed(invoke: Invoke) -> None:
    code, out, err = invoke("--version")
    assert (code, err) == (0, "")
    assert out.startswith("gristmill ")


@pytest.mark.parametrize(
    ("command", "others"),
    [
        ("run", {"database_url"}),
        ("submit", {"database_url", "broker_url", "idempotency_key", "wait"}),
    ],
)
def test_the_flags_of_an_order_are_the_fields_of_the_spec(command: str, others: set[str]) -> None:
    built = typer.main.get_command(gristmill.worker.cli.main.app).commands[command]  # type: ignore[attr-defined]
    flags = {param.name for param in built.params}
    assert flags - others - {"prompt_file", "spec_file"} == {
        name for name, flag in spec_flags().items() if flag.only in (None, command)
    }
    for param in built.params:
        words = {"input": "input", "spec_file": "--spec"}
        assert set(param.opts) == {words.get(param.name, f"--{param.name.replace('_', '-')}")}


def test_the_engine_takes_what_an_order_may_ask_of_it() -> None:
    for name in ("dtype", "quantization", "kv_dtype"):
        field, flag = JobSpec.model_fields[name], engine_flags()[name]
        assert (get_args(field.annotation), field.description) == (flag.choices, flag.help)


SPEC_FILE = {"input": "a.jsonl", "output": "out", "model": "null:", "prompt": "a", "sampling": {"top_k": 4}}


def test_a_spec_file_is_the_order_and_flags_override_it(
    invoke: Invoke, specs: list[JobSpec], tmp_path: Path
) -> None:
    (tmp_path / "order.json").write_text(json.dumps(SPEC_FILE | {"limit": 5}))
    (tmp_path / "order.toml").write_text(
        'input = ["a.jsonl"]\noutput = "out"\nmodel = "null:"\nprompt = "a"\nlimit = 5\n[sampling]\ntop_k = 4\n'
    )
    for name in ("order.json", "order.toml"):
        assert invoke("run", "--spec", str(tmp_path / name)) == (0, "", "")
    words = ("b.jsonl", "--limit", "7", "--messages", "chat", "--sampling", "top_p=0.5")
    assert invoke("run", "--spec", str(tmp_path / "order.json"), *words) == (0, "", "")
    whole = JobSpec.model_validate(SPEC_FILE | {"limit": 5})
    changes = {
        "input": ["b.jsonl"],
        "limit": 7,
        "prompt": None,
        "messages": "chat",
        "sampling": {"top_p": 0.5},
    }
    assert specs == [whole, whole, JobSpec.model_validate(SPEC_FILE | changes)]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.json", None, "none.json"),
        ("order.yaml", "", ".json or .toml"),
        ("order.json", "{", "not valid JSON"),
        ("order.toml", "=", "not valid TOML"),
        ("order.json", "[1]", "holds no object"),
        ("order.json", json.dumps(SPEC_FILE | {"promt": "x"}), "promt is not an option"),
        ("order.json", json.dumps(SPEC_FILE | {"priority": "high"}), "priority is not an option"),
        ("order.json", json.dumps(SPEC_FILE | {"limit": 0}), "limit is 0"),
        ("order.json", '{"input": "a", "output": "o"}', "--model"),
    ],
)
def test_a_bad_spec_file_is_one_line(
    invoke: Invoke, specs: list[JobSpec], tmp_path: Path, name: str, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    code, out, err = invoke("run", "--spec", str(tmp_path / name))
    assert (code, out, err.count("\n"), specs) == (2, "", 1, [])
    assert said in err


def test_the_shell_completes_flags(repo_root: Path) -> None:
    words = {"_GRISTMILL_COMPLETE": "complete_bash", "COMP_WORDS": "gristmill run --on", "COMP_CWORD": "2"}
    command = [sys.executable, "-m", "gristmill"]
    done = subprocess.run(
        command, cwd=repo_root, env=os.environ | words, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split()) == (0, ["--on-null", "--on-too-long"])


def test_only_flags_that_were_given_reach_the_spec(invoke: Invoke, specs: list[JobSpec]) -> None:
    assert invoke("run", "a.jsonl", "--output", "out", "--model", "null:") == (0, "", "")
    assert specs == [JobSpec(input=["a.jsonl"], output="out", model="null:")]


def test_every_flag_reaches_the_spec(invoke: Invoke, specs: list[JobSpec]) -> None:
    words = (
        "run a.jsonl b.parquet --output out --model null: --prompt {{x}} --system be --max-tokens 7 "
        "--seed -3 --sampling temperature=0.5,top_k=4 --stop END --stop . --input-format jsonl "
        "--output-format jsonl --keep a,b --keep c --limit 9 --on-null skip --on-too-long truncate-left "
        "--max-errors 5% --dtype float32 --if-exists fail --shard-rows 64"
    )
    assert invoke(*words.split()) == (0, "", "")
    assert specs[0].model_dump(exclude_defaults=True) == {
        "input": ["a.jsonl", "b.parquet"],
        "output": "out",
        "model": "null:",
        "prompt": "{{x}}",
        "system": "be",
        "max_tokens": 7,
        "sampling": {"temperature": 0.5, "top_k": 4},
        "seed": -3,
        "stop": ["END", "."],
        "input_format": "jsonl",
        "output_format": "jsonl",
        "keep": ["a", "b", "c"],
        "limit": 9,
        "on_null": "skip",
        "on_too_long": "truncate-left",
        "max_errors": "5%",
        "dtype": "float32",
        "if_exists": "fail",
        "shard_rows": 64,
    }


def test_a_prompt_file_is_the_prompt(invoke: Invoke, specs: list[JobSpec], tmp_path: Path) -> None:
    template = tmp_path / "prompt.txt"
    template.write_text("Dịch: {{ text }}\n", encoding="utf-8")
    assert (
        invoke("run", "a.jsonl", "--output", "o", "--model", "null:", "--prompt-file", str(template))[0] == 0
    )
    assert specs[0].prompt == "Dịch: {{ text }}\n"


@pytest.mark.parametrize("code", [0, 1, 130])
def test_the_exit_code_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch, invoke: Invoke, code: int) -> None:
    monkeypatch.setattr("gristmill.worker.local.run.run_local", lambda *_: code)
    monkeypatch.setattr("gristmill.worker.local.run.resume_local", lambda *_: code)
    assert invoke("run", "a.jsonl", "--output", "o", "--model", "null:")[0] == code
    assert invoke("resume", "job_a")[0] == code


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RefusedError("no such file"), 2, "gristmill: no such file\n"),
        (ModelRefused("no weights\nhere"), 2, "gristmill: no weights here\n"),
        (OutputError("disk full: free some"), 1, "gristmill: disk full: free some\n"),
        (EngineDied("killed by signal 9", -9, ()), 1, "gristmill: killed by signal 9\n"),
        (KeyError("x"), 1, "gristmill: internal error, KeyError: 'x' (GRISTMILL_TRACEBACK=1 shows where)\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, invoke: Invoke, error: BaseException, code: int, line: str
) -> None:
    monkeypatch.setattr("gristmill.worker.local.run.run_local", fail_with(error))
    assert invoke("run", "a.jsonl", "--output", "o", "--model", "null:") == (code, "", line)


def test_a_live_job_is_named_and_exits_1(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.setattr(
        "gristmill.worker.local.run.run_local", fail_with(JobIsLive("job_a", "process 12 on box"))
    )
    code, out, err = invoke("run", "a.jsonl", "--output", "o", "--model", "null:")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "job_a" in err
    assert "process 12" in err


def test_a_developer_can_ask_for_the_traceback(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.setenv("GRISTMILL_TRACEBACK", "1")
    monkeypatch.setattr("gristmill.worker.local.run.run_local", fail_with(KeyError("x")))
    with pytest.raises(KeyError):
        invoke("run", "a.jsonl", "--output", "o", "--model", "null:")


def test_schema_prints_the_schema_of_the_spec(invoke: Invoke) -> None:
    code, out, err = invoke("schema")
    assert (code, err) == (0, "")
    assert json.loads(out) == JobSpec.model_json_schema()


def test_doctor_prints_json_and_fails_with_a_check(invoke: Invoke, tmp_path: Path) -> None:
    code, out, err = invoke("doctor", "--json", "--model", "null:")
    assert (code, err) == (0, "")
    assert {"name", "state", "detail", "remedy"} == set(json.loads(out)["checks"][0])
    code, out, err = invoke("doctor", "--model", str(tmp_path))
    assert (code, err) == (1, "")
    assert "fail  model" in out


# What must be refused: {rows} is a good input, {tmp} a folder; the line must hold the last string.
BAD_WORDS = {
    "no such file": ("nowhere.jsonl", "--prompt {{{{text}}}}", "nowhere.jsonl"),
    "an unknown column": ("{rows}", "--prompt {{{{txet}}}}", "text"),
    "template syntax": ("{rows}", "--prompt {{{{text", "prompt"),
    "neither prompt nor messages": ("{rows}", "", "--prompt"),
    "an unknown messages column": ("{rows}", "--messages chat", "text"),
    "an unknown kept column": ("{rows}", "--prompt {{{{text}}}} --keep nope", "nope"),
    "prompt with messages": ("{rows}", "--prompt {{{{text}}}} --messages text", "--messages"),
    "prompt with prompt file": ("{rows}", "--prompt a --prompt-file {rows}", "--prompt-file"),
    "no prompt file": ("{rows}", "--prompt-file {tmp}/none.txt", "none.txt"),
    "sampling nonsense": ("{rows}", "--prompt {{{{text}}}} --sampling nonsense", "nonsense"),
    "an unknown sampling key": ("{rows}", "--prompt {{{{text}}}} --sampling temprature=1", "temperature"),
    "a sampling value": ("{rows}", "--prompt {{{{text}}}} --sampling top_p=2", "top_p"),
    "max errors nonsense": ("{rows}", "--prompt {{{{text}}}} --max-errors many", "many"),
    "a negative limit": ("{rows}", "--prompt {{{{text}}}} --limit -1", "limit"),
    "shards of no rows": ("{rows}", "--prompt {{{{text}}}} --shard-rows 0", "shard_rows"),
    "no output tokens": ("{rows}", "--prompt {{{{text}}}} --max-tokens 0", "max_tokens"),
    "a word that is not a number": ("{rows}", "--prompt {{{{text}}}} --limit ten", "--limit"),
    "a choice that is none": ("{rows}", "--prompt {{{{text}}}} --on-null maybe", "--on-null"),
    "an unknown flag": ("{rows}", "--promt x", "--promt"),
    "no database": (
        "{rows}",
        "--prompt {{{{text}}}} --database-url sqlite:///{rows}/jobs.db",
        "--database-url",
    ),
    "a database URL": ("{rows}", "--prompt {{{{text}}}} --database-url nonsense", "database URL"),
    "a model that is not there": ("{rows}", "--prompt {{{{text}}}} --model {tmp}/none.gguf", "none.gguf"),
    "a model folder without weights": ("{rows}", "--prompt {{{{text}}}} --model {tmp}/empty", "safetensors"),
    "an unsupported architecture": ("{rows}", "--prompt {{{{text}}}} --model {tmp}/gpt2", "gpt2"),
    "an unknown null setting": ("{rows}", "--prompt {{{{text}}}} --model null:?speed=9", "speed"),
}


LLAMA_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 1,
}


@pytest.mark.parametrize("name", BAD_WORDS)
def test_bad_words_are_refused_before_any_work(
    invoke: Invoke, rows: Path, tmp_path: Path, repo_root: Path, name: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(
        '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}'
    )
    (tmp_path / "gpt2" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    given, flags, said = BAD_WORDS[name]
    words = [word.format(rows=rows, tmp=tmp_path) for word in (given, *flags.split())]
    output = tmp_path / "out"
    model = [] if "--model" in words else ["--model", "null:"]
    code, out, err = invoke("run", *words, "--output", str(output), *model)
    assert (code, out) == (2, ""), err
    assert err.startswith("gristmill: "), err
    assert err.count("\n") == 1, err
    assert said in err
    assert "Traceback" not in err
    assert not output.exists()


@pytest.mark.parametrize("below", ["", "out"])
def test_an_output_that_cannot_be_written_is_refused(
    invoke: Invoke, rows: Path, tmp_path: Path, below: str
) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    output = str(blocker / below)
    code, out, err = invoke("run", str(rows), "--output", output, "--model", "null:", "--prompt", "a")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(blocker) in err


@pytest.mark.parametrize("command", ["status", "resume", "cancel"])
def test_an_unknown_job_is_refused(invoke: Invoke, command: str) -> None:
    code, out, err = invoke(command, "job_nowhere")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "job_nowhere" in err
    assert "gristmill list" in err


def test_a_list_of_nothing_is_json_too(invoke: Invoke) -> None:
    assert invoke("list", "--json") == (0, "[]\n", "")


def test_a_run_prints_its_table_and_every_read_knows_the_job(
    invoke: Invoke, rows: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    words = ("run", str(rows), "--output", str(output), "--model", "null:", "--prompt", "{{ text }}")
    code, out, err = invoke(*words, "--max-tokens", "4")
    assert code == 0, err
    job_id = out.split()[0]
    assert f"{job_id}  completed after" in out
    assert "40: 40 completed, 0 failed, 0 skipped, 0 not run" in out
    assert "p50" in out
    assert "40/40 rows (100%)" in err

    code, out, err = invoke("status", str(output), "--json")
    found = json.loads(out)
    assert (code, err, found["job_id"], found["state"]) == (0, "", job_id, "completed")
    assert (found["rows"], found["completed"], found["resume"], found["is_live"]) == (40, 40, None, False)
    assert invoke("status", job_id)[1].startswith(f"{job_id}  completed after")
    assert [job["job_id"] for job in json.loads(invoke("list", "--json")[1])] == [job_id]
    assert "40/40" in invoke("list")[1]
    assert invoke("cancel", job_id)[:2] == (0, f"{job_id}: completed\n")

    code, again, _ = invoke(*words, "--max-tokens", "4")
    assert (code, again.split()[0]) == (0, job_id)
    manifest = json.loads((output / "_manifest.json").read_text())
    assert sum(part["rows"] for part in manifest["parts"]) == 40


def test_more_errors_than_allowed_exit_1_and_can_be_resumed(
    invoke: Invoke, rows: Path, tmp_path: Path
) -> None:
    words = (
        "run",
        str(rows),
        "--output",
        str(tmp_path / "out"),
        "--prompt",
        "{{ text }}",
        "--max-errors",
        "3",
    )
    code, out, err = invoke(*words, "--model", "null:?failure_rate=1.0")
    assert code == 1, err
    assert "failed after" in out
    assert "gristmill resume" in out
    assert "Traceback" not in err


def run_process(repo_root: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gristmill", *words]
    options = {"capture_output": True, **options}
    return subprocess.run(command, cwd=repo_root, text=True, timeout=60, check=False, **options)


def interrupt_on_a_terminal(repo_root: Path, words: list[str]) -> tuple[int, str]:
    """Run with a terminal as stderr and press Ctrl-C once rows are done: exit code, and what was shown."""
    terminal, stderr = pty.openpty()
    command = [sys.executable, "-m", "gristmill", *words]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    shown, is_interrupted = "", False
    with subprocess.Popen(
        command, cwd=repo_root, stdout=subprocess.PIPE, stderr=stderr, env=environment
    ) as run:
        os.close(stderr)
        with suppress(OSError):  # how Linux tells that the other side of a terminal is closed
            while chunk := os.read(terminal, 65536):
                shown += chunk.decode()
                if not is_interrupted and re.search(r"[1-9]\d*/400 rows", shown):
                    is_interrupted = True
                    run.send_signal(signal.SIGINT)
    os.close(terminal)
    return run.returncode, shown


def test_ctrl_c_then_cancel_then_resume(invoke: Invoke, tmp_path: Path, repo_root: Path) -> None:
    rows, output = tmp_path / "many.jsonl", str(tmp_path / "out")
    rows.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(400)))
    words = ["run", str(rows), "--output", output, "--model", "null:?delay_ms=5", "--prompt", "{{ text }}"]
    code, shown = interrupt_on_a_terminal(repo_root, [*words, "--max-tokens", "4"])
    assert code == 130, shown
    assert "tok/s" in shown
    assert "Traceback" not in shown
    last = shown.splitlines()[-1].removeprefix("\x1b[?25h")  # the live line gave the cursor back
    assert last.startswith("gristmill: interrupted: ")
    job_id = last.split()[-1]
    assert last.endswith(f"gristmill resume {job_id}")

    found = json.loads(invoke("status", output, "--json")[1])
    assert (found["job_id"], found["state"], found["is_live"]) == (job_id, "in_progress", False)
    assert found["resume"] == f"gristmill resume {job_id}"
    assert 0 < found["completed"] < 400
    assert invoke("cancel", output) == (0, f"{job_id}: cancelled\n", "")
    code, out, err = invoke("resume", job_id)
    assert code == 0, err
    assert "400: 400 completed, 0 failed" in out


def test_a_name_that_the_terminal_cannot_spell_is_still_printed(repo_root: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = run_process(repo_root, "doctor", "--json", "--model", "null:?vé=1", env=environment)
    assert done.returncode == 1
    assert done.stderr == ""
    assert "null:" in done.stdout


def test_status_imports_no_torch(invoke: Invoke, rows: Path, tmp_path: Path, repo_root: Path) -> None:
    output = str(tmp_path / "out")
    assert invoke("run", str(rows), "--output", output, "--model", "null:", "--prompt", "a")[0] == 0
    code = (
        "import sys; from gristmill.worker.cli.main import run_cli; code = run_cli(['status', sys.argv[1]]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, output]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "completed after" in done.stdout


def test_help_answers_within_a_second(repo_root: Path) -> None:
    def measure() -> float:
        start_s = time.perf_counter()
        assert run_process(repo_root, "--help").returncode == 0
        return time.perf_counter() - start_s

    assert any(measure() < 1.0 for _ in range(5))  # the best of five: the machine may be busy


def test_an_interrupt_within_generated_code_keeps_the_exit_code(repo_root: Path, tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(
        "import gristmill.worker.cli.main\n"
        "def run_cli(words):\n"
        "    try:\n"
        "        exec('import signal; signal.raise_signal(signal.SIGINT)')\n"
        "    except KeyboardInterrupt:\n"
        "        return 130\n"
        "gristmill.worker.cli.main.run_cli = run_cli\n"
        "gristmill.worker.cli.main.main()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(
        command, cwd=repo_root, env=environment, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize("words", [["list", "--json"], ["schema"], ["status", "job_nowhere"]])
def test_a_reader_that_went_away_is_no_error(repo_root: Path, words: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = "stderr" if words[0] == "status" else "stdout"
    other = "stdout" if stream == "stderr" else "stderr"
    done = run_process(repo_root, *words, capture_output=False, **{stream: write_end, other: subprocess.PIPE})
    os.close(write_end)
    assert done.returncode == (2 if words[0] == "status" else 0)
    assert not getattr(done, other)

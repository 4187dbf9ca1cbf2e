"""The options that several commands share, each written once.

The flags of an order come from the fields of JobSpec, those of the engine from the fields of EngineOptions: a
command names a parameter that stands for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import Parameter
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

from gristmill.engine.config import EngineOptions, engine_flags
from gristmill.jobs.spec import JobSpec, load_file, parse_sampling, parse_spec
from gristmill.jobs.spec import flags as spec_flags
from gristmill.worker.show.console import UsageRefused

if TYPE_CHECKING:
    from gristmill.jobs.records import JobRecord
    from gristmill.jobs.store.store import Store

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Job database; else GRISTMILL_DATABASE_URL, else SQLite in the user's state folder.",
    ),
]
BrokerUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="Redis as redis://HOST:PORT/N; else GRISTMILL_BROKER_URL.")
]
JobReference = Annotated[str, typer.Argument(metavar="JOB|DIR", help="A job's id or its output folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

PromptFile = Annotated[str | None, typer.Option(metavar="F", help="The same, read from a file.")]

Command = Callable[..., int]


def take_order(command: Command) -> Command:
    """Gives `gristmill run` or `submit` the flags of an order for its parameter `spec`."""
    is_run = command.__name__ == "run"
    names = [name for name, flag in spec_flags().items() if flag.only in (None, command.__name__)]
    flags = [_spec_parameter(name, on_queue=not is_run) for name in names]
    spec_file = Annotated[
        str | None,
        typer.Option(
            "--spec",
            metavar="FILE",
            help="An order as JSON or TOML (see `gristmill schema`); flags override.",
            callback=_load_spec_file,
            is_eager=True,
        ),
    ]
    flags.insert(1, _parameter("spec_file", spec_file))
    flags.insert(names.index("prompt") + 2, _parameter("prompt_file", PromptFile))
    return _expand(command, "spec", flags, build_spec)


def take_fields(*names: str) -> Callable[[Command], Command]:
    """Gives a command the flags of these fields of JobSpec, and --prompt-file with `prompt`, for its parameter
    `fields`: the values of those that were given.
    """

    def decorate(command: Command) -> Command:
        flags = [_spec_parameter(name) for name in names]
        if "prompt" in names:
            flags.insert(names.index("prompt") + 1, _parameter("prompt_file", PromptFile))
        return _expand(command, "fields", flags, dict)

    return decorate


def take_engine_options(*names: str) -> Callable[[Command], Command]:
    """Gives a command the flags of these EngineOptions, which are its parameter `engine_options`."""

    def decorate(command: Command) -> Command:
        flags = [_engine_parameter(name) for name in names]
        return _expand(command, "engine_options", flags, _build_engine_options)

    return decorate


def _expand(
    command: Command, name: str, flags: Sequence[Parameter], build: Callable[[dict[str, Any]], Any]
) -> Command:
    """The command with `flags` in the place of its parameter `name`, which is built of those that were given."""
    signature = inspect.signature(command, eval_str=True)

    def call(context: typer.Context, **values: Any) -> int:
        given = {flag.name: values.pop(flag.name) for flag in flags}
        for each in list(given):
            source = context.get_parameter_source(each)
            if source is None or source.name != "COMMANDLINE":
                del given[each]
        return command(**values, **{name: build(given)})

    parameters = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for parameter in signature.parameters.values():
        own = [parameter.replace(kind=Parameter.KEYWORD_ONLY)]
        parameters += flags if parameter.name == name else own
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {}
    return call


def _parameter(name: str, annotation: Any, default: Any = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _spec_parameter(name: str, on_queue: bool = False) -> Parameter:
    """The flag of a field. Only kinds of values are checked by it: JobSpec refuses them in its own words."""
    field, flag = JobSpec.model_fields[name], spec_flags()[name]
    metavar, help_text = flag.metavar, field.description
    if on_queue and flag.on_queue is not None:
        metavar, help_text = flag.on_queue
    kind = _to_flag_type(field.annotation)
    if name == "input":
        info: Any = typer.Argument(metavar=metavar, help=help_text)
    else:
        info = typer.Option(metavar=metavar, help=help_text)
    if field.is_required():
        return _parameter(name, Annotated[kind, info], Parameter.empty)
    return _parameter(name, Annotated[kind | None, info])


def _to_flag_type(annotation: Any) -> Any:
    """The type of a flag: a choice, a whole number, a list of texts, yes or no, or a text."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Literal or annotation in (int, bool):
        return annotation
    if kind is Annotated:
        return _to_flag_type(parts[0])
    if kind in (Union, UnionType):
        return _to_flag_type(next(part for part in parts if part is not NoneType))
    return list[str] if kind is list else str


def _engine_parameter(name: str) -> Parameter:
    flag = engine_flags()[name]
    words: dict[str, Any] = {"metavar": flag.metavar, "help": flag.help, "min": flag.minimum}
    option = typer.Option(flag.words, **words) if flag.words else typer.Option(**words)
    if flag.choices:
        return _parameter(name, Annotated[Literal[flag.choices] | None, option])
    return _parameter(name, Annotated[(int if flag.minimum is not None else bool) | None, option])


def _build_engine_options(given: dict[str, Any]) -> EngineOptions:
    """A switch means the other of its field's values, a number counts the flag's unit."""
    usual, flags = EngineOptions(), engine_flags()
    changes: dict[str, Any] = {
        name: not getattr(usual, name) if value is True else value * flags[name].unit
        for name, value in given.items()
    }
    return replace(usual, **changes)


def _load_spec_file(context: typer.Context, path: str | None) -> dict[str, Any] | None:
    """The fields of --spec FILE; the flags that a command demands may be left out where the file has them."""
    if path is None:
        return None
    if not path.endswith((".json", ".toml")):
        raise UsageRefused(f"--spec {path}: give a .json or .toml file")
    fields = load_file(path, "--spec")
    if not isinstance(fields, dict):
        raise UsageRefused(f"--spec {path} holds no object: `gristmill schema` prints what it may hold")
    allowed = [each.name for each in context.command.params if each.name in JobSpec.model_fields]
    for name in fields:
        if name not in allowed:
            options = ", ".join(sorted(allowed))
            raise UsageRefused(
                f"--spec {path}: {name} is not an option of this command; the options are {options}"
            )
    stand_ins: dict[str, Any] = {"input": ["-"], "output": "-", "model": "-"}
    context.default_map = {name: value for name, value in stand_ins.items() if name in fields}
    return fields


def build_spec(given: dict[str, Any]) -> JobSpec:
    """The JobSpec of the flags that were given; RefusedError says which one is wrong."""
    fields = dict(given.pop("spec_file", {}))
    prompt = load_prompt(given.get("prompt"), given.pop("prompt_file", None), given.get("messages"))
    if prompt is not None:
        given["prompt"] = prompt
    if "prompt" in given or "messages" in given:  # one takes the place of the other in the file
        fields = {name: value for name, value in fields.items() if name not in ("prompt", "messages")}
    if "keep" in given:
        given["keep"] = ",".join(given["keep"])
    if "sampling" in given:
        given["sampling"] = parse_sampling(given["sampling"])
    return parse_spec(fields | given)


def load_prompt(prompt: str | None, prompt_file: str | None, messages: str | None) -> str | None:
    """The prompt template from whichever flag holds it; at most one of the three may be given."""
    flags = {"--prompt": prompt, "--prompt-file": prompt_file, "--messages": messages}
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) > 1:
        raise UsageRefused(f"{' and '.join(given)} exclude each other: give one of them")
    if prompt_file is None:
        return prompt
    try:
        with open(prompt_file, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise UsageRefused(f"--prompt-file {prompt_file}: {error.strerror}: give a readable file") from error
    except UnicodeDecodeError as error:
        message = f"--prompt-file {prompt_file} is not UTF-8 at byte {error.start}: convert it"
        raise UsageRefused(message) from error


def open_jobs(url: str | None) -> Store:
    """The store of the flag or of the environment."""
    from gristmill.jobs.store.database import database_url
    from gristmill.jobs.store.store import open_store

    return open_store(database_url(url))


def load_job(store: Store, reference: str) -> JobRecord:
    """The job that the reference names: an id, the beginning of one, or an output folder."""
    job = store.jobs.find(reference)
    if job is None:
        raise UsageRefused(f"no job {reference!r} in this database: `gristmill list` shows those there are")
    return job

"""The command line: from what was typed to a function, from what comes of it to a stream and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from batchgen import __version__, share_cores
from batchgen.errors import BatchgenError, ExitCode, Interrupted, NoInputError, UsageError

# Every command imports what it needs when it runs: `--help`, `validate` and `status` answer at once.
if TYPE_CHECKING:
    from batchgen.io.stores import Store
    from batchgen.runstatus import RunStatus
    from batchgen.spec import JobSpec

NOT_MAPPED = ("failed to map segment", "cannot allocate memory")  # of a shared library: the loader's words
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_CommandT = TypeVar("_CommandT", bound=Callable[..., Any])


def main(args: Sequence[str] | None = None) -> None:
    """The `batchgen` command; ends the process with one of `errors.ExitCode`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a row may hold what the terminal cannot show
    share_cores()
    state = {"debug": False}
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)  # until a run handles them itself
    try:
        code = cli.main(args, prog_name="batchgen", standalone_mode=False, obj=state)
    except click.ClickException as error:
        error.show()
        code = ExitCode.USAGE
    except click.Abort:
        code = _failed(Interrupted("stopped by a signal", reason="signal"), debug=False)
    except Exception as error:
        code = _failed(error, debug=state["debug"])
    for number in (signal.SIGINT, *STOP_SIGNALS):  # all is said; one more signal must not change the exit code
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code or ExitCode.DONE)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _failed(error: Exception, *, debug: bool) -> ExitCode:
    """Say what went wrong on standard error."""
    if debug:
        traceback.print_exception(error)
    message, code = _explained(error)
    if code == ExitCode.INTERNAL and not debug and not isinstance(error, BatchgenError):
        message += "\nrun again with --debug for the traceback, and please report it"
    for line in message.splitlines() or [type(error).__name__]:
        click.echo(f"batchgen: {line}", err=True)
    return code


def _explained(error: Exception) -> tuple[str, ExitCode]:
    """What to tell, and what to end with."""
    if isinstance(error, BatchgenError):
        return str(error), error.exit_code
    unloaded = isinstance(error, ImportError) and any(text in str(error) for text in NOT_MAPPED)
    if isinstance(error, MemoryError) or unloaded or getattr(error, "errno", None) == errno.ENOMEM:
        what = "there is too little memory even to begin (a limit of the process, as ulimit -v, counts): give it more"
        return what, ExitCode.CONFIG
    if isinstance(error, OSError):
        return str(error), ExitCode.PERMISSION if isinstance(error, PermissionError) else ExitCode.IO
    return f"our bug: {type(error).__name__}: {error}", ExitCode.INTERNAL


def _print(text: str) -> None:
    """One result on standard output. A reader that has seen enough and left, such as `head`, is no error."""
    try:
        click.echo(text)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail too
        raise click.exceptions.Exit(ExitCode.DONE) from None


def _print_json(data: Any) -> None:
    import orjson

    _print(orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY).decode())


# -- options -----------------------------------------------------------------------------------------------------------


def _params(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    params: dict[str, str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"{value!r}: expected NAME=VALUE")
        if name in params:
            raise click.BadParameter(f"{name} is given twice")
        params[name] = text
    return params


def _yaml_params(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    from batchgen.jobfile import parse_yaml

    texts = _params(context, option, values)
    return {name: parse_yaml(text, where=f"{option.opts[0]} {name}") for name, text in texts.items()}


def _duration(context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    from batchgen import kinds

    try:
        return None if value is None else kinds.duration(value)
    except ValueError:
        raise click.BadParameter(f"{value!r}: expected a duration such as 90s, 30m, 3h or 1h30m") from None


def _debug(context: click.Context, option: click.Parameter, value: bool) -> None:
    context.obj["debug"] = value


_debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_debug, help="Show the traceback of an error."
)
_set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the job file, given with its path.",
)


def _job_options(command: _CommandT) -> _CommandT:
    """A job file and what may be put into it."""
    param = click.option(
        "--param",
        "params",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_params,
        help="Value of ${NAME} in the job file.",
    )
    return click.argument("job", type=click.Path())(param(_set_option(_debug_option(command))))


def _load(job: str, params: Mapping[str, str], overrides: Sequence[str]) -> JobSpec:
    from batchgen import spec

    return spec.load(job, params=params, overrides=overrides)


# -- commands ----------------------------------------------------------------------------------------------------------


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Offline batch inference: a data set in (Parquet, JSON Lines, CSV ...), checkpointed results out."""


@cli.command()
@_job_options
@click.option(
    "--limit", type=click.IntRange(1), help="Only the first LIMIT input rows, for a trial; never marked complete."
)
@click.option("--extend", is_flag=True, help="Take new input files into the run in the output folder, finished or not.")
@click.option("--must-be-new", is_flag=True, help="Refuse an output folder that holds a run.")
@click.option("--overwrite", is_flag=True, help="Delete the run in the output folder, then start afresh.")
@click.option("--yes", is_flag=True, help="Do not ask before --overwrite deletes.")
@click.option(
    "--max-runtime", metavar="DURATION", callback=_duration, help="Save and exit 75 after this time, such as 3h."
)
@click.option("--max-output-tokens", type=click.IntRange(1), help="Save and exit 75 after that many output tokens.")
@click.option(
    "--spot",
    type=click.Choice(["aws", "gcp", "azure", "auto"]),
    help="Save and exit 75 when this cloud announces that it takes the machine away; auto finds out which one it is.",
)
def run(
    job: str,
    params: dict[str, str],
    overrides: tuple[str, ...],
    limit: int | None,
    extend: bool,
    must_be_new: bool,
    overwrite: bool,
    yes: bool,
    max_runtime: float | None,
    max_output_tokens: int | None,
    spot: Literal["aws", "gcp", "azure", "auto"] | None,
) -> None:
    """Run JOB, or go on with it where it was stopped.

    The last line on standard output is JSON: the summary, or how it failed.
    """
    if must_be_new and overwrite:
        raise click.UsageError("--must-be-new and --overwrite contradict each other")
    if extend and (must_be_new or overwrite):
        raise click.UsageError("--extend goes on with a run; it contradicts --must-be-new and --overwrite")
    if yes and not overwrite:
        raise click.UsageError("--yes answers the question of --overwrite, which is not given")
    with _last_line():
        spec = _load(job, params, overrides)
        if overwrite and not yes:
            _confirm(f"Delete the run in {spec.output.path}?")
        _show_logs()
        from batchgen import checks, memory

        if not memory.room_to_begin():
            raise MemoryError
        from batchgen import job as jobs

        checks.check_templates(spec, job)

        options = jobs.RunOptions(
            limit=limit,
            extend=extend,
            must_be_new=must_be_new,
            overwrite=overwrite,
            max_runtime=max_runtime,
            max_output_tokens=max_output_tokens,
            spot=spot,
        )
        _print_json(jobs.run(spec, options))


@contextlib.contextmanager
def _last_line() -> Iterator[None]:
    """However the block ends, programs find JSON on the line where they expect the summary."""
    try:
        yield
    except KeyboardInterrupt:
        error = Interrupted("stopped by a signal; run the same command again", "signal")
        _print_json(_end(error))
        raise error from None
    except (click.ClickException, click.exceptions.Exit, UsageError):
        raise
    except Exception as error:
        _print_json(_end(error))
        raise


def _end(error: Exception) -> dict[str, Any]:
    message, code = _explained(error)
    how = {"status": "failed"}
    if isinstance(error, Interrupted):
        how = {"status": "interrupted", "reason": error.reason}
    return {**how, "exit_code": int(code), "error": message}


def _show_logs() -> None:
    """What batchgen itself has to say goes to standard error; of its libraries only warnings do."""
    import logging

    logging.basicConfig(format="batchgen: %(message)s", level=logging.WARNING)
    logging.getLogger("batchgen").setLevel(logging.INFO)


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("--overwrite deletes results and there is no terminal to ask on; add --yes")
    if not click.confirm(question, err=True):
        raise UsageError("not confirmed; nothing was deleted")


@cli.command()
@_job_options
@click.option("-n", "rows", type=click.IntRange(1), default=5, show_default=True, help="Number of input rows.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line for each answer.")
def preview(job: str, params: dict[str, str], overrides: tuple[str, ...], rows: int, as_json: bool) -> None:
    """Show the first prompts of JOB as the model sees them, and its answers. Writes nothing."""
    spec = _load(job, params, overrides)
    _show_logs()
    from batchgen.preview import preview as answers

    for answer in answers(spec, rows):
        if as_json:
            _print_json(answer)
        else:
            _print(_readable(answer))


def _readable(answer: Mapping[str, Any]) -> str:
    """One previewed row for a person."""
    tokens = answer["prompt_tokens"]
    size = "" if tokens is None else f" · {tokens:,} prompt tokens"
    head = click.style(f"── {answer['id']}{size} ", bold=True)
    if error := answer["error"]:
        end = click.style(f"error {error['code']}: {error['message']}", fg="red")
    else:
        end = f"{answer['text']}\n{click.style('[' + answer['finish_reason'] + ']', dim=True)}"
    prompt = [] if answer["prompt"] is None else [answer["prompt"], click.style("── answer ", bold=True)]
    return "\n".join([head, *prompt, end, ""])


@cli.command()
@_job_options
def validate(job: str, params: dict[str, str], overrides: tuple[str, ...]) -> None:
    """Check JOB in a moment: its keys, templates and paths, the columns it needs. Loads no model."""
    spec = _load(job, params, overrides)
    from batchgen import checks

    _print(f"{job}: ok: {checks.check(spec, where=job)}")


@cli.command()
@_job_options
@click.option("--json", "as_json", is_flag=True, help="One JSON line.")
def status(job: str, params: dict[str, str], overrides: tuple[str, ...], as_json: bool) -> None:
    """Show how far a run is. JOB is its job file or its output folder."""
    from batchgen.runstatus import peek

    store = _run_folder(job, params, overrides)
    found = peek(store)
    if as_json:
        _print_json(found)
    else:
        _print(_status_table(found, store.url))


def _is_job_file(job: str) -> bool:
    return os.path.isfile(job) or job.endswith((".yaml", ".yml"))


def _run_folder(job: str, params: Mapping[str, str], overrides: Sequence[str]) -> Store:
    """The run folder that a job file names, or the folder itself."""
    from batchgen.io.storage import local_path
    from batchgen.io.stores import Store

    if _is_job_file(job):
        output = _load(job, params, overrides).output
        return Store(output.path, output.storage_options)
    if params or overrides:
        raise click.UsageError(f"--param and --set go with a job file, {job} is a folder")
    if not os.path.isdir(local_path(job) or "/"):
        raise NoInputError(f"{job}: no such folder or job file")
    return Store(job)


def _status_table(run: RunStatus, url: str) -> str:
    if run.state == "empty":
        return f"{url}: no run in this folder"

    def part(done: int, total: int | None) -> str:
        return f"{done:,}" if total is None else f"{done:,} of {total:,} ({done / total if total else 1:.1%})"

    worker = "" if run.pid is None else f", process {run.pid} on {run.host}"
    rows = {
        "state": f"{run.state}{worker if run.state == 'running' else ''}{f': {run.error}' if run.error else ''}",
        "rows": part(run.rows_done, run.rows_total),
        "failed rows": f"{run.rows_failed:,}",
        "shards": part(run.shards_done, run.shards_total),
        "input files": f"{run.files:,}",
        "prompt tokens": f"{run.prompt_tokens:,}",
        "output tokens": f"{run.output_tokens:,}",
        "starts": f"{run.epoch}, the first {run.started or 'unknown'}",
        "last sign": run.updated or "none",
    }
    width = max(map(len, rows))
    return "\n".join([f"{run.name} in {url}", *(f"  {name:<{width}}  {value}" for name, value in rows.items())])


@cli.command()
@_job_options
@click.option("--json", "as_json", is_flag=True, help="One JSON line.")
@click.option("--repair", is_flag=True, help="Compute what is damaged anew; JOB has to be the job file.")
def verify(job: str, params: dict[str, str], overrides: tuple[str, ...], as_json: bool, repair: bool) -> None:
    """Read every part of a finished or running run and say what is wrong. JOB is its job file or its output folder.

    Exit code 0 when all is well, 74 when something is wrong.
    """
    from batchgen import verify as checks

    if not repair:
        found = checks.verify(_run_folder(job, params, overrides))
        if as_json:
            _print_json(found.to_json())
        else:
            for line in checks.lines(found):
                _print(line)
        raise click.exceptions.Exit(ExitCode.DONE if found.ok else ExitCode.IO)
    if not _is_job_file(job):
        raise click.UsageError(f"--repair computes rows anew, for which it needs the job file; {job} is none")
    with _last_line():
        spec = _load(job, params, overrides)
        _show_logs()
        from batchgen import repair as repairs

        _print_json(repairs.repair(spec))


@cli.command()
@_job_options
@click.option(
    "--to", metavar="FOLDER", help="Leave the run as it is and write a complete one with the new results there."
)
def retry(job: str, params: dict[str, str], overrides: tuple[str, ...], to: str | None) -> None:
    """Run the failed rows of a finished run again; all other results stay as they are.

    Rows that could not be read or rendered fail again, as their input may not change. The last line on standard output
    is JSON: the summary, or how it failed.
    """
    with _last_line():
        spec = _load(job, params, overrides)
        _show_logs()
        from batchgen import retry as retries

        _print_json(retries.retry(spec, to))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def models(as_json: bool) -> None:
    """List the model families and formats that run, and how large a model this machine holds."""
    from batchgen import supported

    found = supported.describe()
    if as_json:
        _print_json(found)
    else:
        for line in supported.lines(found):
            _print(line)


@cli.group()
def bench() -> None:
    """Measure this machine."""


@bench.command("engine")
@click.option("--model", metavar="PATH", help="As model.path in a job file.")
@click.option(
    "--config",
    metavar="NAME",
    help="With --random-weights, instead of a model: smollm2-135m, qwen3-0.6b, llama-3.1-8b, or a config.json.",
)
@click.option("--random-weights", is_flag=True, help="Fill a model of that shape with random numbers; needs no files.")
@click.option(
    "--workload", default="mixed", show_default=True, metavar="NAME", help="nano, mixed, prefix, longtail or summarise."
)
@click.option("--workload-file", type=click.Path(), help="A JSON list of {prompt: [token ids], out: number} instead.")
@click.option("--save", type=click.Path(), help="Write the generated token ids to this file.")
@_set_option
@_debug_option
def bench_engine(
    model: str | None,
    config: str | None,
    random_weights: bool,
    workload: str,
    workload_file: str | None,
    save: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Run a workload through the engine; prints its speed as one JSON line.

    Times are in seconds: startup_s is from the start of the process to the first step, load_s is the part of it that
    loads the model, process_s ends with the workload. occupancy and kv_used are shares of the rows that may run at once
    and of the KV pool, roofline_share is the least time for the work on this machine by the time it took, host_share is
    the share of time outside the model's steps. KV memory is what the workload needs, as engine.kv_memory: auto finds.

    --set takes the keys of the sections model and engine of a job file.
    """
    for override in overrides:
        if not override.startswith(("model.", "engine.")):
            raise click.BadParameter(f"{override!r}: expected a key of model or engine", param_hint="--set")
    if (model is None) == (config is None) or random_weights != (config is not None):
        raise click.UsageError("give --model PATH, or --config NAME with --random-weights")
    from batchgen import spec
    from batchgen.weights.random import find_config

    shape = find_config(config) if config else None
    job = {
        "model": {"path": model or config},
        "input": {"path": "-"},
        "sampling": {"max_tokens": None},
        "output": {"path": "-"},
    }
    settings = spec.parse(job, where="bench engine", overrides=overrides)
    _show_logs()
    from batchgen import bench as benches

    found = benches.engine(
        model=settings.model,
        spec=settings.engine,
        random_weights=shape,
        workload=workload,
        workload_file=workload_file,
        save=save,
    )
    _print_json(found)


@bench.command("quality")
@_job_options
@click.option("--rows", type=click.IntRange(1), default=64, show_default=True, help="Of the job's first rows.")
def bench_quality(job: str, params: dict[str, str], overrides: tuple[str, ...], rows: int) -> None:
    """Compare JOB's quantised model with the plain one; prints one JSON line.

    Both answer the first rows greedily, then both read the plain model's answers. rows counts those that neither failed
    with. perplexity and perplexity_quantized are those of the plain answers under either model, over positions tokens;
    top1_agreement is the share of these at which both find the same token most likely. rows_equal is the share of rows
    with equal answers, tokens_before_difference that of the plain answers' tokens before the first one that differs.
    """
    settings = _load(job, params, overrides)
    _show_logs()
    from batchgen import bench_quality as benches

    _print_json(benches.measure(settings, rows))


@bench.command("data")
@click.option("--rows", type=click.IntRange(1), default=200_000, show_default=True, help="Rows of the input.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=100, show_default=True, help="Of a row, about.")
@click.option("--answer-tokens", type=click.IntRange(1), default=32, show_default=True, help="Of a row, at most.")
@click.option("--files", type=click.IntRange(1), default=1, show_default=True, help="Files that the input is cut into.")
@click.option("--input-format", type=click.Choice(["parquet", "jsonl"]), default="parquet", show_default=True)
@click.option("--output-format", type=click.Choice(["parquet", "jsonl"]), default="parquet", show_default=True)
@click.option(
    "--carried-bytes", type=click.IntRange(0), default=0, help="Size of a text column that goes into the results."
)
@click.option("--model", metavar="PATH", help="Whose tokenizer is used; by default one with a token for each byte.")
@click.option("--folder", metavar="URL", help="A new folder for input and results, kept; by default a temporary one.")
@click.option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_yaml_params,
    help="As storage_options in a job file; VALUE is YAML.",
)
@click.option(
    "--resume", is_flag=True, help="Kill the job when half of the rows are committed; measure the next start."
)
@_debug_option
def bench_data(resume: bool, **workload: Any) -> None:
    """Run a synthetic input through everything but the model; prints one JSON line.

    The model answers at once: what is measured is reading, encoding, decoding and committing.
    """
    _show_logs()
    from batchgen import bench_data as benches

    _print_json(benches.measure(benches.Workload(**workload), resume=resume))


@bench.command("scheduler")
@click.option(
    "--workload", default="mixed", show_default=True, metavar="NAME", help="nano, mixed, prefix, longtail or summarise."
)
@click.option("--rows", type=click.IntRange(1), default=10_000, show_default=True, help="Rows of the job.")
@click.option(
    "--certain/--eos",
    default=False,
    help="Whether the scheduler is told each row's length. By default rows end by EOS, below a generous limit.",
)
@click.option(
    "--kv-share",
    type=click.FloatRange(0, min_open=True),
    default=0.25,
    show_default=True,
    help="Size of the KV pool, as a share of what the job would use without a limit.",
)
@click.option("--blocks", type=click.IntRange(1), help="Size of the KV pool instead, in blocks.")
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens of a block.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="As in a job file; by default no limit.")
@click.option("--max-batch-tokens", type=click.IntRange(1), default=8192, show_default=True, help="As in a job file.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the lengths.")
@click.option("--parameters", type=click.FloatRange(0), default=8e9, show_default=True, help="Of the modelled model.")
@click.option("--parameter-bytes", type=click.FloatRange(0), default=2, show_default=True, help="Of each of them.")
@click.option("--kv-bytes", type=click.FloatRange(0), default=131_072, show_default=True, help="KV of one token.")
@click.option(
    "--flops", type=click.FloatRange(0, min_open=True), default=6e14, show_default=True, help="Of the device, a second."
)
@click.option(
    "--bandwidth", type=click.FloatRange(0, min_open=True), default=4e12, show_default=True, help="Bytes a second."
)
@_debug_option
def bench_scheduler(
    parameters: float, parameter_bytes: float, kv_bytes: float, flops: float, bandwidth: float, **what: Any
) -> None:
    """Run a workload's lengths through the scheduler, without a model; prints one JSON line.

    A step of the modelled device takes the longer of reading the weights and multiplying by them, then the time to
    read its KV. Occupancy is that of the KV pool, from when a row first waits for blocks until none waits.
    """
    from batchgen import bench_scheduler as benches

    device = benches.Device(parameters, parameter_bytes, kv_bytes, flops, bandwidth)
    _print_json(benches.simulate(benches.Simulation(**what, device=device)))


if __name__ == "__main__":
    main()

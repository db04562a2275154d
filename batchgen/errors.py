"""The error tree: every way a command can end, with its exit code, and the codes a row can fail with."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the caller (Airflow, cron, Kubernetes) sees; 74 and 75 are worth another start as they are."""

    DONE = 0
    USAGE = 64
    DATA = 65
    NO_INPUT = 66
    MODEL = 69
    INTERNAL = 70
    IO = 74
    INTERRUPTED = 75
    PERMISSION = 77
    CONFIG = 78


ROW_CODES = frozenset(
    {
        "invalid_json",
        "invalid_row",
        "invalid_unicode",
        "missing_column",
        "template_error",
        "empty_prompt",
        "prompt_too_long",
        "invalid_parameter",
        "invalid_grammar",
        "nonfinite_logits",
        "out_of_memory",
        "timeout",
        "internal",
    }
)


class BatchgenError(Exception):
    """An error with a message for a person: what, where, what was expected, what to do. Never shown as a traceback."""

    exit_code: ExitCode = ExitCode.INTERNAL


class UsageError(BatchgenError):
    exit_code = ExitCode.USAGE


class DataError(BatchgenError):
    """Input that cannot be used at all, or too many failed rows."""

    exit_code = ExitCode.DATA


class NoInputError(BatchgenError):
    exit_code = ExitCode.NO_INPUT


class ModelError(BatchgenError):
    """A model that is unsupported, incomplete or broken: starting again does not help."""

    exit_code = ExitCode.MODEL


class StorageError(BatchgenError):
    """A store, disk or hub that failed after retries: starting again may help."""

    exit_code = ExitCode.IO


class Interrupted(BatchgenError):
    """Stopped before the end with progress saved: run the same command again.

    `reason` is "signal", "spot", "limit", "locked", "fenced", "feeder", "device" or "stalled"; programs read it from
    the last line of standard output.
    """

    exit_code = ExitCode.INTERRUPTED

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class PermissionDenied(BatchgenError):
    exit_code = ExitCode.PERMISSION


class ConfigError(BatchgenError):
    """A job file that is wrong, or one that does not fit the run it would resume."""

    exit_code = ExitCode.CONFIG


class InvalidRow(Exception):
    """Raised while one row is read, rendered or encoded; becomes that row's error, never the job's."""

    def __init__(self, code: str, message: str) -> None:
        assert code in ROW_CODES, code
        super().__init__(message)
        self.code = code
        self.message = message

"""The feeder: rows read, rendered and encoded ahead of the engine by a child process. This is the parent's end of it.

The child is a fresh interpreter, not a fork: it never loads torch, runs on one thread, at low priority once it is ahead
of the engine, and can be killed without harm. (multiprocessing's spawn would import the caller's main script, and torch
with it.) Batches come through a pipe; a few bytes of shared memory say which rows the child is working on, so that a
row that hangs is found, made an error, and passed over by the next child.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import psutil

from batchgen import errors
from batchgen.carry import InputFields, input_fields
from batchgen.errors import BatchgenError, Interrupted
from batchgen.feeder_child import Only, RowBatch, State, Task
from batchgen.io.files import InputFile
from batchgen.spec import JobSpec
from batchgen.types import Demand, ShardRange, TokenIds

READY_BATCHES = 8  # wait in the parent; each is at most 256 rows or about 1 MiB of input
PATIENCE = 10.0  # seconds for the first batch, before the engine is made without knowing one
MORE_PATIENCE = 0.5  # and, from then on, for those that follow
STUCK_SECONDS = 30.0  # of the child's processor time, without a sign of progress

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",  # a panic in the tokenizers library is a row's error
}

BOOT = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
sys.path[:] = sys.argv[4:]
pipe, state, parent = map(int, sys.argv[1:4])
from batchgen.lifeline import die_with
die_with(parent)
from batchgen.feeder_child import child_main
child_main(pipe, state)
"""


class Feeder:
    """Delivers all rows that are not in `done`, batch by batch, in input order. A context manager.

    With `only` just these rows of each shard.
    """

    def __init__(
        self,
        spec: JobSpec,
        files: Sequence[InputFile],
        formats: Sequence[str],
        model_path: str,
        max_model_len: int,
        done: Mapping[int, Mapping[int, ShardRange | None]],
        limit: int | None,
        *,
        fields: InputFields | None = None,
        only: Only | None = None,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        known = {file: dict(shards) for file, shards in done.items()}
        fields = fields or input_fields(spec, files, formats)
        self._task = Task(spec, tuple(files), tuple(formats), model_path, max_model_len, fields, known, limit, only)
        self._stuck_seconds = stuck_seconds
        self._child: _Child | None = None
        self._ahead: deque[RowBatch] = deque()  # seen by `demand`, not handed out yet
        self._ended = False  # the child has sent all

    def __enter__(self) -> Feeder:
        self._child = _Child(self._task)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    @property
    def finished(self) -> bool:
        """All rows have been handed out."""
        return self._ended and not self._ahead

    def demand(self) -> Demand | None:
        """What the first rows ask of an engine; they are still to be handed out.

        Waits for the first rows, which the engine has to wait for anyway; None where they do not come soon.
        """
        until = time.monotonic() + PATIENCE
        while not self._ended and len(self._ahead) < READY_BATCHES and (left := until - time.monotonic()) > 0:
            if (batch := self._receive(min(left, 1.0))) is not None:
                if not self._ahead:
                    until = time.monotonic() + MORE_PATIENCE
                self._ahead.append(batch)
        if not self._ahead and not self._ended:
            return None
        default, context = self._task.spec.sampling.params(), self._task.max_model_len
        prompts: list[TokenIds] = []
        outputs: list[int] = []
        for batch in self._ahead:
            failed = {index for index, _, _ in batch.errors}
            for index, params in enumerate(batch.params or [default] * batch.num_rows):
                if index not in failed:
                    prompts += [batch.token_ids[batch.offsets[index] : batch.offsets[index + 1]]] * params.n
                    outputs += [context if params.max_tokens is None else params.max_tokens] * params.n
        return Demand(prompts, outputs, complete=self._ended)

    def cpu_seconds(self) -> float:
        """Processor time that the present child has used; 0 where it is gone."""
        return 0.0 if self._child is None else self._child.cpu_seconds()

    def poll(self) -> RowBatch | None:
        """A batch if one is ready. Never waits. Raises what made the child fail."""
        return self._next(None)

    def get(self, timeout: float) -> RowBatch | None:
        """The next batch, waiting for at most `timeout` seconds; None then, and after the last one."""
        deadline = time.monotonic() + timeout
        while not self.finished:
            left = deadline - time.monotonic()
            if (batch := self._next(max(0.0, min(left, 1.0)))) is not None:
                return batch
            if left <= 0:
                break
        return None

    def _next(self, timeout: float | None) -> RowBatch | None:
        return self._ahead.popleft() if self._ahead else self._receive(timeout)

    def _receive(self, timeout: float | None) -> RowBatch | None:
        assert self._child is not None, "the feeder is used outside its `with` block"
        if self._ended:
            return None
        try:
            kind, payload = self._child.receive(timeout)
        except queue.Empty:
            self._look_after()
            return None
        if kind == "rows":
            self._note(payload)
            return payload
        if kind == "finished":
            self._ended = True
            return None
        if kind == "failed":
            raise _rebuilt(*payload)
        raise self._child.last_words()

    def _note(self, batch: RowBatch) -> None:
        """Keep what is delivered, for a child that has to start in the middle."""
        if batch.end is not None and not batch.cut_off:
            self._task.done.setdefault(batch.file, {})[batch.shard] = batch.end
        if batch.num_rows:
            self._task = replace(self._task, resume=(batch.file, int(batch.rows[-1]) + 1))
        if batch.last_of_file:
            self._task = replace(self._task, resume=(batch.file + 1, 0))

    def _look_after(self) -> None:
        """Replaces a child that hangs."""
        assert self._child is not None
        stuck = self._child.stuck_on(self._stuck_seconds)
        if stuck is None:
            return
        file, first, last = stuck
        self._child.close()
        if first == last:
            self._task = replace(self._task, hung=self._task.hung | {(file, first)})
        else:
            self._task = replace(self._task, careful=(file, last))
        # what the dead child had sent and nobody has read comes again
        self._child = _Child(self._task)


class _Child:
    """One child process and the thread that empties its pipe, so that the engine never waits for a transfer."""

    def __init__(self, task: Task) -> None:
        self._ready: queue.Queue[bytes | None] = queue.Queue(READY_BATCHES)
        self._closing = False
        self._state = State.create()
        reader, writer = os.pipe()
        self._pipe = Connection(reader, writable=False)
        environment = {**os.environ, **ENVIRONMENT}
        paths = [os.path.abspath(path) for path in sys.path]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, str(writer), str(self._state.descriptor), str(os.getpid()), *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # ours is for results
                env=environment,
                pass_fds=(writer, self._state.descriptor),
                start_new_session=True,  # a Ctrl+C in the terminal is for us alone
            )
        finally:
            os.close(writer)
        try:
            self._give(task)
            self._watched = psutil.Process(self._process.pid)
            self._progress = -1
            self._busy_since = 0.0
            self._looked = 0.0
            self._thread = threading.Thread(target=self._empty_pipe, name="feeder-pipe", daemon=True)
            self._thread.start()
        except BaseException:  # a signal
            self._process.kill()
            self._process.wait()
            raise

    def _give(self, task: Task) -> None:
        """The task; the pipe it goes through stays open, because its end tells the child that we are gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead child is seen by its pipe
            pickle.dump(task, self._process.stdin)
            self._process.stdin.flush()

    def _empty_pipe(self) -> None:
        try:
            while not self._closing:
                self._put(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._put(None)

    def _put(self, message: bytes | None) -> None:
        while not self._closing:
            with contextlib.suppress(queue.Full):
                self._ready.put(message, timeout=0.2)
                return

    def receive(self, timeout: float | None) -> tuple[str, Any]:
        """The next message; raises queue.Empty where there is none."""
        message = self._ready.get(timeout is not None, timeout)
        return ("gone", None) if message is None else pickle.loads(message)

    def stuck_on(self, seconds: float) -> tuple[int, int, int] | None:
        """(file, first row, last row) that the child has worked on for too long. Its own processor time counts, so
        that a stopped or starved machine is nobody's fault."""
        now = time.monotonic()
        if now - self._looked < 0.2:
            return None
        self._looked = now
        progress, file, first, last = self._state.read()
        used = self.cpu_seconds()
        if progress != self._progress or first < 0:
            self._progress, self._busy_since = progress, used
            return None
        return (file, first, last) if used - self._busy_since > seconds else None

    def cpu_seconds(self) -> float:
        """Processor time that the child has used; 0 where it is gone."""
        try:
            times = self._watched.cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def last_words(self) -> BatchgenError:
        """Why a child that said nothing is gone."""
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return Interrupted(
                "the feeder process was killed by signal 9: most likely the machine ran out of memory; give the job "
                "more memory and run it again",
                reason="feeder",
            )
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return BatchgenError(f"the feeder process {how} without a message; run the job again")

    def close(self) -> None:
        self._closing = True
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._thread.join()  # the dead child's pipe ends, and a full queue is given up
        self._pipe.close()
        self._state.close()


class _ChildTraceback(Exception):
    """The child's traceback as the cause of the error it died of."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _rebuilt(name: str, message: str, reason: str | None, trace: str) -> BatchgenError:
    kind = getattr(errors, name, BatchgenError)
    error: BatchgenError = kind(message) if reason is None else kind(message, reason)
    error.__cause__ = _ChildTraceback(trace)
    return error


__all__ = ["Feeder", "RowBatch"]

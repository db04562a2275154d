"""Rows between reading and running: equal greedy ones run once, rows that share a prefix become neighbours, and when
all rows are known the longest go first, so that short ones fill the end."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, Protocol

import numpy as np

from batchgen.engine.forecast import LengthForecast
from batchgen.engine.step import EngineSettings
from batchgen.types import Completion, InFlight, Request, RowError, RowKey, SamplingParams, TokenIds

MAX_WAITING = 4096  # samples read ahead
MAX_FOLLOWING = 65_536  # samples that wait for an equal one to be finished
MAX_REMEMBERED_BYTES = 16 << 20  # of finished greedy samples, for equal ones that are still to be read
REMEMBERED_BYTES = 400  # what one takes beside its tokens, roughly
LEARN_FROM = 4096  # finished samples, the last ones: what lengths are expected by
OF_THE_ROW = {"empty_prompt", "prompt_too_long", "nonfinite_logits"}  # errors that an equal row would meet too

# A finished sample's tokens, and what else its completion says: of plain values, so no work for the garbage collector
Ending = tuple[bytes, str, "str | int | None", int, "RowError | None"]


class EngineLike(Protocol):
    """The engine as a job sees it."""

    @property
    def settings(self) -> EngineSettings: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> list[Completion]: ...
    def snapshot(self) -> list[InFlight]: ...
    def stats(self) -> Any: ...


class Planner:
    """A window of rows before an engine, which gets them as late as it can.

    While rows are still to come they run in the order in which they came, but for those that share a prefix with an
    earlier one of the window: it is put in order when the last one has run out, so that no row is passed over by
    more than a window of others. With `dedupe`, samples that must come out equal (greedy, same tokens, same limits)
    run once. One that has tokens of an earlier start always runs by itself: these are kept verbatim.
    """

    def __init__(self, engine: EngineLike, *, dedupe: bool = True) -> None:
        self._engine = engine
        self._dedupe = dedupe
        self._fresh: list[Request] = []  # as they came
        self._queue: deque[Request] = deque()  # as they are to run, before the fresh ones
        self._num_waiting = 0  # samples of both
        self._longest_first = False  # the queue holds all that is left
        self._seen: deque[tuple[int, int, bool]] = deque(maxlen=LEARN_FROM)  # prompt and output tokens, stopped
        self._num_seen = self._num_seen_then = 0  # in all, and when the queue was put in order
        self._running: dict[tuple[RowKey, int], bytes] = {}  # greedy samples in window and engine: what they equal
        self._followers: dict[bytes, list[tuple[Request, int]]] = {}  # samples that wait for a running one
        self._num_following = 0
        self._answered: list[Completion] = []  # without the engine, not handed out yet
        self._remembered: OrderedDict[bytes, Ending] = OrderedDict()  # the one used longest ago first
        self._remembered_bytes = 0
        self._digest_of = lru_cache(1024)(_digest)  # rows may bring parameters of their own
        self._last = (SamplingParams(0), b"")  # most bring none: the last ones and their digest
        self.num_copied = 0  # samples that got an equal one's result

    # -- what goes in ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a row; its samples come out of `step` in any order."""
        if not (self._dedupe and request.sampling.greedy):
            self._fresh.append(request)
            self._num_waiting += _num_samples(request)
            return
        if self._last[0] is not request.sampling:
            self._last = request.sampling, self._digest_of(request.sampling)
        equal = hashlib.blake2b(request.prompt_token_ids.tobytes(), digest_size=16, key=self._last[1]).digest()
        unbegun = []
        for sample in range(request.sampling.n):
            tokens = request.resume.get(sample, ())
            if tokens is not None and len(tokens):
                self._fresh.append(self._leader(request, sample, equal))
            elif tokens is not None:
                unbegun.append(sample)
        for sample in unbegun:
            if (known := self._remembered.get(equal)) is not None:
                self._remembered.move_to_end(equal)
                kept = np.frombuffer(known[0], np.int32)
                self._answered.append(Completion(request.key, sample, kept, *known[1:]))
                self.num_copied += 1
            elif (followers := self._followers.get(equal)) is not None:
                followers.append((request, sample))
                self._num_following += 1
            else:
                self._fresh.append(self._leader(request, sample, equal))

    @property
    def full(self) -> bool:
        """Enough is known to choose from; more would only take memory."""
        waiting = self._num_waiting + self._engine.num_waiting
        return waiting >= MAX_WAITING or self._num_following >= MAX_FOLLOWING

    def _leader(self, request: Request, sample: int, equal: bytes) -> Request:
        """What is to be run: one greedy sample, for which others may wait from now on."""
        self._running[request.key, sample] = equal
        self._followers.setdefault(equal, [])
        self._num_waiting += 1
        return _only(request, sample)

    # -- what comes out -------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._answered or self._fresh or self._queue or self._engine.has_work)

    def step(self, more: bool) -> list[Completion]:
        """One step of the engine, and what has ended with it; `more` rows may be added after it."""
        self._feed(more)
        done, self._answered = self._answered, []
        for completion in self._engine.step() if self._engine.has_work else ():
            self._finish(completion, done)
        return done

    def _finish(self, completion: Completion, done: list[Completion]) -> None:
        done.append(completion)
        if completion.error is None:
            self._seen.append((completion.prompt_tokens, len(completion.token_ids), completion.finish_reason == "stop"))
            self._num_seen += 1
        equal = self._running.pop((completion.key, completion.sample), None)
        if equal is None:
            return
        followers = self._followers.pop(equal, None)  # of several leaders the first one tells them
        if completion.error is None or self._of_the_row(completion):
            self._remember(equal, completion)
            if followers:
                self._num_following -= len(followers)
                self.num_copied += len(followers)
                done += [_copy(completion, request.key, sample) for request, sample in followers]
        elif followers:  # it was bad luck, which the next one need not have
            self._num_following -= 1
            request, sample = followers.pop(0)
            self._followers[equal] = followers
            self._queue.appendleft(self._leader(request, sample, equal))

    def _of_the_row(self, completion: Completion) -> bool:
        """Whether an equal row would meet this error too. Memory that a step wanted may be there for the next one,
        a pool that a row has outgrown stays too small."""
        assert completion.error is not None
        if completion.error.code != "out_of_memory":
            return completion.error.code in OF_THE_ROW
        settings = self._engine.settings
        num_tokens = completion.prompt_tokens + len(completion.token_ids)
        return num_tokens > settings.num_blocks * settings.block_size

    def _remember(self, equal: bytes, completion: Completion) -> None:
        if equal in self._remembered:
            return
        tokens, one = completion.token_ids.tobytes(), completion
        self._remembered[equal] = tokens, one.finish_reason, one.stop_reason, one.prompt_tokens, one.error
        self._remembered_bytes += REMEMBERED_BYTES + len(tokens)
        while self._remembered_bytes > MAX_REMEMBERED_BYTES:
            _, oldest = self._remembered.popitem(last=False)
            self._remembered_bytes -= REMEMBERED_BYTES + len(oldest[0])

    def snapshot(self) -> list[InFlight]:
        """The output so far of every unfinished sample that has any: what a checkpoint keeps."""
        waiting = [
            InFlight(request.key, sample, tokens)
            for request in chain(self._queue, self._fresh)
            for sample, tokens in request.resume.items()
            if tokens is not None and len(tokens)
        ]
        return self._engine.snapshot() + waiting

    def stats(self) -> Any:
        """The engine's: what was computed, each equal sample once."""
        return self._engine.stats()

    # -- the order ------------------------------------------------------------------------------------------------

    def _feed(self, more: bool) -> None:
        """Give the engine what it may start in its next step, and no more."""
        if not more and (self._fresh or self._queue):
            learned_much = self._num_seen >= 2 * self._num_seen_then
            if self._fresh or not self._longest_first or learned_much:
                self._arrange([*self._queue, *self._fresh], longest_first=True)
        engine = self._engine
        wanted = max(engine.settings.max_num_seqs - engine.num_running, 1)
        while engine.num_waiting < wanted:
            if not self._queue:
                if not self._fresh:
                    return
                self._arrange(self._fresh, longest_first=False)
            request = self._queue.popleft()
            self._num_waiting -= _num_samples(request)
            engine.add(request)

    def _arrange(self, requests: list[Request], *, longest_first: bool) -> None:
        self._longest_first, self._num_seen_then = longest_first, max(self._num_seen, 1)
        self._fresh = []
        settings = self._engine.settings
        if longest_first:
            requests = by_length(requests, self._seen, settings.max_model_len)
        if settings.prefix_cache:
            order = neighbours([request.prompt_token_ids for request in requests], settings.block_size)
            requests = [requests[index] for index in order]
        self._queue = deque(requests)


def by_length(requests: Iterable[Request], seen: Iterable[tuple[int, int, bool]], max_model_len: int) -> list[Request]:
    """Those first that are expected to run longest, equals as they were. `seen` are finished samples' prompt and
    output tokens, and whether they stopped by themselves."""
    forecast = LengthForecast(max_model_len)
    for num_prompt, num_output, stopped in seen:
        forecast.learn(num_prompt, num_output, stopped=stopped)

    @lru_cache(None)
    def expected(num_prompt: int, room: int) -> float:
        """Roughly: rows of about the same length stay mixed as they came, so that something is learned of each kind."""
        return float(2 ** (round(8 * math.log2(1 + forecast.expected(num_prompt, room))) / 8))

    def steps(request: Request) -> float:
        """Of its sample that takes most: one for each token of output."""
        sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
        room = max(max_model_len - num_prompt, 0)
        if sampling.max_tokens is not None:
            room = min(room, sampling.max_tokens)
        made = [request.resume.get(sample, ()) for sample in range(sampling.n)] if request.resume else [()]
        produced = min((len(tokens) for tokens in made if tokens is not None), default=0)
        room = max(room - produced, 0)
        if sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids:
            return float(room)
        if produced:
            return float(forecast.remaining(np.array([produced]), np.array([room]))[0])
        return expected(num_prompt, room)

    return sorted(requests, key=steps, reverse=True)


def neighbours(prompts: Sequence[TokenIds], block_size: int) -> list[int]:
    """The order of prompts in which those that share blocks from their beginning on stand together.

    So it is at every depth: those that share more stand together among those that share less. A group stands where
    its first member stood, and prompts that share no more than all do keep their places.
    """
    by_first_block: dict[bytes | int, list[int]] = {}  # as the first members came
    for index, prompt in enumerate(prompts):
        first: bytes | int = prompt[:block_size].tobytes() if len(prompt) >= block_size else index
        by_first_block.setdefault(first, []).append(index)
    order: list[int] = []
    for members in by_first_block.values():
        order += members if len(members) < 3 else _together(members, prompts, block_size)
    return order


def _together(members: Sequence[int], prompts: Sequence[TokenIds], block_size: int) -> list[int]:
    """Those of `prompts` that share a block or more, in the order that `neighbours` wants."""
    keys = {index: prompts[index].tobytes() for index in members}
    size = block_size * prompts[members[0]].itemsize
    # By their bytes, whatever order that is, prompts come as in a depth-first walk through the tree of shared blocks.
    # `path` is the way from its root to the present prompt: (blocks shared, groups), each with its first one in front.
    path: list[tuple[int, list[list[int]]]] = [(0, [])]
    before = b""

    def leave() -> None:
        groups = sorted(path.pop()[1])
        path[-1][1].append(list(chain.from_iterable(groups)))

    for index in sorted(members, key=keys.__getitem__):
        shared = _shared_blocks(before, keys[index], size, path[-1][0])
        while path[-1][0] > shared:
            leave()
        if path[-1][0] < shared:
            path.append((shared, [path[-1][1].pop()]))
        path[-1][1].append([index])
        before = keys[index]
    while len(path) > 1:
        leave()
    return list(chain.from_iterable(sorted(path[0][1])))


def _shared_blocks(one: bytes, other: bytes, size: int, likely: int) -> int:
    """How many blocks of `size` bytes are equal from the beginning on; about `likely` ones, for speed."""
    low, high = 0, min(len(one), len(other)) // size
    if likely <= high and one[: likely * size] == other[: likely * size]:
        low, end = likely, (likely + 1) * size
        if low == high or one[end - size : end] != other[end - size : end]:
            return low
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * size] == other[: middle * size]:
            low = middle
        else:
            high = middle - 1
    return low


# -- equal samples -----------------------------------------------------------------------------------------------------


def _digest(sampling: SamplingParams) -> bytes:
    """The same where greedy tokens of the same prompt must be the same."""
    plain = SamplingParams(max_tokens=None)
    same = replace(
        sampling,
        temperature=0.0,
        top_p=plain.top_p,
        top_k=plain.top_k,
        min_p=plain.min_p,
        n=1,
        seed=0,
        include_stop=False,  # of texts
    )
    return hashlib.blake2b(repr(same).encode(), digest_size=16).digest()


def _num_samples(request: Request) -> int:
    """That are to be run."""
    num_done = sum(tokens is None for tokens in request.resume.values()) if request.resume else 0
    return request.sampling.n - num_done


def _only(request: Request, sample: int) -> Request:
    """The row without its other samples."""
    if request.sampling.n == 1:
        return request
    resume: dict[int, TokenIds | None] = dict.fromkeys(range(request.sampling.n))
    del resume[sample]
    return replace(request, resume=resume | {at: tokens for at, tokens in request.resume.items() if at == sample})


def _copy(completion: Completion, key: RowKey, sample: int) -> Completion:
    return replace(completion, key=key, sample=sample)

"""One live sample's mutable state: its tokens, its blocks with their hashes, and what ends it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b
from typing import Protocol

import numpy as np

from batchgen.types import Request, TokenIds

# (finish reason, stop reason) as a Completion has them
Finish = tuple[str, "str | int | None"]


class TextStream(Protocol):
    """Incremental text of one sample; text that later tokens may still change is held back."""

    def push(self, token_id: int) -> str: ...


class StopStrings:
    """Looks for stop strings in a growing text, also where one spans tokens or ends inside one.

    The match that starts leftmost wins, among equals the one given first.
    """

    def __init__(self, stops: tuple[str, ...], stream: TextStream) -> None:
        self._stops = stops
        self._stream = stream
        self._keep = max(len(stop) for stop in stops) - 1  # a longer tail would hold a whole stop, found before
        self._tail = ""

    def push(self, token_id: int) -> str | None:
        text = self._stream.push(token_id)
        if not text:
            return None
        window = self._tail + text
        found: str | None = None
        first = len(window)
        for stop in self._stops:
            start = window.find(stop)
            if 0 <= start < first:
                found, first = stop, start
        self._tail = window[max(0, len(window) - self._keep) :]
        return found


class Sequence:
    """A sample from the moment it is added until it is finished, across preemptions.

    `tokens` are prompt and output; tokens still on the device are not in it. `limit` is the length at which it ends.
    `finish` is set at once where the resumed tokens already end it. `slot` is -1 while it waits. `num_computed` is
    how far it had come when it was last preempted, -1 before it ever ran.
    """

    __slots__ = (
        "_eos",
        "_stop_ids",
        "_stop_strings",
        "block_ids",
        "finish",
        "hashes",
        "limit",
        "num_computed",
        "num_prompt",
        "request",
        "sample",
        "slot",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        sample: int,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        stream_factory: Callable[[], TextStream],
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.sample = sample
        self.num_prompt = len(request.prompt_token_ids)
        room = max(0, max_model_len - self.num_prompt)
        new_tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        self.limit = self.num_prompt + new_tokens
        self.slot = -1
        self.block_ids: list[int] = []
        self.hashes: list[bytes] = []
        self.num_computed = -1
        self._eos: frozenset[int] = frozenset() if sampling.ignore_eos else eos_token_ids
        self._stop_ids = self._eos.union(sampling.stop_token_ids) if sampling.stop_token_ids else self._eos
        self._stop_strings = StopStrings(sampling.stop, stream_factory()) if sampling.stop else None
        self.tokens = array("i", np.asarray(request.prompt_token_ids, np.int32).tobytes())
        self.finish: Finish | None = None if new_tokens > 0 else ("length", None)
        resumed = request.resume.get(sample)
        if resumed is not None:
            for token_id in resumed.tolist():
                if self.finish is not None:
                    break
                self.finish = self.accept(token_id)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def ends_at_limit(self) -> bool:
        """True where nothing but the limit can end it, so that its final length is known."""
        return not self._stop_ids and self._stop_strings is None

    def output(self) -> TokenIds:
        return np.array(self.tokens[self.num_prompt :], np.int32)

    @property
    def ends_at_eos(self) -> bool:
        """True where nothing but its limit and the model's EOS can end it."""
        return self._stop_strings is None and self._stop_ids is self._eos

    def extend(self, token_ids: TokenIds) -> None:
        """Append output tokens that are known to end nothing."""
        self.tokens.frombytes(np.ascontiguousarray(token_ids, np.int32).tobytes())

    def accept(self, token_id: int) -> Finish | None:
        """Append the next output token; says how it ends the sample, if it does."""
        self.tokens.append(token_id)
        if token_id in self._stop_ids:
            return "stop", None if token_id in self._eos else token_id
        if self._stop_strings is not None:
            found = self._stop_strings.push(token_id)
            if found is not None:
                return "stop", found
        if len(self.tokens) >= self.limit:
            return "length", None
        return None

    def block_hash(self, index: int, block_size: int) -> bytes:
        """The hash of full block `index` and all before it: equal hashes mean equal tokens from position 0 on."""
        hashes = self.hashes
        if index >= len(hashes):
            start, size = len(hashes) * block_size, block_size * self.tokens.itemsize
            content = self.tokens[start : (index + 1) * block_size].tobytes()
            before = hashes[-1] if hashes else b""
            for at in range(0, len(content), size):
                before = blake2b(before + content[at : at + size], digest_size=16).digest()
                hashes.append(before)
        return hashes[index]

"""Steps in which every row decodes, captured once for each number of rows and replayed: the host starts one graph
instead of hundreds of kernels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchgen.attention.base import AttentionBackend, AttentionMetadata
from batchgen.device import Device


class _Graph(NamedTuple):
    replay: Callable[[], torch.Tensor]
    inputs: torch.Tensor  # (3 * num_rows,) int64


class DecodeGraphs:
    """A graph is captured when a step first needs its bucket; a step of fewer rows is padded.

    `forward` takes inputs (3, num_rows) int64 on the device and the step's metadata -> (num_rows, hidden_size). What
    else it reads are tensors that stay where they are.
    """

    def __init__(
        self,
        device: Device,
        backend: AttentionBackend,
        forward: Callable[[torch.Tensor, AttentionMetadata], torch.Tensor],
        max_rows: int,
    ) -> None:
        self._device, self._backend, self._forward = device, backend, forward
        self._buckets = buckets(max_rows)
        self._graphs: dict[int, _Graph] = {}

    def run(
        self,
        inputs: npt.NDArray[np.int64],  # (3, num_rows): ids, positions, slot mapping
        metadata: Callable[[torch.Tensor], AttentionMetadata],  # of a slot mapping on the device
    ) -> torch.Tensor:
        """(num_rows, hidden_size), to be used before the next run."""
        num_rows = inputs.shape[1]
        bucket = self._buckets[bisect_left(self._buckets, num_rows)]
        padded = np.zeros((3, bucket), np.int64)
        padded[2] = -1
        padded[:, :num_rows] = inputs
        graph = self._graphs.get(bucket)
        if graph is None:
            target = torch.empty(3 * bucket, dtype=torch.int64, device=self._device.torch_device)
        else:
            target = graph.inputs
        self._device.upload(padded.reshape(-1), target)
        step = metadata(target[2 * bucket :])
        self._backend.prepare(step, capacity=bucket)
        if graph is None:
            work = target.view(3, bucket)
            graph = _Graph(self._device.capture(lambda: self._forward(work, step)), target)
            self._graphs[bucket] = graph
        return graph.replay()[:num_rows]


def buckets(max_rows: int) -> list[int]:
    """Numbers of rows that graphs are made for: at most an eighth of a large one is padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, max_rows, 64)]
    return [*(size for size in sizes if size < max_rows), max_rows]

"""A device that answers late, on the CPU: results stand still where they were asked for, and come when waited for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from batchgen.device import Array, Cpu


class LateDevice(Cpu):
    """What was uploaded has memory of its own, and its source is scribbled over; `events` is what was asked of the
    device, in order: "begun" and "waited", each with the number of the download."""

    def __init__(self, captures: bool = False) -> None:
        super().__init__()
        self.captures = captures
        self.events: list[tuple[str, int]] = []
        self.num_captured = 0
        self._downloads = 0

    def upload(self, array: Array, into: torch.Tensor | None = None) -> torch.Tensor:
        tensor = torch.from_numpy(array.copy())
        array.fill(-(1 << 20))
        return tensor if into is None else into[: len(tensor)].copy_(tensor)

    def download(self, tensor: torch.Tensor) -> Callable[[], Array]:
        number, self._downloads = self._downloads, self._downloads + 1
        now = tensor.clone()
        self.events.append(("begun", number))

        def wait() -> Array:
            self.events.append(("waited", number))
            array: Array = now.numpy()
            return array

        return wait

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """As a graph: every replay writes into the tensor that the first one gave."""
        self.num_captured += 1
        result = work()
        return lambda: result.copy_(work())

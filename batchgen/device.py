"""The device that a model runs on: what goes to it and what comes back, without the host having to wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy.typing as npt
import torch

from batchgen import memory
from batchgen.errors import BatchgenError, Interrupted

Array = npt.NDArray[Any]

# of CUDA, cuBLAS, and torch's CPU allocator; in lower case, as what is below
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "cublas_status_alloc_failed")
OF_A_GPU = ("cuda error", "hip error", "triton error")
# What a lost or broken GPU says. Anything else is a program that went wrong, and would do so again
LOST = (
    "uncorrectable",
    "hardware stack error",
    "no cuda-capable device",
    "busy or unavailable",
    "is lost",
    "unknown error",
    "system not yet initialized",
    "unspecified launch failure",
    "launch timed out",
    "present state",
)


class Device(Protocol):
    """Everything happens in the order in which it is asked for, as on one CUDA stream."""

    torch_device: torch.device
    name: str  # for people
    num_multiprocessors: int
    captures: bool  # whether `capture` pays

    def upload(self, array: Array, into: torch.Tensor | None = None) -> torch.Tensor:
        """The array on the device. It must not be changed afterwards, except where `into` takes a copy: a tensor of
        the same dtype and at least as long, whose first entries are overwritten; comes back cut to the array's length.
        """
        ...

    def download(self, tensor: torch.Tensor) -> Callable[[], Array]:
        """Begin to bring the tensor, as it is at this point, to the host; the call that comes back waits for it."""
        ...

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """What repeats `work`, on tensors that stay where they are, into the same result. It has not run yet."""
        ...

    def free_bytes(self) -> int:
        """Memory that can still be taken."""
        ...

    def give_back(self) -> None:
        """Free what torch keeps for itself, after an attempt that found no memory."""
        ...


class Cpu:
    """The host itself: nothing is copied, nothing is late."""

    torch_device = torch.device("cpu")
    name = "cpu"
    num_multiprocessors = 1
    captures = False

    def upload(self, array: Array, into: torch.Tensor | None = None) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if into is None:
            return tensor
        return into[: len(tensor)].copy_(tensor)

    def download(self, tensor: torch.Tensor) -> Callable[[], Array]:
        array: Array = tensor.numpy()
        return lambda: array

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return work

    def free_bytes(self) -> int:
        return memory.available()

    def give_back(self) -> None:
        pass


class Cuda:
    """A GPU of NVIDIA's or AMD's, through torch's current stream."""

    captures = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", 0)
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.name = str(properties.name)
        self.total_bytes = int(torch.cuda.mem_get_info(self.torch_device)[1])
        self.num_multiprocessors = properties.multi_processor_count
        self._pool: Any = None  # memory that all graphs share

    def upload(self, array: Array, into: torch.Tensor | None = None) -> torch.Tensor:
        # torch keeps a pinned buffer that is given back from being used again before the copy out of it is done
        pinned = torch.from_numpy(array).pin_memory()
        if into is None:
            return pinned.to(self.torch_device, non_blocking=True)
        return into[: len(pinned)].copy_(pinned, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> Callable[[], Array]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> Array:
            arrived.synchronize()
            array: Array = host.numpy()
            return array

        return wait

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        work()  # kernels are compiled, and libraries take their workspaces, before anything is recorded
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                result = work()
        except BaseException:
            torch.cuda.set_stream(stream)  # torch leaves its own where the end of a capture fails
            raise
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def free_bytes(self) -> int:
        self.give_back()
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def peak_of(self, work: Callable[[], None]) -> int:
        """Bytes that torch takes at most during `work`, beside what it holds before."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        work()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated(self.torch_device)) - before


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error.__context__, torch.OutOfMemoryError):  # hidden by what a capture said as it ended
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in OUT_OF_MEMORY)


def device_error(error: Exception) -> BatchgenError | None:
    """What an error of the GPU itself means for the job; None where it is none of these."""
    if not isinstance(error, RuntimeError) or not any(text in str(error).lower() for text in OF_A_GPU):
        return None
    first = str(error).splitlines()[0]
    if not any(text in first.lower() for text in LOST):
        return BatchgenError(f"a kernel failed on the GPU: {first}; progress is saved, please report it")
    return Interrupted(
        f"the GPU was lost: {first}; progress is saved, run the same command again, on another machine if this comes "
        "back (the system log names the cause: Xid)",
        reason="device",
    )

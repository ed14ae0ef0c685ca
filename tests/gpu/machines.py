"""What random programs need of a rank's device: memory, streams, graphs, random numbers. On GPUs, and the same motions on target cpu."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkernel import env
from tests.programs.memory import KINDS, NAN, host_plane

__all__ = ["GpuMachine", "Machine"]

ROOT = Path(__file__).resolve().parents[2]


class Machine:
    """What a program needs of a rank's device. This one is target cpu: everything happens at once."""

    def __init__(self, world: Any) -> None:
        self.world, self.xp = world, world.xp
        self.torch = __import__("torch") if importlib.util.find_spec("torch") else None

    def plane(self, words: int) -> Any:
        return host_plane(words)

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """The stream is the current one of every library."""
        yield

    def handle(self, stream: int) -> Any:
        """For ``stream=``."""
        return None

    def follow(self, stream: int, other: int) -> None:
        """Work on ``stream`` waits for what is on ``other`` by now."""

    def fill(self, words: Any, seed: int, dtype: str) -> None:
        """Normal numbers, as 16-bit words: the same everywhere for the same seed and shape."""
        values = self.xp.random.default_rng(seed).standard_normal(words.shape, self.xp.float32).astype(KINDS[dtype])
        words[...] = values.view(self.xp.uint16)

    def delay(self, microseconds: int) -> None:
        time.sleep(microseconds * 1e-6)

    def capture(self, stream: int, library: str, body: Callable[[], None]) -> Callable[[], None]:
        """What launches the captured work; it is captured here and does not run."""
        return body

    def synchronize(self) -> None: ...

    def to_torch(self, array: Any, dtype: str) -> Any:
        """The same memory as torch's tensor."""
        kinds = {"bfloat16": self.torch.bfloat16, "float16": self.torch.float16}
        transposed = not array.flags.c_contiguous and array.T.strides[-1] == 2 and array.strides[-1] != 2
        stored = array.T if transposed else array
        tensor = self._tensor(stored.view(self.xp.int16)).view(kinds[dtype])
        return tensor.t() if transposed else tensor

    def _tensor(self, words: Any) -> Any:
        return self.torch.from_numpy(words)

    def saved(self, result: Any) -> Any:
        """A copy of its bits, made in the current stream."""
        if self.torch is not None and isinstance(result, self.torch.Tensor):
            return result.view(self.torch.int16).clone(memory_format=self.torch.contiguous_format)
        return self.xp.ascontiguousarray(result.view(self.xp.uint16)).copy()

    def words(self, saved: Any) -> Any:
        """What was saved, as 16-bit words."""
        if self.torch is not None and isinstance(saved, self.torch.Tensor):
            return saved.numpy().view(self.xp.uint16)
        return saved

    def spoil(self, result: Any) -> None:
        if self.torch is not None and isinstance(result, self.torch.Tensor):
            result.view(self.torch.int16).fill_(NAN)
        else:
            result.view(self.xp.uint16)[...] = NAN


class GpuMachine(Machine):
    def __init__(self, world: Any) -> None:
        super().__init__(world)
        xp = self.xp
        xp.cuda.Device(world.device).use()
        self.streams = [xp.cuda.Stream(non_blocking=True) for _ in range(2)]
        if self.torch is not None:
            self.torch.cuda.set_device(world.device)
            self.torch_streams = [self.torch.cuda.ExternalStream(stream.ptr, device=world.device) for stream in self.streams]
        module = xp.RawModule(code=(ROOT / "mkernel" / "bench" / "kernels.cu").read_text(), options=("--std=c++17",))
        self._hold, self._fill = module.get_function("hold"), module.get_function("fill")
        self._kept: list[Any] = []  # graphs, until the device is idle

    def plane(self, words: int) -> Any:
        """16-byte aligned and no more."""
        return self.xp.empty(words + 8, self.xp.uint16)[8:]

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.torch is not None:
                stack.enter_context(self.torch.cuda.stream(self.torch_streams[stream]))
            stack.enter_context(self.streams[stream])
            yield

    def handle(self, stream: int) -> Any:
        return self.streams[stream].ptr

    def follow(self, stream: int, other: int) -> None:
        event = self.xp.cuda.Event(disable_timing=True)
        event.record(self.streams[other])
        self.streams[stream].wait_event(event)

    def fill(self, words: Any, seed: int, dtype: str) -> None:
        xp = self.xp
        if not words.size:
            return
        plain = xp.empty(words.shape, xp.uint16)
        self._fill((264,), (256,), (plain, xp.uint64(plain.size), xp.uint64(seed), xp.uint32(dtype == "float16")))
        words[...] = plain

    def delay(self, microseconds: int) -> None:
        self._hold((1,), (1,), (self.xp.uint64(1000 * microseconds),))

    def capture(self, stream: int, library: str, body: Callable[[], None]) -> Callable[[], None]:
        if self.world.num_nodes > 1 and env.EMULATED_ENGINE.get() == "sms":
            return body  # plain calls, as on target cpu: no fabric of SMs would serve replays (docs/fabric.md)
        if library == "torch":
            graph = self.torch.cuda.CUDAGraph()
            # Relaxed: the engine of an emulated network copies meanwhile, in another thread of this process.
            with self.torch.cuda.graph(graph, stream=self.torch_streams[stream], capture_error_mode="relaxed"):
                body()
            self._kept.append(graph)
            return graph.replay  # type: ignore[no-any-return]
        self.streams[stream].begin_capture()
        body()
        captured = self.streams[stream].end_capture()
        self._kept.append(captured)
        return lambda: captured.launch(self.streams[stream])

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()
        self.world.synchronize()

    def forget(self) -> None:
        """Graphs, after ``synchronize``."""
        self._kept.clear()

    def _tensor(self, words: Any) -> Any:
        return self.torch.as_tensor(words, device=f"cuda:{self.world.device}")

    def words(self, saved: Any) -> Any:
        return self.xp.asarray(saved).view(self.xp.uint16)

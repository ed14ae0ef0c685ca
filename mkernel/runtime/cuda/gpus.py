"""The GPUs that this process sees."""

from __future__ import annotations

import dataclasses

from mkernel.memory.driver import DriverError, call, driver

__all__ = ["Gpu", "available", "current_ordinal", "name_of", "pci_address_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process sees."""

    ordinal: int
    uuid: str
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    peers: tuple[int, ...]  # ordinals whose memory it reaches directly


def available() -> list[Gpu]:
    """The GPUs that this process sees; none when there is no driver. Raises ImportError without the package cuda-bindings."""
    try:
        cuda = driver()
    except DriverError:
        return []
    number = cuda.CUdevice_attribute
    major, minor = number.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, number.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    gpus = []
    count = call(cuda.cuDeviceGetCount(), "counting GPUs")
    for ordinal in range(count):
        what = f"attributes of GPU {ordinal}"
        others = (peer for peer in range(count) if peer != ordinal)
        gpus.append(
            Gpu(
                ordinal,
                bytes(call(cuda.cuDeviceGetUuid(ordinal), what).bytes).hex(),
                name_of(ordinal),
                (call(cuda.cuDeviceGetAttribute(major, ordinal), what), call(cuda.cuDeviceGetAttribute(minor, ordinal), what)),
                call(cuda.cuDeviceTotalMem(ordinal), what),
                tuple(peer for peer in others if call(cuda.cuDeviceCanAccessPeer(ordinal, peer), what)),
            )
        )
    return gpus


def current_ordinal() -> int | None:
    """The GPU whose context is the calling thread's; None if it has none."""
    cuda = driver()
    if not int(call(cuda.cuCtxGetCurrent(), "asking for the current context")):
        return None
    return int(call(cuda.cuCtxGetDevice(), "asking for the current GPU"))


def name_of(ordinal: int) -> str:
    name: bytes = call(driver().cuDeviceGetName(128, ordinal), f"name of GPU {ordinal}")
    return name.split(b"\0")[0].decode()


def pci_address_of(ordinal: int) -> str:
    name: bytes = call(driver().cuDeviceGetPCIBusId(32, ordinal), f"PCI address of GPU {ordinal}")
    return name.split(b"\0")[0].decode().lower()

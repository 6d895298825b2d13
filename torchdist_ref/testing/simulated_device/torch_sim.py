"""Python module `torch.sim`: the names of `torch.cuda` that make sense for a simulated device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

Device = torch.device | str | int | None


def ops() -> Any:
    """Return the functions of the compiled library."""
    return torch.ops.simulated_device


def index_of(device: Device) -> int:
    """Convert a device in any of torch's spellings to its number; None is the current device."""
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "sim":
        raise ValueError(f"expected a device of type sim, not {device}")
    return torch.accelerator.current_device_index() if device.index is None else device.index


class Stream(torch.Stream):
    """Stream of a simulated device: a queue whose operations run when something waits for them."""

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        """Make a stream on `device`, by default the current one; keyword arguments are those of `torch.Stream`."""
        if kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, device=torch.device("sim", index_of(device)), priority=priority)


class EventType(type):
    """Type of `Event`, of which each `torch.Event` is an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event)


class DeviceEvent(metaclass=EventType):
    """Position in a stream of a simulated device, to wait for: a `torch.Event`, since torch compares no subclasses."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:  # type: ignore[misc]
        """Make an event; its device is that of the stream that records it."""
        if interprocess:
            raise ValueError("events of sim are for one process: use another way to notify the other one")
        return torch.Event(device="sim", enable_timing=enable_timing, blocking=blocking)


Event = DeviceEvent


def is_available() -> bool:
    """Return True: a module that exists has its devices."""
    return True


def is_initialized() -> bool:
    """Return whether this process has used a device, so that a process forked now could not use one."""
    return bool(ops().is_used())


def init() -> None:
    """Do nothing: there is nothing to initialize."""


# torch calls it before the first operation. torch 2.11 takes a device without it for one that was never used, and does
# not wait for it in torch.accelerator.synchronize.
_lazy_init = init


def _is_in_bad_fork() -> bool:
    return bool(ops().in_bad_fork())


def device_count() -> int:
    """Return the number of devices that `install` made."""
    return int(ops().device_count())


def current_device() -> int:
    """Return the number of the calling thread's current device."""
    return torch.accelerator.current_device_index()


def set_device(device: Device) -> None:
    """Make a device the calling thread's current one."""
    torch.accelerator.set_device_index(index_of(device))


def synchronize(device: Device = None) -> None:
    """Wait until all streams of a device have completed all that they were given."""
    torch.accelerator.synchronize(index_of(device))


def current_stream(device: Device = None) -> torch.Stream:
    """Return the stream to which the calling thread submits operations for a device."""
    return torch.accelerator.current_stream(index_of(device))


def default_stream(device: Device = None) -> torch.Stream:
    """Return the stream that a device has from the start."""
    kind = torch.accelerator.current_stream(index_of(device)).device_type
    return Stream(stream_id=0, device_index=index_of(device), device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    """Make a stream the calling thread's current one of its device."""
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Submit the operations of a block to `stream`; nothing changes for None."""
    with stream if stream is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def device(device: Device) -> Iterator[None]:
    """Make a device the current one for a block; nothing changes for None or a negative number."""
    before = current_device()
    if device is not None and index_of(device) >= 0:
        set_device(device)
    try:
        yield
    finally:
        set_device(before)


def is_current_stream_capturing() -> bool:
    """Return False: streams of sim are not captured into graphs."""
    return False


class Properties(NamedTuple):
    """Properties of a simulated device.

    Attributes:
        name: name of the device.
        total_memory: size of its memory, in bytes.
    """

    name: str
    total_memory: int


def get_device_name(device: Device = None) -> str:
    """Return the name of a device."""
    return f"simulated device {index_of(device)}"


def get_device_properties(device: Device = None) -> Properties:
    """Return name and size of a device."""
    return Properties(get_device_name(device), mem_get_info(device)[1])


def can_device_access_peer(device: Device, peer: Device) -> bool:
    """Return True for two devices: each can copy to each other."""
    return index_of(device) != index_of(peer)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes of `torch.autocast` on this device."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True: the CPU's kernels take bfloat16."""
    return True


def memory_stats(device: Device = None) -> dict[str, Any]:
    """Return the counts of the allocator, under the names that `torch.accelerator.memory_stats` uses."""
    return dict(torch.accelerator.memory_stats(index_of(device)))


def memory_allocated(device: Device = None) -> int:
    """Return the bytes of the blocks that are in use."""
    return torch.accelerator.memory_allocated(index_of(device))


def max_memory_allocated(device: Device = None) -> int:
    """Return the most bytes that were in use since the last `reset_peak_memory_stats`."""
    return torch.accelerator.max_memory_allocated(index_of(device))


def memory_reserved(device: Device = None) -> int:
    """Return the bytes of all blocks, used and free."""
    return torch.accelerator.memory_reserved(index_of(device))


def max_memory_reserved(device: Device = None) -> int:
    """Return the most bytes of all blocks since the last `reset_peak_memory_stats`."""
    return torch.accelerator.max_memory_reserved(index_of(device))


def reset_peak_memory_stats(device: Device = None) -> None:
    """Let the peaks be what is in use now."""
    torch.accelerator.reset_peak_memory_stats(index_of(device))


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Set the sums over time to zero."""
    torch.accelerator.reset_accumulated_memory_stats(index_of(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the bytes that were never allocated and the size of the device's memory."""
    return torch.accelerator.get_memory_info(index_of(device))


def empty_cache() -> None:
    """Return the pages of free blocks to the system."""
    torch.accelerator.empty_cache()


def default_generator(device: Device = None) -> torch.Generator:
    """Return the generator from which a device draws random numbers."""
    return ops().default_generator(index_of(device))  # type: ignore[no-any-return]


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
        default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    return default_generator().initial_seed()


def get_rng_state(device: Device = None) -> torch.Tensor:
    """Return the state of a device's generator."""
    return default_generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Set the state of a device's generator."""
    default_generator(device).set_state(new_state)


def host_register(address: int, size: int) -> None:
    """Pin `size` bytes of host memory at `address`, as cudaHostRegister does; copies from and to it are asynchronous.

    The memory must stay mapped until the copies have completed. A copy that runs later fails with an error.
    """
    ops().host_register(address, size)


def host_unregister(address: int) -> None:
    """Undo `host_register`; this does not wait for copies."""
    ops().host_unregister(address)


def ipc_handle(tensor: torch.Tensor) -> str:
    """Return a handle of a tensor's storage with which another process of the same user can map it.

    The storage must be kept until the other process has finished with it, and all operations that the other process is
    to see must have completed.
    """
    return str(ops().ipc_handle(tensor))


def open_ipc_handle(handle: str) -> torch.Tensor:
    """Map the storage that a handle of another process names; the result has its bytes, in dtype uint8."""
    return ops().open_ipc_handle(handle)  # type: ignore[no-any-return]

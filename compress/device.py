"""Which device computes, and what it can hold."""

import torch

from compress.errors import InputError
from compress.ranks import launched, processes_here

__all__ = ["resolve_device"]


def resolve_device(name: str) -> torch.device:
    """`auto` (a GPU where there is one), `cpu`, `cuda`, `cuda:1`, `mps`.

    Raises:
        InputError: no such device here, or one GPU for all processes of a launcher.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # a device without values, `meta`, computes nothing
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {name!r} is not available here: use auto, cpu, cuda, cuda:N or mps") from error
    if launched():
        _check_each(device, name)
    return device


def _check_each(device: torch.device, name: str) -> None:
    """Refuse a device that is not there for every process."""
    if device.index is not None:
        raise InputError(f"device {name!r} is one GPU, but a launcher gives each process its own: say {device.type}")
    here = processes_here()
    if device.type != "cpu" and here > (count := torch.accelerator.device_count()):
        raise InputError(f"{here} processes are started here, but {count} GPUs are: start as many as there are GPUs")

"""What the numbers were computed with: versions, processor, accelerator; nothing that names a person, host or path."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from compress import __version__

__all__ = ["environment"]

PACKAGES = (
    "torch",
    "transformers",
    "compressed-tensors",
    "bitsandbytes",
    "safetensors",
    "tokenizers",
    "lm-eval",
    "datasets",
    "accelerate",
    "numpy",
    "scipy",
)


def environment() -> dict[str, Any]:
    """Plain data for environment.json."""
    return {
        "compress": __version__,
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerators": _accelerators(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """The model's name; `platform.processor` is empty or the architecture on most Linux systems."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _accelerators() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]

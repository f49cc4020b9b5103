"""What a calibrated run has finished, block by block, so that a killed run goes on where it was.

One safetensors file per block in a folder named after what the results depend on: the tensors to store, and the report.
A file appears in one rename, so a block is either whole or not there. The hidden states are not kept: running the
finished blocks again, on the weights that were stored, gives the same ones and costs a fraction of calibrating.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["Journal"]


class Journal:
    """The finished blocks of one run.

    Args:
        directory: created when the first block is saved.
        writes: false on all ranks but one; the others only read.
    """

    def __init__(self, directory: Path, *, writes: bool) -> None:
        self.directory = directory
        self.writes = writes

    def path(self, part: str) -> Path:
        """Where a part, a block's name, is kept."""
        return self.directory / f"{part}.safetensors"

    def save(self, part: str, tensors: dict[str, Tensor], report: dict[str, Any]) -> None:
        """Add a part durably."""
        if not self.writes:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.path(part).with_suffix(".tmp")
        # clones: runs of rows and a scale of several layers share memory, which safetensors refuses
        whole = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        save_file(whole, temporary, metadata={"report": json.dumps(report)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.rename(self.path(part))

    def load(self, part: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The tensors and the report of a part; None if it is not finished."""
        if not self.path(part).exists():
            return None
        with safe_open(self.path(part), framework="pt") as file:
            report = json.loads(file.metadata()["report"])
        return dict(self.tensors(part)), report

    def parts(self) -> list[str]:
        """The finished parts."""
        return sorted(path.name.removesuffix(".safetensors") for path in self.directory.glob("*.safetensors"))

    def tensors(self, part: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a part, one at a time."""
        with safe_open(self.path(part), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)

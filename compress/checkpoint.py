"""A checkpoint directory, read lazily: its configuration, where each tensor lies, and the files beside them.

Everything that can be wrong with the files is found here, from headers alone, before hours are spent on the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.errors import CheckpointError
from compress.inputs import parse_json
from compress.tensor_file import Spec, TensorInfo, read_header, read_tensor

__all__ = ["BLOCKS", "Checkpoint", "quantization_block", "read_config", "read_json"]

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OTHER_WEIGHTS = (
    ".safetensors",
    ".gguf",
    ".onnx",
    ".onnx_data",
    ".h5",
    ".msgpack",
    ".ot",
    ".tflite",
    ".mlmodel",
    *PICKLES,
)
NOT_CARRIED = (
    "evidence",
    ".evidence.new",
    ".evidence.old",
    ".git",
    ".cache",
    ".eval_results",
    "__pycache__",
)  # folders that describe the source, not the model

BLOCKS = ("quantization_config", "compression_config")  # keys of config.json; the second one is older
CONFIG_TYPES: dict[str, type] = {
    "model_type": str,
    "architectures": list,
    "text_config": dict,
    "quantization_config": dict,
    "num_hidden_layers": int,
    "hidden_size": int,
    "vocab_size": int,
}
TYPE_WORDS: dict[type, str] = {str: "text", list: "a list", dict: "a mapping", int: "a whole number"}


@dataclass(frozen=True)
class Checkpoint:
    """A directory with `config.json`, safetensors shards and side files.

    path      the directory
    config    config.json
    tensors   every tensor by name, in shard and file order
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @staticmethod
    def open(path: Path | str) -> "Checkpoint":
        """Read config and headers; no weights.

        Raises:
            CheckpointError: anything missing, damaged, contradictory, or of a kind that is not read.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a directory: give a checkpoint directory")
        config, tensors = read_config(path / "config.json"), _open_shards(path)
        if not any(info.nbytes for info in tensors.values()):
            raise CheckpointError(f"{path} holds no weights: its safetensors files are empty, fetch them again")
        return Checkpoint(path, config, tensors)

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        return read_tensor(self.tensors[name])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def specs(self) -> dict[str, Spec]:
        """Dtype and shape of every tensor by name."""
        return {name: info.spec for name, info in self.tensors.items()}

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's own configuration, also where it is nested in a multimodal one."""
        nested = self.config.get("text_config")
        return {**self.config, **nested} if isinstance(nested, dict) else self.config

    @property
    def tied(self) -> bool:
        """The output head is the embedding; a configuration that does not say so leaves it to the tensors."""
        own = any(f".{name}".endswith(".lm_head.weight") for name in self.tensors)
        return bool(self.text_config.get("tie_word_embeddings", True)) and not own

    @cached_property
    def side_files(self) -> list[Path]:
        """Files to carry over unchanged, relative to `path`: tokenizer, chat template, code, licence."""
        found = [file for file in sorted(self.path.rglob("*")) if file.is_file()]
        return [file.relative_to(self.path) for file in found if self._carried(file.relative_to(self.path))]

    def _carried(self, file: Path) -> bool:
        if any(part in NOT_CARRIED for part in file.parts) or file.name == "config.json":
            return False
        return not file.name.endswith((*OTHER_WEIGHTS, ".safetensors.index.json", ".bin.index.json"))


def quantization_block(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What config.json says about quantization, None for a 16-bit checkpoint."""
    block = next((config[key] for key in BLOCKS if config.get(key) is not None), None)
    return None if block is None else dict(block)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint.

    Raises:
        CheckpointError: missing, unreadable, or no JSON object.
    """
    try:
        value = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: {path.parent} is not a whole checkpoint") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object: fetch the file again")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """config.json, with what this program reads of it of the types it is read as.

    Raises:
        CheckpointError: as `read_json`, or a value of another type.
    """
    config = read_json(path)
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        for key, kind in CONFIG_TYPES.items():
            if part.get(key) is not None and not isinstance(part[key], kind):
                raise CheckpointError(f"{path}: {key} is {part[key]!r}, not {TYPE_WORDS[kind]}: fetch the file again")
    return config


def _open_shards(path: Path) -> dict[str, TensorInfo]:
    if (path / INDEX).exists():
        return _open_indexed(path)
    files = sorted(path.glob("*.safetensors"))
    if (path / "model.safetensors").exists():
        files = [path / "model.safetensors"]
    if len(files) == 1:
        return read_header(files[0])
    if files:
        raise CheckpointError(
            f"{path} has {len(files)} safetensors files but no {INDEX}: add the index or merge the files"
        )
    pickles = sorted(file.name for file in path.iterdir() if file.name.endswith(PICKLES))
    if pickles:
        raise CheckpointError(
            f"{path} holds pickled weights ({pickles[0]}), which can run code when read: convert them to safetensors "
            "on a machine you trust with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    raise CheckpointError(
        f"{path} holds no safetensors file: give a directory with model.safetensors or shards and {INDEX}"
    )


def _open_indexed(path: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX} has no weight_map: the index is damaged")
    wrong = [
        shard for shard in weight_map.values() if not (shard and isinstance(shard, str) and Path(shard).name == shard)
    ]
    if wrong:
        raise CheckpointError(f"{path / INDEX} names {wrong[0]!r}, which is no file name: the index is damaged")
    tensors: dict[str, TensorInfo] = {}
    for shard in dict.fromkeys(weight_map.values()):
        if not (path / shard).is_file():
            raise CheckpointError(
                f"the index names the shard {shard}, which is missing in {path}: fetch the checkpoint again"
            )
        for name, info in read_header(path / shard).items():
            if name in tensors:
                raise CheckpointError(
                    f"the tensor {name!r} is in {tensors[name].path.name} and in {shard}: keep one of them"
                )
            tensors[name] = info
    _check_index(weight_map, tensors)
    return tensors


def _check_index(weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    absent = sorted(
        name for name, shard in weight_map.items() if name not in tensors or tensors[name].path.name != shard
    )
    if absent:
        raise CheckpointError(
            f"the index names {len(absent)} tensors that are not in their shard, first {absent[0]!r} in "
            f"{weight_map[absent[0]]}: fetch the checkpoint again"
        )
    unlisted = sorted(set(tensors) - set(weight_map))
    if unlisted:
        raise CheckpointError(
            f"{len(unlisted)} tensors are in the shards but not in the index, first {unlisted[0]!r}: rebuild the index"
        )

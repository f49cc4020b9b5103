"""A model to plan for: its config and its inventory, from a directory, a config.json, or a hub id.

Only config.json and safetensors headers are read; no weights. A model on the hub is never downloaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.checkpoint import quantization_block
from compress.errors import InputError
from compress.inputs import HUB_REPOSITORY, local_path
from compress.planner.inventory import Header, Weight, inventory, key_rows, meta_headers

if TYPE_CHECKING:
    from compress.checkpoint import Checkpoint

__all__ = ["Model", "build_model", "load_model", "model_of"]

SAME_AS = {"kimi_k2": "deepseek_v3"}  # model types that need remote code only for their name


@dataclass(frozen=True)
class Model:
    """What a plan needs to know of a model.

    name       the directory's or file's own name, or the hub id
    config     the language model's transformers config
    weights    every weight, grouped
    key_rows   output sizes of the key projections, empty where they are not stored on their own
    quantized  the checkpoint is quantized already; "" or its method
    measured   the weights come from headers, not from the config
    """

    name: str
    config: Any
    weights: tuple[Weight, ...]
    key_rows: frozenset[int]
    quantized: str
    measured: bool

    @property
    def parameters(self) -> int:
        """Parameters an engine loads: without multi-token-prediction layers."""
        return sum(weight.numel for weight in self.weights if weight.role != "mtp")

    def get(self, *names: str, default: int = 0) -> int:
        """The first of these fields that the config has, as a whole number."""
        found = next((value for name in names if (value := getattr(self.config, name, None)) is not None), default)
        return int(found)

    @property
    def own_format(self) -> str:
        """The weight format that changes nothing."""
        return "stored" if self.quantized else "bf16"

    @property
    def experts(self) -> int:
        """Routed experts of a layer, 0 for dense models."""
        return self.get("n_routed_experts", "num_local_experts", "num_experts")

    @property
    def experts_per_token(self) -> int:
        """Routed experts a token visits."""
        return self.get("num_experts_per_tok", "top_k_experts", "moe_topk")


def load_model(source: str) -> Model:
    """Read a model's config and headers.

    Args:
        source: a directory, a path of a config.json, or a hub id such as Qwen/Qwen3-32B.

    Raises:
        InputError: nothing there, not reachable, or an architecture that is not known.
    """
    path = local_path(source)
    if path.is_dir():
        return _from_directory(path)
    if path.is_file() and path.name == "config.json":
        return build_model(path.resolve().parent.name, _read_json(path))
    if path.is_file():
        return build_model(path.stem, _read_json(path))
    if HUB_REPOSITORY.fullmatch(source):
        return _from_hub(source)
    raise InputError(f"{source!r} is no directory, no config.json and no hub id: give one of them")


def build_model(name: str, config: Mapping[str, Any], headers: Mapping[str, Header] | None = None) -> Model:
    """A model from the contents of config.json and, where at hand, its headers.

    Raises:
        InputError: an architecture that is not known.
    """
    quantization = quantization_block(config) or {}
    whole = _normalise(name, config)
    found = headers or meta_headers(whole, quantization)
    text = whole.get_text_config(decoder=True)
    weights = inventory(found, text, quantization)
    method = str(quantization.get("quant_method", ""))
    return Model(name, text, weights, frozenset(key_rows(found)), method, headers is not None)


def _normalise(name: str, config: Mapping[str, Any]) -> Any:
    """The transformers config object: defaults filled in, layer types spelled out, aliases resolved."""
    import transformers  # an import of seconds

    fields = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    model_type = str(fields.pop("model_type", ""))
    try:
        return transformers.AutoConfig.for_model(SAME_AS.get(model_type, model_type), **fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"the config of {name} (model_type {model_type!r}) is not understood by transformers "
            f"{transformers.__version__}: {reason}"
        ) from error


def _from_directory(path: Path) -> Model:
    if not any(path.glob("*.safetensors")):
        return build_model(path.resolve().name, _read_json(path / "config.json"))
    from compress.checkpoint import Checkpoint  # imports torch, which a bare config need not wait for

    return model_of(Checkpoint.open(path))


def model_of(checkpoint: "Checkpoint") -> Model:
    """A model from a checkpoint's config and headers; the files need not have been written yet.

    Raises:
        InputError: an architecture that is not known.
    """
    from compress.tensor_file import NAMES

    headers = {name: (NAMES[info.dtype], info.shape, info.nbytes) for name, info in checkpoint.tensors.items()}
    return build_model(checkpoint.path.resolve().name, checkpoint.config, headers)


def _read_json(path: Path) -> dict[str, Any]:
    from compress.checkpoint import read_json

    return read_json(path)


def _from_hub(repo: str) -> Model:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        config = _read_json(Path(huggingface_hub.hf_hub_download(repo, "config.json")))
        return build_model(repo, config, _hub_headers(repo))
    except (OSError, errors.HFValidationError, errors.SafetensorsParsingError) as error:
        raise InputError(
            f"{repo} is no directory here, and its config and headers cannot be had from the hub "
            f"({type(error).__name__}): check the name, log in, or give a local directory"
        ) from error


def _hub_headers(repo: str) -> dict[str, Header] | None:
    """Headers of a model on the hub, a few kilobytes per shard; None where it has no safetensors."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        metadata = huggingface_hub.get_safetensors_metadata(repo)
    except errors.NotASafetensorsRepoError:
        return None
    return {
        name: (info.dtype, tuple(info.shape), info.data_offsets[1] - info.data_offsets[0])
        for file in metadata.files_metadata.values()
        for name, info in file.tensors.items()
    }

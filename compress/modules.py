"""The modules of a checkpoint, derived from its headers: name, class, weight. No model is built.

Classes are the words that `targets` and `ignore` use: Linear, Embedding, Router, Vision, MTP. The last three are
matrices too, but no engine quantizes them, so a target of `Linear` does not mean them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from compress.architectures import (
    EMBEDDINGS,
    FUSED_EXPERTS,
    INTERLEAVED_EXPERTS,
    MULTIMODAL,
    NEXT_TOKEN_HEADS,
    ROUTERS,
    layer_of,
)
from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.tensor_file import TensorInfo

__all__ = ["CLASSES", "Module", "class_of", "modules", "pattern_of"]

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
CLASSES = ("Linear", "Embedding", "Router", "Vision", "MTP")


@dataclass(frozen=True)
class Module:
    """One matrix of the model.

    name      full module name; the tensor on disk is `name + ".weight"` unless it is an expert of a fused tensor
    cls       one of CLASSES
    weight    (O, I), where its bytes lie
    tensor    the name of the tensor that holds it
    """

    name: str
    cls: str
    weight: TensorInfo
    tensor: str

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        rows, columns = self.weight.shape
        return rows, columns

    @property
    def layer(self) -> int | None:
        """Index of its decoder layer."""
        return layer_of(self.name)


def modules(checkpoint: Checkpoint) -> list[Module]:
    """Every matrix of the checkpoint as a module, in file order; a tied head appears under its own name."""
    found = [module for name, info in checkpoint.tensors.items() for module in _modules_of(checkpoint, name, info)]
    if checkpoint.tied:
        found += [
            Module(_head_name(module.name), "Linear", module.weight, module.tensor)
            for module in found
            if module.cls == "Embedding" and module.name.endswith("embed_tokens")
        ][:1]
    return found


def pattern_of(name: str) -> str:
    """A name with `*` for the numbers of its layer and expert."""
    return NUMBER.sub("*", name)


def _head_name(embedding: str) -> str:
    """lm_head sits beside the language model: model.embed_tokens -> lm_head."""
    prefix = embedding.removesuffix("embed_tokens").removesuffix("model.")
    return f"{prefix}lm_head"


def _modules_of(checkpoint: Checkpoint, name: str, info: TensorInfo) -> Iterator[Module]:
    if len(info.shape) == 2 and name.endswith(".weight"):
        module = name.removesuffix(".weight")
        yield Module(module, class_of(module, checkpoint), info, name)
    elif len(info.shape) == 3 and ".experts." in name:
        yield from _experts(checkpoint, name, info)


def class_of(name: str, checkpoint: Checkpoint) -> str:
    """The class of a matrix by its name: one of CLASSES."""
    parts = name.split(".")
    layers = checkpoint.text_config.get("num_hidden_layers")
    layer = layer_of(name)
    if MULTIMODAL.intersection(parts):
        return "Vision"
    if NEXT_TOKEN_HEADS.intersection(parts) or (layer is not None and layers is not None and layer >= layers):
        return "MTP"
    if parts[-1] in EMBEDDINGS:
        return "Embedding"
    return "Router" if parts[-1] in ROUTERS else "Linear"


def _experts(checkpoint: Checkpoint, name: str, info: TensorInfo) -> Iterator[Module]:
    """Experts fused into one (E, O, I) tensor, as the 2-D modules that engines load: each a run of bytes of it."""
    parent, _, child = name.removesuffix(".weight").rpartition(".")
    if child not in FUSED_EXPERTS or not _out_in(checkpoint, parent, child):
        return
    for expert in range(info.shape[0]):
        matrix = info.item(expert)
        rows = matrix.shape[0] // len(FUSED_EXPERTS[child])
        for i, part in enumerate(FUSED_EXPERTS[child]):
            yield Module(f"{parent}.{expert}.{part}", "Linear", matrix.rows(i * rows, (i + 1) * rows), name)


def _out_in(checkpoint: Checkpoint, parent: str, child: str) -> bool:
    """Whether fused expert tensors are stored (experts, out, in) with gate above up.

    A square tensor does not tell; its sibling, half as wide or twice as high, then does.

    Raises:
        CheckpointError: both are square or missing, so that the orientation cannot be told.
    """
    config = checkpoint.text_config
    if config.get("model_type", "").removesuffix("_text") in INTERLEAVED_EXPERTS:
        return False
    hidden = config.get("hidden_size")
    for name in (child, *FUSED_EXPERTS):
        info = checkpoint.tensors.get(f"{parent}.{name}") or checkpoint.tensors.get(f"{parent}.{name}.weight")
        if info and info.shape[1] != info.shape[2]:
            return bool(info.shape[1 if name == "down_proj" else 2] == hidden)
    raise CheckpointError(f"the fused experts {parent} are square: whether rows are outputs cannot be told")

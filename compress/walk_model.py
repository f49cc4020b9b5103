"""One decoder block at a time, its weights read from the checkpoint; the rest of the model has no memory.

transformers supplies the code of the block and what each block is called with (rotary embeddings, masks); the weights
never pass through its loader, which reads whole models. Experts, which transformers keeps as one tensor, are taken
apart into the linears that checkpoints and engines know, so that one expert is like any other linear.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.model_config import model_config
from compress.modules import modules
from compress.tensor_file import TensorInfo, read_tensor

__all__ = ["Chain", "SeparateExperts", "Skeleton", "run_block", "skeleton"]

# names inside a block, ours -> the checkpoint's, for families that name them otherwise
ALIASES = (
    ("mlp.", "block_sparse_moe."),
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)


class SeparateExperts(nn.Module):
    """The experts of a mixture as linears of their own, for the same call as transformers' fused module.

    An expert that a batch sends fewer than `floor` tokens is also shown evenly spaced other tokens of the batch. They
    reach its layers, so that it is calibrated, and not its output. `routed` counts the tokens that were meant for it.
    """

    def __init__(self, fused: Any, floor: int) -> None:
        super().__init__()
        self.floor = floor
        self.gate = getattr(fused, "_apply_gate", None)
        self.act_fn = getattr(fused, "act_fn", None)
        experts, width, hidden = fused.gate_up_proj.shape
        self.routed = [0] * experts
        for expert in range(experts):
            self.add_module(str(expert), _expert(hidden, width // 2))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(tokens, H) -> (tokens, H), the weighted sum of each token's experts."""
        total = torch.zeros_like(hidden_states)
        for expert in range(len(self.routed)):
            token, rank = torch.where(top_k_index == expert)
            self.routed[expert] += len(token)
            output = self._compute(expert, hidden_states[self._shown(token, len(hidden_states))])[: len(token)]
            total.index_add_(0, token, (output * top_k_weights[token, rank, None]).to(total.dtype))
        return total

    def _shown(self, token: Tensor, tokens: int) -> Tensor:
        missing = min(self.floor, tokens) - len(token)
        if missing <= 0:
            return token
        spread = torch.linspace(0, tokens - 1, missing, device=token.device).long()
        return torch.cat([token, spread])

    def _compute(self, expert: int, x: Tensor) -> Tensor:
        parts: Any = self.get_submodule(str(expert))
        gate, up = parts["gate_proj"](x), parts["up_proj"](x)
        gated: Tensor = self.gate(torch.cat([gate, up], dim=-1)) if self.gate else self.act_fn(gate) * up  # type: ignore[misc]
        output: Tensor = parts["down_proj"](gated)
        return output


def _expert(hidden: int, width: int) -> nn.ModuleDict:
    shapes = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
    return nn.ModuleDict({name: nn.Linear(*shape, bias=False, device="meta") for name, shape in shapes.items()})


class _Recorded(Exception):
    """Ends a forward pass when every block has been asked."""


class _Recorder(nn.Module):
    """Stands in for a block: hands its input on and keeps the rest of the call; other attributes are the block's."""

    def __init__(self, block: nn.Module, *, last: bool) -> None:
        super().__init__()
        self._block = (block,)  # in a tuple, so that it is no submodule
        self._last = last
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.hidden: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"][0], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.call, self.hidden = (args, kwargs), hidden_states
        if self._last:
            raise _Recorded
        return hidden_states


@dataclass(frozen=True)
class Skeleton:
    """The model without weights, and where each block's weights lie.

    model    transformers' causal language model on the meta device
    blocks   its decoder blocks
    prefix   the checkpoint's name of the list of blocks, e.g. "model.layers"
    where    every tensor of the checkpoint by name, experts taken apart
    """

    model: Any
    blocks: nn.ModuleList
    prefix: str
    where: dict[str, TensorInfo]

    def names(self, index: int, local: str) -> str:
        """The checkpoint's name of a tensor or module of block `index`, from its name inside the block."""
        other = f"{local}."
        for ours, theirs in ALIASES:
            other = other.replace(ours, theirs)
        name, alias = f"{self.prefix}.{index}.{local}", f"{self.prefix}.{index}.{other[:-1]}"
        return alias if alias in self.where or f"{alias}.weight" in self.where else name

    def load(self, index: int, dtype: torch.dtype, device: torch.device, *, floor: int) -> nn.Module:
        """Block `index` with its weights, in evaluation mode.

        Raises:
            CheckpointError: a tensor of the block is missing or has another shape.
        """
        block = copy.deepcopy(self.blocks[index])
        for name, module in list(block.named_modules()):
            if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter) and self._separate(index, name):
                block.set_submodule(name, SeparateExperts(module, floor))
        for name, tensor in block.state_dict().items():
            owner, _, leaf = name.rpartition(".")
            value = self._read(self.names(index, name), tensor).to(device, dtype)
            module = block.get_submodule(owner)
            setattr(module, leaf, nn.Parameter(value, requires_grad=False) if leaf in module._parameters else value)
        return block.to(device).eval()

    def _separate(self, index: int, experts: str) -> bool:
        return f"{self.names(index, f'{experts}.0.gate_proj')}.weight" in self.where

    def _read(self, name: str, like: Tensor) -> Tensor:
        info = self.where.get(name)
        if info is None:
            raise CheckpointError(
                f"the tensor {name!r} is missing: the checkpoint is not whole or of an unknown layout"
            )
        if tuple(info.shape) != tuple(like.shape):
            raise CheckpointError(f"{name} is {list(info.shape)}, but the model's code expects {list(like.shape)}")
        return read_tensor(info)

    def record(self, tokens: Tensor, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, list[Any]]]:
        """For each sequence of `tokens` (N, T): the first block's input (1, T, D) and every block's other arguments."""
        decoder = self.model.get_decoder()
        recorders = [_Recorder(block, last=block is self.blocks[-1]) for block in self.blocks]
        front = copy.deepcopy(decoder)
        for name, child in front.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == len(self.blocks):
                front.set_submodule(name, nn.ModuleList(recorders))
        self._fill_embeddings(front, dtype, device)
        for sequence in tokens:
            try:
                front(input_ids=sequence[None].to(device), use_cache=False)
            except _Recorded:
                assert recorders[0].hidden is not None
                yield recorders[0].hidden, [recorder.call for recorder in recorders]

    def _fill_embeddings(self, front: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        parent = self.prefix.rpartition(".")[0]
        for name, parameter in list(front.named_parameters(recurse=True)):
            full = f"{parent}.{name}" if parent else name
            owner, _, leaf = name.rpartition(".")
            if full in self.where:
                value = self._read(full, parameter).to(device, dtype)
                setattr(front.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
        for module in front.modules():
            for leaf, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[leaf] = buffer.to(device)


def run_block(module: nn.Module, call: tuple[Sequence[Any], Mapping[str, Any]], hidden: Tensor) -> Tensor:
    """What a block makes of hidden states (n, T, D), given its other arguments as `Skeleton.record` found them."""
    args, kwargs = call
    output: Any = module(hidden, *args, **kwargs)
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


class Chain(nn.Module):
    """Blocks one behind the other, each with its own other arguments: one block, called with hidden states alone."""

    def __init__(self, parts: Iterable[tuple[nn.Module, Any]]) -> None:
        super().__init__()
        blocks, self.calls = zip(*parts, strict=True)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Tensor) -> Tensor:
        for block, call in zip(self.blocks, self.calls, strict=True):
            hidden = run_block(block, call, hidden)
        return hidden


def skeleton(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> Skeleton:
    """Build the model's code without weights and find its blocks; `trust_remote_code` lets it be the checkpoint's own.

    Raises:
        CheckpointError: an architecture that is not known, or no list of decoder blocks is found.
    """
    config = model_config(checkpoint, trust_remote_code=trust_remote_code).get_text_config()
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,  # buffers too, such as Gemma's scale
        )
    where = dict(checkpoint.tensors) | {f"{module.name}.weight": module.weight for module in modules(checkpoint)}
    for name, child in model.get_decoder().named_children():
        if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers:
            return Skeleton(model.eval(), child, _prefix(name, where), where)
    raise CheckpointError(f"{type(model).__name__} has no list of {config.num_hidden_layers} decoder blocks")


def _prefix(name: str, where: dict[str, TensorInfo]) -> str:
    """Where the blocks lie in the checkpoint: the shortest prefix that ends in the list's name and a first block."""
    marker = f"{name}.0."
    prefixes = {tensor[: tensor.index(marker) + len(name)] for tensor in where if marker in tensor}
    text = sorted((prefix for prefix in prefixes if "vis" not in prefix and "audio" not in prefix), key=len)
    if not text:
        raise CheckpointError(f"no tensor of the checkpoint is named *{marker}*: its decoder blocks are not found")
    return text[0]

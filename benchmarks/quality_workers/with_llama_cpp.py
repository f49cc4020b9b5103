"""Weights by llama.cpp's K-quants, in its environment: python with_llama_cpp.py request.json.

For Llama's architecture. K-quants have blocks of 256 columns; llama.cpp itself takes another type for a matrix whose
columns they do not divide, and spends more bits on some layers: `bits` counts what it wrote.
"""

from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
from shared import Request

TYPES = {"Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}


def heads_of(config: Any, name: str) -> int:
    """How many heads the rows of a projection make whose halves GGUF interleaves; 0 where it does not."""
    found = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return next((heads for part, heads in found.items() if f".{part}." in name), 0)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """(O, I) with the two halves of each head's rows, which rotate together, side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def separated(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(model: Any, tokens: list[str], file: Path) -> dict[str, str]:
    """The model as float32 GGUF; the model's names of its tensors by GGUF's."""
    config = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = heads_of(config, name)
        to = names.get_name(name, try_suffixes=(".weight",))
        found[to] = name
        writer.add_tensor(to, (interleaved(tensor, heads) if heads else tensor).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def main() -> None:
    request = Request()
    model = request.model()
    plain, quantized = request.target / "plain.gguf", request.target / "quantized.gguf"
    vocabulary = sorted(request.tokenizer().get_vocab().items(), key=lambda item: item[1])
    names = write(model, [token for token, _ in vocabulary], plain)
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = TYPES[request.method], torch.get_num_threads()
    if llama_cpp.llama_model_quantize(str(plain).encode(), str(quantized).encode(), parameters):
        raise SystemExit("llama.cpp could not quantize")
    weights, stored, count = {}, 0, 0
    for tensor in gguf.GGUFReader(quantized).tensors:
        name = names[tensor.name]
        if ".layers." not in name or not name.endswith("proj.weight"):
            continue
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        heads = heads_of(model.config, name)
        weights[name.removesuffix(".weight")] = separated(values, heads) if heads else values
        stored += 8 * int(tensor.n_bytes)
        count += values.numel()
    request.done(bits=stored / count)
    plain.unlink()
    quantized.unlink()
    request.save_dequantized(weights)


if __name__ == "__main__":
    main()

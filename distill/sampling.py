"""Training data where there is none: what the teacher itself writes, one sequence after the other from its start token.

Drawn from the teacher's own distribution at temperature 1, without a cut: the texts show what the teacher does, its
mistakes too. An end of text does not end a sequence; the teacher goes on with the next text, as in its own training.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import InputError
from compress.progress import step
from distill.data import TokenText

__all__ = ["sample_rows", "sampled_texts"]

AT_A_TIME = 16  # sequences
KEPT = "sampled.safetensors"


def sampled_texts(
    teacher: PreTrainedModel, tokenizer: Any, count: int, length: int, seed: int, folder: Path
) -> list[TokenText]:
    """`count` sequences of `length` tokens, kept in `folder`, from where a continued run takes them again.

    Raises:
        InputError: a tokenizer with neither a start nor an end token.
    """
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise InputError("the tokenizer has no token to begin a text with: name sources under data instead of self")
    kept = folder / KEPT
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"ids": sample_rows(teacher, start, (count, length), seed)}, kept.with_suffix(".partial"))
        kept.with_suffix(".partial").rename(kept)
    return [TokenText(row) for row in load_file(kept)["ids"].tolist()]


@torch.inference_mode()
def sample_rows(model: PreTrainedModel, start: int, shape: tuple[int, int], seed: int) -> Tensor:
    """(N, T) int64 on the CPU, each row begun with `start`."""
    generator = torch.Generator(model.device).manual_seed(seed)
    count, length = shape
    parts = []
    with step("the teacher writes texts", count * length) as advance:
        for first in range(0, count, AT_A_TIME):
            ids = torch.full((min(AT_A_TIME, count - first), 1), start, device=model.device)
            cache = None
            for _ in range(length - 1):
                found = model(input_ids=ids[:, -1:], cache=cache, use_cache=True)
                cache = found.cache
                chances = found.logits[:, -1].float().softmax(-1)
                ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], dim=1)
                advance(len(ids))
            parts.append(ids.cpu())
    return torch.cat(parts)

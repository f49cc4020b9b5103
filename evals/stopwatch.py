"""The times of a model's own generation: when each token comes out of `generate`, as its user would see it.

Greedy, of a fixed length, from a prompt of random tokens, so that neither side stops early and no data decides. All
rows of a batch advance together and share their times. Reading a token waits for the device, so the times are real.
"""

import time

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from evals.serving import Round, Timed

__all__ = ["random_prompt", "time_generation"]


class _Clock(BaseStreamer):
    """Notes when each token arrives; the prompt comes first and is not one."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def random_prompt(vocabulary: int, *, batch: int, tokens: int) -> Tensor:
    """Token ids (batch, tokens), the same on every call."""
    return torch.randint(vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(0))


def time_generation(model: PreTrainedModel, prompt: Tensor, *, tokens: int) -> Round:
    """Generate `tokens` tokens for each row of `prompt` (B, T) and time them.

    Raises:
        ValueError: the model stopped early.
    """
    clock = _Clock()
    inputs = prompt.to(model.device)
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(  # type: ignore[operator]
            inputs,
            attention_mask=torch.ones_like(inputs),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            streamer=clock,
        )
    _, *times = clock.times
    if len(times) != tokens:
        raise ValueError(f"{tokens} tokens were asked for and {len(times)} came")
    return Round((Timed(start, times[0], times[-1], tokens, prompt.shape[1]),) * len(prompt))

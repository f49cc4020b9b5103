"""A loaded model as lm-eval wants it, watched: what the harness would answer wrongly or cut in silence is refused here.

lm-eval's way to give it a model is a subclass of its `LM`; this one hands requests to the harness's own Hugging Face
model in slices, so that progress can be told and the first wrong answer stops the run.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import InputError, Refused

__all__ = ["WatchedModel"]

SLICE: Final = 16  # batches between two reports of progress
LIMITS: Final = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
CAPPED: Final = 0.95  # of the limit of new tokens


class WatchedModel(HFLM):  # type: ignore[misc]
    """`advance` is told the fraction of all requests that was just answered.

    Raises Refused if wrapping changes the model (the harness ties embeddings that were apart) or its logits are not
    finite, for requests that do not fit into `max_length`, and for likelihoods that are not finite.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        batch_size: int,
        add_bos: bool | None,
        advance: Callable[[float], None],
    ) -> None:
        before = _addresses(model)
        super().__init__(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),  # the harness gives it a padding token
            max_length=max_length,
            batch_size=batch_size,
            add_bos_token=add_bos,
            softmax_dtype="float32",
        )
        if _addresses(model) != before:
            raise Refused(
                "lm-eval has tied the output head to the input embedding, but they were apart: "
                "set tie_word_embeddings to false in the checkpoint's config.json"
            )
        _check_logits(model)
        self._advance = advance

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one."""
        for request in requests:
            context, continuation = request.args
            self._check_fits(request, len(self.tok_encode(context + continuation)) - 1, self.max_length)
        return self._in_slices(super().loglikelihood, requests)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text."""
        return self._in_slices(super().loglikelihood_rolling, requests)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text generated after each prompt."""
        for request in requests:
            context, options = request.args
            room = self.max_length - self.limit_of(options)
            if room < 1:
                raise InputError(
                    f"task {request.task_name!r} generates up to {self.limit_of(options)} tokens, "
                    f"raise max_length ({self.max_length}) above that or lower max_new_tokens"
                )
            self._check_fits(request, len(self.tok_encode(context)), room)
        return self._in_slices(super().generate_until, requests)

    def limit_of(self, options: dict[str, Any]) -> int:
        """New tokens a request allows."""
        return int(next((options[name] for name in LIMITS if name in options), self.max_gen_toks))

    def is_capped(self, text: str, options: dict[str, Any]) -> bool:
        """Whether a generated text seems to have ended at its limit."""
        return len(self.tok_encode(text, add_special_tokens=False)) >= CAPPED * self.limit_of(options)

    def _check_fits(self, request: Any, length: int, room: int) -> None:
        if length > room:
            raise Refused(
                f"a prompt of task {request.task_name!r} has {length} tokens but only {room} fit and lm-eval would "
                "cut it, raise max_length"
            )

    def _in_slices(self, answer: Callable[..., list[Any]], requests: Sequence[Any]) -> list[Any]:
        answers: list[Any] = []
        size = SLICE * self.batch_size
        for start in range(0, len(requests), size):
            part = requests[start : start + size]
            answers += answer(part, disable_tqdm=True)
            _check_answers(part, answers[start:])
            self._advance(len(part) / len(requests))
        return answers


def _check_answers(requests: Sequence[Any], answers: Sequence[Any]) -> None:
    for request, found in zip(requests, answers, strict=True):
        value = found[0] if isinstance(found, tuple) else found
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(f"task {request.task_name!r} has a log-likelihood of {value} for {str(request.args)[:60]!r}")


def _addresses(model: PreTrainedModel) -> dict[str, int]:
    """Where each tensor of the model lies; tied ones lie in one place."""
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


@torch.inference_mode()
def _check_logits(model: PreTrainedModel) -> None:
    """Greedy generation from NaN is a text like any other, so the logits are looked at once before."""
    logits = model(input_ids=torch.arange(8, device=model.device)[None]).logits
    if not logits.isfinite().all():
        raise Refused("the model's logits are not finite: weights or activations hold NaN or infinity")

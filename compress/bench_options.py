"""What `compress bench` takes: directories and key=value words, for a measurement here or against an endpoint."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from compress.errors import InputError
from compress.planner.options import nearest, parse_seconds

__all__ = ["Endpoint", "Local", "parse_bench"]

STRICT = ConfigDict(frozen=True, extra="forbid")
Count = Annotated[int, Field(ge=1)]


def _seconds(value: str, info: ValidationInfo) -> float:
    try:
        return parse_seconds(str(info.field_name), value)
    except InputError as error:
        raise ValueError(str(error)) from error


def _address(value: str, info: ValidationInfo) -> str:
    if not re.fullmatch(r"https?://\S+", value):
        raise ValueError(f"{info.field_name}={value!r} is no http:// or https:// address")
    return value


Seconds = Annotated[float, BeforeValidator(_seconds)]
Address = Annotated[str, AfterValidator(_address)]


class Local(BaseModel):
    """A measurement on this machine; sizes in tokens.

    dtype  of the arithmetic; "auto": the one each checkpoint names
    path   "transformers": its own loading, which computes in the format where it can; "loader": ours, which computes
           with dequantized weights and rounds as an engine would, and is no measure of a format's speed; None: both
           where they differ and work
    """

    model_config = STRICT

    directory: str
    baseline: str | None = None
    prompt: Count = 128
    output: Annotated[int, Field(ge=2)] = 32
    batch: Count = 1
    rounds: Count = 5
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    path: Literal["transformers", "loader"] | None = None
    trust_remote_code: bool = False


class Endpoint(BaseModel):
    """A measurement of an OpenAI-compatible server; `requests` of each round.

    tokenizer   directory or hub id that counts the synthetic prompt's tokens; default: the model's name
    guidellm    the program, where it is not beside Python or on the PATH
    """

    model_config = STRICT

    url: Address
    model: str = Field(min_length=1)
    baseline_url: Address | None = None
    baseline_model: str | None = None
    tokenizer: str | None = None
    prompt: Count = 256
    output: Annotated[int, Field(ge=2)] = 64
    concurrency: Count = 4
    requests: Count = 20
    rounds: Count = 3
    ttft: Seconds | None = None
    tpot: Seconds | None = None
    guidellm: str = "guidellm"

    @model_validator(mode="after")
    def _two_sides(self) -> "Endpoint":
        if (self.baseline_url, self.baseline_model) == (self.url, self.model):
            raise ValueError("baseline_url and baseline_model name the same side as url and model")
        return self


Options = TypeVar("Options", Local, Endpoint)


def parse_bench(words: Sequence[str]) -> Local | Endpoint:
    """Options from the command line.

    Raises:
        InputError: the first thing that is wrong.
    """
    pairs = dict(_pair(word) for word in words if "=" in word)
    directories = [word for word in words if "=" not in word]
    if "url" in pairs or (not directories and set(pairs) & {"model", "baseline_url"}):
        if directories:
            raise InputError(f"give either a directory or url=, not both (got {directories[0]!r})")
        return _read(Endpoint, pairs)
    if len(directories) != 1:
        raise InputError(f"give one directory, or url=… model=… of a server (got {len(directories)} directories)")
    return _read(Local, {"directory": directories[0], **pairs})


def _pair(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key, value


def _read(cls: type[Options], pairs: Mapping[str, str]) -> Options:
    unknown = [key for key in pairs if key not in cls.model_fields]
    if unknown:
        raise nearest("option", unknown[0], list(cls.model_fields))
    try:
        return cls.model_validate(pairs)
    except ValidationError as error:
        raise InputError(_sentence(error)) from error


def _sentence(error: ValidationError) -> str:
    """The first problem."""
    detail = error.errors(include_url=False)[0]
    key, message = ".".join(map(str, detail["loc"])), detail["msg"]
    if detail["type"] == "value_error":
        return message.removeprefix("Value error, ")
    if detail["type"] == "missing":
        return f"{key}= is missing"
    return f"{key}={detail['input']!r}: {message[:1].lower()}{message[1:]}"

"""What a recipe may say under `push`, and what `compress push` takes as key=value words: one model for both."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from compress.errors import RecipeError

__all__ = ["MAIN", "PushOptions", "parse_push"]

MAIN = "main"
RepoId = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$", description="ORG/NAME")]


class PushOptions(BaseModel):
    """Where a variant that passed is published."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo: RepoId
    private: bool | None = Field(default=None, description="default: a new repository is private, an old one as it is")
    revision: str = Field(default=MAIN, min_length=1, description="branch; made from main where there is none")
    create_pr: bool = Field(default=False, description="open a pull request and leave the branch as it is")
    base_model: RepoId | None = Field(default=None, description="hub id of the source, where it was not fetched by one")

    @model_validator(mode="after")
    def _one_target(self) -> "PushOptions":
        if self.create_pr and self.revision != MAIN:
            raise ValueError("create_pr opens a pull request to main, so it cannot be given with revision")
        return self


def parse_push(words: Sequence[str]) -> PushOptions:
    """Options from `key=value` words.

    Raises:
        RecipeError: every problem.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise RecipeError(f"{word!r} is not of the form key=value: did you mean repo={word}?")
        found[key] = value  # pydantic reads true and false
    try:
        return PushOptions.model_validate(found)
    except ValidationError as error:
        raise RecipeError("; ".join(map(_sentence, error.errors(include_url=False)))) from error


def _sentence(detail: Any) -> str:
    key = ".".join(map(str, detail["loc"]))
    kinds = {
        "extra_forbidden": f"{key}: unknown key; allowed: {', '.join(PushOptions.model_fields)}",
        "missing": f"{key}: missing; give {key}=ORG/NAME",
        "string_pattern_mismatch": f"{key}: {detail['input']!r} is not of the form ORG/NAME",
    }
    message = detail["msg"].removeprefix("Value error, ")
    return kinds.get(detail["type"], f"{key}: {message[:1].lower()}{message[1:]}".removeprefix(": "))

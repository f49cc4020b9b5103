"""The words after `compress push`."""

import re

import pytest

from compress.errors import RecipeError
from compress.push_options import PushOptions, parse_push


def test_words_become_options():
    assert parse_push(["repo=org/model", "private=false", "revision=v1"]) == PushOptions(
        repo="org/model", private=False, revision="v1"
    )
    assert parse_push(["repo=org/model"]) == PushOptions(
        repo="org/model", private=None, revision="main", create_pr=False, base_model=None
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["org/model"], "'org/model' is not of the form key=value: did you mean repo=org/model?"),
        ([], "repo: missing; give repo=ORG/NAME"),
        (["repo=model"], "repo: 'model' is not of the form ORG/NAME"),
        (["repo=a/b", "publik=true"],
         "publik: unknown key; allowed: repo, private, revision, create_pr, base_model"),
        (["repo=a/b", "create_pr=true", "revision=v1"],
         "create_pr opens a pull request to main, so it cannot be given with revision"),
        (["repo=a/b", "private=maybe"], "private: input should be a valid boolean, unable to interpret input"),
        (["repo=a", "x=1"], "repo: 'a' is not of the form ORG/NAME; x: unknown key; "
         "allowed: repo, private, revision, create_pr, base_model"),
    ],
    ids=["bare", "no repo", "no owner", "unknown", "two targets", "no boolean", "two problems"],
)  # fmt: skip
def test_problems_are_named_together(words, sentence):
    with pytest.raises(RecipeError, match=f"^{re.escape(sentence)}$"):
        parse_push(words)

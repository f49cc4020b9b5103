"""The builders of `tests.distill.pairs` as fixtures."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from distill.data import Data
from tests.distill.pairs import build_rows, build_student, build_teacher


@pytest.fixture
def teacher() -> PreTrainedModel:
    return build_teacher()


@pytest.fixture
def student() -> PreTrainedModel:
    return build_student()


@pytest.fixture
def make_rows() -> Callable[[int, int], Data]:
    return build_rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"

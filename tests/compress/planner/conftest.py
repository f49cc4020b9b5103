"""Real models by name, from the fields of their config.json that matter; each is built once on the meta device."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from compress.planner.model import Model, build_model

DATA = Path(__file__).parent / "data"


@cache
def _model(name: str) -> Model:
    return build_model(name, json.loads((DATA / "configs" / f"{name}.json").read_text()))


@pytest.fixture(scope="session")
def model() -> Callable[[str], Model]:
    return _model


@pytest.fixture(scope="session")
def config_path() -> Callable[[str], str]:
    return lambda name: str(DATA / "configs" / f"{name}.json")


@pytest.fixture(scope="session")
def config() -> Callable[[str], dict[str, Any]]:
    return lambda name: json.loads((DATA / "configs" / f"{name}.json").read_text())

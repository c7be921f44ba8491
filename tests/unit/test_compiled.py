"""What runs is what is tested: compiled modules if they are asked for, Python otherwise."""

import os
import re
from pathlib import Path

import kvrouter.scheduler

ROOT = Path(__file__).parents[2]


def test_modules_are_compiled_exactly_if_this_is_asked_for() -> None:
    asked = os.environ.get("KVROUTER_TEST_COMPILED") == "1"
    assert (Path(kvrouter.scheduler.__file__).suffix == ".so") == asked


def test_only_modules_that_are_there_are_compiled() -> None:
    named = re.findall(r'"([a-z_/]+\.py)"', (ROOT / "setup.py").read_text())
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []

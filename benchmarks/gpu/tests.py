"""Run the tests that need a GPU, or say which they are.

Only files that have such tests are collected: others may need packages that a GPU machine lacks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

MARK = "mark.gpu"


def files(folder: Path = Path("tests")) -> list[str]:
    """Test files in which something is marked."""
    return [str(path) for path in sorted(folder.rglob("test_*.py")) if MARK in path.read_text()]


def main() -> int:
    """pytest's exit code; 0 where there is no GPU."""
    chosen = files()
    if not chosen:
        print("no test is marked as one that needs a GPU")
        return 0
    if torch.cuda.is_available():
        print(f"tests that need a GPU, on {torch.cuda.get_device_name()}:", flush=True)
        return pytest.main(["-m", "gpu", "-v", "-ra", "--durations=10", *chosen])
    print("There is no CUDA device here, so no test was run. On a machine with one these would have been:", flush=True)
    pytest.main(["-m", "gpu", "--collect-only", *chosen])
    return 0


if __name__ == "__main__":
    sys.exit(main())

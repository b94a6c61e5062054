"""Measure the engine alone and beside busy processes, for several OpenMP settings.

    python -m benchmarks.contention [--rounds 3] [--busy 2] [--settings shipped,default,spin=0]

Each measurement is one `ssd-engine generate` process with the shipped model: 24 prompts, 64 tokens each, at most eight
at a time. Settings and loads alternate; times are medians over the rounds. Ratios are relative to the setting `default`
without busy processes. The last line is one JSON document. Other load on the machine makes the figures meaningless.

Settings: `shipped` uses the command's default; `default` is GNU OpenMP's default spin count; `spin=N` sets
GOMP_SPINCOUNT; `passive` sets OMP_WAIT_POLICY; `threads=N` sets OMP_NUM_THREADS with the shipped spin count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.models.shipped import PROMPTS_FILE, SHIPPED_MODEL

PROMPTS, MAX_TOKENS, MAX_SEQUENCES = 24, 64, 8
OPENMP_DEFAULT_SPIN_COUNT = "300000"
SETTINGS = "default,shipped,spin=0,spin=10000,passive,threads=1"
BUSY_PROGRAM = "while True: pass"
TIMEOUT_S = 600


def environment_of(setting: str) -> dict[str, str]:
    """Return the environment variables of a setting. Raises ValueError for an unknown one."""
    name, _, value = setting.partition("=")
    match name:
        case "shipped":
            return {}
        case "default":
            return {"GOMP_SPINCOUNT": OPENMP_DEFAULT_SPIN_COUNT}
        case "spin":
            return {"GOMP_SPINCOUNT": str(int(value))}
        case "passive":
            return {"OMP_WAIT_POLICY": "passive"}
        case "threads":
            return {"OMP_NUM_THREADS": str(int(value))}
    raise ValueError(f"unknown setting {setting!r}")


def generation_seconds(prompts: Path, setting: str) -> float:
    """Return the seconds that `ssd-engine generate` reports for its outputs, without start-up."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "engine.commands.main", "generate"),
            *("--file", str(prompts), "--out", os.devnull),
            *("--max-tokens", str(MAX_TOKENS), "--max-sequences", str(MAX_SEQUENCES)),
        ],
        env=clean | environment_of(setting),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    found = re.search(r"tokens in ([\d.]+) s", done.stderr)
    if done.returncode or found is None:
        sys.exit(f"ssd-engine generate failed:\n{done.stderr}")
    return float(found[1])


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that keep a core busy."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY_PROGRAM]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(settings: list[str], busy: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds for each setting, alone and beside `busy` processes, one value per round."""
    seconds: dict[str, dict[str, list[float]]] = {setting: {"alone": [], "busy": []} for setting in settings}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        lines = (SHIPPED_MODEL / PROMPTS_FILE).read_text(encoding="utf-8").splitlines(keepends=True)
        prompts.write_text("".join(lines[:PROMPTS]), encoding="utf-8")
        generation_seconds(prompts, settings[0])  # fills the caches of kernels and files
        for number in range(rounds):
            for setting in settings if number % 2 == 0 else reversed(settings):
                seconds[setting]["alone"].append(generation_seconds(prompts, setting))
                with busy_processes(busy):
                    seconds[setting]["busy"].append(generation_seconds(prompts, setting))
    return seconds


def main() -> None:
    """Run the comparison and print a table and one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=2, help="busy processes")
    parser.add_argument("--settings", default=SETTINGS, help=f"default: {SETTINGS}")
    options = parser.parse_args()
    settings = list(dict.fromkeys(["default", *options.settings.split(",")]))
    for setting in settings:
        environment_of(setting)
    seconds = measure(settings, options.busy, options.rounds)
    medians = {name: {load: statistics.median(times) for load, times in row.items()} for name, row in seconds.items()}
    print(f"{'setting':<12} {'alone, s':>9} {'busy, s':>9} {'alone':>7} {'busy':>7}")
    for name, row in medians.items():
        alone, beside = (row[load] / medians["default"]["alone"] for load in ("alone", "busy"))
        print(f"{name:<12} {row['alone']:>9.2f} {row['busy']:>9.2f} {alone:>6.2f}x {beside:>6.2f}x")
    print(json.dumps({"busy_processes": options.busy, "rounds": options.rounds, "seconds": seconds}))


if __name__ == "__main__":
    main()

"""Measure how fast logs are learned: parsed, tokenized, sorted and saved into a snapshot of 16 M tokens.

    python -m benchmarks.warm [--megabytes 100] [--rounds 3]

The last line of the output is one JSON document; rates are medians of the rounds. Two logs are measured: completions
of synthetic text with token ids, as vLLM returns them; and prompts and completions as text, cut from Python's standard
library. Whole prompts are learned, so that the tokenizer alone, which is timed for comparison, reads the same text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
from tokenizers import Tokenizer

from benchmarks.text import Writer
from drafter_service.ingest.files import list_files
from drafter_service.ingest.pipeline import load
from drafter_service.ingest.reading import Reading
from drafter_service.ingest.resume import Resume
from drafter_service.ingest.vocabulary import Vocabulary

MODEL = Path(__file__).parents[1] / "engine" / "models" / "assets" / "stdlib-7m"
CAPACITY = 16_000_000
MEGABYTES, ROUNDS = 100, 3
PROMPT_TOKENS = 80
PROMPT_LINES, COMPLETION_LINES = 20, 40
TEXTS_AT_ONCE = 128
"""Texts per call of the tokenizer; between 16 and 1,024 its speed differs by less than between rounds."""


def id_records() -> Iterator[dict[str, object]]:
    """Yield completions with their token ids, endlessly."""
    for index, request in enumerate(Writer(seed=1).requests()):
        ids = request.tolist()
        choice = {"index": 0, "text": "", "finish_reason": "stop", "token_ids": ids[PROMPT_TOKENS:]}
        yield {
            "id": f"cmpl-{index:032x}",
            "object": "text_completion",
            "created": 1_790_000_000 + index,
            "prompt_token_ids": ids[:PROMPT_TOKENS],
            "choices": [choice],
        }


def text_records() -> Iterator[dict[str, object]]:
    """Yield prompts and completions from source code, endlessly; each pass cuts the files at different lines."""
    paths = [
        path for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")) if "site-packages" not in str(path)
    ]
    shift = 0
    while True:
        for path in paths:
            try:
                lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[shift:]
            except UnicodeDecodeError:
                continue
            for first in range(0, len(lines), PROMPT_LINES + COMPLETION_LINES):
                middle = first + PROMPT_LINES
                prompt, completion = lines[first:middle], lines[middle : middle + COMPLETION_LINES]
                if completion:
                    yield {"prompt": "".join(prompt), "completion": "".join(completion)}
        shift += 7


def write_log(path: Path, records: Iterator[dict[str, object]], size: int) -> None:
    """Write about `size` bytes of records."""
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(orjson.dumps(next(records), option=orjson.OPT_APPEND_NEWLINE))


def time_load(path: Path, vocabulary: Vocabulary | None) -> float:
    """Return tokens per second of a whole load into a new snapshot."""
    from drafter_service.ingest.sinks import OfflineSink

    with tempfile.TemporaryDirectory() as folder:
        sink = OfflineSink(Path(folder) / "corpus.ssd", CAPACITY)
        reading = Reading(vocabulary, whole_prompts=True)
        summary = load(list_files([str(path)]), reading, sink, Resume(None, ""), lambda _: None)
    assert summary.faults.count == 0
    return summary.learned.tokens / summary.seconds


def time_tokenizer(path: Path) -> float:
    """Return tokens per second of the tokenizer alone."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    with path.open("rb") as file:
        records = map(orjson.loads, file)
        texts = [text for record in records for text in (record["prompt"], record["completion"])]
    tokens = 0
    began = time.perf_counter()
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        encodings = tokenizer.encode_batch_fast(texts[first : first + TEXTS_AT_ONCE], add_special_tokens=False)
        tokens += sum(map(len, encodings))
    return tokens / (time.perf_counter() - began)


def measure(megabytes: int, rounds: int, log: Callable[[str], None]) -> dict[str, float]:
    """Measure in `rounds` rounds and return the medians; `log` gets progress messages."""
    rates: dict[str, list[float]] = {"warm_ids": [], "warm_text": [], "tokenizer": []}
    with tempfile.TemporaryDirectory() as folder:
        ids, text = Path(folder) / "ids.jsonl", Path(folder) / "text.jsonl"
        log(f"writing two logs of {megabytes} MB")
        write_log(ids, id_records(), megabytes * 1_000_000)
        write_log(text, text_records(), megabytes * 1_000_000)
        vocabulary = Vocabulary(MODEL)
        for number in range(1, rounds + 1):
            rates["warm_ids"].append(time_load(ids, None))
            rates["tokenizer"].append(time_tokenizer(text))
            rates["warm_text"].append(time_load(text, vocabulary))
            log(f"round {number}: " + ", ".join(f"{name} {rate[-1]:,.0f} tokens/s" for name, rate in rates.items()))
    shares = [load / alone for load, alone in zip(rates["warm_text"], rates["tokenizer"], strict=True)]
    return {
        "warm_tokens_per_s_ids": round(statistics.median(rates["warm_ids"])),
        "warm_tokens_per_s_text": round(statistics.median(rates["warm_text"])),
        "tokenizer_tokens_per_s": round(statistics.median(rates["tokenizer"])),
        "warm_text_over_tokenizer": round(statistics.median(shares), 3),
    }


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="size of each log")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    print(json.dumps(measure(options.megabytes, options.rounds, lambda text: print(f"{text} ...", flush=True))))


if __name__ == "__main__":
    main()

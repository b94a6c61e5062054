"""Helpers for tests of loads: reading files to documents, a sink, tokenizers."""

import functools
import json
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson

from drafter_service.client.protocol import NamespaceState
from drafter_service.ingest.containers import BINARY, EMPTY, NO_RECORDS, NOT_TEXT, read_batches
from drafter_service.ingest.documents import Totals
from drafter_service.ingest.files import list_files
from drafter_service.ingest.json_text import JSON_CUT, NOT_JSON, NOT_UTF8
from drafter_service.ingest.reading import PREFIX_TOKENS, Reading, Vocabulary, tokenize
from drafter_service.ingest.tables import BAD_ROW, LOST_LINE, NO_HEADER

RECORDS = [{"prompt_token_ids": list(range(100)), "token_ids": [7, index]} for index in range(50)]
LEARNED = [[*range(100 - PREFIX_TOKENS, 100), 7, index] for index in range(50)]
REFUSED = "refused"
REASONS = {BAD_ROW, BINARY, EMPTY, JSON_CUT, LOST_LINE, NO_HEADER, NO_RECORDS, NOT_JSON, NOT_TEXT, NOT_UTF8}
MODEL = Path(__file__).parents[3] / "engine" / "models" / "assets" / "stdlib-7m"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls[0].function | tojson }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def documents_in(*paths, reading=None):
    """Return all documents of files, {place: token ids}, and the reading with its faults."""
    reading = reading or Reading()
    batches = read_batches(list_files(map(str, paths)), reading)
    found = [each for batch in batches for each in tokenize(batch.items, reading)]
    documents = {item.place: [*reading.prefix_of(prompt), *output] for item, prompt, output in found}
    assert len(documents) == len(found) == len({item.name for item, *_ in found})
    return documents, reading


def names_in(*paths):
    """Return the names of the documents of a load of files, without a tokenizer."""
    return [item.name for batch in read_batches(list_files(map(str, paths)), Reading()) for item in batch.items]


def small(**settings):
    """Return a `Reading` with blocks of a few records."""
    return Reading(block_bytes=1000, **settings)


def pairs_of(documents):
    """Return pairs of name and token ids."""
    bounds = documents.offsets.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(documents.tokens)
    assert documents.tokens.dtype == np.uint32
    texts = [documents.tokens[first:end].tolist() for first, end in pairwise(bounds)]
    return list(zip(documents.names, texts, strict=True))


def counts_of(faults):
    """Return the number of faults by reason."""
    return {reason: fault.count for reason, fault in faults.by_reason.items()}


def outputs_in(path, **settings):
    """Return the outputs of a file as text, and the faults by reason."""
    reading = Reading(block_bytes=16, **settings)
    items = [item for batch in read_batches(list_files([str(path)]), reading) for item in batch.items]
    assert len({item.name for item in items}) == len(items), "each document has a name of its own"
    return [item.output for item in items], faults_of(reading)


def faults_of(reading):
    """Return the number of faults by reason; those that formats give are one."""
    counts = Counter()
    for reason, count in counts_of(reading.faults).items():
        counts[reason if reason in REASONS else REFUSED] += count
    return dict(counts)


def write_jsonl(path, records):
    """Write records as lines."""
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return path


def model_folder(path, template=TEMPLATE):
    """Copy the shipped tokenizer to a folder, with a chat template."""
    path.mkdir()
    shutil.copy(MODEL / "tokenizer.json", path)
    config = {"bos_token": {"content": "<s>"}, **({"chat_template": template} if template else {})}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@functools.cache
def shipped():
    """Return the shipped tokenizer."""
    return Vocabulary(MODEL)


def tokenized(text):
    """Return the token ids of a text."""
    return shipped().encode([text])[0].tolist()


class Collected:
    """A sink that keeps all documents."""

    state = NamespaceState("n", 5, "other", 7)
    saved = "no"

    def __init__(self):
        self.pairs = []

    def accept(self, documents):
        self.pairs += pairs_of(documents)

    def finish(self):
        return Totals(len(self.pairs), sum(len(tokens) for _, tokens in self.pairs), 0)

"""Write a snapshot for `--drafter rest`: the files that the shipped model was trained on.

    python -m benchmarks.library_corpus build/library.ssd

Held-out files, from which the shipped prompts are taken, are left out.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus


def main() -> None:
    """Write the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    names = json.loads((SHIPPED_MODEL / "files.json").read_text())["train"]
    paths = (Path(sysconfig.get_path("stdlib")) / name for name in names)
    tokenizer = Tokenizer(SHIPPED_MODEL)
    # Other versions of Python have other files.
    documents = [tokenizer.encode(path.read_text("utf-8"), add_special_tokens=False) for path in paths if path.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(sum(len(tokens) + 1 for tokens in documents))  # with a separator each
    for tokens in documents:
        corpus.append(tokens)
    snapshot.save(corpus, path)
    corpus.close()
    print(f"wrote {path}: {len(documents):,} files, {sum(map(len, documents)):,} tokens")


if __name__ == "__main__":
    main()

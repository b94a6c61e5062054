"""The steps of one request: what is drafted, what the target accepts, and the token that it adds.

    python examples/first_drafts.py
    python examples/first_drafts.py --svg drafts.svg

The engine first answers a request from an empty corpus, then a similar one; the second answer is printed step by step.
With --svg its text is also drawn, with accepted draft tokens marked as on the status page of `ssd-engine serve`.
"""

import argparse
from pathlib import Path
from xml.sax.saxutils import escape

from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DrafterConfig

FIRST, SECOND = (f"def {name}(top):\n    for name in os.listdir(top):\n" for name in ("walk", "find_files"))
CHARACTER, LINE, MARGIN = 8.43, 22, 16
"""Width of a character, height of a line and margin of the drawing, in pixels."""


def steps_of(engine, tokenizer, prompt, max_tokens=56):
    """Return the draft, the number of its tokens that were accepted, and all new tokens, for each step of a request."""
    engine.add(Request(tokenizer.encode(prompt), SamplingParams(max_tokens=max_tokens)))
    steps = []
    while engine.has_work:
        result = engine.step().result
        if result.lengths.any():  # The first steps may run only a part of the prompt.
            draft = result.plan.drafts.batch.tokens[result.draft_of(0)]
            steps.append((draft, int(result.accepted[0]), result.tokens_of(0)))
    return steps


def svg_of(prompt, pieces):
    """Return a drawing of a text; pieces: parts of the output, and whether each is an accepted draft token."""
    marks, texts, column, row = [], [], 0, 0
    for piece, style in [(prompt, "prompt"), *((text, "draft" if drafted else "own") for text, drafted in pieces)]:
        for index, part in enumerate(piece.split("\n")):
            if index:
                column, row = 0, row + 1
            x, y = MARGIN + column * CHARACTER, MARGIN + row * LINE
            if style == "draft" and part:
                width = len(part) * CHARACTER - 1
                marks.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LINE - 3}" rx="3"/>')
            if part.strip():
                texts.append(f'<text class="{style}" x="{x:.1f}" y="{y + 14}">{escape(part)}</text>')
            column += len(part)
    height = 2 * MARGIN + (row + 1) * LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" font-family="monospace" font-size="14">'
        "<style>text { white-space: pre; fill: #1c2733 } .prompt { fill: #6b7680 }</style>"
        f'<rect width="760" height="{height}" rx="12" fill="#ffffff"/>'
        f'<g fill="#bfe5d5">{"".join(marks)}</g>{"".join(texts)}</svg>\n'
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--svg", type=Path, help="file to draw the second answer into")
    path = parser.parse_args().svg
    tokenizer, model = Tokenizer(SHIPPED_MODEL), pack(load_model(SHIPPED_MODEL))
    drafter = build_drafter("ssd", DrafterConfig())
    engine = build_engine(model, EngineConfig(), drafter)
    steps_of(engine, tokenizer, FIRST)
    drafter.corpus.refresh()  # Index the first answer now; a background thread would within 10 ms.
    steps = steps_of(engine, tokenizer, SECOND)
    engine.close()
    print(f"{SECOND}\nstep  accepted of drafted  draft | token of the target")
    pieces = []
    for number, (draft, accepted, tokens) in enumerate(steps, 1):
        texts = [tokenizer.decode(draft[[index]]) for index in range(len(draft))]
        own = tokenizer.decode(tokens[accepted:])
        print(f"{number:4}  {accepted:8} of {len(draft):2}         {''.join(texts)!r} | {own!r}")
        pieces += [(text, True) for text in texts[:accepted]] + [(own, False)]
    total = sum(len(tokens) for _, _, tokens in steps)
    print(f"{total} tokens in {len(steps)} steps: {total / len(steps):.1f} tokens per step")
    if path is not None:
        path.write_text(svg_of(SECOND, pieces))


if __name__ == "__main__":
    main()

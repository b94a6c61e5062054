"""Logs as services, tools and data sets write them, with the outputs that a person expects of each."""

import json
from pathlib import Path

import pytest

from drafter_service.ingest.containers import read_batches
from drafter_service.ingest.files import list_files
from drafter_service.ingest.reading import Reading

CASES = Path(__file__).parents[4] / "shared" / "cases"
FILES = sorted((CASES / "logs").iterdir()) if CASES.is_dir() else [None]
NOON = "The sea is blue green at noon."
NOTED = {
    "alpaca.jsonl": ["Blue green."],
    "anthropic_response.jsonl": ["Blue green.", '{"v":1}'],
    "anthropic_thinking.jsonl": ["Noon means much light.", "Blue green."],
    "anthropic_tool_use.jsonl": ["I look it up.", '{"thing":"sea","hour":12}', "|", '{"value":"blue green"}'],
    "choice_function_call.jsonl": ["{}"],
    "content_dict.jsonl": ['{"answer":"Blue green."}'],
    "dpo.jsonl": [NOON],
    "function_call_legacy.jsonl": ['{"thing":"sea"}', "|", NOON],
    "input_ids_labels.jsonl": ["[3, 4]"],
    "log.arrow": ["Blue green."],
    "r1_columns.jsonl": ["Noon is bright.", "Blue green."],
    "reasoning_details.jsonl": ["Noon is bright.", "Blue green."],
    "responses_api.jsonl": ["Noon is bright.", "Blue green.", '{"v":1}'],
    "responses_api_flat.jsonl": ["First part.", "Second part."],
    "responses_api_flat_call.jsonl": ["First part.", '{"v":1}'],
    "sharegpt_roles.jsonl": ["Blue green.", "|", "Blue green.", "|", "f", "|", "Blue green."],
    "space_first.json": ["Blue green."],
    "tool_arguments_broken_answer.jsonl": ["I look it up."],
    "tool_arguments_broken_conversation.jsonl": [NOON, "|", "Sorry."],
    "tool_arguments_broken_prompt.jsonl": [NOON],
}
"""Parts of outputs in order, "|" between outputs, where the expected text is a note or depends on the chat template."""
COUNTED = {"content_dict.jsonl", "tool_arguments_broken_answer.jsonl", "tool_arguments_broken_conversation.jsonl"}
"""Files in which a part may be left out, if it is counted."""
PROMPTS = {
    "alpaca.jsonl": "Say the colour of the sea.",
    "dpo.jsonl": "Which colour is the sea at noon?",
    "input_ids_labels.jsonl": "[1, 2]",
    "tool_arguments_broken_prompt.jsonl": "Which colour is the sea at noon?",
    "conversation.parquet": "Which colour is the sea at noon?",
}


@pytest.mark.skipif(not CASES.is_dir(), reason="the folder of cases is not beside this checkout")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path and path.name)
def test_every_case_is_read_as_expected(path, vocabulary):
    reading = Reading()
    outputs = [_text(item.output) for item in _items(path, reading)]
    if path.name in NOTED:
        texts, parts = "|".join(outputs), NOTED[path.name]
        assert _contains_in_order(texts, parts) or (path.name in COUNTED and not outputs), (texts, parts)
        assert path.name in COUNTED or len(outputs) == 1 + parts.count("|")
    else:
        assert outputs == json.loads((CASES / "expected.json").read_text())[path.name]
    assert bool(reading.faults.count) <= (path.name in COUNTED), reading.faults.summary
    if path.name in PROMPTS:
        first = next(_items(path, Reading(vocabulary, for_replay=True)))
        assert PROMPTS[path.name] in _text(first.prompt)


def _items(path, reading):
    for batch in read_batches(list_files([str(path)]), reading):
        yield from batch.items


def _text(part):
    return part if isinstance(part, str) else str(part.tolist())


def _contains_in_order(text, parts):
    text = text.replace('": ', '":').replace('", "', '","').replace(', "', ',"')
    for part in parts:
        _, found, text = text.partition(part)
        if not found:
            return False
    return True

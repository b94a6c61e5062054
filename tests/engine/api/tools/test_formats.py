"""Tool calls are read from outputs in the formats of published models, whole and in arbitrary parts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.tool_formats import FORMATS, recognize
from tests.engine.api.tools.outputs import collected, divided, message_of, streamed, written

NAMES = ("weather", "send_mail-2")
PARIS, BERLIN = '{"city": "Paris"}', '{"city":"Berlin", "days" : 2}'
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n%s\n```<｜tool▁call▁end｜>"

WELL_FORMED = {
    "hermes": [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
        ('<tool_call>\n{"arguments": {"city": "Paris"}, "name": "weather"}\n</tool_call>', "", [PARIS]),
        (f'Two.\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n<tool_call>\n'
         f'{{"name": "weather", "arguments": {BERLIN}}}\n</tool_call>', "Two.", [PARIS, BERLIN]),
        (f'<think>\nHm.\n</think>\n\n<tool_call>{{"name":"weather","arguments":{PARIS}}}</tool_call>\n\n',
         "<think>\nHm.\n</think>", [PARIS]),
        (f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}', "", [PARIS]),
        (f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}</tool_call> Done. ', "Done. ", [PARIS]),
        ('<tool_call>\n{"name": "weather", "arguments": {"a": "</tool_call>}\\"{"}}\n</tool_call>', "",
         ['{"a": "</tool_call>}\\"{"}']),
    ],
    "llama3_json": [
        ('{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        (f'\n\n{{"name": "weather", "parameters": {PARIS}}}; {{"name": "weather", "parameters": {BERLIN}}}', "",
         [PARIS, BERLIN]),
        (f'{{"type": "function", "name": "weather", "parameters": {PARIS}}}\n'
         f'{{"parameters": {BERLIN}, "id": {{"a": [1]}}, "name": "weather"}}', "", [PARIS, BERLIN]),
        (f'{{"name": "weather", "parameters": {PARIS}}};{{"name": "weather", "parameters": {BERLIN}}}\nDone.', "Done.",
         [PARIS, BERLIN]),
        (f'{{"name": "weather", "parameters": {PARIS}}}\n{{"answer": 42}}', '\n{"answer": 42}', [PARIS]),
    ],
    "mistral": [
        (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}, "id": "a1b2c3d4e"}}]', "", [PARIS]),
        (f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, '
         f'{{"name": "weather", "arguments": {BERLIN}}}]', "", [PARIS, BERLIN]),
    ],
    "deepseek_v3": [
        (f"<｜tool▁calls▁begin｜>{DEEPSEEK_CALL % PARIS}\n{DEEPSEEK_CALL % BERLIN}<｜tool▁calls▁end｜>", "",
         [PARIS, BERLIN]),
        (f"I look.<｜tool▁calls▁begin｜>{DEEPSEEK_CALL % PARIS}<｜tool▁calls▁end｜>", "I look.", [PARIS]),
    ],
    "deepseek_v31": [
        (f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
         f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{BERLIN}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "",
         [PARIS, BERLIN]),
    ],
}  # fmt: skip


def cases(table):
    return [
        pytest.param(FORMATS[name], *case, id=f"{name}-{index}")
        for name in table
        for index, case in enumerate(table[name])
    ]


@pytest.mark.parametrize(("form", "text", "content", "arguments"), cases(WELL_FORMED))
def test_outputs_as_models_write_them(form, text, content, arguments):
    expected = [("weather", each) for each in arguments]
    assert message_of(form, text, NAMES) == (content or None, expected)
    assert collected(streamed(form, text, NAMES)) == (content, expected)


@pytest.mark.parametrize("cut", range(13))
def test_an_output_may_end_within_the_marker_after_a_call(cut):
    text = '<tool_call>\n{"name": "weather", "arguments": {}}\n' + "</tool_call>"[:cut]
    assert message_of(FORMATS["hermes"], text, NAMES) == (None, [("weather", "{}")])


@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_are_written_as_models_write_them(name):
    calls = written(FORMATS[name], [("weather", json.loads(PARIS))] * 2)
    assert any(text.replace(BERLIN, PARIS).endswith(calls) for text, *_ in WELL_FORMED[name])


MALFORMED = {
    "hermes": [
        '<tool_call>\n{"name": "weather", "arguments": {"city": Paris}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Par',
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": "Paris"}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {}, "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "weather"}\n</tool_call>',
        '<tool_call>\n{"name": ["weather"], "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}, "name": ["weather"]}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {}, "parameters": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {},}\n</tool_call>',
        '<tool_call>\n{"name": "weather" "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather"{"arguments": {}}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"a": 1]}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {}, "id": "a\nb"}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {}, "id"}\n</tool_call>', "<tool_call>{}",
        '<tool_call>\n{"arguments": {}, "name": "weather", "name": "unknown"}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {}, "name": "unknown"}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "  <tool_call>  ", "  ", "", " a <tool_call", "{}", "\n",
    ],
    "llama3_json": ['{"answer": 42}\n', "<|python_tag|>print(1)", " {", "a {", '{"name": "weather", "parameters": {}',
                    '; {"name": "weather", "parameters": {}}'],
    "mistral": ['[TOOL_CALLS]{"name": "weather", "arguments": {}}', "[TOOL_CALLS] [", "[TOOL_CALLS] []", "[TOOL"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", f"<｜tool▁calls▁begin｜>{DEEPSEEK_CALL % '[]'}",
                    f"<｜tool▁calls▁begin｜>{DEEPSEEK_CALL.replace('json', 'xml') % PARIS}<｜tool▁calls▁end｜>"],
    "deepseek_v31": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather", "<｜tool▁calls▁begin｜>weather",
                     f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{'a' * 101}<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"],
}  # fmt: skip


@pytest.mark.parametrize(("form", "text"), cases({name: [(text,) for text in MALFORMED[name]] for name in MALFORMED}))
def test_a_malformed_call_is_content(form, text):
    assert message_of(form, text, NAMES) == (text, [])
    deltas = streamed(form, divided(text, range(min(len(text), 100))), NAMES)
    assert collected(deltas) == (text, [])


def test_calls_around_a_malformed_one_are_kept():
    form = FORMATS["hermes"]
    good, bad = written(form, [("weather", {})]), written(form, [("unknown", {"a": 1})])
    assert message_of(form, f"a {good}\n{bad}\n{good}\nb", NAMES) == (f"a{bad}b", [("weather", "{}")] * 2)
    mail = written(form, [("weather", {"city": "Paris"}), ("send_mail-2", {}), ("weather", {})])
    content, calls = message_of(form, mail, NAMES, max_calls=1)
    assert calls == [("weather", PARIS)]
    assert content.strip() == written(form, [("send_mail-2", {}), ("weather", {})])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('a{}[]"\\/\n,:; é😀<', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('n"}\\', max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text("ab{", max_size=2), VALUES, max_size=3)), max_size=3
)
CUTS = st.lists(st.integers(0, 300), max_size=12)
FORMS = st.sampled_from(list(FORMATS.values()))


@given(FORMS, st.text("a< \n[", max_size=8), CALLS, CUTS, st.none() | st.integers(0, 200))
def test_calls_that_arrive_in_any_parts_are_those_that_were_written_before_any_end(form, content, calls, cuts, end):
    content = "" if form.name == "llama3_json" and calls else content
    text = (content + (written(form, calls) if calls else ""))[:end]
    found_content, found = collected(streamed(form, divided(text, cuts), NAMES))
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls[: len(found)]
    if not found:
        assert found_content == text
    if end is None:
        assert (found_content, len(found)) == (content.rstrip() if calls else text, len(calls))


PIECES = [
    '{"name": "weather", ', '{"name": "x", ', '"arguments": ', '"parameters": ', "{", "}", '"', "\\", "[", "]", ",",
    ";", " ", "\n", "a", "<", "name", "weather", "function", "```", "```json", '"name": "weather"', ": ",
]  # fmt: skip


@given(FORMS, st.data(), CUTS)
def test_any_text_is_read_the_same_in_any_parts_and_none_of_it_is_lost(form, data, cuts):
    pieces = [*PIECES, *form.markers, written(form, [("weather", {"a": 1})])]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=12)))
    content, calls = message_of(form, text, NAMES)
    assert collected(streamed(form, divided(text, cuts), NAMES)) == (content or "", calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    if not calls:
        assert content == text


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_content_is_streamed_at_once_and_a_call_in_one_delta(form):
    call = written(form, [("weather", {"city": "Paris"})])
    before = "" if form.name == "llama3_json" else "Look:"
    deltas = streamed(form, f"{before}{call}Done.", NAMES)
    assert [delta["content"] for delta in deltas[: len(before)]] == list(before)
    assert len([delta for delta in deltas if "tool_calls" in delta]) == 1
    assert [delta["content"] for delta in deltas[-5:-1]] == list("one.")


@pytest.mark.parametrize("space", [10, 64, 65, 200])
def test_at_most_64_white_space_characters_are_dropped_before_a_call(space):
    form = FORMATS["hermes"]
    text = "a" + " " * space + written(form, [("weather", {})])
    expected = "a" + " " * max(space - 64, 0), [("weather", "{}")]
    assert message_of(form, text, NAMES) == expected
    assert collected(streamed(form, text, NAMES)) == expected


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{{ tools }}<tool_call>\n{"name": <function-name>, "arguments": <args-dict>}\n</tool_call>', "hermes"),
        ("{{ tools }}<tool_call>\n<function=example>\n<parameter=a>", None),
        ("{{ tools }}<tool_call>{function-name}\n<arg_key>", None),
        ("""{{ "Environment: ipython" }}{{ tools }}{{- '"parameters": ' }}""", "llama3_json"),
        ('{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS] [', "mistral"),
        ("{{ tools }}[TOOL_CALLS]name[ARGS]{}", None),
        ("{{ tools }}<｜tool▁calls▁begin｜>\n```json\n", "deepseek_v3"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("{{ tools }}", None),
        ("", None),
    ],
)  # fmt: skip
def test_formats_are_recognized_in_chat_templates(template, name):
    assert recognize(template) is (name and FORMATS[name])

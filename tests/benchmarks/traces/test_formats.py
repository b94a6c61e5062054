"""Conversations are read from small files of the formats of the public repositories."""

import json

import pytest

from benchmarks.traces.formats import FORMATS, RENDERED, SQL_SYSTEM

TOOL = """
class Sum(Tool):
    @staticmethod
    def invoke(data):
        raise SystemExit

    @staticmethod
    def get_info():
        return {"type": "function", "function": {"name": "sum", "description": "Größe"}}
"""


def conversations(name, files):
    return list(FORMATS[name](files))


def test_tools_and_calls_of_tau_bench_are_written_as_text():
    call = {"function": {"name": "sum", "arguments": '{"a": 1}'}}
    trajectory = [
        {"role": "system", "content": "Policy."},
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "name": "sum", "content": "1"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [call]},
        {"role": "assistant", "content": "Done."},
    ]
    files = {"t.json": json.dumps([{"task_id": 7, "traj": trajectory}]), "sum.py": TOOL, "again.py": TOOL}
    (conversation,) = conversations("tau-bench", files)
    schema = '{"type": "function", "function": {"name": "sum", "description": "Größe"}}'
    block = '<tool_call>\n{"name": "sum", "arguments": {"a": 1}}\n</tool_call>'
    assert conversation.task == "7"
    assert conversation.messages == [
        ("system", f"Policy.\n\n# Tools\n\n{schema}\n{schema}"),
        ("user", "Add."),
        ("assistant", f"{block}\n{block}"),
        ("tool", "1"),
        ("assistant", f"Wait.\n{block}"),
        ("assistant", "Done."),
    ]


def test_a_tool_without_a_schema_is_an_error():
    with pytest.raises(ValueError, match="get_info"):
        conversations("tau-bench", {"t.json": '[{"task_id": 1, "traj": [{"content": ""}]}]', "a.py": "class Tool: ..."})


def test_the_label_of_mint_is_removed_from_outputs_only():
    def record(task, output):
        history = [{"role": "user", "content": "Assistant:\nTask"}, {"role": "assistant", "content": output}]
        return json.dumps({"state": {"history": history}, "task": {"task_id": task}})

    lines = [record(1, "Assistant:\n\u2028a"), record(2, "Assistant: b")]
    first, second = conversations("mint", {"x/results.jsonl": "\n".join(lines) + "\n"})
    assert first.messages == [("user", "Assistant:\nTask"), ("assistant", "\u2028a")]
    assert second.messages[1] == ("assistant", "Assistant: b")
    assert first.task != second.task


def test_results_and_rewards_of_sql_are_messages_of_the_user():
    turns = {"actions": ["SELECT 1", "SELECT 2"], "observations": ["x" * 2_000, [1]], "rewards": [0.0, 1.0]}
    (conversation,) = conversations("intercode-sql", {"f": json.dumps({"0": {"query": "q", "turn_history": turns}})})
    assert conversation.task == "q"
    assert conversation.messages == [
        ("system", SQL_SYSTEM),
        ("user", 'Query: "q".\nYour response must only contain the SQL query'),
        ("assistant", "SELECT 1"),
        ("user", f"Output: {'x' * 1_000}\nReward: 0.0"),
        ("assistant", "SELECT 2"),
    ]


def test_samples_of_reasoning_gym_have_the_checkpoint_as_their_stage():
    result = {"question": "q", "completions": [{"full_model_response": "a"}, {"full_model_response": "b"}]}
    document = json.dumps({"categories": [{"datasets": [{"results": [result]}]}]})
    files = {"prompt.json": '{"system_prompt": "s"}', "m/step_800/x.json": document, "m/step_400/x.json": document}
    found = conversations("reasoning-gym", files)
    assert [conversation.stage for conversation in found] == [800, 800, 400, 400]
    assert [conversation.messages for conversation in found[:2]] == [
        [("system", "s"), ("user", "q"), ("assistant", output)] for output in "ab"
    ]
    assert {conversation.task for conversation in found} == {"q"}


REACT_LOG = """
########################################
BEGIN TRIAL 1
------------- BEGIN CORRECT AGENTS -------------

Question: Who?
Thought 1: Look.

Then answer.
Action 1: Search[x]
Observation 1: x is
Thought of nothing.
Thought 2: Known.
Action 2: Finish[x]
Observation 2: Answer is CORRECT
Correct answer: x

------------- BEGIN INCORRECT AGENTS -----------

Question: Why?
Thought 1: Guess.
Action 1: Finish[y]
Observation 1: Answer is INCORRECT
Correct answer: z

########################################
BEGIN TRIAL 2
------------- BEGIN CORRECT AGENTS -------------

Question: Who?
Thought 1: Look.
Action 1: Finish[x]
Observation 1: Answer is CORRECT
Correct answer: x

Question: Why?You have attempted to answer following question before and failed.
Reflections:
- Do not guess.
Thought 1: Think.
Action 1: Finish[z]
Observation 1: Answer is CORRECT
Correct answer: z
"""


def test_reflexion_tries_a_question_until_it_is_answered():
    prompts = 'REACT_INSTRUCTION = """Solve it.\n{examples}\n(END)\nQuestion: {question}{scratchpad}"""'
    files = {"log.txt": REACT_LOG, "prompts.py": prompts, "shots.py": 'WEBTHINK_SIMPLE6 = "Question: a"'}
    who, why, again = conversations("reflexion-react", files)
    assert who.messages == [
        ("system", "Solve it.\nQuestion: a\n(END)"),
        ("user", "Question: Who?"),
        ("assistant", "Thought 1: Look.\n\nThen answer.\nAction 1: Search[x]"),
        ("user", "Observation 1: x is\nThought of nothing."),
        ("assistant", "Thought 2: Known.\nAction 2: Finish[x]"),
        ("user", "Observation 2: Answer is CORRECT"),
    ]
    assert [(one.task, one.stage) for one in (who, why, again)] == [
        ("Question: Who?", 0),
        ("Question: Why?", 0),
        ("Question: Why?", 1),
    ]
    assert again.messages[1].text.endswith("Reflections:\n- Do not guess.")


@pytest.mark.parametrize(
    ("starter", "expected"),
    [("", "delimiters as follows. Ensure"), ("class Solution:", "```python\nclass Solution:\n```")],
)
def test_prompts_of_livecodebench_have_the_starter_code_if_there_is_some(starter, expected):
    record = {"question_content": "Add.", "starter_code": starter, "output_list": ["a", "b"], "question_id": "7"}
    first, second = conversations("livecodebench", {"f": json.dumps([record])})
    assert (first.task, second.messages[1]) == ("7", ("assistant", "b"))
    assert first.messages[0].text.startswith("### Question:\nAdd.\n\n### Format: ")
    assert expected in first.messages[0].text


def test_other_formats():
    answer = {"session_id": "s", "model_input": "<|begin_of_text|>q", "output": ["a"]}
    assert conversations("zero-eval", {"f": json.dumps([answer])})[0].messages == [
        (RENDERED, "<|begin_of_text|>q"),
        ("assistant", "a"),
    ]
    line = json.dumps({"uid": "u", "messages": [{"content": "q"}, {"content": {"answer": "a"}}]})
    assert conversations("arena-hard", {"f": line + "\n"})[0].messages == [("user", "q"), ("assistant", "a")]
    samples = json.dumps([{"idx": 1, "ys": ["a", "b"]}])
    files = {"l.json": samples, "i.txt": "zero\none", "p.py": "other = 1\ncot_prompt = 'End with: {input}'"}
    found = conversations("tree-of-thought", files)
    assert [conversation.messages for conversation in found] == [
        [("user", "End with: one"), ("assistant", output)] for output in "ab"
    ]

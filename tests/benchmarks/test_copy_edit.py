from benchmarks.copy_edit import CASES, make_edits, measure


def test_a_prediction_is_worth_about_as_much_as_the_text_in_the_prompt():
    edits = make_edits(8, seed=1)
    steps = {case: measure(edits, case, "path", 16)["tokens_per_step"] for case in CASES}
    assert steps["prediction"] > 0.98 * steps["in the prompt"] > 3 * steps["neither"]

from engine.training import sources
from engine.training.sources import SourceFile, near_duplicate_groups, read_files, split

LINES = [f"value_{number} = compute_something(number={number})\n" for number in range(200)]


def file(path, lines):
    return SourceFile(path, "".join(lines))


def test_files_are_sorted_and_unusable_ones_left_out(tmp_path):
    for name in ("b.py", "a.py", "sub/c.py", "site-packages/d.py", "encodings/e.py", "notes.txt", "empty.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.py" else "x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    assert [found.path for found in read_files(tmp_path)] == ["a.py", "b.py", "sub/c.py"]


def test_copies_are_grouped_directly_and_through_others():
    files = [
        file("original.py", LINES[:40]),
        file("unrelated.py", LINES[100:140]),
        file("copy.py", [*LINES[:30], *LINES[60:70]]),
        file("copy_of_copy.py", [*LINES[60:70], *LINES[80:90]]),
    ]
    groups = sorted(sorted(group) for group in near_duplicate_groups(files))
    assert groups == [[0, 2, 3], [1]]


def test_files_that_share_common_lines_are_not_copies():
    idiom = ["if __name__ == '__main__': unittest.main()\n"] * 2
    files = [file(f"{n}.py", [*idiom, LINES[n]]) for n in range(sources.COMMON_LINE_FILES + 5)]
    assert all(len(group) == 1 for group in near_duplicate_groups(files))


def test_near_duplicates_stay_on_one_side(monkeypatch):
    monkeypatch.setattr(sources, "MAX_HELD_OUT_GROUP_SHARE", 1.0)
    files = []
    for family in range(40):
        lines = [f"family_{family}_{line} = compute_something({line})\n" for line in range(20)]
        files += [file(f"{family}_{copy}.py", lines) for copy in range(3)]
    for seed in range(5):
        sides = split(files, seed)
        held_out = {found.path.partition("_")[0] for found in sides.held_out}
        trained = {found.path.partition("_")[0] for found in sides.train}
        assert held_out
        assert not held_out & trained
        assert len(sides.held_out) + len(sides.train) == len(files)

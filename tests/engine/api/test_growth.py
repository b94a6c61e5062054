"""A total over time in few points."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from engine.api.growth import MOST_POINTS, Growth


@example([(1.0, 1)], 40 * 60)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.integers(0, 5)), max_size=60),
    st.integers(1, 40),
)
def test_few_points_say_what_was_there(steps, repeats):
    growth, time, total, noted = Growth(), 0.0, 0, []
    for wait, more in steps * repeats:
        time, total = time + wait, total + more
        growth.note(time, total)
        noted.append((time, total))
    points = growth.points
    assert len(points) <= MOST_POINTS + 1
    assert set(points) <= set(noted)
    assert points == sorted(points)
    assert [points[0], points[-1]] == [noted[0], noted[-1]] if noted else points == []
    # Where a gap is much longer than what so many points are apart in the mean, nothing was noted in it.
    span = time - noted[0][0] if noted else 0
    for (before, _), (after, _) in pairwise(points):
        inside = [moment for moment, _ in noted if before < moment < after]
        assert not inside or inside[-1] - before <= max(1, 4 * span / MOST_POINTS)

"""Which weight versions' records may go, whatever refers to which."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slackwater.engine.freshness import StepMap
from slackwater.engine.model import WeightVersion
from slackwater.engine.stepmap import expendable_versions


def versions(steps: list[int], first: int = 1) -> list[WeightVersion]:
    """One version for each step, numbered from `first` on."""
    return [WeightVersion(version=number, step=step, timeline=1) for number, step in enumerate(steps, first)]


def test_only_what_nothing_needs_goes() -> None:
    """The oldest referred version, and what samples near it were made by, stay; so do the newest."""
    known = versions([3 * n for n in range(1, 41)])
    # version 20 is of step 60; samples up to 5 steps older are of step 55 and later: version 19 (57) stays
    assert expendable_versions(known, [20, 35], 4, 5) == list(range(1, 19))
    assert expendable_versions(known, [], 4, 0) == list(range(1, 37))
    assert expendable_versions(known, [1], 4, 0) == []
    assert expendable_versions([], [7], 4, 0) == []


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40),
    st.sets(st.integers(1, 40)),
    st.integers(1, 5),
    st.integers(0, 10),
)
def test_what_goes_is_a_beginning_that_nobody_names(
    steps: list[int], referred: set[int], keep: int, staleness: int
) -> None:
    """Whatever the steps do: a prefix goes, nothing that is named, nothing that is fresh for what is named."""
    known = versions(steps)
    gone = expendable_versions(known, referred, keep, staleness)
    assert gone == list(range(1, len(gone) + 1))
    assert not set(gone) & referred
    assert len(known) - len(gone) >= min(keep, len(known))
    needed = [r.step for r in known if r.version in referred] or [r.step for r in known[-keep:]]
    assert all(known[version - 1].step < min(needed) - staleness for version in gone)


def test_a_forgotten_version_is_as_old_as_it_can_be() -> None:
    """A sample of a trimmed version is stale, and weighs less than one of the oldest version that is known."""
    known = StepMap()
    known.apply({10: 30, 11: 33}, 40, replace=True)
    assert known.verdict(9, 8) == "stale"
    assert known.lag(9) == 11
    assert known.weight(9, 8) < known.weight(10, 8)
    assert known.lag(12) == 0

"""Retention never takes what a recovery could need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slackwater.engine.model import Checkpoint
from slackwater.engine.retention import expendable


def record(number: int, *, durable: bool = False, pinned: bool = False) -> Checkpoint:
    """A checkpoint record of which only id, state and pin matter here."""
    return Checkpoint(
        checkpoint=number,
        timeline=1,
        round=number,
        training_step=number,
        weight_version=number,
        buffer_version=0,
        path=f"p{number}",
        manifest_digest="sha256:" + "0" * 64,
        state="durable" if durable else "committed",
        pinned=pinned,
    )


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=12),
    st.sampled_from([-1, 1, 2, 5]),
    st.sets(st.integers(1, 12), max_size=3),
)
def test_what_a_recovery_could_need_is_never_marked(
    shape: list[tuple[bool, bool, bool]], keep: int, in_use: set[int]
) -> None:
    """I12: newest committed, newest durable, newest on the lineage, pinned, uploading and read ones stay."""
    records = [record(n, durable=d, pinned=p) for n, (d, p, _) in enumerate(shape, 1)]
    lineage = [r for r, (_, _, on) in zip(records, shape, strict=True) if on]
    marked = expendable(records, lineage, keep, in_use)
    stays = {r.checkpoint for r in records} - set(marked)
    assert not in_use & set(marked)
    assert all(r.checkpoint in stays for r in records if r.pinned)
    for group in (records, lineage, [r for r in records if r.state == "durable"]):
        if group:
            assert max(r.checkpoint for r in group) in stays
    if keep > 0:
        newest = sorted((r.checkpoint for r in lineage), reverse=True)[:keep]
        assert set(newest) <= stays
    if keep < 0:
        assert not {r.checkpoint for r in lineage} & set(marked)


def test_d6_the_old_one_goes_only_after_the_new_one_is_committed() -> None:
    """Case D6: with keep_last=1 the only checkpoint stays until a newer one exists; order is by commit."""
    assert expendable([record(1)], [record(1)], 1, set()) == []
    assert expendable([record(1), record(2)], [record(1), record(2)], 1, set()) == [1]


def test_an_abandoned_timeline_goes_once_the_lineage_is_ahead() -> None:
    """Case D6: after going back from 5 to 3, the stale 4 and 5 do not outlive the new 6."""
    old = [record(n) for n in (3, 4, 5)]
    assert expendable(old, [old[0]], 1, set()) == []
    assert expendable([*old, record(6)], [old[0], record(6)], 2, set()) == [4, 5]

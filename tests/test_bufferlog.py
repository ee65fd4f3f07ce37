"""Promises of the log: what was written comes back, a torn tail is cut, damage elsewhere is an error."""

import pytest

from slackwater.engine.bufferlog import Head, Kind, SegmentLog
from slackwater.engine.errors import CorruptCheckpoint


def write(directory, count=20, **options):
    """A log of `count` entries; returns the end position of each."""
    log = SegmentLog(directory, **options)
    list(log.replay())
    ends = [log.append(Kind.TRAINED, Head(step=n, reason="x"), bytes(range(n))).end for n in range(count)]
    log.close()
    return ends


def steps(directory, **options):
    """Steps of all entries that a fresh reader sees."""
    log = SegmentLog(directory)
    try:
        return [frame.head.step for frame in log.replay(**options)]
    finally:
        log.close()


def test_entries_come_back_over_segments_and_reopening(tmp_path):
    """Positions go on where the last process stopped."""
    first = write(tmp_path, segment_bytes=300)
    second = write(tmp_path, segment_bytes=300)
    assert steps(tmp_path) == [*range(20), *range(20)]
    assert second[0] > first[-1]
    assert len(list(tmp_path.glob("log-*.seg"))) > 3


def test_a_tail_torn_at_any_byte_is_cut_to_whole_entries(tmp_path):
    """Every length of the file gives exactly the entries wholly within it, and can be appended to."""
    ends = write(tmp_path, 6)
    (path,) = tmp_path.glob("log-*.seg")
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        expected = [n for n, end in enumerate(ends) if end <= length]
        if length not in (0, *ends):
            with pytest.raises(CorruptCheckpoint):
                steps(tmp_path, torn_tail=False)
        assert steps(tmp_path) == expected
        assert path.stat().st_size == ([0, *ends])[len(expected)]
        write(tmp_path, 1)
        assert steps(tmp_path) == [*expected, 0]


def test_damage_before_the_tail_is_an_error_at_every_byte(tmp_path):
    """A flipped bit anywhere but in the last entry is never taken for a torn tail, lengths included."""
    ends = write(tmp_path, 6)
    (path,) = tmp_path.glob("log-*.seg")
    whole = path.read_bytes()
    for offset in range(ends[-2]):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x10]) + whole[offset + 1 :])
        with pytest.raises(CorruptCheckpoint):
            steps(tmp_path)
    assert path.stat().st_size == len(whole)


def test_a_missing_or_torn_middle_segment_is_an_error(tmp_path):
    """Segments must join without a gap; only the very last may be torn."""
    write(tmp_path, segment_bytes=300)
    paths = sorted(tmp_path.glob("log-*.seg"))
    kept = paths[1].read_bytes()
    paths[1].write_bytes(kept[:-3])
    with pytest.raises(CorruptCheckpoint):
        steps(tmp_path)
    paths[1].unlink()
    with pytest.raises(CorruptCheckpoint, match="does not begin"):
        steps(tmp_path)


def test_zeros_after_a_power_cut_are_a_torn_tail(tmp_path):
    """A file that was extended but not filled ends at the last whole entry."""
    write(tmp_path, 3)
    (path,) = tmp_path.glob("log-*.seg")
    with path.open("ab") as stream:
        stream.write(bytes(4096))
    assert steps(tmp_path) == [0, 1, 2]

"""A view of a job: records below a prefix, found once."""

from __future__ import annotations

from slackwater.engine.keys import Keys
from slackwater.engine.model import Hold, Record, Route, encode
from slackwater.engine.ports import KV
from slackwater.engine.view import View

KEYS = Keys("job")


def make_view(*records: tuple[str, Record]) -> View:
    """A view of these keys, whatever their order."""
    kvs = {key: KV(key, encode(record), at, at) for at, (key, record) in enumerate(records, 1)}
    return View(KEYS, kvs, len(kvs), {})


def route(name: str, version: int) -> tuple[str, Record]:
    """A route and its key."""
    record = Route(name=name, url="http://127.0.0.1:1", version=version, timeline=1, incarnation="i")
    return KEYS.route(name), record


def test_records_below_a_prefix_are_in_key_order_and_no_others() -> None:
    """Keys beside the prefix, before and after it, are left out."""
    view = make_view(route("b", 2), (KEYS.hold("lag"), Hold(reason="lag")), route("a", 1), route("ab", 3))
    assert [(name, found.version) for name, found in view.routes().items()] == [("a", 1), ("ab", 3), ("b", 2)]
    assert list(view.holds()) == ["lag"]
    assert view.checkpoints() == {}


def test_what_a_caller_does_to_the_found_records_stays_with_it() -> None:
    """The dict is the caller's own: the next one finds all records again."""
    view = make_view(route("a", 1), route("b", 2))
    view.routes().clear()
    assert list(view.routes()) == ["a", "b"]

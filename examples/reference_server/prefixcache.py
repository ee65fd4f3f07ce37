"""The prefix cache: KV of finished prompts, found again by their longest common beginning."""

from __future__ import annotations

from collections import OrderedDict

from .model import KV

__all__ = ["PrefixCache"]


class PrefixCache:
    """Keeps the KV of the newest sequences; as long as nobody flushes, also across a change of weights."""

    def __init__(self, capacity: int = 64) -> None:
        self._entries: OrderedDict[tuple[int, ...], KV] = OrderedDict()
        self._capacity = capacity

    def put(self, tokens: list[int], kv: KV) -> None:
        """Remember a sequence; `kv` covers its first tokens, at most all of them."""
        key = tuple(tokens[: kv[0][0].shape[1]])
        self._entries[key] = kv
        self._entries.move_to_end(key)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def find(self, tokens: list[int]) -> tuple[int, KV | None]:
        """The number of leading tokens that are known, at most all but the last, and their KV."""
        best, kv = 0, None
        for key, stored in self._entries.items():
            length = _common(key, tokens[:-1])
            if length > best:
                best, kv = length, stored
        if kv is None:
            return 0, None
        return best, [(k[:, :best], v[:, :best]) for k, v in kv]

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()


def _common(a: tuple[int, ...], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count

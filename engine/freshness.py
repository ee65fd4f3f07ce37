"""When a sample is too old: the step map of the lineage and the verdict on a weight version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

__all__ = ["StepMap", "Verdict"]

Verdict = Literal["fresh", "stale", "dead"]


class StepMap:
    """Weight version -> training step, for the versions of the current lineage.

    A version above every known one is only not known yet: fresh. A missing one between known ones was
    published
    on a timeline that a recovery abandoned: dead. One below every known one is so old that it was trimmed:
    stale.
    """

    def __init__(self) -> None:
        self.versions: dict[int, int] = {}
        self.training_step = 0

    def news(self, versions: Mapping[int, int]) -> tuple[bool, dict[int, int]]:
        """(replace everything?, what to record) to get from what is known to `versions`."""
        gone = [version for version in self.versions if version not in versions]
        changed = {version: step for version, step in versions.items() if self.versions.get(version) != step}
        return (True, dict(versions)) if gone else (False, changed)

    def apply(self, versions: Mapping[int, int], training_step: int, *, replace: bool) -> None:
        """Take over recorded versions and the trainer's step."""
        if replace:
            self.versions = {}
        self.versions.update(versions)
        self.training_step = training_step

    def lag(self, version: int) -> int:
        """Training steps that this version is behind the trainer; 0 for one not known yet.

        For one that was trimmed it is the least that it can be: one more than the oldest known.
        """
        step = self.versions.get(version)
        if step is not None:
            return self.training_step - step
        if not self.versions or version > min(self.versions):
            return 0
        return self.training_step - self.versions[min(self.versions)] + 1

    def verdict(self, version: int, max_staleness_steps: int) -> Verdict:
        """Judge a sample by its oldest version. Without any step map everything is fresh."""
        if version in self.versions:
            return "stale" if self.lag(version) > max_staleness_steps else "fresh"
        if not self.versions or version > max(self.versions):
            return "fresh"
        return "stale" if version < min(self.versions) else "dead"

    def weight(self, version: int, max_staleness_steps: int) -> float:
        """Weight by age: 1.0 up to the limit, then 1/2, 1/3, … for each step beyond it."""
        return 1.0 / (1 + max(0, self.lag(version) - max_staleness_steps))

"""Schedules made for one broken rule each: what random faults meet too seldom to be found in a minute.

The sound protocol passes every one of them; the seed still draws all delays.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from .faults import Schedule
from .strikes import Fault

__all__ = ["DIRECTED"]


def _schedule(
    *faults: Fault, rollouts: int = 2, seconds: float = 60.0, **more: object
) -> Callable[..., Schedule]:
    def make(seed: int) -> Schedule:
        return Schedule(seed, faults, rollouts=rollouts, seconds=seconds, **more)  # type: ignore[arg-type]

    return make


def _every(first: float, step: float, times: int, *faults: Fault) -> tuple[Fault, ...]:
    return tuple(
        msgspec.structs.replace(fault, at=first + n * step + fault.at)
        for n in range(times)
        for fault in faults
    )


# A leader stands still for longer than its lease with a decision and its history on their way, another leads meanwhile.
_stale_leader = _schedule(
    Fault(20.0, "hold"),
    Fault(24.0, "dam", "coordinator", 7.0, on="coordinator log/", before=True, key="log/"),
    Fault(24.0, "pause", "leader", 8.0, on="coordinator log/", before=True),
    Fault(24.5, "hold"),
)

# Votes of a life that was never made a voter, written past all fences.
_zombie_votes = _schedule(
    *(
        Fault(20.0 + n, "forge_vote", who, on=on)
        for n, (who, on) in enumerate(
            (
                ("buffer", "coordinator rounds/current ready"),
                ("rollout-0", "coordinator rounds/current ready"),
                ("buffer", "coordinator rounds/current ready"),
                ("rollout-1", "coordinator rounds/current ready"),
            )
        )
    ),
    *(Fault(20.0, "slow", who, 20.0, 1.0) for who in ("buffer", "rollout")),
)

# Answers to renewals come late, and then the beat stands still: its worker must stop in time.
_late_answers = _schedule(
    *_every(
        10.0,
        8.0,
        6,
        Fault(0.0, "echo", "rollout", 2.5, 1.0),
        Fault(1.5, "beat", "rollout-0", 5.0),
        Fault(1.9, "beat", "rollout-1", 5.0),
    ),
)

# The leader stands still beyond its lease in the middle of its decisions: two rollouts are silent at once.
_sleepy_leader = _schedule(
    *_every(
        10.0,
        14.0,
        4,
        Fault(0.0, "beat", "rollout-0", 6.0),
        Fault(0.0, "beat", "rollout-1", 6.0),
        Fault(0.5, "pause", "leader", 4.5, on="coordinator health/"),
    ),
)

# An operator goes back in the very moment in which the manifest is sealed: both are in one view of the leader.
_rollback_at_seal = _schedule(
    *(Fault(at, "older", on="trainer rounds/votes/ sealed") for at in (20.0, 32.0, 44.0)),
    coordinators=1,
)

# The trainer publishes while an operator goes back, and its transaction is held until after the fence.
_publication_across_fence = _schedule(
    *_every(
        20.0,
        12.0,
        3,
        Fault(0.0, "dam", "trainer", 2.5, on="trainer weights/", before=True, key="weights/"),
        Fault(0.0, "older", on="trainer weights/", before=True),
    ),
)

# The answers to publications are lost, twice in a row each.
_lost_answers = _schedule(
    *_every(12.0, 5.0, 8, Fault(0.0, "lost", "trainer", 2.6, 1.0, on="trainer weights/", before=True)),
)

# A publication is on its way for longer than its sender tries.
_publication_in_flight = _schedule(
    *_every(
        12.0, 11.0, 4, Fault(0.0, "dam", "trainer", 7.5, on="trainer weights/", before=True, key="weights/")
    ),
)

# The grant is on its way when the trainer dies, and its successor registers first.
_grant_across_replacement = _schedule(
    *_every(
        0.0,
        25.0,
        3,
        Fault(0.0, "dam", "coordinator", 2.9, on="coordinator go", before=True, key="go"),
        Fault(0.0, "exit", "trainer", 2.1, on="coordinator go", before=True),
    ),
    Fault(24.0, "older"),
    Fault(48.0, "older"),
)

# All engines are gone for a while.
_no_engines = _schedule(
    Fault(22.0, "blackout", seconds=7.0), Fault(45.0, "blackout", seconds=7.0), rollouts=1
)

# A rollout is away for the lease and the window, and comes back while the verdict is on its way.
_back_in_time = _schedule(
    Fault(15.0, "drop", "rollout-0/beat", 30.0, 1.0),
    Fault(
        16.0, "dam", "coordinator", 2.6, on="coordinator health/rollout-0 failed", before=True, key="health/"
    ),
    Fault(16.0, "clear", on="coordinator health/rollout-0 failed", before=True),
)

# The trainer hears nothing between its first vote and the next.
_deaf_trainer = _schedule(
    *_every(
        15.0, 4.0, 10, Fault(0.0, "watch", "trainer", 3.0, 1.0, on="trainer rounds/votes/ ready", before=True)
    ),
)

# A freeze that belongs to no round.
_orphan_freeze = _schedule(*(Fault(at, "forge_freeze", on="coordinator checkpoints/") for at in (18.0, 30.0)))

# No checkpoint can be loaded, and no older one would cure it.
_poisoned = _schedule(Fault(20.0, "poison"), Fault(20.0, "kill", "trainer", 2.0), seconds=60.0)

# A rollout is away for longer than lease and window, and wakes up.
_sleeper = _schedule(
    Fault(12.0, "pause", "rollout-0", 25.0), Fault(12.0, "pause", "rollout-1", 25.0), rollouts=3, seconds=50.0
)

# The buffer is replaced in the middle of a recovery.
_buffer_in_recovery = _schedule(
    *_every(
        20.0,
        12.0,
        3,
        Fault(0.0, "older"),
        Fault(0.0, "exit", "buffer", 2.1, on="coordinator recovery/current restore"),
    ),
)

# One rollout refuses to be ready for longer than half the deadline.
_laggard = _schedule(
    Fault(15.0, "flush", "rollout-0", 12.0), Fault(35.0, "flush", "rollout-1", 12.0), rollouts=2
)

# One rollout refuses, another lost its engine a moment before the cut and is back before all are ready.
_newcomer = _schedule(
    *_every(
        12.0,
        7.5,
        6,
        Fault(0.0, "flush", "rollout-0", 6.0),
        Fault(0.5, "engine_restart", "rollout-1"),
        Fault(2.0, "engine_restart", "rollout-2"),
    ),
    rollouts=3,
)

# A vote is held until its round is over.
_vote_too_late = _schedule(
    *_every(
        15.0,
        16.0,
        3,
        Fault(0.0, "dam", "buffer", 11.0, on="buffer rounds/votes/", before=True, key="rounds/"),
    ),
)

# A rollout is taken off the job while its route is on its way.
_route_too_late = _schedule(
    *_every(
        15.0,
        9.0,
        4,
        Fault(0.0, "dam", "rollout-0", 0.8, on="rollout-0 routes/", before=True, key="routes/"),
        Fault(0.0, "leave", "rollout-0", on="rollout-0 routes/", before=True),
    ),
)

# The only coordinator dies more often than the window lasts while a rollout is silent.
_fickle_leaders = _schedule(
    Fault(20.0, "pause", "rollout-0", 60.0),
    *_every(28.0, 8.0, 5, Fault(0.0, "kill", "leader", 1.0)),
    Fault(59.5, "must_fail", "rollout-0"),
    coordinators=1,
)

# Most hosts fall silent at once, for longer than a single one may.
_silent_hosts = _schedule(
    Fault(20.0, "drop", "rollout", 19.0, 1.0),
    Fault(20.0, "drop", "buffer", 19.0, 1.0),
    Fault(39.0, "must_live"),
    rollouts=3,
)

# A call of an earlier life lands on a standing engine.
_old_call = _schedule(
    Fault(20.0, "hold"),
    Fault(26.0, "relabel", "rollout-0"),
    Fault(31.0, "must_match", "rollout-0"),
)

# The worker hangs, its beat does not.
_hanging = _schedule(
    Fault(20.0, "worker", "trainer", 80.0), Fault(48.0, "must_fail", "trainer"), stall_s=16.0, seconds=60.0
)

# The buffer's worker hangs in a round, and its beat does not.
_hanging_buffer = _schedule(
    Fault(20.0, "worker", "buffer", 70.0, on="trainer freeze"), seconds=90.0, mode="strict"
)

# An operator goes back in the very moment of a commit, when an old checkpoint may be marked.
_rollback_at_commit = _schedule(
    *(Fault(at, "older", on="coordinator checkpoints/ committed") for at in (20.0, 34.0, 48.0)),
    coordinators=1,
)

# A late route meets a leader that has just fixed the voters.
_route_at_freeze = _schedule(
    *_every(
        15.0,
        6.0,
        7,
        Fault(0.0, "engine_restart", "rollout-0"),
        Fault(
            0.2, "dam", "coordinator", 0.9, on="coordinator rounds/current ready", before=True, key="rounds/"
        ),
    ),
)

DIRECTED: dict[str, Callable[[int], Schedule]] = {
    "no_epoch": _stale_leader,
    "any_vote_counts": _zombie_votes,
    "lease_from_reply": _late_answers,
    "never_lost": _sleepy_leader,
    "commit_unguarded": _rollback_at_seal,
    "no_timeline_fence": _publication_across_fence,
    "lost_reply_is_a_no": _lost_answers,
    "in_flight_is_a_no": _publication_in_flight,
    "go_for_anyone": _grant_across_replacement,
    "no_min_rollouts": _no_engines,
    "failed_beats_return": _back_in_time,
    "voters_not_awaited": _deaf_trainer,
    "orphan_freeze_kept": _orphan_freeze,
    "attempts_unlimited": _poisoned,
    "back_after_failed": _sleeper,
    "ack_of_older_recovery": _buffer_in_recovery,
    "dropped_keeps_route": _laggard,
    "voters_follow_votes": _laggard,
    "voters_recomputed": _newcomer,
    "vote_without_token": _vote_too_late,
    "no_registration_fence": _route_too_late,
    "silence_not_persisted": _fickle_leaders,
    "massacre": _silent_hosts,
    "label_not_read": _old_call,
    "stall_ignored": _hanging,
    "deadlines_ignored": _hanging_buffer,
    "mark_unguarded": _rollback_at_commit,
    "routes_not_compared": _route_at_freeze,
}
"""By mutant."""

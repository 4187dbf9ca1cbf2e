"""Where a runner's next shard comes from: the database decides which one is next."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from gristmill.jobs.crash_points import reach
from gristmill.jobs.owner import Owner
from gristmill.jobs.records import ModelOffer, ShardClaim
from gristmill.jobs.store.claims import Claims

LOOK_EVERY_S = 2.0  # without a message: a broker that lost all of them costs no more than this
SHARE_S = 0.5  # from one claim to the next, for a worker that has plenty to do while it has peers


class ShardSource:
    """Claims shards for one runner; used by its loop, except that `look_again` and `drain` come from any thread."""

    def __init__(
        self,
        claims: Claims,
        offer: ModelOffer,
        owner: Owner,
        warm: Callable[[], Collection[str]] = lambda: (),
    ) -> None:
        """`warm`: the prefix keys of the jobs whose prompts the engine saw last."""
        self.owner = owner  # of the claims
        self.only_job = offer.job_id  # the run ends with this job
        self.num_peers = 0  # other workers that offer the model
        self._claims = claims
        self._offer = offer
        self._warm = warm
        self._next_look_s = 0.0
        self._last_claim_s = float("-inf")
        self._is_draining = False
        self._has_none = False

    @property
    def is_exhausted(self) -> bool:
        """Whether there will be no further shard."""
        return self._is_draining or (self._has_none and self.only_job is not None)

    def claim(self, now: float, has_plenty: bool) -> ShardClaim | None:
        """The next shard; None when there is none at present. has_plenty: there is no hurry."""
        if self.is_exhausted or now < self._next_look_s:
            return None
        if has_plenty and self.num_peers and now < self._last_claim_s + SHARE_S:
            return None  # a job of few shards is not taken whole by whoever woke first
        reach("claim.before")
        claim = self._claims.next(self._offer, self.owner, self._warm())
        self._has_none = claim is None
        if claim is None:
            self._next_look_s = now + LOOK_EVERY_S * random.uniform(0.8, 1.2)
        else:
            reach("claim.after")
            self._last_claim_s = now
        return claim

    def look_again(self) -> None:
        """A shard may be free again."""
        self._next_look_s = 0.0
        self._has_none = False

    def drain(self) -> None:
        """No further shard: the run ends when those at hand are done."""
        self._is_draining = True

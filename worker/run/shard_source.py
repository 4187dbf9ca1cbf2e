"""Where a runner's next shard comes from: one job that this process holds, or all jobs of a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Protocol

from gristmill.jobs.crash_points import reach
from gristmill.jobs.owner import Owner
from gristmill.jobs.records import JobStatus, ModelOffer, ShardClaim
from gristmill.jobs.store.claims import Claims

LOOK_EVERY_S = 2.0  # without a message: a broker that lost all of them costs no more than this
SHARE_S = 0.5  # from one claim to the next, for a worker that has plenty to do while it has peers


class ShardSource(Protocol):
    """Claims shards for one runner; used by its loop, except that `wake` and `drain` come from any thread."""

    owner: Owner  # of the claims
    only_job: JobStatus | None  # when the run began; it ends with this job

    @property
    def is_exhausted(self) -> bool:
        """Whether there will be no further shard."""
        ...

    def claim(self, now: float, has_plenty: bool) -> ShardClaim | None:
        """The next shard; None when there is none at present. has_plenty: there is no hurry."""
        ...

    def look_again(self) -> None:
        """A shard may be free again."""


class JobShards:
    """The shards of one local job, in order."""

    def __init__(self, claims: Claims, job: JobStatus, owner: Owner) -> None:
        self.owner = owner
        self.only_job: JobStatus | None = job
        self._claims = claims
        self._job_id = job.job_id
        self._is_exhausted = False

    @property
    def is_exhausted(self) -> bool:
        return self._is_exhausted

    def claim(self, now: float, has_plenty: bool) -> ShardClaim | None:
        claim = None if self._is_exhausted else self._claims.of_job(self._job_id, self.owner)
        self._is_exhausted = claim is None
        return claim

    def look_again(self) -> None:
        self._is_exhausted = False


class ModelShards:
    """The shards of all submitted jobs that name a model; the database decides which one is next."""

    def __init__(
        self, claims: Claims, offer: ModelOffer, owner: Owner, warm: Callable[[], Collection[str]]
    ) -> None:
        self.owner = owner
        self.only_job: JobStatus | None = None
        self._claims = claims
        self._offer = offer
        self._warm = warm
        self.num_peers = 0  # other workers that offer the model
        self._next_look_s = 0.0
        self._last_claim_s = float("-inf")
        self._is_draining = False

    @property
    def is_exhausted(self) -> bool:
        return self._is_draining

    def claim(self, now: float, has_plenty: bool) -> ShardClaim | None:
        if self._is_draining or now < self._next_look_s:
            return None
        if has_plenty and self.num_peers and now < self._last_claim_s + SHARE_S:
            return None  # a job of few shards is not taken whole by whoever woke first
        reach("claim.before")
        claim = self._claims.next(self._offer, self.owner, self._warm())
        if claim is None:
            self._next_look_s = now + LOOK_EVERY_S * random.uniform(0.8, 1.2)
        else:
            reach("claim.after")
            self._last_claim_s = now
        return claim

    def look_again(self) -> None:
        self._next_look_s = 0.0

    def drain(self) -> None:
        """No further shard: the run ends when those at hand are done."""
        self._is_draining = True

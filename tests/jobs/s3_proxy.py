"""The proxy before the S3 server, told in one line what breaks, and a note of every request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import ClassVar
from urllib.parse import urlsplit

from tests.s3_proxy import Fault as ProxyFault
from tests.s3_proxy import S3Proxy, no_fault


class Fault:
    """What happens to a request."""

    NONE: ClassVar[ProxyFault | None] = None
    BUSY = ProxyFault.SLOW_DOWN
    ERROR = ProxyFault.INTERNAL_ERROR
    RESET = ProxyFault.RESET
    LOST_REPLY = ProxyFault.LOST_REPLY
    FLIP_REQUEST = ProxyFault.FLIP  # of a PUT or POST
    FLIP_REPLY = ProxyFault.FLIP  # of a GET
    CUT_REPLY = ProxyFault.TRUNCATE


class FaultyProxy(S3Proxy):
    """Breaks nothing until it is told to."""

    def __init__(self, target_port: int) -> None:
        self.requests: list[tuple[str, str]] = []  # method and path
        super().__init__(target_port)

    def note(self, method: str, path: str) -> ProxyFault | None:
        self.requests.append((method, path))
        return super().note(method, path)

    def first(self, num: int, fault: ProxyFault, method: str, part: str = "") -> None:
        """The first `num` requests of that method with `part` in their path meet the fault."""
        left = [fault] * num

        def choose(found: str, path: str) -> ProxyFault | None:
            return left.pop() if found == method and part in path and left else None

        self.choose = choose

    def always(self, fault: ProxyFault | None) -> None:
        """Every request meets the fault."""
        self.choose = no_fault if fault is None else lambda method, path: fault


@contextmanager
def run_proxy(upstream: str) -> Iterator[FaultyProxy]:
    """A proxy before that endpoint for as long as the block runs."""
    port = urlsplit(upstream).port
    assert port is not None
    with closing(FaultyProxy(port)) as proxy:
        yield proxy

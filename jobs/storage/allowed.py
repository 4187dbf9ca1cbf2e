"""Which files a job from the queue may read and write: those below the roots that the worker was started with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from gristmill.jobs.errors import RefusedError


def check_allowed(uris: Iterable[str], roots: Sequence[str]) -> None:
    """Raises RefusedError for the first URI that lies below no root.

    Local paths (also as file://) are compared with links and `..` resolved; other URIs letter by letter, at the
    border of a `/`. A glob counts as the path it is written as, for a match may lie behind a link: check again
    what it expands to.
    """
    places = [_to_place(root) for root in roots]
    for uri in uris:
        if "\0" in uri or not _is_absolute(uri):
            raise RefusedError(
                f"{uri!r}: workers have another working folder; write an absolute path or a URL"
            )
        place = _to_place(uri)
        if not any(place == root or place.startswith(_as_folder(root)) for root in places):
            raise RefusedError(
                f"{uri!r} is not below what this worker may use ({', '.join(roots) or 'nothing'}):"
                " choose another place, or start workers with --allow-uri for it"
            )


def _is_absolute(uri: str) -> bool:
    return os.path.isabs(_local_path(uri)) or _is_remote(uri)


def _is_remote(uri: str) -> bool:
    return "://" in _local_path(uri)


def _local_path(uri: str) -> str:
    return uri.removeprefix("file://")


def _to_place(uri: str) -> str:
    """A URI in the form that is compared: links resolved, no slash at the end but that of a bare scheme."""
    if not _is_remote(uri):
        return os.path.realpath(_local_path(uri))
    stripped = uri.rstrip("/")
    return stripped + "//" if stripped.endswith(":") else stripped


def _as_folder(place: str) -> str:
    return place if place.endswith("/") else place + "/"

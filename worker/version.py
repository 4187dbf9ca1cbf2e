"""Which Gristmill this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def load_version() -> str:
    """The installed version."""
    try:
        return version("gristmill")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "(not installed)"

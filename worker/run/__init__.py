"""Shards through an engine: prepare, feed, collect, commit."""

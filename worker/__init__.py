"""Joins jobs and the engine: shard runner, engine process client, command line."""

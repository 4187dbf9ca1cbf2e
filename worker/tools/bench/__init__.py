"""gristmill bench: how fast the engine is on this machine."""

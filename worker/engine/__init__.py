"""The worker's side of an engine process."""

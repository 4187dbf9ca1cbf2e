"""A device whose every operation is the oracle's: what a new one has to bring, at its smallest."""

"""`python -m examples.cluster`: the queue on this machine. Its real servers are also those of the tests."""

"""Commands that are not jobs: bench, compare, doctor."""

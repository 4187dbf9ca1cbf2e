"""A worker process: models, messages, and what keeps jobs going."""

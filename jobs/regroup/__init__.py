"""Rows in another order: sorted by prefix where that saves prompt tokens."""

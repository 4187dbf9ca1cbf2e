"""gristmill compare: two models, or one with two settings, on the same rows."""

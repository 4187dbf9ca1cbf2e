"""gristmill doctor: what would go wrong on this machine, and the remedy."""

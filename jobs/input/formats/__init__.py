"""One file for each format of input."""

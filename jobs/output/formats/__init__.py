"""One file for each format of parts."""

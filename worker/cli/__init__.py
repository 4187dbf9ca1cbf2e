"""The gristmill command: words into orders. One file for each group of commands."""

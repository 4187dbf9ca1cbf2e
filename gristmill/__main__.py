"""`python -m gristmill` is the command `gristmill`."""

from gristmill.worker.cli.main import main

main()

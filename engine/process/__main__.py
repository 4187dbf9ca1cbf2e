"""`python -m gristmill.engine.process` runs the engine process."""

from gristmill.engine.process.serve import main

main()

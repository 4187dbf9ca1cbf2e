"""Which tokens are computed next: the scheduler, the rows that wait and run, blocks and prefixes."""

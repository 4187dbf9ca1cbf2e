"""The job database: tables, transactions, and what is asked of jobs, shards, plans, ends and workers."""

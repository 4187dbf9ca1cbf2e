"""What a job is: spec, rows, storage, database, planning. No torch, nothing else of ours."""

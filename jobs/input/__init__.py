"""Sources and their rows: which files a job reads, and how."""

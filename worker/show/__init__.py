"""What people see: progress, reports, log lines."""

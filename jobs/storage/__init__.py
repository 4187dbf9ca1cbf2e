"""Where bytes lie: output folders on local disk and in S3, and which of them a job may touch."""

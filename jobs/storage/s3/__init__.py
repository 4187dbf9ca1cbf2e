"""S3 and its like."""

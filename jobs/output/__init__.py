"""Parts, their schema and formats, their publication, and the end of a job."""

"""A job in this process, without a broker."""

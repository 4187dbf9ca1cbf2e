"""The engine in a process of its own, at the far end of a socket."""

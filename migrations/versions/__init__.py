"""The revisions, one file each, in order of their numbers. They import no logic."""

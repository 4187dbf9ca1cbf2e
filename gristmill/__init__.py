"""Gristmill grinds a file of prompts into a file of completions: an offline LLM batch inference worker."""

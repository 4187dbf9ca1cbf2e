"""Requests in, completions out: tokenizer, model, KV cache, batcher."""

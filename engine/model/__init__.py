"""The decoder and what drives it: weights in, hidden states, logits and sampled tokens out."""

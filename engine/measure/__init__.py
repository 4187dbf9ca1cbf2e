"""Measurements that the engine makes of itself and of models: roofline, likelihoods."""

"""From an order to shards that can be claimed."""

"""From a row to chat messages: templates in a sandbox with limits."""

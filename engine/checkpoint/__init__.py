"""What a model path holds: configuration, tensors and their formats, read from files as they are."""

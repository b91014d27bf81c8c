"""JSON request bodies -> typed requests, by field tables."""

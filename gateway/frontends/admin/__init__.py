"""What operators see and do: the workers, their load, drain, flush."""

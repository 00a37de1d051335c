"""The attempts at a request: the work for both workers, and the events and phase times they report."""

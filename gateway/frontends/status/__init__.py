"""Status page: a gateway's workers and load in a browser, for operators."""

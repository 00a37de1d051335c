"""What both workers have around their engines: how an attempt reads, the gateway's link, start and drain."""

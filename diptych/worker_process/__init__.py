"""The parts that both workers have around their engines: attempts, links to gateways, start and drain."""

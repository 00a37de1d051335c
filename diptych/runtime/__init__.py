"""Runtime that every process of Diptych shares: settings, errors, gRPC, telemetry and the Redis directory."""

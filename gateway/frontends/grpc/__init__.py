"""`diptych.v1.InferenceService` over gRPC."""

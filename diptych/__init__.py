"""What users of Diptych import: the generated gRPC stubs and the client. No torch, nothing of the workers."""

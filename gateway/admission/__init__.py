"""Admission control: queueing, fairness between tenants, and refusal under overload."""

"""`python -m lab.roofline`: the bare engine, without service, beside what the machine could do at best.

Time of a decode step by batch and context, rate of prefill by length; memory rate and arithmetic peak are
measured in the same run, bytes and operations are counted from the model's shape.
"""
